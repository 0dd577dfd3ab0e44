// Long calls end early when somebody asks: on every way that parallel_for can run.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "foci/core/error.h"
#include "foci/core/threads.h"

namespace foci {
namespace {

// So many naps that they would take minutes: a test that ends has been interrupted.
constexpr int64_t kEndless = int64_t{1} << 18;

void nap() {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Runs each loop on `count` threads of its own.
void run_on_threads(int count, int64_t tasks, const std::function<void(int64_t)>& task) {
  std::atomic<int64_t> next = 0;
  const auto work = [&] {
    for (int64_t i = next++; i < tasks; i = next++) task(i);
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < count; ++t) threads.emplace_back(work);
  work();
  for (std::thread& t : threads) t.join();
}

enum class Way { serial, arena, wide_arena, executor, scope };

class Interrupt : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    switch (GetParam()) {
      case Way::serial:
        return set_num_threads(1);
      case Way::arena:
        return set_num_threads(2);
      case Way::wide_arena:
        return set_num_threads(5);
      case Way::executor:
        return set_executor([](int64_t count, const std::function<void(int64_t)>& task) {
          run_on_threads(2, count, task);
        });
      case Way::scope:
        scope_.emplace(std::make_shared<const Executor>(
                           [](int64_t count, const std::function<void(int64_t)>& task) {
                             run_on_threads(2, count, task);
                           }),
                       2);
    }
  }
  void TearDown() override {
    set_num_threads(before_);
    set_executor({});
    scope_.reset();
  }
  const int before_ = num_threads();
  std::optional<ExecutorScope> scope_;
};

std::string way_name(const ::testing::TestParamInfo<Way>& info) {
  const char* const names[] = {"serial", "arena", "wide_arena", "executor", "scope"};
  return names[static_cast<int>(info.param)];
}
INSTANTIATE_TEST_SUITE_P(Ways, Interrupt,
                         ::testing::Values(Way::serial, Way::arena, Way::wide_arena, Way::executor,
                                           Way::scope),
                         way_name);

TEST_P(Interrupt, EndsALoop) {
  const std::thread::id here = std::this_thread::get_id();
  std::atomic<int64_t> started = 0, ended = 0;
  int asked = 0;
  const InterruptScope scope([&] {
    EXPECT_EQ(std::this_thread::get_id(), here);
    return ++asked == 2;
  });
  EXPECT_THROW(parallel_for(kEndless,
                            [&](int64_t) {
                              ++started;
                              nap();
                              ++ended;
                            }),
               Interrupted);
  EXPECT_EQ(asked, 2);
  EXPECT_LT(started, kEndless);
  EXPECT_EQ(started, ended);  // what had begun was waited for
}

TEST_P(Interrupt, EndsLoopsInsideTasks) {
  std::atomic<int64_t> begun = 0, finished = 0;
  const InterruptScope scope([] { return true; });
  EXPECT_THROW(parallel_for(4,
                            [&](int64_t) {
                              ++begun;
                              parallel_for(kEndless, [](int64_t) { nap(); });
                              ++finished;
                            }),
               Interrupted);
  EXPECT_GT(begun, 0);
  EXPECT_EQ(finished, 0);
}

TEST_P(Interrupt, RunsEveryTaskWhileTheAnswerIsNo) {
  int asked = 0;
  const InterruptScope scope([&] {
    ++asked;
    return false;
  });
  std::atomic<int> total = 0;
  // A loop is asked about at its first task, once 50 ms have passed.
  for (int n = 0; n < 4; ++n) {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    parallel_for(8, [&](int64_t) { parallel_for(8, [&](int64_t) { ++total; }); });
  }
  EXPECT_EQ(total, 4 * 64);
  if (GetParam() == Way::serial) {
    EXPECT_GE(asked, 4);
  }
}

TEST_P(Interrupt, IsOverWithItsScope) {
  {
    bool answer = true;
    const InterruptScope scope([&] { return std::exchange(answer, false); });
    EXPECT_THROW(parallel_for(kEndless, [](int64_t) { nap(); }), Interrupted);
    // The next call of the same scope begins anew.
    std::atomic<int> runs = 0;
    parallel_for(2, [&](int64_t) { ++runs; });
    EXPECT_EQ(runs, 2);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  std::atomic<int> total = 0;
  parallel_for(8, [&](int64_t) { parallel_for(8, [&](int64_t) { ++total; }); });
  EXPECT_EQ(total, 64);
}

TEST_P(Interrupt, TheInnermostScopeAsks) {
  const InterruptScope outer([] { return false; });
  {
    const InterruptScope inner([] { return true; });
    EXPECT_THROW(parallel_for(kEndless, [](int64_t) { nap(); }), Interrupted);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  std::atomic<int> runs = 0;
  parallel_for(20, [&](int64_t) { ++runs; });
  EXPECT_EQ(runs, 20);
}

TEST_P(Interrupt, ASlowAnswerMayUseThreadsItself) {
  const InterruptScope scope([] {
    std::atomic<int> runs = 0;
    parallel_for(50, [&](int64_t) {
      nap();
      ++runs;
    });
    EXPECT_EQ(runs, 50);
    return true;
  });
  EXPECT_THROW(parallel_for(kEndless, [](int64_t) { nap(); }), Interrupted);
}

TEST_P(Interrupt, OtherThreadsAreLeftAlone) {
  std::atomic<bool> stop = false;
  std::atomic<int64_t> interrupted = 0, loops = 0;
  std::vector<std::thread> others;
  for (int t = 0; t < 3; ++t) {
    others.emplace_back([&] {
      while (!stop) {
        std::atomic<int> runs = 0;
        try {
          parallel_for(40, [&](int64_t) {
            ++runs;
            nap();
          });
        } catch (const Interrupted&) {
          ++interrupted;
        }
        EXPECT_EQ(runs, 40);
        ++loops;
      }
    });
  }
  for (int n = 0; n < 3; ++n) {
    const InterruptScope scope([] { return true; });
    EXPECT_THROW(parallel_for(kEndless, [](int64_t) { nap(); }), Interrupted);
  }
  stop = true;
  for (std::thread& t : others) t.join();
  EXPECT_EQ(interrupted, 0);
  EXPECT_GT(loops, 0);
}

TEST_P(Interrupt, EachThreadHasItsOwnScope) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      const std::thread::id here = std::this_thread::get_id();
      for (int n = 0; n < 2; ++n) {
        const InterruptScope scope([&] { return std::this_thread::get_id() == here; });
        EXPECT_THROW(parallel_for(kEndless, [](int64_t) { nap(); }), Interrupted);
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

// (The executor of these tests lets no exception through.)
class InterruptErrors : public Interrupt {};
INSTANTIATE_TEST_SUITE_P(Ways, InterruptErrors,
                         ::testing::Values(Way::serial, Way::arena, Way::wide_arena), way_name);

TEST_P(InterruptErrors, ErrorsOfTasksReachTheCallerAsEver) {
  const InterruptScope scope([] { return false; });
  EXPECT_THROW(parallel_for(10, [](int64_t i) { require(i != 7, "seven"); }), ArgumentError);
  EXPECT_THROW(parallel_for(10, [](int64_t) { throw Interrupted("of its own"); }), Interrupted);
}

TEST_P(InterruptErrors, AnErrorWhileAskingReachesTheCaller) {
  const InterruptScope scope([]() -> bool { throw std::logic_error("asked"); });
  EXPECT_THROW(parallel_for(kEndless, [](int64_t) { nap(); }), std::logic_error);
}

TEST(InterruptScope, NeedsAQuestion) {
  EXPECT_THROW(InterruptScope scope({}), ArgumentError);
}

}  // namespace
}  // namespace foci
