// Long calls without the GIL, which Ctrl-C ends.
#pragma once

#include <nanobind/nanobind.h>

#include "foci/core/error.h"
#include "foci/core/threads.h"

namespace foci::python {

// Of calls that may take long whatever their sizes.
inline constexpr double kLong = 1e300;

// Runs work() without the GIL; now and then Python's signal handlers get their turn, and what they
// raise ends the call and is raised from it. `pairs` of query and key below which no one waits long
// enough to press keys: then nobody asks.
template <class F>
void without_gil(double pairs, const F& work) {
  constexpr double kShort = 1e7;
  const nanobind::gil_scoped_release free;
  if (pairs < kShort) return work();
  const InterruptScope scope([] {
    const nanobind::gil_scoped_acquire held;
    return PyErr_CheckSignals() != 0;
  });
  try {
    work();
  } catch (const Interrupted&) {
    const nanobind::gil_scoped_acquire held;
    if (PyErr_Occurred() == nullptr) throw;
    nanobind::raise_python_error();
  }
}

}  // namespace foci::python
