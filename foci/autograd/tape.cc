// The tape and the slots in which gradients collect.
#include "foci/autograd/tape.h"

#include "foci/autograd/elementwise.h"

namespace foci {
namespace detail {

template <class T>
Tensor GradSlot<T>::buffer() {
  if (base) return view(base->buffer());
  if (!grad.defined()) {
    grad = Tensor::zeros(shape, dtype_v<T>);
  } else if (!owned) {
    grad = grad.clone();
  }
  owned = true;
  return grad;
}

template <class T>
void GradSlot<T>::add(const Tensor& g, bool fresh) {
  require(g.shape() == shape, "gradient: shape {} arrived for a value of shape {}", g.shape(),
          shape);
  if (base && whole) {
    const Tensor dense = g.contiguous();
    base->add(dense.reshape(base->shape), fresh || !dense.shares_storage(g));
  } else if (base) {
    add_into<T>(buffer(), g);
  } else if (!grad.defined()) {
    grad = g.contiguous();  // a handle where g is contiguous already
    owned = fresh || !grad.shares_storage(g);
  } else if (owned) {
    add_into<T>(grad, g);
  } else {
    Tensor sum = Tensor::empty(shape, dtype_v<T>);
    const Tensor other = g.contiguous();
    foci::add<T>(sum.numel(), grad.template data<T>(), other.template data<T>(),
                 sum.template data<T>());
    grad = sum;
    owned = true;
  }
}

template <class T>
void GradSlot<T>::add_by(const std::function<void(const T* so_far, T* sum)>& write) {
  if (base && whole) return base->add_by(write);
  if (base) {
    const Tensor g = Tensor::empty(shape, dtype_v<T>);
    write(nullptr, g.template data<T>());
    add_into<T>(buffer(), g);
  } else if (grad.defined() && owned) {
    write(grad.template data<T>(), grad.template data<T>());
  } else {
    const Tensor sum = Tensor::empty(shape, dtype_v<T>);
    write(grad.defined() ? grad.template data<T>() : nullptr, sum.template data<T>());
    grad = sum;
    owned = true;
  }
}

template struct GradSlot<float>;
template struct GradSlot<double>;

}  // namespace detail

template <class T>
Tensor Var<T>::grad() const {
  if (!slot_ || !slot_->has()) return {};
  if (!slot_->base) return slot_->grad;
  return slot_->buffer();
}

template <class T>
Var<T> Tape<T>::leaf(Tensor value) {
  return result(std::move(value), true);
}

template <class T>
Var<T> Tape<T>::parameter(Parameter<T>& p) {
  Var<T> v(p.value);
  if (!recording_) return v;
  if (!p.grad.defined()) p.grad = Tensor::zeros(p.value.shape(), dtype_v<T>);
  v.slot_ = std::make_shared<detail::GradSlot<T>>();
  v.slot_->shape = p.value.shape();
  v.slot_->grad = p.grad;
  v.slot_->owned = true;  // in place on purpose: the parameter's gradient is where it collects
  return v;
}

template <class T>
Var<T> Tape<T>::result(Tensor value, bool needs_grad) {
  Var<T> v(std::move(value));
  if (recording_ && needs_grad) {
    v.slot_ = std::make_shared<detail::GradSlot<T>>();
    v.slot_->shape = v.shape();
  }
  return v;
}

template <class T>
Var<T> Tape<T>::result(Tensor value, std::initializer_list<const Var<T>*> inputs) {
  bool needed = false;
  for (const Var<T>* v : inputs) needed = needed || v->needs_grad();
  return result(std::move(value), needed);
}

template <class T>
Var<T> Tape<T>::view(const Var<T>& x, const std::function<Tensor(const Tensor&)>& view,
                     bool whole) {
  Var<T> v = result(view(x.value()), {&x});
  if (v.slot_) {
    v.slot_->base = x.slot_;
    v.slot_->view = view;
    v.slot_->whole = whole;
  }
  return v;
}

template <class T>
void Tape<T>::record(const std::vector<Var<T>>& outputs,
                     std::function<void()> back) {  // NOLINT(performance-unnecessary-value-param)
  Step step;
  for (const Var<T>& v : outputs) {
    if (v.slot_) step.outputs.push_back(v.slot_);
  }
  if (step.outputs.empty()) return;
  step.back = std::move(back);
  steps_.push_back(std::move(step));
}

template <class T>
void Tape<T>::backward(const Var<T>& from, const Tensor& upstream) {
  backward(std::vector<std::pair<Var<T>, Tensor>>{{from, upstream}});
}

template <class T>
void Tape<T>::backward(const std::vector<std::pair<Var<T>, Tensor>>& from) {
  require(recording_, "backward: the tape does not record");
  for (const auto& [var, upstream] : from) {
    require(var.needs_grad(), "backward: the value does not depend on any leaf");
    require(upstream.defined() || var.value().numel() == 1,
            "backward: a value of shape {} needs an upstream gradient", var.shape());
    var.slot_->add(upstream.defined() ? upstream : Tensor::full(var.shape(), 1, dtype_v<T>),
                   !upstream.defined());
  }
  while (!steps_.empty()) {
    const Step step = std::move(steps_.back());  // what it saved goes with it
    steps_.pop_back();
    bool reached = false;
    for (const auto& slot : step.outputs) reached = reached || slot->has();
    if (reached) step.back();
  }
}

template class Tape<float>;
template class Tape<double>;
template class Var<float>;
template class Var<double>;

}  // namespace foci
