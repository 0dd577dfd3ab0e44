// The vector functions of kernels/math-inl.h, run over arrays on a chosen target.
#pragma once

#include <cstdint>

#include "foci/core/simd_target.h"

namespace foci::kernels {

struct MathProbe {
  void (*log_positive)(int64_t n, const float* x, float* y);
  void (*power_positive)(int64_t n, const float* x, const float* a, float* y);
  void (*log_near_one)(int64_t n, const float* f, float* y);
};
const MathProbe& math_probe(SimdTarget target);

}  // namespace foci::kernels
