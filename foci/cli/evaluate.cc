// Runs a model over pictures in batches and collects what is asked about.
#include "foci/cli/evaluate.h"

#include <algorithm>
#include <cmath>

#include "foci/vision/trainer.h"

namespace foci::cli {
namespace {

constexpr int64_t kBatch = 64;

}  // namespace

std::vector<double> probabilities_of(const float* logits, int64_t classes) {
  const double largest = *std::max_element(logits, logits + classes);
  std::vector<double> out;
  double sum = 0;
  for (int64_t c = 0; c < classes; ++c) {
    out.push_back(std::exp(logits[c] - largest));
    sum += out.back();
  }
  for (double& p : out) p /= sum;
  return out;
}

report::Scene scene_of(const vision::Sample& sample, const PictureAttention& attention,
                       const float* logits, int64_t classes, bool truth_known) {
  report::Scene scene;
  scene.name = sample.name;
  scene.pixels = sample.picture.pixels;
  scene.rows = sample.grid.rows;
  scene.columns = sample.grid.cols;
  scene.layers = attention.maps.dim(0);
  scene.heads = attention.maps.dim(1);
  const auto maps = attention.maps.span<float>();
  scene.attention.assign(maps.begin(), maps.end());
  scene.landmark = sample.landmarks;
  if (truth_known) scene.truth = sample.label;
  scene.predicted = std::max_element(logits, logits + classes) - logits;
  scene.probabilities = probabilities_of(logits, classes);
  return scene;
}

insight::Estimate Evaluation::accuracy() const {
  return insight::share_of(right, sources);
}

double even_entropy(const VitConfig& config, int64_t patches) {
  const bool token = config.pooling == Pooling::class_token;
  return std::log(static_cast<double>(patches + (token ? 1 : 0)));
}

Evaluation evaluate(Vit<float>& model, const vision::Dataset& data,
                    const EvaluateOptions& options) {
  const int64_t classes = static_cast<int64_t>(data.classes().size());
  const int64_t layers = model.map_layers(), heads = model.config().heads;
  Evaluation out{insight::ConfusionMatrix(classes),
                 {},
                 {},
                 0,
                 insight::HeadMeans(layers, heads),
                 0,
                 std::nullopt,
                 {},
                 {}};
  if (data.has_landmarks()) out.hits.emplace(layers, heads);
  const int64_t end = std::min(options.begin + options.count,
                               data.size(options.split).value_or(options.begin + options.count));
  for (int64_t at = options.begin; at < end; at += kBatch) {
    std::vector<vision::Sample> samples;
    for (int64_t i = at; i < std::min(at + kBatch, end); ++i) {
      samples.push_back(data.get(options.split, i));
    }
    const vision::Batch batch = vision::make_batch(samples, data.format());
    const auto look = model.look(batch.patches, vision::patch_grids(batch));
    for (size_t i = 0; i < samples.size(); ++i) {
      const vision::Sample& sample = samples[i];
      const PictureAttention& attention = look.pictures[i];
      const float* logits = look.logits.data<float>() + static_cast<int64_t>(i) * classes;
      const int64_t predicted = std::max_element(logits, logits + classes) - logits;
      out.confusion.add(sample.label, predicted);
      out.right.push_back(predicted == sample.label ? 1 : 0);
      out.sources.push_back(sample.source);
      out.loss -= std::log(
          std::max(1e-300, probabilities_of(logits, classes)[static_cast<size_t>(sample.label)]));
      out.even_entropy += even_entropy(model.config(), sample.grid.tokens());
      for (int64_t l = 0; l < layers; ++l) {
        for (int64_t h = 0; h < heads; ++h) {
          const float nats = attention.entropy.at<float>(l, h);
          out.entropy.add(l, h, {&nats, 1});
        }
      }
      if (out.hits) out.hits->add(attention.maps.span<float>(), sample.landmarks, sample.source);
      const auto keep = [&](std::vector<report::Scene>& into, int64_t limit) {
        if (static_cast<int64_t>(into.size()) < limit) {
          into.push_back(scene_of(sample, attention, logits, classes, true));
        }
      };
      keep(out.gallery, options.gallery);
      if (predicted != sample.label) keep(out.mistakes, options.mistakes);
    }
    const int64_t done = std::min(at + kBatch, end) - options.begin;
    if (options.keep_going && !options.keep_going(done)) break;
  }
  const double seen = static_cast<double>(out.right.size());
  out.loss /= seen;
  out.even_entropy /= seen;
  return out;
}

}  // namespace foci::cli
