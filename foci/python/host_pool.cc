// GOMP_parallel behind an executor: a loop of foci is one parallel region, whose threads take tasks
// from a counter.
#include "foci/python/host_pool.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "foci/core/fork.h"
#include "foci/python/bindings.h"

namespace foci::python {
namespace {

// GCC's entry to a parallel region, which every OpenMP runtime that PyTorch is built with has:
// body(data) runs on each of `threads` threads, the calling one among them.
using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
using Threads = int (*)();

struct Pool {
  PyTypeObject* type = nullptr;  // of the library's arrays; kept
  Threads threads = nullptr;
  std::shared_ptr<const Executor> executor{};
};

// Under the GIL.
Pool& pool() {
  static Pool* const only = new Pool;  // threads may outlive statics
  return *only;
}

// A child of a fork has none of OpenMP's threads, and no way to get new ones: it would wait for
// them.
std::atomic<bool> forked = false;
[[maybe_unused]] const bool asked = call_in_child([] { forked = true; });

struct Loop {
  int64_t count;
  const std::function<void(int64_t)>* task;
  std::atomic<int64_t> next = 0;
};

void work(void* data) {
  Loop& loop = *static_cast<Loop*>(data);
  for (int64_t i = loop.next++; i < loop.count; i = loop.next++) (*loop.task)(i);
}

}  // namespace

HostPoolScope::HostPoolScope(nb::handle array) {
  const Pool& p = pool();
  if (p.type == nullptr || !PyObject_TypeCheck(array.ptr(), p.type)) return;
  const int threads = std::max(1, p.threads());
  if (threads > 1 && forked) return;
  scope_.emplace(p.executor, threads);
}

void bind_host_pool(nb::module_& m) {
  m.def(
      "set_host_pool",
      [](nb::type_object type, uintptr_t parallel, uintptr_t threads) {
        Pool& p = pool();
        if (p.type != nullptr) return;  // once for all
        // Addresses as ctypes has them.
        p.threads = reinterpret_cast<Threads>(threads);         // NOLINT(performance-no-int-to-ptr)
        const auto run = reinterpret_cast<Parallel>(parallel);  // NOLINT(performance-no-int-to-ptr)
        p.executor = std::make_shared<const Executor>(
            [run, ask = p.threads](int64_t count, const std::function<void(int64_t)>& task) {
              Loop loop{.count = count, .task = &task};
              run(work, &loop, static_cast<unsigned>(std::max(1, ask())), 0);
            });
        p.type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
      },
      nb::arg("type"), nb::arg("parallel"), nb::arg("threads"),
      "From now on calls on arrays of this type run on the threads of their library. parallel: the "
      "address of GOMP_parallel, threads: of a function without arguments that says how many.");
}

}  // namespace foci::python
