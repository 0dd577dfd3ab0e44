// One case through an implementation, everything that comes out of it against the oracle.
#pragma once

#include <cstdint>
#include <string>

#include "foci/attention/plan.h"
#include "reference/sweep.h"

namespace foci::testing {

inline constexpr AttentionWanted kEverything{true, true, true, true, true, true, true};

struct Comparison {
  std::string failures;          // empty where all is close
  int64_t rows = 0, unfair = 0;  // rows, and those that float32 cannot decide (fairness.h)
  double worst = 0;              // largest error of its tolerance
  std::string worst_name;
};

// Forward with every statistic, every gradient, and exact weights of every other row, on strided
// views of the case's tensors.
Comparison compare_with_oracle(SweepCase c, Implementation implementation, SimdTarget target);

}  // namespace foci::testing
