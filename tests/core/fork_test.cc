// A child of fork() can use foci, whatever the other threads were doing in it.
#include "core/fork_child.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "foci/core/error.h"
#include "foci/core/memory.h"
#include "foci/core/tensor.h"
#include "foci/core/threads.h"

namespace foci {
namespace {

using testing::in_child;

// Whether a loop runs each task once.
bool loop_is_whole(int64_t count) {
  std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
  parallel_for(count, [&](int64_t i) { ++runs[static_cast<size_t>(i)]; });
  for (auto& r : runs) {
    if (r != 1) return false;
  }
  return true;
}

bool tensors_work() {
  const KeepMemory keep;
  for (int n = 0; n < 3; ++n) {
    const Tensor a = Tensor::full({100, 30}, n), b = a.clone();
    if (b.item({99, 29}) != n) return false;
  }
  return true;
}

bool serial_and_sound() {
  return num_threads() == 1 && loop_is_whole(100) && tensors_work();
}

class Fork : public ::testing::Test {
 protected:
  void SetUp() override { set_num_threads(4); }
  void TearDown() override {
    set_executor({});
    set_num_threads(before_);
  }
  const int before_ = num_threads();
};

// Threads that are in the middle of foci's loops for as long as it lives.
class InsideLoops {
 public:
  explicit InsideLoops(int count) {
    for (int t = 0; t < count; ++t) {
      threads_.emplace_back([this] {
        parallel_for(8, [this](int64_t) {
          ++inside_;
          while (!over_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        });
      });
    }
    while (inside_ < count) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~InsideLoops() {
    over_ = true;
    for (std::thread& t : threads_) t.join();
  }

 private:
  std::atomic<bool> over_ = false;
  std::atomic<int> inside_ = 0;
  std::vector<std::thread> threads_;
};

TEST_F(Fork, AChildOfAProcessWithThreadsIsSerial) {
  ASSERT_TRUE(loop_is_whole(100));
  EXPECT_EQ(in_child(serial_and_sound), "");
  EXPECT_EQ(num_threads(), 4);
  EXPECT_TRUE(loop_is_whole(100));
}

TEST_F(Fork, OtherThreadsMayBeInsideLoops) {
  const InsideLoops others(2);
  for (int n = 0; n < 5; ++n) EXPECT_EQ(in_child(serial_and_sound), "");
}

TEST_F(Fork, AThreadThatIsNotTheFirstMayFork) {
  const InsideLoops others(2);
  std::thread([] {
    tensors_work();
    EXPECT_EQ(in_child(serial_and_sound), "");
  }).join();
}

TEST_F(Fork, AChildMayForkToo) {
  const InsideLoops others(2);
  EXPECT_EQ(in_child([] { return serial_and_sound() && in_child(serial_and_sound).empty(); }), "");
}

TEST_F(Fork, AChildMayBeInterrupted) {
  const InsideLoops others(2);
  EXPECT_EQ(in_child([] {
              const InterruptScope scope([] { return true; });
              try {
                parallel_for(int64_t{1} << 20, [](int64_t) {
                  std::this_thread::sleep_for(std::chrono::milliseconds(1));
                });
              } catch (const Interrupted&) {
                return true;
              }
              return false;
            }),
            "");
}

TEST_F(Fork, AChildAsksForThreadsAnew) {
#ifdef FOCI_TEST_THREAD_SANITIZER
  GTEST_SKIP() << "the thread sanitiser allows no new threads in the child of a fork";
#endif
  const InsideLoops others(2);
  EXPECT_EQ(in_child([] {
              set_num_threads(3);
              std::mutex mutex;
              std::set<std::thread::id> ids;
              // Each task waits for the others, so there must be three threads.
              parallel_for(3, [&](int64_t) {
                for (;;) {
                  const std::lock_guard lock(mutex);
                  ids.insert(std::this_thread::get_id());
                  if (ids.size() == 3) return;
                }
              });
              return num_threads() == 3 && loop_is_whole(1000);
            }),
            "");
  EXPECT_EQ(in_child([] {
              set_num_threads(2);
              std::atomic<int> total = 0;
              parallel_for(8, [&](int64_t) { parallel_for(8, [&](int64_t) { ++total; }); });
              try {
                parallel_for(10, [](int64_t i) { require(i != 7, "seven"); });
              } catch (const ArgumentError&) {
                return total == 64 && loop_is_whole(10);
              }
              return false;
            }),
            "");
  EXPECT_EQ(in_child([] {
              set_num_threads(2);
              const InterruptScope scope([] { return true; });
              try {
                parallel_for(int64_t{1} << 20, [](int64_t) {
                  std::this_thread::sleep_for(std::chrono::milliseconds(1));
                });
              } catch (const Interrupted&) {
                return loop_is_whole(10);
              }
              return false;
            }),
            "");
}

TEST_F(Fork, AHostsExecutorStaysWithTheParent) {
  std::atomic<int> calls = 0;
  const Executor host = [&](int64_t count, const std::function<void(int64_t)>& task) {
    ++calls;
    for (int64_t i = 0; i < count; ++i) task(i);
  };
  set_executor(host);
  EXPECT_EQ(in_child([&] { return serial_and_sound() && calls == 0; }), "");
  EXPECT_EQ(in_child([&] {
              set_executor(host);
              return loop_is_whole(10) && calls == 1;
            }),
            "");
}

TEST_F(Fork, AChildMayExitAsUsual) {
#ifdef FOCI_TEST_ADDRESS_SANITIZER
  GTEST_SKIP() << "what the threads of the parent held is a leak to the address sanitiser";
#endif
  const InsideLoops others(2);
  for (int n = 0; n < 5; ++n) EXPECT_EQ(in_child(serial_and_sound, true), "");
}

// Forks in the midst of locks taken and released.
TEST_F(Fork, OtherThreadsMayHoldLocks) {
  set_num_threads(2);
  std::atomic<bool> over = false;
  std::atomic<int> working = 0;
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::microseconds(20)); };
  std::vector<std::thread> others;
  others.emplace_back([&] {
    for (; !over; ++working, pause()) loop_is_whole(4);
  });
  others.emplace_back([&] {
    for (; !over; ++working, pause()) tensors_work();
  });
  others.emplace_back([&] {
    for (; !over; ++working, pause()) set_num_threads(1 + working % 2);
  });
  while (working < 10) std::this_thread::yield();
  for (int n = 0; n < 40; ++n) {
    // One that had no threads yet may start some.
    const std::string end = in_child([] {
#ifdef FOCI_TEST_THREAD_SANITIZER
      set_num_threads(1);
#endif
      return loop_is_whole(100) && tensors_work();
    });
    EXPECT_EQ(end, "");
    if (!end.empty()) break;
  }
  over = true;
  for (std::thread& t : others) t.join();
}

}  // namespace
}  // namespace foci
