// Estimate: a number with its 95 % interval, the way every result of foci is told.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "foci/core/api.h"

namespace foci::insight {

// `value` lies in [low, high]; all NaN where nothing was measured, and the interval is NaN where
// one thing alone was and its kind of interval needs more.
struct Estimate {
  double value = std::numeric_limits<double>::quiet_NaN();
  double low = std::numeric_limits<double>::quiet_NaN();
  double high = std::numeric_limits<double>::quiet_NaN();
  int64_t count = 0;        // how many observations stand behind it
  int64_t independent = 0;  // of how many independent things they are; at most `count`
};

// A share `successes / count` with Wilson's score interval at 95 %, which stays inside [0, 1] and
// does not vanish at 0 or 1. Source: Wilson, JASA 22 (1927). Throws ArgumentError unless
// 0 ≤ successes ≤ count; of count 0 the estimate is NaN.
FOCI_API Estimate wilson(int64_t successes, int64_t count);

// The mean of values in [0, 1] (right or wrong; hits, of which ties leave fractions) that come in
// groups which are not independent inside (scenes that show the same digit): Wilson's interval at
// 95 % for as many independent observations as the groups are worth. That number is p(1 − p) over
// the variance of the mean between groups, at most the number of values, lessened as Student's t
// asks where groups are few; where all values agree, no variance tells and it is the number of
// groups. So one thing looked at often counts as one, and an interval never vanishes. Where every
// value is its own group and 0 or 1, this is wilson(). `groups` names each value's group; any
// numbers will do. Source: Franco, Little, Louis and Slud, J. Surv. Stat. Methodol. 7 (2019).
// Throws ArgumentError where lengths differ or a value is outside [0, 1].
FOCI_API Estimate share_of(std::span<const double> values, std::span<const int64_t> groups);

// The mean with a percentile bootstrap interval at 95 %: `resamples` means of as many values drawn
// with replacement. Equal seeds give equal intervals. Memory: one number a resample. Values that
// are all equal give an interval of no width, one value gives none (NaN); for shares take share_of.
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
