// A spec that Python holds, with the plans made of it.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/spec/spec.h"

namespace foci::python {

// The statistics of a number of bits, as python/foci/_attention.py makes them: bit n is the
// Statistic of that number.
Statistics statistics_of(unsigned bits);

// Immutable. Plans depend on the spec, the shape and the statistics, so the last ones are kept: a
// call of Python's then costs what bind and forward cost.
class HeldSpec {
 public:
  explicit HeldSpec(AttentionSpec spec) : spec_(std::move(spec)) {}
  const AttentionSpec& spec() const { return spec_; }
  Plan plan(const AttentionShape& shape, Statistics statistics) const;

 private:
  struct Made {
    AttentionShape shape;
    Statistics statistics;
    SimdTarget target;
    Plan plan;
  };
  static constexpr size_t kMostPlans = 16;

  const AttentionSpec spec_;
  mutable std::mutex mutex_;
  mutable std::vector<Made> plans_;  // the newest last
};

}  // namespace foci::python
