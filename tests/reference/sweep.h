// A deterministic sweep over specs: case n combines options of every kind at random (seeded by n),
// with small inputs, broadcasts, empty rows and upstream gradients for everything. Whatever
// computes attention can be run over it and compared with the oracle.
#pragma once

#include <cstdint>
#include <string>

#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"

namespace foci::testing {

struct SweepCase {
  AttentionSpec spec;  // asks for every statistic
  AttentionInputs in;
  AttentionUpstream up;  // each of them given
  std::string text;      // spec and shapes, for messages
};

struct SweepLimits {
  int64_t batch = 2, kv_heads = 2, group = 3, queries = 5, keys = 7, head = 4, value = 3;
};

// Floating tensors come in `dtype` (rounded, so every dtype sees nearly the same case).
SweepCase sweep_case(uint64_t n, DType dtype, const SweepLimits& limits = {});

}  // namespace foci::testing
