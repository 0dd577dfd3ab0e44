// Skips a test where no float implementation of attention is built.
#pragma once

#include <gtest/gtest.h>

#include "foci/attention/plan.h"

namespace foci::testing {

inline bool engine_is_built() {
  try {
    Plan::make({}, {.N = 1, .M = 1, .D = 1, .Dv = 1});
    return true;
  } catch (const ArgumentError&) {
    return false;
  }
}

}  // namespace foci::testing

#define FOCI_NEEDS_ENGINE() \
  if (!::foci::testing::engine_is_built()) GTEST_SKIP() << "no float attention is built"
