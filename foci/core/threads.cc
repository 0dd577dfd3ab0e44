// Tasks on oneTBB, in an arena of as many threads as were asked for.
#include "foci/core/threads.h"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "foci/core/error.h"
#include "foci/core/fork.h"

#ifdef FOCI_THREAD_SANITIZER
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
// What oneTBB does with memory of its own.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "ignore_noninstrumented_modules=1";
}
#endif

namespace foci {

// What parallel_for knows of the scope that it runs in. Tasks find it through `current`, whichever
// thread they run on, so that loops inside them stop too.
struct InterruptScope::Call {
  using Clock = std::chrono::steady_clock;
  static constexpr auto kPause = std::chrono::milliseconds(50);

  std::function<bool()> asked;
  const std::thread::id owner = std::this_thread::get_id();
  Clock::time_point next = Clock::now() + kPause;  // the owner's
  bool running = false;                            // the owner's
  std::atomic<bool> stopped = false;
  std::shared_ptr<tbb::task_arena> arena;  // of the loop that runs; under `mutex`

  bool stop();
};

// Where the loops of a thread run that is inside a scope.
struct ExecutorScope::Host {
  std::shared_ptr<const Executor> executor;
  int threads;
};

namespace {

using Task = std::function<void(int64_t)>;
using Arena = std::shared_ptr<tbb::task_arena>;
using Call = InterruptScope::Call;
using Host = ExecutorScope::Host;

struct State {
  int threads = 1;
  std::unique_ptr<tbb::global_control> limit{};  // lets more threads run than there are cores
  Arena arena{};                                 // made on first use, remade when `threads` changes
  std::vector<Arena> for_call{};                 // those that no call uses now, of as many threads
  std::shared_ptr<const Executor> executor{};
  bool had_threads = false;  // a fork would lose some
  bool without_tbb = false;  // this is a fork that lost some
};

constinit std::mutex mutex;  // guards all that follows
constinit State* shared = nullptr;

// Never destroyed: threads may outlive the statics of this file.
State& state() {
  if (!shared) shared = new State{.threads = tbb::info::default_concurrency()};
  return *shared;
}

// What is left of oneTBB here waits for threads that are gone, even when it is destroyed. So the
// parent's state is left lying.
void forget_threads() {
  if (!shared || !(shared->had_threads || shared->executor)) return;
  shared = new State{.threads = 1, .without_tbb = true};
}

[[maybe_unused]] const bool forks = hold_over_fork(mutex) && call_in_child(forget_threads);

thread_local Call* current = nullptr;
thread_local bool on_own_threads = false;
thread_local const Host* host = nullptr;
constinit const Host in_a_task = {.executor = nullptr, .threads = 1};

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

// How a loop runs: by an executor (a scope's, whose tasks do not share out further, or
// everybody's), in the arena, or on so many threads of its own.
struct Way {
  std::shared_ptr<const Executor> scoped{};
  std::shared_ptr<const Executor> executor{};
  Arena arena{};
  int own_threads = 1;
};

Way way_of(int64_t count, Call* call) {
  if (host) {
    if (host->threads == 1 || count == 1) return {};
    return {.scoped = host->executor};
  }
  const std::lock_guard lock(mutex);
  State& s = state();
  if (s.executor) return {.executor = s.executor};
  if (s.threads == 1 || count == 1) return {};
  if (s.without_tbb) return {.own_threads = on_own_threads ? 1 : s.threads};
  s.had_threads = true;
  if (!call) {
    if (!s.arena) s.arena = std::make_shared<tbb::task_arena>(s.threads);
    return {.arena = s.arena};
  }
  // An arena of its own: in one that others have filled TBB would let the owner sleep until one of
  // their threads has run its loop, and then nobody asks.
  if (!call->arena) {
    if (s.for_call.empty()) s.for_call.push_back(std::make_shared<tbb::task_arena>(s.threads));
    call->arena = std::move(s.for_call.back());
    s.for_call.pop_back();
  }
  return {.arena = call->arena};
}

// The first exception of a loop. Tasks leave theirs here, so that none is still in use by a thread
// when the caller has it.
class FirstError {
 public:
  bool taken() const { return taken_.load(std::memory_order_relaxed); }
  // False where task(i) threw.
  bool run(const Task& task, int64_t i) {
    try {
      task(i);
      return true;
    } catch (...) {
      if (!taken_.exchange(true)) error_ = std::current_exception();
      return false;
    }
  }
  void rethrow() {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  std::atomic<bool> taken_ = false;
  std::exception_ptr error_;
};

// A loop on threads that are started for it. Loops inside its tasks stay where they are.
void run_on_own_threads(int64_t threads, int64_t count, const Task& task) {
  std::atomic<int64_t> next = 0;
  FirstError error;
  const auto work = [&] {
    const bool before = std::exchange(on_own_threads, true);
    for (int64_t i = next++; i < count; i = next++) {
      if (!error.run(task, i)) next = count;
    }
    on_own_threads = before;
  };
  std::vector<std::thread> helpers;
  helpers.reserve(static_cast<size_t>(threads));
  try {
    while (std::ssize(helpers) < std::min(threads, count) - 1) helpers.emplace_back(work);
  } catch (const std::exception&) {
    // No more threads to be had: those there are do it all.
  }
  work();
  for (std::thread& t : helpers) t.join();
  error.rethrow();
}

void run_in_arena(tbb::task_arena& arena, int64_t count, const Task& task) {
  FirstError error;
  char begun = 0, ended = 0;
  release(begun);
  // A loop inside a task ends in its own way when the one around it is cancelled: what follows it
  // in that task counts on it.
  tbb::task_group_context context(tbb::task_group_context::isolated);
  // Isolated: a thread that waits here must not pick up a foreign task, which could re-enter
  // thread-local scratch in mid-use.
  arena.execute([&] {
    tbb::this_task_arena::isolate([&] {
      tbb::parallel_for(
          int64_t{0}, count,
          [&](int64_t i) {
            acquire(begun);
            if (!error.run(task, i)) context.cancel_group_execution();
            release(ended);
          },
          tbb::simple_partitioner(), context);
    });
  });
  acquire(ended);
  error.rethrow();
}

// Sets a thread-local pointer while it lives.
template <class T>
class Within {
 public:
  Within(T*& place, T* value) : place_(place), before_(std::exchange(place, value)) {}
  ~Within() { place_ = before_; }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;

