// parallel_for runs each task once, carries exceptions, nests, and can be handed to a host.
#include "foci/core/threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "foci/core/error.h"

namespace foci {
namespace {

class Threads : public ::testing::Test {
 protected:
  void TearDown() override {
    set_num_threads(before_);
    set_executor({});
  }
  int before_ = num_threads();
};

TEST_F(Threads, EachTaskRunsOnce) {
  for (int threads : {1, 2, 3, 5}) {
    set_num_threads(threads);
    std::vector<std::atomic<int>> runs(1000);
    parallel_for(1000, [&](int64_t i) { ++runs[i]; });
    for (auto& r : runs) ASSERT_EQ(r, 1);
  }
}

TEST_F(Threads, NestedLoopsFinish) {
  set_num_threads(2);
  std::atomic<int> total = 0;
  parallel_for(8, [&](int64_t) { parallel_for(8, [&](int64_t) { ++total; }); });
  EXPECT_EQ(total, 64);
}

TEST_F(Threads, ExceptionsReachTheCaller) {
  set_num_threads(2);
  EXPECT_THROW(parallel_for(10, [](int64_t i) { require(i != 7, "seven"); }), ArgumentError);
}

TEST_F(Threads, AHostExecutorIsUsed) {
  int64_t seen = 0;
  set_executor([&](int64_t count, const std::function<void(int64_t)>& task) {
    seen = count;
    for (int64_t i = 0; i < count; ++i) task(i);
  });
  int64_t sum = 0;
  parallel_for(5, [&](int64_t i) { sum += i; });
  EXPECT_EQ(seen, 5);
  EXPECT_EQ(sum, 10);
}

// An executor that counts its calls and runs tasks on two threads.
class Pool {
 public:
  std::shared_ptr<const Executor> executor() {
    return std::make_shared<const Executor>(
        [this](int64_t count, const std::function<void(int64_t)>& task) {
          ++calls;
          std::atomic<int64_t> next = 0;
          const auto work = [&] {
            for (int64_t i = next++; i < count; i = next++) task(i);
          };
          std::thread other(work);
          work();
          other.join();
        });
  }
  std::atomic<int> calls = 0;
};

TEST_F(Threads, AScopesExecutorRunsTheLoopsOfItsThreadAlone) {
  set_num_threads(3);
  Pool outer, inner;
  std::vector<std::atomic<int>> runs(100);
  const auto loop = [&] { parallel_for(100, [&](int64_t i) { ++runs[i]; }); };
  {
    const ExecutorScope scope(outer.executor(), 2);
    EXPECT_EQ(num_threads(), 2);
    loop();
    EXPECT_EQ(outer.calls, 1);
    {
      const ExecutorScope nested(inner.executor(), 4);
      EXPECT_EQ(num_threads(), 4);
      loop();
    }
    EXPECT_EQ(inner.calls, 1);
    std::thread([&] {
      EXPECT_EQ(num_threads(), 3);
      loop();
    }).join();
    loop();
    EXPECT_EQ(outer.calls, 2);
  }
  loop();
  EXPECT_EQ(num_threads(), 3);
  EXPECT_EQ(outer.calls + inner.calls, 3);
  for (auto& r : runs) EXPECT_EQ(r, 5);
}

TEST_F(Threads, LoopsInsideAScopesTasksStayOnTheirThread) {
  Pool pool;
  const ExecutorScope scope(pool.executor(), 2);
  std::atomic<int> total = 0, strayed = 0;
  parallel_for(8, [&](int64_t) {
    const auto self = std::this_thread::get_id();
    if (num_threads() != 1) ++strayed;
    parallel_for(8, [&](int64_t) {
      ++total;
      if (std::this_thread::get_id() != self) ++strayed;
    });
  });
  EXPECT_EQ(total, 64);
  EXPECT_EQ(strayed, 0);
  EXPECT_EQ(pool.calls, 1);
}

TEST_F(Threads, AScopeOfOneThreadExecutesNothingElsewhere) {
  Pool pool;
  const ExecutorScope scope(pool.executor(), 1);
  int total = 0;
  parallel_for(8, [&](int64_t) { ++total; });
  EXPECT_EQ(total, 8);
  EXPECT_EQ(pool.calls, 0);
}

TEST_F(Threads, AScopesExecutorSeesNoExceptionAndTheCallerDoes) {
  bool threw = false;
  const auto executor = std::make_shared<const Executor>(
      [&](int64_t count, const std::function<void(int64_t)>& task) {
        try {
          for (int64_t i = 0; i < count; ++i) task(i);
        } catch (...) {
          threw = true;
        }
      });
  const ExecutorScope scope(executor, 2);
  int last = 0;
  EXPECT_THROW(parallel_for(10,
                            [&](int64_t i) {
                              last = static_cast<int>(i);
                              require(i != 7, "seven");
                            }),
               ArgumentError);
  EXPECT_FALSE(threw);
  EXPECT_EQ(last, 7);
}

TEST_F(Threads, ZeroThreadsAreRefused) {
  EXPECT_THROW(set_num_threads(0), ArgumentError);
  Pool pool;
  EXPECT_THROW(ExecutorScope(pool.executor(), 0), ArgumentError);
  EXPECT_THROW(ExecutorScope(nullptr, 2), ArgumentError);
  EXPECT_NE(num_threads(), 0);
}

}  // namespace
}  // namespace foci
