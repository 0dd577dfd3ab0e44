// Whether the library has an implementation of attention, so that tests of it can run.
#pragma once

#include <gtest/gtest.h>

#include "foci/attention/plan.h"

namespace foci::testing {

inline bool engine_built() {
  try {
    (void)Plan::make({}, {.N = 1, .M = 1, .D = 1, .Dv = 1});
    return true;
  } catch (const ArgumentError&) {
    return false;
  }
}

}  // namespace foci::testing

#define FOCI_SKIP_WITHOUT_AN_ENGINE()   \
  if (!::foci::testing::engine_built()) \
  GTEST_SKIP() << "this build has no implementation of attention to be verified"