 private:
  T*& place_;
  T* before_;
};

void run_in_scope(const Executor& executor, int64_t count, const Task& task) {
  FirstError error;
  executor(count, [&](int64_t i) {
    if (error.taken()) return;
    const Within inside(host, &in_a_task);
    error.run(task, i);
  });
  error.rethrow();
}

void run(const Way& way, int64_t count, const Task& task) {
  if (way.scoped) {
    run_in_scope(*way.scoped, count, task);
  } else if (way.executor) {
    (*way.executor)(count, task);
  } else if (way.arena) {
    run_in_arena(*way.arena, count, task);
  } else if (way.own_threads > 1) {
    run_on_own_threads(way.own_threads, count, task);
  } else {
    for (int64_t i = 0; i < count; ++i) task(i);
  }
}

// While it lives the call runs; then its arena waits for the next one.
class Running {
 public:
  explicit Running(Call& call) : call_(call) {
    call.running = true;
    call.stopped = false;
  }
  ~Running() {
    call_.running = false;
    if (!call_.arena) return;
    const std::lock_guard lock(mutex);
    State& s = state();
    Arena arena = std::exchange(call_.arena, nullptr);
    if (arena->max_concurrency() != s.threads) return;
    try {
      s.for_call.push_back(std::move(arena));
    } catch (const std::bad_alloc&) {
      // No room to remember it: let it go.
    }
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  Call& call_;
};

void run_in_call(Call& call, int64_t count, const Task& task) {
  const Way way = way_of(count, &call);
  run(way, count, [&](int64_t i) {
    const Within within(current, &call);
    if (!call.stop()) {
      try {
        return task(i);
      } catch (const Interrupted&) {
        if (!call.stopped) throw;
      }
    }
    // The rest of the loop is not begun. A host's executor need not let exceptions through.
    if (!way.executor) throw Interrupted("interrupted");
  });
  if (call.stopped) throw Interrupted("interrupted");
}

}  // namespace

// Whether tasks must not start any more; asks when it is time to.
bool InterruptScope::Call::stop() {
  if (stopped.load(std::memory_order_relaxed)) return true;
  if (std::this_thread::get_id() != owner || Clock::now() < next) return false;
  {
    const Within none(current,
                      static_cast<Call*>(nullptr));  // what `asked` calls is not part of the call
    if (asked()) stopped = true;
  }
  next = Clock::now() + kPause;
  return stopped;
}

InterruptScope::InterruptScope(std::function<bool()> asked)
    : call_(new Call{.asked = std::move(asked)}), outer_(current) {
  require(call_->asked != nullptr, "asked: an empty function given, one that answers is needed");
  current = call_.get();
}

InterruptScope::~InterruptScope() {
  current = outer_;
}

ExecutorScope::ExecutorScope(std::shared_ptr<const Executor> executor, int threads)
    : host_(new Host{.executor = std::move(executor), .threads = threads}), outer_(host) {
  require(threads >= 1, "threads: {} given, at least 1 is needed", threads);
  require(host_->executor != nullptr && *host_->executor != nullptr,
          "executor: none given, one that runs tasks is needed");
  host = host_.get();
}

ExecutorScope::~ExecutorScope() {
  host = outer_;
}

void set_num_threads(int n) {
  require(n >= 1, "threads: {} given, at least 1 is needed", n);
  const std::lock_guard lock(mutex);
  State& s = state();
  if (s.threads == n) return;
  s.arena.reset();
  s.for_call.clear();
  s.limit.reset();
  s.threads = n;
  if (s.without_tbb) return;
  if (n > tbb::info::default_concurrency()) {
    s.limit = std::make_unique<tbb::global_control>(tbb::global_control::max_allowed_parallelism,
                                                    static_cast<size_t>(n));
  }
}

int num_threads() {
  if (host) return host->threads;
  const std::lock_guard lock(mutex);
  State& s = state();
  return s.threads;
}

void set_executor(Executor executor) {
  const std::lock_guard lock(mutex);
  State& s = state();
  s.executor = executor ? std::make_shared<const Executor>(std::move(executor)) : nullptr;
}

void parallel_for(int64_t count, const Task& task) {
  if (count <= 0) return;
  require(task != nullptr, "task: an empty function given, one that runs is needed");
  Call* const call = current;
  if (!call) {
    run(way_of(count, nullptr), count, task);
  } else if (call->running) {
    run_in_call(*call, count, task);
  } else {
    const Running running(*call);
    run_in_call(*call, count, task);
  }
}

}  // namespace foci
