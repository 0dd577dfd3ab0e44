// Estimate: a number with its 95 % interval, the way every result of foci is told.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "foci/core/api.h"

namespace foci::insight {

// `value` lies in [low, high]; all NaN where nothing was measured.
struct Estimate {
  double value = std::numeric_limits<double>::quiet_NaN();
  double low = std::numeric_limits<double>::quiet_NaN();
  double high = std::numeric_limits<double>::quiet_NaN();
  int64_t count = 0;  // how many observations stand behind it
};

// A share `successes / count` with Wilson's score interval at 95 %, which stays inside [0, 1] and
// does not vanish at 0 or 1. Source: Wilson, JASA 22 (1927). Throws ArgumentError unless
// 0 ≤ successes ≤ count; of count 0 the estimate is NaN.
FOCI_API Estimate wilson(int64_t successes, int64_t count);

// The mean with a percentile bootstrap interval at 95 %: `resamples` means of as many values drawn
// with replacement. Equal seeds give equal intervals. Memory: one number a resample.
// Source: Efron, Ann. Statist. 7 (1979). Throws ArgumentError where a value is not finite or
// resamples < 40 (below which 2.5 % is less than one resample).
FOCI_API Estimate bootstrap_mean(std::span<const double> values, uint64_t seed,
                                 int resamples = 2000);

// The same where values come in groups that are not independent inside (scenes that show the same
// digit): whole groups are drawn, so that many looks at one thing do not pass for many things.
// `groups` names each value's group; any numbers will do. Throws also where the lengths differ.
FOCI_API Estimate bootstrap_mean(std::span<const double> values, std::span<const int64_t> groups,
                                 uint64_t seed, int resamples = 2000);

}  // namespace foci::insight
