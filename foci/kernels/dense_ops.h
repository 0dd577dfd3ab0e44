// Row-wise and elementwise operators: what one task runs on one thread, as a table per SIMD target.
// Private to dense*.cc. Arguments as in dense.h, for the rows or elements of one task.
#pragma once

#include <cstdint>

#include "foci/core/simd_target.h"
#include "foci/kernels/dense.h"

namespace foci::kernels {

struct DenseOps {
  void (*activation_backward)(Activation activation, int64_t n, const float* saved, const float* dy,
                              float* dpre);
  void (*layer_norm_forward)(int64_t rows, int64_t channels, const float* x, const float* gamma,
                             const float* beta, float eps, float* y, float* mean, float* rstd);
  // dgamma, dbeta [C]: sums over these rows, overwritten.
  void (*layer_norm_backward)(int64_t rows, int64_t channels, const float* x, const float* gamma,
                              const float* mean, const float* rstd, const float* dy,
                              const float* add, float* dx, float* dgamma, float* dbeta);
  // `grad_scale` is one over the rows of the whole batch.
  void (*softmax_cross_entropy)(int64_t rows, int64_t classes, const float* logits,
                                const int64_t* labels, float smoothing, float grad_scale,
                                float* loss, float* dlogits);
  void (*add)(int64_t n, const float* a, const float* b, float* y);
  void (*axpy)(int64_t n, float scale, const float* x, float* y);
  void (*scale)(int64_t n, float scale, float* x);
  double (*sum_of_squares)(int64_t n, const float* x);
  void (*adamw_step)(int64_t n, const AdamW& a, float* grad, float* param, float* m, float* v);
};

const DenseOps& dense_ops(SimdTarget target);

}  // namespace foci::kernels
