// Properties of attention over random recipes: RapidCheck draws them, and shrinks one that fails to
// the plainest that still does.
//
// FOCI_PROPERTY_CASES sets the number of cases of each property, FOCI_PROPERTY_SEED the seed (by
// default always the same, so that a run can be repeated).
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "foci/attention/plan.h"
#include "foci/core/simd_target.h"
#include "reference/sweep.h"

namespace foci::testing {

// What a recipe may hold.
struct Domain {
  int64_t batch = 2, kv_heads = 2, group = 3;
  // Sizes are 0 … 70 or next to a tile's edge, up to 513.
  int64_t most_keys = 513, most_queries = 513, most_depth = 70;
  // (query, key) pairs of all heads together: the oracle takes them one by one.
  int64_t most_pairs = 40000;
  bool positions = true;  // masks and biases that depend on where a key stands
  bool segments = true;
  bool tensors = true;  // keep and bias tensors, lengths
  bool dropout = true;
  bool poison = true;
  bool half = false;
  bool empty = true;  // sizes of 0
};

// Empty if the property holds for this case, otherwise what is wrong.
using Property = std::function<std::string(const Recipe&, SimdTarget)>;

// Checks `cases` random recipes of the domain, each on another target; a failure is reported to
// GoogleTest with the shrunk recipe and its spec.
void check_property(const Domain& domain, int cases, const Property& property);

Bound bind_fused(const AttentionSpec& spec, const AttentionInputs& in, SimdTarget target);

}  // namespace foci::testing
