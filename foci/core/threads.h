// Threads: how foci runs independent tasks.
//
// How work is cut into tasks depends on shapes alone and every task writes its own memory, so
// results never depend on the number of threads. A host program can cap the threads, or hand in
// its own executor.
#pragma once

#include <cstdint>
#include <functional>

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

// Runs task(i) for i in [0, count). An exception from a task reaches the caller.
FOCI_API void parallel_for(int64_t count, const std::function<void(int64_t)>& task);

}  // namespace foci
