// The threads of a library whose arrays foci computes on: calls on them run there.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "foci/core/threads.h"

namespace foci::python {

namespace nb = nanobind;

// Keeps loops of this thread in the pool of `array`'s library while it lives, if one is known
// (set_host_pool, which `foci.torch` calls). Two pools would disturb each other: OpenMP's threads
// spin for a while after their work, on the cores that another pool's want.
class HostPoolScope {
 public:
  explicit HostPoolScope(nb::handle array);

 private:
  std::optional<ExecutorScope> scope_;
};

}  // namespace foci::python
