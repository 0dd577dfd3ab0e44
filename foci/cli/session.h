// What `demo` and `train` share: training with progress on stderr, and the report about it.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "foci/cli/evaluate.h"
#include "foci/cli/progress.h"
#include "foci/cli/verb.h"
#include "foci/report/report.h"
#include "foci/vision/trainer.h"

namespace foci::cli {

struct TrainOutcome {
  vision::TrainResult result;
  std::vector<report::EvaluationRecord> evaluations;  // on pictures held back, while it trained
  std::unique_ptr<vision::Trainer> trainer;           // holds the model
};

// Trains to the end or to Ctrl-C. `options.stop` and `options.progress` are set here. About a dozen
// times on the way the model is tried on held-back pictures, which changes nothing of the training.
// `accepted`, where given, is called once the options and the folder have been found good, and
// `replaced` when a first checkpoint of this call stands in the folder and a step has been taken.
TrainOutcome train(const vision::Dataset& data, vision::TrainOptions options, Progress& progress,
                   const std::function<void()>& accepted = {},
                   const std::function<void()>& replaced = {});

// Says how to go on, and gives kInterrupted.
int stopped(const TrainOutcome& outcome, const std::string& command, Progress& progress);

// The rows at the foot of a report. `model` is the model file, hashed; empty where there is none.
std::vector<std::pair<std::string, std::string>> provenance(const std::filesystem::path& model,
                                                            const std::string& data);

// "89.4 – 92.8 %"
std::string interval_text(const insight::Estimate& estimate);
// With what stands behind it: "95 % interval 89.4 – 92.8 %; 1,000 scenes of 359 digits", and of few
// things "only 1 picture: 95 % interval 20.7 – 100.0 %". `observed` and `thing` are singulars.
std::string interval_words(const insight::Estimate& estimate, const std::string& observed,
                           const std::string& thing = "original");

// The parts of a report that come from training and from a test: curves, confusion, gallery,
// mistakes, entropy. The caller adds titles, numbers, hits and provenance.
report::Report report_of(const std::vector<std::string>& classes, const TrainOutcome& outcome,
                         const Evaluation& test);

// What a patch's heat means under this way of pooling, as report::Report::reading wants it.
std::string reading_of(Pooling pooling);

}  // namespace foci::cli
