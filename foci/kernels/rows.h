// Row operators of the unfused attention (foci/attention/plain_*.cc): what stands between its
// matrix products. Rows are float32 in memory order; n is a multiple of kRowLanes. Sums run over
// one partial sum a vector lane, so they depend on where in the row a value stands, never on the
// row.
#pragma once

#include <cstdint>

#include "foci/core/simd_target.h"

namespace foci::kernels {

constexpr int64_t kRowLanes = 16;

struct RowKernels {
  void (*scale)(int64_t n, float factor, float* x);  // x ← factor·x
  // The largest value, −inf for n = 0. NaN is passed over or given back, as it falls.
  float (*largest)(int64_t n, const float* x);
  // x ← e^(x − max), exactly 0 below the smallest normal float; returns Σ. Every x ≤ max or NaN.
  float (*exponentials)(int64_t n, float max, float* x);
  // The same, and *products = Σ e^(x − max)·(x − max), in which −inf counts 0.
  float (*exponentials_and_products)(int64_t n, float max, float* x, float* products);
  float (*dot)(int64_t n, const float* x, const float* y);
  // g ← p·(g + shift)
  void (*weighted_shift)(int64_t n, float shift, const float* p, float* g);
  void (*add)(int64_t n, const float* x, float* y);  // y ← y + x
};

const RowKernels& row_kernels(SimdTarget target);

}  // namespace foci::kernels
