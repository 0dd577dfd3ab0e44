// Rotary positions: pairs of channels of float32 rows turned by given angles. Private to
// attention/.
#pragma once

#include <cstdint>

#include "foci/core/simd_target.h"

namespace foci::kernels {

// cosine, sine [half]; of the row x only channels [0, 2·half) are read and written. With
// `transposed` sines count negative: the way of gradients. y may be x.
struct RotaryKernels {
  // Channel r turns with channel r + half.
  void (*half_split)(int64_t half, const float* cosine, const float* sine, bool transposed,
                     const float* x, float* y);
  // Channel 2r turns with channel 2r + 1.
  void (*interleaved)(int64_t half, const float* cosine, const float* sine, bool transposed,
                      const float* x, float* y);
};
const RotaryKernels& rotary_kernels(SimdTarget target);

}  // namespace foci::kernels
