// Threads: how foci runs independent tasks.
//
// How work is cut into tasks depends on shapes alone and every task writes its own memory, so
// results never depend on the number of threads. A host program can cap the threads, hand in its
// own executor, and end long calls before they are done.
//
// After fork() the child has none of its parent's threads. Where foci had run tasks on some, or on
// a host's executor, the child forgets them and runs its tasks one after the other: num_threads()
// is 1 there, until set_num_threads or set_executor is called anew (then each loop starts threads
// of its own). Other threads may be inside foci at a fork; the one that forks must not.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "foci/core/api.h"

namespace foci {

// Runs task(0) … task(count-1), each exactly once, in any order, and returns when all are done.
using Executor = std::function<void(int64_t count, const std::function<void(int64_t)>& task)>;

// Threads that parallel_for may use, 1 or more. The default is what the process may run on
// (its affinity mask). Throws ArgumentError below 1.
FOCI_API void set_num_threads(int n);
FOCI_API int num_threads();

// Replaces the executor (oneTBB by default; an empty function restores it).
FOCI_API void set_executor(Executor executor);

// While one lives, loops of the thread that made it run on `executor`, and num_threads() is
// `threads` there: for hosts whose pools belong to some of their calls only. Loops inside its tasks
// stay on their thread, and the executor sees no exception of a task. With 1 thread nothing is
// executed elsewhere. Scopes may lie within each other: the innermost counts. A scope ends on the
// thread that made it, which must not fork meanwhile. Throws ArgumentError below 1 thread.
class FOCI_API ExecutorScope {
 public:
  ExecutorScope(std::shared_ptr<const Executor> executor, int threads);
  ~ExecutorScope();
  ExecutorScope(const ExecutorScope&) = delete;
  ExecutorScope& operator=(const ExecutorScope&) = delete;

  struct Host;  // private

 private:
  std::unique_ptr<Host> host_;
  const Host* outer_;
};

// Runs task(i) for i in [0, count). An exception from a task reaches the caller.
FOCI_API void parallel_for(int64_t count, const std::function<void(int64_t)>& task);

// While one lives, calls into foci from the thread that made it can be ended early:
//
//   const InterruptScope scope([] { return ctrl_c_was_pressed(); });
//   bound.forward(…);  // may throw Interrupted
//
// parallel_for asks `asked` on that thread alone, between its tasks, at most every 50 ms. Once the
// answer is true no further task starts, in loops inside tasks neither, and when those that run
// have ended the call throws Interrupted (core/error.h). What it would have written is unspecified
// then; everything else can be used again. Scopes may lie within each other: the innermost asks. A
// scope ends on the thread that made it. An executor sees tasks that return at once, not an
// exception. An exception that `asked` itself throws goes the way of one from a task.
class FOCI_API InterruptScope {
 public:
  explicit InterruptScope(std::function<bool()> asked);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  struct Call;  // private

 private:
  std::unique_ptr<Call> call_;
  Call* outer_;
};

}  // namespace foci
