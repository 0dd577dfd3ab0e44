// parallel_for runs each task once, carries exceptions, nests, and can be handed to a host.
#include "foci/core/threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
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

TEST_F(Threads, ZeroThreadsAreRefused) {
  EXPECT_THROW(set_num_threads(0), ArgumentError);
}

}  // namespace
}  // namespace foci
