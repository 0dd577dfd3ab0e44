// The parts of linear layers: float on the kernels, double in loops.
#include "foci/autograd/ops/linear_parts.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "foci/core/simd_target.h"
#include "foci/kernels/dense.h"

namespace foci::ops {
namespace {

double normal_cdf(double x) {
  return 0.5 * (1 + std::erf(x * std::numbers::sqrt2 / 2));
}
double gelu_slope(double x) {
  return normal_cdf(x) + x * std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
}

kernels::Activation kernel_activation(Activation a) {
  switch (a) {
    case Activation::relu:
      return kernels::Activation::relu;
    case Activation::gelu:
      return kernels::Activation::gelu;
    case Activation::none:
      break;
  }
  return kernels::Activation::none;
}

}  // namespace

template <>
void linear_forward(const Rows& x, int64_t outputs, const float* w, const float* bias,
                    Activation act, float* y, float* slope, const float* residual) {
  kernels::linear_forward(current_target(), {.rows = x.count,
                                             .inputs = x.width,
                                             .outputs = outputs,
                                             .x = x.hold.data<float>(),
                                             .ldx = x.stride,
                                             .w = w,
                                             .bias = bias,
                                             .y = y,
                                             .ldy = outputs,
                                             .activation = kernel_activation(act),
                                             .slope = slope,
                                             .residual = residual});
}
template <>
void linear_forward(const Rows& x, int64_t outputs, const double* w, const double* bias,
                    Activation act, double* y, double* slope, const double* residual) {
  const double* in = x.hold.data<double>();
  for (int64_t r = 0; r < x.count; ++r) {
    for (int64_t o = 0; o < outputs; ++o) {
      double s = bias ? bias[o] : 0;
      for (int64_t i = 0; i < x.width; ++i) s += in[r * x.stride + i] * w[o * x.width + i];
      const int64_t at = r * outputs + o;
      if (slope) slope[at] = gelu_slope(s);
      if (act == Activation::relu) s = std::max(s, 0.0);
      if (act == Activation::gelu) s *= normal_cdf(s);
      y[at] = residual ? s + residual[at] : s;
    }
  }
}

template <>
void activation_backward(Activation act, int64_t n, const float* saved, const float* dy, float* g) {
  kernels::activation_backward(current_target(), kernel_activation(act), n, saved, dy, g);
}
template <>
void activation_backward(Activation act, int64_t n, const double* saved, const double* dy,
                         double* g) {
  for (int64_t i = 0; i < n; ++i) {
    g[i] = dy[i] * (act == Activation::relu ? (saved[i] > 0 ? 1.0 : 0.0) : saved[i]);
  }
}

template <>
void linear_backward_input(int64_t rows, int64_t inputs, int64_t outputs, const float* g,
                           const float* w, const float* factor, const float* add, float* dx) {
  kernels::linear_backward_input(current_target(), {.rows = rows,
                                                    .inputs = inputs,
                                                    .outputs = outputs,
                                                    .dy = g,
                                                    .lddy = outputs,
                                                    .w = w,
                                                    .dx = dx,
                                                    .lddx = inputs,
                                                    .factor = factor,
                                                    .add = add});
}
template <>
void linear_backward_input(int64_t rows, int64_t inputs, int64_t outputs, const double* g,
                           const double* w, const double* factor, const double* add, double* dx) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < inputs; ++i) {
      double s = 0;
      for (int64_t o = 0; o < outputs; ++o) s += g[r * outputs + o] * w[o * inputs + i];
      const int64_t at = r * inputs + i;
      if (factor) s *= factor[at];
      dx[at] = add ? add[at] + s : s;
    }
  }
}

template <>
void linear_backward_weight(const Rows& x, int64_t outputs, const float* g, float* dw, float* db) {
  kernels::linear_backward_weight(current_target(), x.count, x.width, outputs, g, outputs,
                                  x.hold.data<float>(), x.stride, dw, db, true);
}
template <>
void linear_backward_weight(const Rows& x, int64_t outputs, const double* g, double* dw,
                            double* db) {
  const double* in = x.hold.data<double>();
  for (int64_t r = 0; r < x.count; ++r) {
    for (int64_t o = 0; o < outputs; ++o) {
      const double d = g[r * outputs + o];
      if (db) db[o] += d;
      for (int64_t i = 0; dw && i < x.width; ++i) dw[o * x.width + i] += d * in[r * x.stride + i];
    }
  }
}

template <class T>
void add_weight_gradients(const Rows& x, int64_t outputs, const T* g,
                          const std::shared_ptr<detail::GradSlot<T>>& dw,
                          const std::shared_ptr<detail::GradSlot<T>>& db) {
  if (!dw && !db) return;
  const auto weight = [&](T* bias_sum) {
    if (!dw) {
      const Tensor unread = Tensor::empty({outputs, x.width}, dtype_v<T>);
      linear_backward_weight<T>(x, outputs, g, unread.data<T>(), bias_sum);
      return;
    }
    dw->add_onto([&](T* sum) { linear_backward_weight<T>(x, outputs, g, sum, bias_sum); });
  };
  if (!db) return weight(nullptr);
  db->add_onto(weight);
}

#define FOCI_INSTANTIATE(T)                                                       \
  template void add_weight_gradients(const Rows&, int64_t, const T*,              \
                                     const std::shared_ptr<detail::GradSlot<T>>&, \
                                     const std::shared_ptr<detail::GradSlot<T>>&);
FOCI_INSTANTIATE(float)
FOCI_INSTANTIATE(double)
#undef FOCI_INSTANTIATE

}  // namespace foci::ops
