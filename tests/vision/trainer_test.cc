// Training: the same bits however often a run is interrupted, killed or moved between thread
// counts; errors; and that it learns.
#include "foci/vision/trainer.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "foci/core/threads.h"
#include "foci/nn/checkpoint.h"
#include "foci/vision/scenes.h"
#include "io/damage.h"

namespace foci::vision {
namespace {

constexpr const char* kChildFolder = "FOCI_TEST_TRAIN_FOLDER";

Scenes scenes() {
  return Scenes({.seed = 5, .min_side = 16, .max_side = 24});
}

TrainOptions small_run(int64_t steps) {
  TrainOptions o;
  o.model.width = 16;
  o.model.layers = 1;
  o.model.heads = 2;
  o.model.feed_forward = 24;
  o.model.dropout = 0.1;  // so that its random numbers must come back too
  o.model.attention.dropout = Dropout{0.1};
  o.steps = steps;
  o.batch = 8;
  o.checkpoint_seconds = 1e9;
  return o;
}

std::vector<Tensor> bits_of(Vit<float>& model) {
  std::vector<Tensor> all;
  for (const auto* p : model.parameters()) all.push_back(p->value.clone());
  return all;
}

void expect_same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].shape(), b[i].shape());
    EXPECT_EQ(std::memcmp(a[i].raw(), b[i].raw(), a[i].nbytes()), 0) << "parameter " << i;
  }
}

class TrainerTest : public ::testing::Test {
 protected:
  template <class E>
  void expect_error(const TrainOptions& options, const std::vector<std::string>& parts) {
    const Scenes data = scenes();
    foci::testing::expect_error<E>(
        [&] {
          Trainer trainer(data, options);
          trainer.run();
        },
        parts);
  }

  foci::testing::TemporaryFolder temporary_;
  const std::filesystem::path folder_ = temporary_ / "run";  // made by the trainer
};

TEST_F(TrainerTest, TheSameBitsOnAnyNumberOfThreads) {
  const Scenes data = scenes();
  const int before = num_threads();
  std::vector<std::vector<Tensor>> results;
  for (int threads : {1, 2, 5}) {
    set_num_threads(threads);
    Trainer trainer(data, small_run(6));
    trainer.run();
    results.push_back(bits_of(trainer.model()));
  }
  set_num_threads(before);
  expect_same_bits(results[0], results[1]);
  expect_same_bits(results[0], results[2]);
}

TEST_F(TrainerTest, StoppedAndResumedEndsWithTheSameBits) {
  const Scenes data = scenes();
  Trainer whole(data, small_run(12));
  whole.run();
  for (int64_t stop_after : {1, 7}) {
    std::filesystem::remove_all(folder_);
    std::atomic<bool> stop = false;
    TrainOptions options = small_run(12);
    options.folder = folder_;
    options.stop = &stop;
    options.progress = [&](const Progress& p) { stop = p.step == stop_after; };
    {
      Trainer first(data, options);
      const TrainResult r = first.run();
      EXPECT_FALSE(r.finished);
      EXPECT_EQ(r.steps, stop_after);
    }
    options.resume = true;
    options.stop = nullptr;
    options.progress = nullptr;
    Trainer second(data, options);
    EXPECT_EQ(second.step(), stop_after);
    const TrainResult r = second.run();
    EXPECT_TRUE(r.finished);
    EXPECT_EQ(r.steps, 12);
    EXPECT_EQ(r.curve.size(), 12u);
    expect_same_bits(bits_of(second.model()), bits_of(whole.model()));
    expect_same_bits(bits_of(*load_vit(folder_)), bits_of(whole.model()));
  }
}

// The child of the next test: it trains in the folder it is told until somebody kills it.
TEST(TrainerChild, Trains) {
  const char* folder = std::getenv(kChildFolder);
  if (!folder) GTEST_SKIP() << "runs as a child of TrainerTest.KilledAnywhereEndsWithTheSameBits";
  const Scenes data = scenes();
  TrainOptions options = small_run(40);
  options.folder = folder;
  options.checkpoint_every = 1;
  options.resume = std::filesystem::exists(options.folder / "training.safetensors");
  Trainer(data, options).run();
}

TEST_F(TrainerTest, KilledAnywhereEndsWithTheSameBits) {
  const Scenes data = scenes();
  Trainer whole(data, small_run(40));
  whole.run();
  const auto start = [&] {
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv(kChildFolder, folder_.c_str(), 1);
      ::execl("/proc/self/exe", "trainer_tests", "--gtest_filter=TrainerChild.Trains",
              "--gtest_brief=1", nullptr);
      ::_exit(127);
    }
    return child;
  };
  const auto step_of = [&]() -> int64_t {
    if (!std::filesystem::exists(folder_ / "training.safetensors")) return -1;
    return std::stoll(nn::read_training_text(folder_ / "training.safetensors").at("step"));
  };
  int kills = 0;
  for (int64_t until : {1, 6, 13, 27}) {
    const pid_t child = start();
    ASSERT_GT(child, 0);
    // Each checkpoint on the way must be whole: reading it throws otherwise. A child that is done
    // before it could be killed is no failure, the test only needs most of them to be killed.
    int status = 0;
    while (step_of() < until && ::waitpid(child, &status, WNOHANG) == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(700 * until));  // anywhere in a step
    if (::kill(child, SIGKILL) == 0 && ::waitpid(child, &status, 0) == child) {
      kills += WIFSIGNALED(status);
    }
    ASSERT_GE(step_of(), 0);
    load_vit(folder_);  // the model beside it is whole too
  }
  EXPECT_GE(kills, 2);
  TrainOptions options = small_run(40);
  options.folder = folder_;
  options.resume = true;
  Trainer last(data, options);
  last.run();
  expect_same_bits(bits_of(last.model()), bits_of(whole.model()));
}

