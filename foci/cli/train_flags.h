// The options of training, as `train vit` and `demo` declare them.
#pragma once

#include <optional>
#include <string>

#include "foci/cli/verb.h"
#include "foci/vision/trainer.h"

namespace foci::cli {

struct TrainFlags {
  // How long: steps where given, else minutes.
  std::optional<int64_t> steps;
  double minutes = 1;

  int64_t width = 64, layers = 4, heads = 4, feed_forward = 256;
  std::string pooling = "class_token";
  std::string spec = "{}";  // of attention, as JSON
  double dropout = 0;

  int64_t batch = 64;
  double learning_rate = 3e-3, warm_up = 0.1, weight_decay = 0.05, clip = 1, label_smoothing = 0.1;
  double checkpoint_seconds = 30;
  bool checkpoint_layers = false;
};

void declare_length(CLI::App& app, TrainFlags& flags);
// The model's shape, the optimiser, and what every run has.
void declare_run(CLI::App& app, TrainFlags& flags, Common& common);

// Throws UsageError where a whole number lies outside of [least, most].
void check_range(const char* option, int64_t value, int64_t least, int64_t most);
// Throws UsageError where an option holds what it may not.
vision::TrainOptions train_options(const TrainFlags& flags, uint64_t seed);

}  // namespace foci::cli
