// Scores: score(q, k), scale, softcap and biases, and their gradients, one pair at a time.
#pragma once

#include <cstdint>

#include "foci/reference/masks.h"
#include "foci/reference/problem.h"

namespace foci::reference {

// The stages a score goes through.
struct PairScore {
  double raw = 0;     // score(q, k)
  double scaled = 0;  // scale · raw
  double capped = 0;  // after softcap; the same as scaled without one
  double biased = 0;  // after biases: what the normaliser sees
};

PairScore pair_score(const Problem& p, const Masks& masks, int64_t b, int64_t h, int64_t i,
                     int64_t j);

// Where gradients gather. All double and zeroed; those that the spec does not read are undefined.
struct Gradients {
  Tensor dq, dk, dv;  // as q, k, v
  Tensor dbias;       // own shape
  Tensor dbias_view;  // the same memory viewed as [B,H,N,M]: broadcast entries add up
  Tensor dslopes, dtable1d, dtable2d, dscore_w;
  Tensor dscale;  // [1] or [H]
  Tensor dalpha;  // [1] or [H], entmax alone
};

// Adds what a gradient `d` for pair_score(…).biased means for everything the score reads.
void pair_score_backward(const Problem& p, const Masks& masks, int64_t b, int64_t h, int64_t i,
                         int64_t j, double d, Gradients& g);

}  // namespace foci::reference