TEST_F(TrainerTest, ResumeRefusesOtherOptions) {
  const Scenes data = scenes();
  TrainOptions options = small_run(2);
  options.folder = folder_;
  expect_error<IoError>(
      [&] {
        TrainOptions o = options;
        o.resume = true;
        return o;
      }(),
      {"training.safetensors"});
  { Trainer(data, options).run(); }
  expect_error<ArgumentError>(options, {"holds training.safetensors already"});
  options.resume = true;
  TrainOptions other = options;
  other.batch = 9;
  expect_error<ArgumentError>(other, {"batch is 8", "9 was given"});
  other = options;
  other.model.width = 18;
  expect_error<FormatError>(other, {"cls_token", "[1, 16]", "[1, 18]"});
  other = options;
  other.model.dropout = 0.2;
  expect_error<ArgumentError>(other, {"model"});
  other = options;
  other.schedule.peak = 0.1;
  expect_error<ArgumentError>(other, {"learning rate is 0.003 in", "0.1 was given"});
  const Scenes others({.seed = 2});
  EXPECT_NE(others.fingerprint(), data.fingerprint());
  foci::testing::expect_error<ArgumentError>([&] { Trainer(others, options); }, {"data"});
}

TEST_F(TrainerTest, ARunKeepsItsRecord) {
  const Scenes data = scenes();
  TrainOptions options = small_run(2);
  options.folder = folder_;
  options.record = "{\"verb\": \"x\"}";
  { Trainer(data, options).run(); }
  EXPECT_EQ(read_record(folder_), options.record);
}

TEST_F(TrainerTest, ALossThatIsNotFiniteStopsAndKeepsTheLastCheckpoint) {
  const Scenes data = scenes();
  TrainOptions options = small_run(30);
  options.folder = folder_;
  options.checkpoint_every = 1;
  options.schedule = {.peak = 1e30, .warm_up = 0.5, .floor = 0};
  options.clip = 0;
  expect_error<NumericError>(options, {"training step ", "lower learning rate"});
  const auto kept = load_vit(folder_);  // whole, and from before the step that failed
  const int64_t step =
      std::stoll(nn::read_training_text(folder_ / "training.safetensors").at("step"));
  EXPECT_GE(step, 0);
  EXPECT_LT(step, 30);
}

TEST_F(TrainerTest, OptionsThatMakeNoSense) {
  TrainOptions o = small_run(2);
  o.minutes = 1;
  expect_error<ArgumentError>(o, {"either steps or minutes", "both"});
  o.minutes.reset();
  o.steps = 0;
  expect_error<ArgumentError>(o, {"steps: 0"});
  o = small_run(2);
  o.batch = 0;
  expect_error<ArgumentError>(o, {"batch: 0"});
  o = small_run(2);
  o.model.heads = 3;
  expect_error<ArgumentError>(o, {"heads: 3"});
  o = small_run(2);
  o.resume = true;
  expect_error<ArgumentError>(o, {"resume"});
}

TEST_F(TrainerTest, ItLearns) {
  const Scenes data = scenes();
  TrainOptions options = small_run(60);
  options.model.dropout = 0;
  options.model.attention.dropout.reset();
  std::vector<double> losses;
  options.progress = [&](const Progress& p) { losses.push_back(p.loss); };
  Trainer trainer(data, options);
  const TrainResult result = trainer.run();
  ASSERT_EQ(losses.size(), 60u);
  const auto mean = [&](size_t from, size_t to) {
    double sum = 0;
    for (size_t i = from; i < to; ++i) sum += losses[i] / static_cast<double>(to - from);
    return sum;
  };
  EXPECT_LT(mean(50, 60), mean(0, 10) - 0.1);
  EXPECT_EQ(result.curve.size(), 60u);
  const Evaluation e = evaluate(trainer.model(), data, Split::test, 0, 30, 7);
  EXPECT_EQ(e.labels.size(), 30u);
  EXPECT_EQ(e.labels.size(), e.predictions.size());
  EXPECT_NEAR(e.accuracy(), static_cast<double>(e.correct()) / 30, 1e-12);
  EXPECT_TRUE(std::isfinite(e.loss));
}

TEST_F(TrainerTest, MinutesEndTheRunAndTheScheduleWithIt) {
  const Scenes data = scenes();
  TrainOptions options = small_run(1);
  options.steps.reset();
  options.minutes = 0.5 / 60;
  std::vector<double> rates;
  options.progress = [&](const Progress& p) {
    rates.push_back(p.learning_rate);
    EXPECT_FALSE(p.steps.has_value());
    EXPECT_GE(p.eta_seconds, -60);
  };
  Trainer trainer(data, options);
  const TrainResult result = trainer.run();
  EXPECT_TRUE(result.finished);
  EXPECT_EQ(static_cast<int64_t>(rates.size()), result.steps);
  EXPECT_LE(*std::max_element(rates.begin(), rates.end()), options.schedule.peak);
}

}  // namespace
}  // namespace foci::vision
