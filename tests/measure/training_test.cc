// What `foci bench train` measures: its workloads, the work that a step is counted at, the profile.
#include "foci/measure/training.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "foci/core/error.h"
#include "foci/core/threads.h"

namespace foci::measure {
namespace {

TrainingWorkload small_pictures() {
  return {.name = "small",
          .width = 16,
          .layers = 2,
          .heads = 2,
          .feed_forward = 24,
          .batch = 3,
          .grids = {{2, 3}, {1, 4}, {3, 3}},
          .patch_values = 5,
          .classes = 4,
          .position_rows = 3,
          .position_cols = 3,
          .class_token = true,
          .label_smoothing = 0.1};
}

TrainingWorkload small_texts() {
  return {.name = "texts",
          .language = true,
          .width = 16,
          .layers = 2,
          .heads = 2,
          .feed_forward = 24,
          .batch = 3,
          .length = 10,
          .vocabulary = 20,
          .learning_rate = 1e-2};
}

TEST(TrainingWorkload, NamesAreKnown) {
  const auto names = training_workloads();
  for (const char* name : {"vit-demo", "vit-d192", "lm-d256", "vit-s"}) {
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name;
    EXPECT_EQ(training_workload(name).name, name);
  }
  EXPECT_EQ(training_workload("vit-s").lengths(), std::vector<int64_t>(8, 197));
  EXPECT_EQ(training_workload("vit-d192").lengths(), std::vector<int64_t>(32, 64));
  EXPECT_EQ(training_workload("lm-d256").lengths(), std::vector<int64_t>(8, 256));
  const auto mixed = training_workload("vit-demo").lengths();
  EXPECT_GT(std::set<int64_t>(mixed.begin(), mixed.end()).size(), 5u);
  EXPECT_THROW(training_workload("vit"), ArgumentError);
}

// Linear maps cost 2·I·O a row forward and twice that backward (the first one sends no gradient to
// its input), attention 4·D a pair and head forward and 10·D backward. Of the last layer before a
// class token is read only its row is computed, but for keys and values: 3 rows of T.
TEST(TrainingJob, CountsItsWork) {
  const double T = 22, C = 16, F = 24, L = 2;
  double pairs = T;
  for (double n : {7.0, 5.0, 10.0}) pairs += n * n;
  const double linear = 3 * 2 * (T * (6 * C * C + 2 * C * F) + 3 * (2 * C * C + 2 * C * F + 4 * C));
  EXPECT_DOUBLE_EQ(TrainingJob(small_pictures()).flops(),
                   linear + 2 * 2 * 19 * 5 * C + pairs * 14 * C);
  const double texts = 3 * 2 * 30 * ((4 * C * C + 2 * C * F) * L + C * 20);
  EXPECT_DOUBLE_EQ(TrainingJob(small_texts()).flops(), texts + L * 3 * 55 * 14 * C);
}

TEST(TrainingJob, LearnsItsBatchWithTheSameBitsOnAnyThreads) {
  const int threads = num_threads();
  for (const TrainingWorkload& w : {small_pictures(), small_texts()}) {
    std::vector<double> losses[2];
    for (int run : {0, 1}) {
      set_num_threads(run == 0 ? 1 : 3);
      TrainingJob job(w, 7);
      for (int i = 0; i < 30; ++i) losses[run].push_back(job.step());
    }
    EXPECT_EQ(losses[0], losses[1]);
    EXPECT_LT(losses[0].back(), 0.8 * losses[0].front()) << w.name;
  }
  set_num_threads(threads);
}

TEST(TrainingJob, CheckpointsChangeNoBit) {
  for (TrainingWorkload w : {small_pictures(), small_texts()}) {
    std::vector<double> losses[2];
    for (const bool checkpoint : {false, true}) {
      w.checkpoint_layers = checkpoint;
      TrainingJob job(w, 7);
      for (int i = 0; i < 5; ++i) losses[checkpoint].push_back(job.step());
    }
    EXPECT_EQ(losses[0], losses[1]) << w.name;
  }
}

TEST(MeasureTraining, TheProfileAddsUp) {
  const TrainingReport r =
      measure_training({.workload = small_texts(), .seconds = 0.001, .profile = true});
  EXPECT_GE(r.steps, 5);
  EXPECT_GT(r.seconds, 0);
  EXPECT_GT(r.parameters, 16 * 20);
  EXPECT_EQ(r.allocations, 0);
  EXPECT_GT(r.tensors, 50);
  EXPECT_GT(r.peak_bytes, 12 * r.parameters);
  double share = 0, gflops = 0;
  std::set<std::string> names;
  for (const TrainingRow& row : r.rows) {
    share += row.share;
    gflops += row.gflops * row.seconds;
    names.insert(row.name);
  }
  EXPECT_NEAR(share, 1, 1e-9);
  EXPECT_NEAR(gflops, 1e-9 * r.flops, 1e-6 * gflops);
  for (const char* name : {"linear", "attention", "layer norm", "embedding", "loss", "optimiser"}) {
    EXPECT_TRUE(names.count(name)) << name;
  }
  int calls = 0;
  const TrainingReport stopped = measure_training(
      {.workload = small_texts(), .seconds = 1e9, .keep_going = [&] { return ++calls < 4; }});
  EXPECT_TRUE(stopped.stopped);
  EXPECT_EQ(stopped.steps, 3);
}

}  // namespace
}  // namespace foci::measure
