// A trained model on pictures it never saw: how often it is right, and where its heads look.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "foci/insight/confusion.h"
#include "foci/insight/heads.h"
#include "foci/insight/landmarks.h"
#include "foci/models/vit/vit.h"
#include "foci/report/report.h"
#include "foci/vision/dataset.h"

namespace foci::cli {

struct EvaluateOptions {
  vision::Split split = vision::Split::test;
  int64_t begin = 0, count = 1000;    // samples [begin, begin + count), cut at the set's end
  int64_t gallery = 0, mistakes = 0;  // how many of the first pictures, and mistakes, to keep
  std::function<bool(int64_t done)> keep_going;  // asked after each batch; may be empty
};

struct Evaluation {
  insight::ConfusionMatrix confusion;
  std::vector<double> right;     // [samples] 1 or 0
  std::vector<int64_t> sources;  // [samples]
  double loss = 0;               // mean cross-entropy in nats
  insight::HeadMeans entropy;    // nats, of all tokens' weights
  double even_entropy = 0;       // mean of even_entropy() below: what even attention would have
  std::optional<insight::LandmarkTally> hits;  // where the data knows landmarks
  std::vector<report::Scene> gallery, mistakes;

  // With Wilson's interval; samples of one source count as one (insight::share_of).
  insight::Estimate accuracy() const;
};

Evaluation evaluate(Vit<float>& model, const vision::Dataset& data, const EvaluateOptions& options);

// One sample and what the model did with it, for a report.
report::Scene scene_of(const vision::Sample& sample, const PictureAttention& attention,
                       const float* logits, int64_t classes, bool truth_known);

// Entropy in nats of attention spread evenly over all that a token of a picture of so many patches
// attends to: the patches, and the class token where the model has one.
double even_entropy(const VitConfig& config, int64_t patches);

// softmax of [classes] logits
std::vector<double> probabilities_of(const float* logits, int64_t classes);

}  // namespace foci::cli
