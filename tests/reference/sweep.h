// Cases to run whatever computes attention over: a recipe of small numbers says which options and
// sizes a case has, a seed fills its tensors. `sweep_case` draws recipes at random, seeded by n;
// the property tests draw them with RapidCheck, which also shrinks them.
#pragma once

#include <cstdint>
#include <string>

#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"

namespace foci::testing {

struct SweepCase {
  AttentionSpec spec;  // asks for every statistic
  AttentionInputs in;
  AttentionUpstream up;   // each of them given
  bool poisoned = false;  // some key holds NaN or infinity
  std::string text;       // spec and shapes, for messages
};

// Fewer or lower numbers make a plainer case; 0 is always "without".
struct Recipe {
  int64_t batch = 1, kv_heads = 1, group = 1;
  int64_t queries = 1, keys = 1, head = 1, value = 1;  // may be 0
  DType dtype = DType::f32;
  uint64_t seed = 0;  // of everything that the tensors hold
  int64_t score = 0;  // dot, cosine, L2, additive
  int64_t scale = 0;  // auto, one number, one a head, a random number
  int64_t softcap = 0;
  // softmax, sparsemax, entmax 1.5, entmax of `alpha`, top-k, entmax of an alpha for each head
  int64_t normalizer = 0;
  int64_t alpha = 0;  // which of kAlphas; the first head's
  int64_t k = 1;
  int64_t causal = 0;             // 1 + Align
  int64_t window = 0;             // 1 + Align
  int64_t left = -1, right = -1;  // −1: unbounded
  int64_t lengths = 0;
  int64_t segments = 0;  // packed, packed with queries and keys alike, scattered queries, scattered
  int64_t keep = 0;      // 1 + place in the list of broadcast shapes
  int64_t bias = 0;      // likewise
  int64_t alibi = 0;
  int64_t relative1d = 0;  // 1 + max_distance
  int64_t relative2d = 0;
  int64_t dropout = 0;  // of weights, of keys
  int64_t poison = 0;   // NaN or infinity in a key's V, in its K and V
  int64_t ties = 0;     // scores so coarse that they are exact (dot only), keys that repeat
};

inline constexpr double kAlphas[] = {1.1, 1.25, 1.75, 2, 2.5, 1.05, 3};
// A broadcast shape has rank 0 … 4, and each of its dimensions is full or 1.
inline constexpr int64_t kBroadcastShapes = 31;

SweepCase make_case(const Recipe& recipe);

struct SweepLimits {
  int64_t batch = 2, kv_heads = 2, group = 3, queries = 5, keys = 7, head = 4, value = 3;
};

// Case n of a deterministic sweep that combines options of every kind. Floating tensors come in
// `dtype` (rounded, so every dtype sees nearly the same case).
Recipe sweep_recipe(uint64_t n, DType dtype, const SweepLimits& limits = {});
SweepCase sweep_case(uint64_t n, DType dtype, const SweepLimits& limits = {});

}  // namespace foci::testing
