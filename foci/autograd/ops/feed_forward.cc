// y = h w2ᵀ + b2 + residual, h = act(x w1ᵀ + b1)
//
// Backward: dh = (dy w2) ∘ act'(pre), multiplied where it is made; then as two linear layers.
#include "foci/autograd/ops.h"
#include "foci/autograd/ops/linear_parts.h"
#include "foci/autograd/profile.h"
#include "foci/autograd/rows.h"

namespace foci::ops {
namespace {

// The value as kernels read it; undefined where there is none.
template <class T>
Tensor dense(const Var<T>& v) {
  return v.defined() ? v.value().contiguous() : Tensor();
}
template <class T>
T* data_of(const Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}

}  // namespace

template <class T>
Var<T> feed_forward(Tape<T>& tape, const Var<T>& x, const Var<T>& w1, const Var<T>& bias1,
                    Activation activation, const Var<T>& w2, const Var<T>& bias2,
                    const Var<T>& residual) {
  tape.check(x, "feed_forward: x");
  tape.check(w1, "feed_forward: w1");
  tape.check_if_given(bias1, "feed_forward: bias1");
  tape.check(w2, "feed_forward: w2");
  tape.check_if_given(bias2, "feed_forward: bias2");
  tape.check_if_given(residual, "feed_forward: residual");
  require(w1.rank() == 2 && w2.rank() == 2 && w2.dim(1) == w1.dim(0),
          "feed_forward: weights of shapes {} and {}; [hidden, inputs] and [outputs, hidden] are "
          "right",
          w1.shape(), w2.shape());
  const int64_t inputs = w1.dim(1), hidden = w1.dim(0), outputs = w2.dim(0);
  const Rows rows = rows_of(x.value(), "feed_forward");
  require(rows.width == inputs, "feed_forward: input of shape {} for a weight of shape {}",
          x.shape(), w1.shape());
  for (const auto& [bias, size] : {std::pair{&bias1, hidden}, std::pair{&bias2, outputs}}) {
    require(!bias->defined() || bias->shape() == Dims{size},
            "feed_forward: bias of shape {} for {} outputs",
            bias->defined() ? bias->shape().str() : "", size);
  }
  const Dims shape = with_last(x.shape(), outputs);
  require(!residual.defined() || residual.shape() == shape,
          "feed_forward: residual of shape {} for a result of shape {}",
          residual.defined() ? residual.shape().str() : "", shape);
  const double flops = 2.0 * static_cast<double>(rows.count * hidden * (inputs + outputs));
  const ProfileScope timed(Operator::linear, Pass::forward, flops);

  Tensor y = Tensor::empty(shape, dtype_v<T>);
  Var<T> out = tape.result(y, {&x, &w1, &bias1, &w2, &bias2, &residual});
  Rows h{Tensor::empty({rows.count, hidden}, dtype_v<T>), rows.count, hidden, hidden};
  Tensor slope;
  if (out.needs_grad() && activation == Activation::gelu) {
    slope = Tensor::empty({rows.count, hidden}, dtype_v<T>);
  }
  const Tensor weight1 = dense(w1), weight2 = dense(w2);
  linear_forward<T>(rows, hidden, weight1.data<T>(), data_of<T>(dense(bias1)), activation,
                    h.hold.data<T>(), data_of<T>(slope), nullptr);
  const Tensor added = dense(residual);
  linear_forward<T>(h, outputs, weight2.data<T>(), data_of<T>(dense(bias2)), Activation::none,
                    y.data<T>(), nullptr, data_of<T>(added));
  if (!out.needs_grad()) return out;

  tape.record({out}, [rows, h, slope, activation, weight1, weight2, in = x.slot(), dw1 = w1.slot(),
                      db1 = bias1.slot(), dw2 = w2.slot(), db2 = bias2.slot(),
                      dresidual = residual.slot(), self = out.slot(), inputs, hidden, outputs,
                      flops] {
    const ProfileScope back(Operator::linear, Pass::backward, 2 * flops);
    const auto weights = [](const Rows& from, int64_t width, const T* g, const auto& dw,
                            const auto& db) { add_weight_gradients<T>(from, width, g, dw, db); };
    const T* const dy = self->grad.template data<T>();
    weights(h, outputs, dy, dw2, db2);
    Tensor dh = Tensor::empty(h.hold.shape(), dtype_v<T>);
    linear_backward_input<T>(rows.count, hidden, outputs, dy, weight2.data<T>(),
                             slope.defined() ? slope.data<T>() : nullptr, nullptr, dh.data<T>());
    if (activation == Activation::relu) {
      activation_backward<T>(activation, dh.numel(), h.hold.data<T>(), dh.data<T>(), dh.data<T>());
    }
    weights(rows, hidden, dh.data<T>(), dw1, db1);
    if (in) {
      in->add_by([&](const T* so_far, T* sum) {
        linear_backward_input<T>(rows.count, inputs, hidden, dh.data<T>(), weight1.data<T>(),
                                 nullptr, so_far, sum);
      });
    }
    if (dresidual) dresidual->add(self->grad, false);
  });
  return out;
}

template Var<float> feed_forward(Tape<float>&, const Var<float>&, const Var<float>&,
                                 const Var<float>&, Activation, const Var<float>&,
                                 const Var<float>&, const Var<float>&);
template Var<double> feed_forward(Tape<double>&, const Var<double>&, const Var<double>&,
                                  const Var<double>&, Activation, const Var<double>&,
                                  const Var<double>&, const Var<double>&);

}  // namespace foci::ops
