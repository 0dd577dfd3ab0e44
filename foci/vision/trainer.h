// Training a vision transformer on a data set: the loop, its checkpoints, and evaluation.
//
//   TrainOptions options{.steps = 1000, .folder = "model"};
//   Trainer trainer(data, options);
//   TrainResult result = trainer.run();
//   Evaluation test = evaluate(trainer.model(), data, Split::test, 0, 1000);
//
// With `steps` a run is a pure function of data, options and seed, bit for bit, on any number of
// threads, however often it is interrupted and resumed.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "foci/core/api.h"
#include "foci/models/vit/vit.h"
#include "foci/nn/optimiser.h"
#include "foci/vision/dataset.h"

namespace foci::vision {

// Where training stands; handed to the callback after every step.
struct Progress {
  int64_t step = 0;              // steps done
  std::optional<int64_t> steps;  // in all; nothing where minutes decide
  double loss = 0;               // of this step's batch
  double smooth_loss = 0;        // moving mean over about 50 steps
  double accuracy = 0;           // moving mean of the share right in training batches
  double grad_norm = 0;          // before clipping
  double learning_rate = 0;
  double items_per_second = 0;  // pictures, moving mean
  double seconds = 0;           // of training, without pauses between resumed runs
  double eta_seconds = 0;       // till the end, estimated
};

struct TrainOptions {
  // Shape of the model; patch, channels, max_side, mean, deviation and classes come from the data.
  VitConfig model;
  // When to stop: exactly one of the two. With minutes the learning rate follows the clock.
  std::optional<int64_t> steps;
  std::optional<double> minutes;
  int64_t batch = 64;  // pictures a step
  nn::Schedule schedule{.peak = 3e-3, .warm_up = 0.1, .floor = 0.01};
  nn::AdamWConfig adamw;
  double clip = 1.0;  // largest global gradient norm; 0 is unlimited
  double label_smoothing = 0.1;
  uint64_t seed = 1;                        // of the first weights, the data's order, and dropout
  std::filesystem::path folder;             // where checkpoints go; empty: nowhere
  double checkpoint_seconds = 30;           // at most so long between two
  std::optional<int64_t> checkpoint_every;  // steps; besides the clock
  bool resume = false;                      // go on from the checkpoint in `folder`
  bool replace = false;                     // an older run's files in `folder` may be overwritten
  std::string record;  // what the run is, in its starter's words: kept in each checkpoint
  // Keep each layer's input alone and compute the layer again on the way back: less memory, more
  // time, the same bits; so a run may be resumed with or without.
  bool checkpoint_layers = false;
  const std::atomic<bool>* stop = nullptr;  // set it (from a signal handler) to end after this step
  std::function<void(const Progress&)> progress;
};

struct CurvePoint {
  int64_t step = 0;
  double seconds = 0;
  double loss = 0;      // means since the last point
  double accuracy = 0;  // of training batches
  double grad_norm = 0;
  double learning_rate = 0;
};

struct TrainResult {
  int64_t steps = 0;              // done in all, resumed ones too
  double seconds = 0;             // of training
  bool finished = false;          // false: stopped by the flag; the folder then holds a checkpoint
  std::vector<CurvePoint> curve;  // at most about 500 points
};

// In a run's folder: its state, written all or nothing; the model's own files stand beside it.
inline constexpr const char* kTrainingFile = "training.safetensors";
// TrainOptions::record of the run in a folder; empty where its checkpoint has none. Throws IoError
// or FormatError where there is no checkpoint.
FOCI_API std::string read_record(const std::filesystem::path& folder);

class FOCI_API Trainer {
 public:
  // Throws ArgumentError for options that make no sense; where `folder` already holds a model and
  // resume is false; and with resume, IoError or FormatError where there is no checkpoint, or one
  // that other options made (naming the option) or other data (by Dataset::fingerprint).
  Trainer(const Dataset& data, TrainOptions options);
  ~Trainer();

  // Trains to the end, or until the stop flag. Saves the model at the end, and before where
  // checkpoints are due. Throws NumericError naming the step where the loss or gradient is not
  // finite: the folder then holds the last checkpoint before it.
  TrainResult run();

  Vit<float>& model();
  const TrainOptions& options() const;
  int64_t step() const;  // steps done so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct FOCI_API Evaluation {
  std::vector<int64_t> labels, predictions;  // one each a picture
  std::vector<int64_t> sources;              // Sample::source: which are not independent
  double loss = 0;                           // mean cross-entropy, no smoothing
  int64_t correct() const;
  double accuracy() const;  // NaN where there is no picture
};

// Samples [begin, end) of a split (cut at its size), in batches.
FOCI_API Evaluation evaluate(Vit<float>& model, const Dataset& data, Split split, int64_t begin,
                             int64_t end, int64_t batch = 64);

// A model's picture format, for preparing pictures of one's own.
FOCI_API PictureFormat format_of(const VitConfig& config);

// Vit's view of a batch.
FOCI_API std::vector<PatchGrid> patch_grids(const Batch& batch);

}  // namespace foci::vision
