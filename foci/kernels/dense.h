// Dense operators in float32: linear layers, layer norm, activations, cross-entropy, AdamW.
//
// Private to attention/ and autograd/. Arguments are plain data, checked by the caller; functions
// here only assert. Each call runs on the threads of core/threads.h. How work is cut depends on
// shapes alone, every sum has a fixed order, and equal input rows give equal bits at every
// position, whatever the row count: a packed batch equals its members one by one.
//
// R rows, I inputs, O outputs, C channels. Matrices are row-major; `ld…` are row strides.
#pragma once

#include <cstdint>

#include "foci/core/simd_target.h"

namespace foci::kernels {

enum class Activation : uint8_t { none, relu, gelu };  // gelu: exact, x·Φ(x)

// C [M, N] (+)= op(A) · op(B). How the operands lie in memory:
enum class GemmLayout : uint8_t {
  nt,  // A [M, K], B [N, K]: rows of B are dotted with rows of A
  nn,  // A [M, K], B [K, N]
  tn   // A [K, M], B [K, N]: summed over rows; here the result of a row depends on the whole shape
};
struct Gemm {
  GemmLayout layout;
  int64_t m, n, k;
  const float* a;
  int64_t lda;
  const float* b;
  int64_t ldb;
  float* c;
  int64_t ldc;
  bool accumulate = false;
};
void gemm(SimdTarget target, const Gemm& a);

struct LinearForward {
  int64_t rows, inputs, outputs;
  const float* x;  // [R, I]
  int64_t ldx;
  const float* w;     // [O, I]
  const float* bias;  // [O] or null
  float* y;           // [R, O]
  int64_t ldy;
  Activation activation = Activation::none;
  float* slope = nullptr;  // [R, O] contiguous, with gelu: its derivative, for the way back
  const float* residual = nullptr;  // [R, O] contiguous, added after the activation
};
// y = act(x wᵀ + bias) + residual
void linear_forward(SimdTarget target, const LinearForward& a);

struct LinearBackwardInput {
  int64_t rows, inputs, outputs;
  const float* dy;  // [R, O]
  int64_t lddy;
  const float* w;  // [O, I]
  float* dx;       // [R, I]
  int64_t lddx;
  const float* factor = nullptr;  // [R, I] contiguous, multiplied in
  const float* add = nullptr;     // [R, I] contiguous, added; may be dx where there is no factor
};
// dx = (dy · w) ∘ factor + add
void linear_backward_input(SimdTarget target, const LinearBackwardInput& a);

// dw [O, I] (+)= dyᵀ · x;  dbias [O] (+)= column sums of dy (null where not wanted)
void linear_backward_weight(SimdTarget target, int64_t rows, int64_t inputs, int64_t outputs,
                            const float* dy, int64_t lddy, const float* x, int64_t ldx, float* dw,
                            float* dbias, bool accumulate);

// dpre = dy ∘ act'(pre), n elements; may be in place (dpre == dy). `saved` is what tells the slope:
// the activation's result for relu, the slope itself for gelu; unread for none.
void activation_backward(SimdTarget target, Activation activation, int64_t n, const float* saved,
                         const float* dy, float* dpre);

// y = (x − mean)/√(var + eps) ∘ gamma + beta over C channels; two-pass variance.
// mean, rstd [R] are kept for backward, which takes out again what the rounded mean is off by.
void layer_norm_forward(SimdTarget target, int64_t rows, int64_t channels, const float* x,
                        const float* gamma, const float* beta, float eps, float* y, float* mean,
                        float* rstd);
// dx overwritten, by its sum with `add` [R, C] where that is given (it may be dx); dgamma, dbeta
// [C] accumulated into.
void layer_norm_backward(SimdTarget target, int64_t rows, int64_t channels, const float* x,
                         const float* gamma, const float* mean, const float* rstd, const float* dy,
                         const float* add, float* dx, float* dgamma, float* dbeta);

// Row-wise softmax cross-entropy with label smoothing. labels [R] in [0, C); loss [R];
// dlogits [R, C] is the gradient of the *mean* loss.
void softmax_cross_entropy(SimdTarget target, int64_t rows, int64_t classes, const float* logits,
                           const int64_t* labels, float smoothing, float* loss, float* dlogits);

// y = a + b, n elements; y += x·scale; x *= scale.
void add(SimdTarget target, int64_t n, const float* a, const float* b, float* y);
void axpy(SimdTarget target, int64_t n, float scale, const float* x, float* y);
void scale(SimdTarget target, int64_t n, float scale, float* x);

// Σ x² in double, in a fixed order.
double sum_of_squares(SimdTarget target, int64_t n, const float* x);

struct AdamW {
  float learning_rate, beta1, beta2, eps, weight_decay;
  float correction1, correction2;  // 1 − beta^t
  float grad_scale;                // gradients are multiplied by it first (clipping)
};
// Decoupled weight decay (Loshchilov & Hutter 2019): p −= lr·(m̂/(√v̂ + eps) + decay·p). Leaves the
// gradient zero, for the next step to add into.
void adamw_step(SimdTarget target, int64_t n, const AdamW& a, float* grad, float* param, float* m,
                float* v);

}  // namespace foci::kernels
