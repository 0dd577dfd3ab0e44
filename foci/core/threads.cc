// Tasks on oneTBB, in an arena of as many threads as were asked for.
#include "foci/core/threads.h"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>

#include <memory>
#include <mutex>

#include "foci/core/error.h"

#ifdef FOCI_THREAD_SANITIZER
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
// What oneTBB does with memory of its own.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "ignore_noninstrumented_modules=1";
}
#endif

namespace foci {
namespace {

struct State {
  std::mutex mutex;
  int threads = tbb::info::default_concurrency();
  std::unique_ptr<tbb::global_control> limit;  // lets more threads run than there are cores
  std::shared_ptr<tbb::task_arena> arena;      // made on first use, remade when `threads` changes
  std::shared_ptr<const Executor> executor;
};

// What the thread sanitiser must be told: oneTBB is not built for it, so it does not see that a
// task begins after its call and ends before it. (This file is built without it, for TBB's
// templates.)
#ifdef FOCI_THREAD_SANITIZER
void acquire(char& event) {
  __tsan_acquire(&event);
}
void release(char& event) {
  __tsan_release(&event);
}
#else
void acquire(char&) {}
void release(char&) {}
#endif

State& state() {
  static State s;
  return s;
}

}  // namespace

void set_num_threads(int n) {
  require(n >= 1, "threads: {} given, at least 1 is needed", n);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.threads == n) return;
  s.arena.reset();
  s.limit.reset();
  if (n > tbb::info::default_concurrency()) {
    s.limit = std::make_unique<tbb::global_control>(tbb::global_control::max_allowed_parallelism,
                                                    static_cast<size_t>(n));
  }
  s.threads = n;
}

int num_threads() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.threads;
}

void set_executor(Executor executor) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.executor = executor ? std::make_shared<const Executor>(std::move(executor)) : nullptr;
}

void parallel_for(int64_t count, const std::function<void(int64_t)>& task) {
  if (count <= 0) return;
  State& s = state();
  std::shared_ptr<tbb::task_arena> arena;
  std::shared_ptr<const Executor> executor;
  {
    const std::lock_guard lock(s.mutex);
    executor = s.executor;
    if (!executor && s.threads > 1 && count > 1) {
      if (!s.arena) s.arena = std::make_shared<tbb::task_arena>(s.threads);
      arena = s.arena;
    }
  }
  if (executor) {
    (*executor)(count, task);
  } else if (!arena) {
    for (int64_t i = 0; i < count; ++i) task(i);
  } else {
    char begun = 0, ended = 0;
    release(begun);
    // Isolated: a thread that waits here must not pick up a foreign task, which could re-enter
    // thread-local scratch in mid-use.
    arena->execute([&] {
      tbb::this_task_arena::isolate([&] {
        tbb::parallel_for(
            int64_t{0}, count,
            [&](int64_t i) {
              acquire(begun);
              task(i);
              release(ended);
            },
            tbb::simple_partitioner());
      });
    });
    acquire(ended);
  }
}

}  // namespace foci
