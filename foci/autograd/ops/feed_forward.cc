// y = h w2ᵀ + b2 + residual, h = act(x w1ᵀ + b1)
//
// Backward: dh = (dy w2) ∘ act'(pre), multiplied where it is made; then as two linear layers.
#include "foci/autograd/ops.h"
#include "foci/autograd/ops/linear_parts.h"
#include "foci/autograd/profile.h"
#include "foci/autograd/rows.h"

namespace foci::ops {
namespace {

template <class T>
const T* data_of(const Var<T>& v) {
  return v.defined() ? v.value().template data<T>() : nullptr;
}

}  // namespace

template <class T>
Var<T> feed_forward(Tape<T>& tape, const Var<T>& x, const Var<T>& w1, const Var<T>& bias1,
                    Activation activation, const Var<T>& w2, const Var<T>& bias2,
                    const Var<T>& residual) {
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
  linear_forward<T>(rows, hidden, data_of(w1), data_of(bias1), activation, h.hold.data<T>(),
                    slope.defined() ? slope.data<T>() : nullptr, nullptr);
  const Tensor added = residual.defined() ? residual.value().contiguous() : Tensor();
  linear_forward<T>(h, outputs, data_of(w2), data_of(bias2), Activation::none, y.data<T>(), nullptr,
                    added.defined() ? added.data<T>() : nullptr);
  if (!out.needs_grad()) return out;

  tape.record({out}, [rows, h, slope, activation, weight1 = w1.value(), weight2 = w2.value(),
                      in = x.slot(), dw1 = w1.slot(), db1 = bias1.slot(), dw2 = w2.slot(),
                      db2 = bias2.slot(), dresidual = residual.slot(), self = out.slot(), inputs,
                      hidden, outputs, flops] {
    const ProfileScope back(Operator::linear, Pass::backward, 2 * flops);
    const auto weights = [](const Rows& from, int64_t width, const T* g, const auto& dw,
                            const auto& db) {
      if (!dw && !db) return;
      Tensor grad = dw ? dw->buffer() : Tensor::empty({width, from.width}, dtype_v<T>);
      linear_backward_weight<T>(from, width, g, grad.template data<T>(),
                                db ? db->buffer().template data<T>() : nullptr);
    };
    const T* const dy = self->grad.template data<T>();
    weights(h, outputs, dy, dw2, db2);
    Tensor dh = Tensor::empty(h.hold.shape(), dtype_v<T>);
    linear_backward_input<T>(rows.count, hidden, outputs, dy, weight2.template data<T>(),
                             slope.defined() ? slope.data<T>() : nullptr, nullptr, dh.data<T>());
    if (activation == Activation::relu) {
      activation_backward<T>(activation, dh.numel(), h.hold.data<T>(), dh.data<T>(), dh.data<T>());
    }
    weights(rows, hidden, dh.data<T>(), dw1, db1);
    if (in) {
      in->add_by([&](const T* so_far, T* sum) {
        linear_backward_input<T>(rows.count, inputs, hidden, dh.data<T>(),
                                 weight1.template data<T>(), nullptr, so_far, sum);
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
