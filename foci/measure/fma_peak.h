// The machine's multiply-add peak, from a loop that touches no memory: the denominator of every
// share of peak that a benchmark prints.
#pragma once

#include "foci/core/simd_target.h"

namespace foci::measure {

// 10⁹ floating-point operations a second (a multiply-add counts two) that `threads` threads reach
// together on `target`, by their CPU time: the best of several samples, about 0.2 s in all. Where
// the target has no fused multiply-add (baseline on x86) it is the rate of a multiplication and an
// addition.
double fma_peak_gflops(SimdTarget target, int threads);

// One sample of that, about 0.02 s.
double fma_peak_sample(SimdTarget target, int threads);

}  // namespace foci::measure
