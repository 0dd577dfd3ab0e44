// y = act(x wᵀ + b) + residual
//
// Backward: g = dy ∘ act'(pre); dx = g w; dw = gᵀ x; db = Σ_rows g; the residual takes dy. For ReLU
// y tells the sign of `pre`, for GELU the slope is kept, which forward has half computed anyway.
#include "foci/autograd/ops.h"
#include "foci/autograd/ops/linear_parts.h"
#include "foci/autograd/profile.h"
#include "foci/autograd/rows.h"

namespace foci::ops {

template <class T>
Var<T> linear(Tape<T>& tape, const Var<T>& x, const Var<T>& w, const Var<T>& bias,
              Activation activation, const Var<T>& residual) {
  tape.check(x, "linear: x");
  tape.check(w, "linear: w");
  tape.check_if_given(bias, "linear: bias");
  tape.check_if_given(residual, "linear: residual");
  require(w.rank() == 2, "linear: the weight is [outputs, inputs], got {}", w.shape());
  const int64_t outputs = w.dim(0), inputs = w.dim(1);
  const Rows rows = rows_of(x.value(), "linear");
  require(rows.width == inputs, "linear: input of shape {} for a weight of shape {}", x.shape(),
          w.shape());
  require(!bias.defined() || bias.shape() == Dims{outputs},
          "linear: bias of shape {} for {} outputs", bias.defined() ? bias.shape().str() : "",
          outputs);
  const Dims shape = with_last(x.shape(), outputs);
  require(!residual.defined() || residual.shape() == shape,
          "linear: residual of shape {} for a result of shape {}",
          residual.defined() ? residual.shape().str() : "", shape);
  require(!residual.defined() || activation != Activation::relu,
          "linear: with relu there is no residual; add it apart");
  const double flops = 2.0 * static_cast<double>(rows.count * inputs * outputs);
  const ProfileScope timed(Operator::linear, Pass::forward, flops);
  Tensor y = Tensor::empty(shape, dtype_v<T>);
  Var<T> out = tape.result(y, {&x, &w, &bias, &residual});
  Tensor saved;  // what the activation's slope is known from
  if (out.needs_grad() && activation == Activation::gelu) {
    saved = Tensor::empty(shape, dtype_v<T>);
  }
  const Tensor added = residual.defined() ? residual.value().contiguous() : Tensor();
  const Tensor weight = w.value().contiguous();
  const Tensor offset = bias.defined() ? bias.value().contiguous() : Tensor();
  linear_forward<T>(rows, outputs, weight.data<T>(), offset.defined() ? offset.data<T>() : nullptr,
                    activation, y.data<T>(), saved.defined() ? saved.data<T>() : nullptr,
                    added.defined() ? added.data<T>() : nullptr);
  if (!out.needs_grad()) return out;
  if (activation == Activation::relu) saved = y;

  tape.record({out},
              [rows, saved, activation, weight, in = x.slot(), dw = w.slot(), db = bias.slot(),
               dresidual = residual.slot(), self = out.slot(), outputs, inputs, flops] {
                const ProfileScope back(Operator::linear, Pass::backward,
                                        flops * ((dw || db) + (in != nullptr)));
                Tensor g = self->grad;
                if (saved.defined()) {
                  const ProfileScope slope(Operator::activation, Pass::backward);
                  g = Tensor::empty(g.shape(), dtype_v<T>);
                  activation_backward<T>(activation, g.numel(), saved.data<T>(),
                                         self->grad.template data<T>(), g.data<T>());
                }
                add_weight_gradients<T>(rows, outputs, g.data<T>(), dw, db);
                if (in) {
                  in->add_by([&](const T* so_far, T* sum) {
                    linear_backward_input<T>(rows.count, inputs, outputs, g.data<T>(),
                                             weight.data<T>(), nullptr, so_far, sum);
                  });
                }
                if (dresidual) dresidual->add(self->grad, false);
              });
  return out;
}

template Var<float> linear(Tape<float>&, const Var<float>&, const Var<float>&, const Var<float>&,
                           Activation, const Var<float>&);
template Var<double> linear(Tape<double>&, const Var<double>&, const Var<double>&,
                            const Var<double>&, Activation, const Var<double>&);

}  // namespace foci::ops
