// Element-wise arithmetic that several operators share (float on the kernels, double in loops), and
// what optimisers run over flat memory.
#pragma once

#include <cstdint>

#include "foci/core/api.h"
#include "foci/core/tensor.h"

namespace foci {

template <class T>
FOCI_API void add(int64_t n, const T* a, const T* b, T* y);  // y = a + b
template <class T>
FOCI_API void axpy(int64_t n, T scale, const T* x, T* y);  // y += scale · x
// into += g, of equal shapes, any strides
template <class T>
FOCI_API void add_into(const Tensor& into, const Tensor& g);

// Σ x² in double, in a fixed order.
FOCI_API double sum_of_squares(int64_t n, const float* x);

// p −= lr · (m̂ / (√v̂ + eps) + decay · p), with m and v the moving moments of grad_scale · grad.
// Leaves grad zero.
struct AdamWStep {
  float learning_rate, beta1, beta2, eps, weight_decay;
  float correction1, correction2;  // 1 − beta^t
  float grad_scale;
};
FOCI_API void adamw_step(int64_t n, const AdamWStep& a, float* grad, float* param, float* m,
                         float* v);

}  // namespace foci
