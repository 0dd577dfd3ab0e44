// Which rows of a case float32 can decide: the oracle's choices are taken in double, and where they
// hang on less than the rounding of a float32 score (whether a key is in a sparse map's support,
// among the k best, or the largest), no float32 result can be held to them.
//
// With x = (α−1)s − τ a sparse map's weight is p = x^P, P = 1/(α−1), and its gradient is a sum of
// f·(…) with f = p^(2−α) = x^((2−α)P); the entropy's gradient is a sum of f·ln p. If scores are off
// by ε, then x is off by δ = 2(α−1)ε (τ moves too), and with K = x^((2−α)P − 1), least x taken,
//   weights by       P·x·K·δ        bounded for α ≤ 2
//   gradients by     |2−α|·P·K·δ    bounded for α ≤ 1.5
//   entropy's by     P·K·(1 + |(2−α) ln p|)·δ
//   entropy by       Σ P·x·K·|ln p|·δ  where all errors have one sign, as those of equal scores do
// Where one of the first three exceeds half of the tolerance, or the last one 16 times the
// tolerance (signs are mixed, as a rule), the row is left out of that comparison.
#pragma once

#include <vector>

#include "attention/tolerance.h"
#include "foci/reference/attention.h"
#include "reference/sweep.h"

namespace foci::testing {

struct RowFairness {
  bool forward = true;  // y, weights, support and all statistics
  bool entropy = true;
  bool gradient = true;
  bool entropy_gradient = true;
  bool largest = true;  // which key has the largest weight
};

struct Fairness {
  std::vector<RowFairness> rows;  // [B·H·N]
  int64_t count = 0;              // of rows whose forward or gradient is left out
};

// Upstream gradients that cannot be compared are taken away from the case, and dcoverage where a
// whole row's gradient cannot be.
Fairness make_fair(SweepCase& c, const reference::Forward& expected);

// Copies the expected values of what is not compared over the actual ones (which must not be shared
// with anything that is still needed).
void excuse(const Fairness& fairness, const AttentionOutputs& expected, AttentionOutputs& actual);

}  // namespace foci::testing
