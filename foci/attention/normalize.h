// The row maps of attention on their own: scores that somebody else made → weights, and back.
#pragma once

#include "foci/core/api.h"
#include "foci/core/tensor.h"
#include "foci/spec/spec.h"

namespace foci {

// Weights of scores [..., M] over the last dimension: each row is ≥ 0 and adds up to 1, but for
// rounding. Any leading shape and any strides; float32, float16 or bfloat16, computed in float32;
// the weights are dense and of the same dtype. −inf is a key that is not there: weight 0, and a row
// of nothing else is 0 throughout. NaN or +inf make the weights of their row NaN, but for those.
// Ties of top-k go to the lowest column. A row's bits depend on nothing but the row, its length and
// the SIMD target. Throws ArgumentError naming the argument for a bad normalizer, rank 0 and other
// dtypes.
FOCI_API Tensor normalize(const Normalizer& normalizer, const Tensor& scores);

// The gradient of the scores, from the weights that normalize gave and the gradient for them: both
// [..., M], of one dtype, which is also that of the result. Where a weight is 0 the gradient is 0,
// also where top-k chose a key whose weight is too small for the dtype, and the gradient that came
// is not read.
//
// Entmax raises weights to the power 2 − α, which magnifies what their dtype rounded: in float32 by
// up to α·1.2e-7 of a row's largest, 2e-5 from α = 160 on. Given the `scores` that normalize had, of
// the shape and dtype of the weights, the map with α > 2 is solved again, and nothing is lost;
// others do not read them.
//
// dalpha, unless null, receives the gradient of entmax's α, the sum over all rows; refused under
// other normalisers.
FOCI_API Tensor normalize_backward(const Normalizer& normalizer, const Tensor& weights,
                                   const Tensor& dweights, const Tensor& scores = {},
                                   double* dalpha = nullptr);

}  // namespace foci
