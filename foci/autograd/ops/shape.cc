// slice and reshape: views that share memory and gradient with their input. concat: a copy.
#include "foci/autograd/ops.h"
#include "foci/autograd/profile.h"

namespace foci::ops {

template <class T>
Var<T> slice(Tape<T>& tape, const Var<T>& x, int dim, int64_t begin, int64_t end) {
  tape.check(x, "slice: x");
  return tape.view(x, [dim, begin, end](const Tensor& t) { return t.slice(dim, begin, end); });
}

template <class T>
Var<T> reshape(Tape<T>& tape, const Var<T>& x, const Dims& shape) {
  tape.check(x, "reshape: x");
  if (x.value().is_contiguous()) {
    const Dims to = x.value().reshape(shape).shape();
    return tape.view(
        x, [to](const Tensor& t) { return t.reshape(to); }, true);
  }
  const ProfileScope timed(Operator::copy, Pass::forward);
  Var<T> out = tape.result(x.value().clone().reshape(shape), {&x});
  if (!out.needs_grad()) return out;
  tape.record(
      {out}, [dx = x.slot(), self = out.slot()] { dx->add(self->grad.reshape(dx->shape), false); });
  return out;
}

template <class T>
Var<T> concat(Tape<T>& tape, const std::vector<Var<T>>& parts, int dim) {
  require(!parts.empty(), "concat: nothing to join");
  for (const Var<T>& p : parts) tape.check(p, "concat: a part");
  const int rank = parts[0].rank();
  const int d = dim < 0 ? dim + rank : dim;
  require(d >= 0 && d < rank, "concat: dimension {} of rank {}", dim, rank);
  Dims shape = parts[0].shape();
  shape[d] = 0;
  bool needed = false;
  for (const Var<T>& p : parts) {
    Dims other = p.shape();
    require(other.size() == rank, "concat: shapes {} and {} differ in rank", parts[0].shape(),
            p.shape());
    shape[d] += other[d];
    other[d] = shape[d];
    require(other == shape, "concat: shapes {} and {} along dimension {}", parts[0].shape(),
            p.shape(), d);
    needed = needed || p.needs_grad();
  }
  const ProfileScope timed(Operator::copy, Pass::forward);
  Tensor y = Tensor::empty(shape, dtype_v<T>);
  int64_t at = 0;
  for (const Var<T>& p : parts) {
    y.slice(d, at, at + p.dim(d)).copy_from(p.value());
    at += p.dim(d);
  }
  Var<T> out = tape.result(y, needed);
  if (!out.needs_grad()) return out;
  std::vector<std::shared_ptr<detail::GradSlot<T>>> slots;
  std::vector<int64_t> sizes;
  for (const Var<T>& p : parts) {
    slots.push_back(p.slot());
    sizes.push_back(p.dim(d));
  }
  tape.record({out}, [slots, sizes, d, self = out.slot()] {
    const ProfileScope back(Operator::copy, Pass::backward);
    int64_t begin = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i]) slots[i]->add(self->grad.slice(d, begin, begin + sizes[i]), false);
      begin += sizes[i];
    }
  });
  return out;
}

template Var<float> slice(Tape<float>&, const Var<float>&, int, int64_t, int64_t);
template Var<float> reshape(Tape<float>&, const Var<float>&, const Dims&);
template Var<float> concat(Tape<float>&, const std::vector<Var<float>>&, int);
template Var<double> slice(Tape<double>&, const Var<double>&, int, int64_t, int64_t);
template Var<double> reshape(Tape<double>&, const Var<double>&, const Dims&);
template Var<double> concat(Tape<double>&, const std::vector<Var<double>>&, int);

}  // namespace foci::ops
