// Elementwise helpers of the operators, in float and double.
#include "foci/autograd/elementwise.h"

#include <algorithm>

#include "foci/core/simd_target.h"
#include "foci/core/threads.h"
#include "foci/kernels/dense.h"

namespace foci {

template <>
void add<float>(int64_t n, const float* a, const float* b, float* y) {
  kernels::add(current_target(), n, a, b, y);
}
template <>
void add<double>(int64_t n, const double* a, const double* b, double* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = a[i] + b[i];
}

template <>
void axpy<float>(int64_t n, float scale, const float* x, float* y) {
  kernels::axpy(current_target(), n, scale, x, y);
}
template <>
void axpy<double>(int64_t n, double scale, const double* x, double* y) {
  for (int64_t i = 0; i < n; ++i) y[i] += scale * x[i];
}

namespace {

// Calls row(to, from) for each row of the last dimension of two tensors of one shape.
template <class T, class F>
void for_rows(const Tensor& to, const Tensor& from, const F& row) {
  const int rank = to.rank();
  const Dims shape = to.shape(), a = to.strides(), b = from.strides();
  const int64_t rows = to.numel() / shape.back();
  T* const x = to.data<T>();
  const T* const y = from.data<T>();
  constexpr int64_t kRows = 64;  // a task long enough to be worth handing to a thread
  parallel_for((rows + kRows - 1) / kRows, [&](int64_t task) {
    for (int64_t r = task * kRows; r < std::min(rows, (task + 1) * kRows); ++r) {
      int64_t rest = r, at = 0, bt = 0;
      for (int d = rank - 2; d >= 0; --d) {
        const int64_t index = rest % shape[d];
        rest /= shape[d];
        at += index * a[d];
        bt += index * b[d];
      }
      row(x + at, y + bt);
    }
  });
}

}  // namespace

template <class T>
void add_into(const Tensor& into, const Tensor& g) {
  require(into.defined() && g.defined(), "add_into: {} is undefined",
          into.defined() ? "g" : "into");
  require(into.shape() == g.shape(), "add_into: shapes {} and {}", into.shape(), g.shape());
  if (into.numel() == 0) return;
  if (into.is_contiguous() && g.is_contiguous()) {
    axpy<T>(into.numel(), T{1}, g.data<T>(), into.data<T>());
    return;
  }
  const int64_t width = into.dim(-1), to_step = into.stride(-1), from_step = g.stride(-1);
  for_rows<T>(into, g, [=](T* to, const T* from) {
    if (to_step == 1 && from_step == 1) {
      for (int64_t c = 0; c < width; ++c) to[c] += from[c];
      return;
    }
    for (int64_t c = 0; c < width; ++c) to[c * to_step] += from[c * from_step];
  });
}

template void add_into<float>(const Tensor&, const Tensor&);
template void add_into<double>(const Tensor&, const Tensor&);

double sum_of_squares(int64_t n, const float* x) {
  return kernels::sum_of_squares(current_target(), n, x);
}

void adamw_step(int64_t n, const AdamWStep& a, float* grad, float* param, float* m, float* v) {
  kernels::adamw_step(current_target(), n,
                      {.learning_rate = a.learning_rate,
                       .beta1 = a.beta1,
                       .beta2 = a.beta2,
                       .eps = a.eps,
                       .weight_decay = a.weight_decay,
                       .correction1 = a.correction1,
                       .correction2 = a.correction2,
                       .grad_scale = a.grad_scale},
                      grad, param, m, v);
}

}  // namespace foci
