// y = act(x wᵀ + b)
//
// Backward: g = dy ∘ act'(pre); dx = g w; dw = gᵀ x; db = Σ_rows g. For ReLU y tells the sign of
// `pre`, for GELU `pre` is kept.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "foci/autograd/ops.h"
#include "foci/autograd/profile.h"
#include "foci/autograd/rows.h"
#include "foci/core/simd_target.h"
#include "foci/kernels/dense.h"

namespace foci::ops {
namespace {

double gelu(double x) {
  return 0.5 * x * (1 + std::erf(x * std::numbers::sqrt2 / 2));
}
double gelu_slope(double x) {
  const double phi = std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
  return 0.5 * (1 + std::erf(x * std::numbers::sqrt2 / 2)) + x * phi;
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

void forward(const Rows& x, int64_t outputs, const float* w, const float* bias, Activation act,
             float* y, float* pre) {
  kernels::linear_forward(current_target(), {.rows = x.count,
                                             .inputs = x.width,
                                             .outputs = outputs,
                                             .x = x.hold.data<float>(),
                                             .ldx = x.stride,
                                             .w = w,
                                             .bias = bias,
                                             .y = y,
                                             .ldy = outputs,
                                             .pre = pre,
                                             .activation = kernel_activation(act)});
}

void forward(const Rows& x, int64_t outputs, const double* w, const double* bias, Activation act,
             double* y, double* pre) {
  const double* in = x.hold.data<double>();
  for (int64_t r = 0; r < x.count; ++r) {
    for (int64_t o = 0; o < outputs; ++o) {
      double s = bias ? bias[o] : 0;
      for (int64_t i = 0; i < x.width; ++i) s += in[r * x.stride + i] * w[o * x.width + i];
      if (pre) pre[r * outputs + o] = s;
      if (act == Activation::relu) s = std::max(s, 0.0);
      if (act == Activation::gelu) s = gelu(s);
      y[r * outputs + o] = s;
    }
  }
}

void activation_backward(Activation act, int64_t n, const float* pre, const float* dy, float* g) {
  kernels::activation_backward(current_target(), kernel_activation(act), n, pre, dy, g);
}
void activation_backward(Activation act, int64_t n, const double* pre, const double* dy,
                         double* g) {
  for (int64_t i = 0; i < n; ++i) {
    g[i] = dy[i] * (act == Activation::relu ? (pre[i] > 0 ? 1.0 : 0.0) : gelu_slope(pre[i]));
  }
}

void backward_input(int64_t rows, int64_t inputs, int64_t outputs, const float* g, const float* w,
                    float* dx) {
  kernels::linear_backward_input(current_target(), rows, inputs, outputs, g, outputs, w, dx, inputs,
                                 false);
}
void backward_input(int64_t rows, int64_t inputs, int64_t outputs, const double* g, const double* w,
                    double* dx) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < inputs; ++i) {
      double s = 0;
      for (int64_t o = 0; o < outputs; ++o) s += g[r * outputs + o] * w[o * inputs + i];
      dx[r * inputs + i] = s;
    }
  }
}

void backward_weight(const Rows& x, int64_t outputs, const float* g, float* dw, float* db) {
  kernels::linear_backward_weight(current_target(), x.count, x.width, outputs, g, outputs,
                                  x.hold.data<float>(), x.stride, dw, db, true);
}
void backward_weight(const Rows& x, int64_t outputs, const double* g, double* dw, double* db) {
  const double* in = x.hold.data<double>();
  for (int64_t r = 0; r < x.count; ++r) {
    for (int64_t o = 0; o < outputs; ++o) {
      const double d = g[r * outputs + o];
      if (db) db[o] += d;
      for (int64_t i = 0; dw && i < x.width; ++i) dw[o * x.width + i] += d * in[r * x.stride + i];
    }
  }
}

}  // namespace

template <class T>
Var<T> linear(Tape<T>& tape, const Var<T>& x, const Var<T>& w, const Var<T>& bias,
              Activation activation) {
  require(w.rank() == 2, "linear: the weight is [outputs, inputs], got {}", w.shape().str());
  const int64_t outputs = w.dim(0), inputs = w.dim(1);
  const Rows rows = rows_of(x.value(), "linear");
  require(rows.width == inputs, "linear: input of shape {} for a weight of shape {}",
          x.shape().str(), w.shape().str());
  require(!bias.defined() || bias.shape() == Dims{outputs},
          "linear: bias of shape {} for {} outputs", bias.defined() ? bias.shape().str() : "",
          outputs);
  const double flops = 2.0 * static_cast<double>(rows.count * inputs * outputs);
  const ProfileScope timed(Operator::linear, Pass::forward, flops);
  Tensor y = Tensor::empty(with_last(x.shape(), outputs), dtype_v<T>);
  Var<T> out = tape.result(y, {&x, &w, &bias});
  Tensor pre;  // what the activation's slope is computed from
  if (out.needs_grad() && activation == Activation::gelu) {
    pre = Tensor::empty(y.shape(), dtype_v<T>);
  }
  forward(rows, outputs, w.value().template data<T>(),
          bias.defined() ? bias.value().template data<T>() : nullptr, activation, y.data<T>(),
          pre.defined() ? pre.data<T>() : nullptr);
  if (!out.needs_grad()) return out;
  if (activation == Activation::relu) pre = y;

  tape.record({out}, [rows, pre, activation, weight = w.value(), in = x.slot(), dw = w.slot(),
                      db = bias.slot(), self = out.slot(), outputs, inputs, flops] {
    const ProfileScope back(Operator::linear, Pass::backward,
                            flops * ((dw || db) + (in != nullptr)));
    Tensor g = self->grad;
    if (pre.defined()) {
      const ProfileScope slope(Operator::activation, Pass::backward);
      g = Tensor::empty(g.shape(), dtype_v<T>);
      activation_backward(activation, g.numel(), pre.data<T>(), self->grad.template data<T>(),
                          g.data<T>());
    }
    if (dw || db) {
      Tensor grad_w = dw ? dw->buffer() : Tensor::empty({outputs, inputs}, dtype_v<T>);
      backward_weight(rows, outputs, g.data<T>(), grad_w.data<T>(),
                      db ? db->buffer().template data<T>() : nullptr);
    }
    if (in) {
      Tensor dx = Tensor::empty(in->shape, dtype_v<T>);
      backward_input(rows.count, inputs, outputs, g.data<T>(), weight.template data<T>(),
                     dx.data<T>());
      in->add(dx, true);
    }
  });
  return out;
}

template Var<float> linear(Tape<float>&, const Var<float>&, const Var<float>&, const Var<float>&,
                           Activation);
template Var<double> linear(Tape<double>&, const Var<double>&, const Var<double>&,
                            const Var<double>&, Activation);

}  // namespace foci::ops
