// a + b and scale · x. Backward: dy goes to both; dx = scale · dy.
#include <cmath>

#include "foci/autograd/elementwise.h"
#include "foci/autograd/ops.h"
#include "foci/autograd/profile.h"

namespace foci::ops {

template <class T>
Var<T> add(Tape<T>& tape, const Var<T>& a, const Var<T>& b) {
  tape.check(a, "add: a");
  tape.check(b, "add: b");
  require(a.shape() == b.shape(), "add: shapes {} and {}", a.shape(), b.shape());
  const ProfileScope timed(Operator::add, Pass::forward);
  const Tensor x = a.value().contiguous(), z = b.value().contiguous();
  Tensor y = Tensor::empty(a.shape(), dtype_v<T>);
  foci::add<T>(y.numel(), x.data<T>(), z.data<T>(), y.data<T>());
  Var<T> out = tape.result(y, {&a, &b});
  if (!out.needs_grad()) return out;
  tape.record({out}, [da = a.slot(), db = b.slot(), self = out.slot()] {
    const ProfileScope back(Operator::add, Pass::backward);
    if (da) da->add(self->grad, false);
    if (db) db->add(self->grad, false);
  });
  return out;
}

template <class T>
Var<T> scale(Tape<T>& tape, const Var<T>& x, double factor) {
  tape.check(x, "scale: x");
  require(std::isfinite(static_cast<T>(factor)), "scale: a factor of {} given, {} must hold it",
          factor, name_of(dtype_v<T>));
  const auto scaled = [factor](const Tensor& in) {
    const Tensor flat = in.contiguous();
    Tensor y = Tensor::zeros(in.shape(), dtype_v<T>);
    axpy<T>(y.numel(), static_cast<T>(factor), flat.data<T>(), y.data<T>());
    return y;
  };
  Var<T> out = tape.result(scaled(x.value()), {&x});
  if (!out.needs_grad()) return out;
  tape.record({out},
              [scaled, dx = x.slot(), self = out.slot()] { dx->add(scaled(self->grad), true); });
  return out;
}

template Var<float> add(Tape<float>&, const Var<float>&, const Var<float>&);
template Var<double> add(Tape<double>&, const Var<double>&, const Var<double>&);
template Var<float> scale(Tape<float>&, const Var<float>&, double);
template Var<double> scale(Tape<double>&, const Var<double>&, double);

}  // namespace foci::ops
