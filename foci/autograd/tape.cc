// The tape and the slots in which gradients collect.
#include "foci/autograd/tape.h"

#include <atomic>
#include <utility>

#include "foci/autograd/elementwise.h"

namespace foci {
namespace {

template <class T>
void check_type(const Tensor& t, const char* name) {
  require(t.dtype() == dtype_v<T>, "{}: a tensor of {} arrived on a tape of {}", name,
          name_of(t.dtype()), name_of(dtype_v<T>));
}

uint64_t next_number() {
  static std::atomic<uint64_t> last = 0;
  return ++last;
}

}  // namespace

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

template <class T>
void GradSlot<T>::add_onto(const std::function<void(T* sum)>& add_to) {
  const Tensor all = buffer();
  if (all.is_contiguous()) return add_to(all.template data<T>());
  const Tensor g = Tensor::zeros(shape, dtype_v<T>);
  add_to(g.template data<T>());
  add_into<T>(all, g);
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
Var<T>::Var(Tensor value) : value_(std::move(value)) {
  if (value_.defined()) check_type<T>(value_, "value");
}

template <class T>
Tape<T>::Tape(bool recording) : recording_(recording), number_(next_number()) {}

template <class T>
void Tape<T>::check(const Var<T>& value, const char* name) const {
  require(value.defined(), "{}: no value was given", name);
  check_slot(value.slot_.get(), name);
}

template <class T>
void Tape<T>::check_slot(const detail::GradSlot<T>* slot, const char* name) const {
  if (!recording_ || !slot) return;
  require(slot->tape == number_,
          "{}: a value of another tape arrived; its gradient would not come back", name);
  require(slot->pass == 0 || slot->pass == pass_,
          "{}: the value is from before backward or clear(), which emptied the tape; compute it "
          "again",
          name);
}

template <class T>
Var<T> Tape<T>::leaf(Tensor value) {
  require(value.defined(), "leaf: no tensor was given");
  Var<T> v = result(std::move(value), true);
  if (v.slot_) v.slot_->pass = 0;
  return v;
}

template <class T>
Var<T> Tape<T>::parameter(Parameter<T>& p) {
  const auto named = [&] { return p.name.empty() ? "parameter" : "parameter " + p.name; };
  require(p.value.defined(), "{}: it has no value", named());
  check_type<T>(p.value, named().c_str());
  for (int d = 0; d < p.value.rank(); ++d) {
    require(
        p.value.dim(d) <= 1 || p.value.stride(d) != 0,
        "{}: it has a shape, but no values of its own yet; reset(seed) or load_parameters gives "
        "them",
        named());
  }
  Var<T> v(p.value);
  if (!recording_) return v;
  if (!p.grad.defined()) p.grad = Tensor::zeros(p.value.shape(), dtype_v<T>);
  require(p.grad.shape() == p.value.shape() && p.grad.is_contiguous(),
          "{}: a gradient of shape {}{} for a value of shape {}", named(), p.grad.shape(),
          p.grad.is_contiguous() ? "" : " (strided)", p.value.shape());
  check_type<T>(p.grad, (named() + ": its gradient").c_str());
  v.slot_ = std::make_shared<detail::GradSlot<T>>();
  v.slot_->tape = number_;
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
    v.slot_->tape = number_;
    v.slot_->pass = pass_;
    v.slot_->shape = v.shape();
  }
  return v;
}

template <class T>
Var<T> Tape<T>::result(Tensor value, std::initializer_list<const Var<T>*> inputs) {
  bool needed = false;
  for (const Var<T>* v : inputs) {
    check_slot(v->slot_.get(), "input of an operator");
    needed = needed || v->needs_grad();
  }
  return result(std::move(value), needed);
}

template <class T>
Var<T> Tape<T>::view(const Var<T>& x, const std::function<Tensor(const Tensor&)>& view,
                     bool whole) {
  check(x, "view: x");
  Var<T> v = result(view(x.value()), {&x});
  if (v.slot_) {
    v.slot_->pass = x.slot_->pass;
    v.slot_->base = x.slot_;
    v.slot_->view = view;
    v.slot_->whole = whole;
  }
  return v;
}

template <class T>
void Tape<T>::record(const std::vector<Var<T>>& outputs,
                     std::function<void()> back) {  // NOLINT(performance-unnecessary-value-param)
  require(back != nullptr, "record: back is an empty function");
  Step step;
  for (const Var<T>& v : outputs) {
    check_slot(v.slot_.get(), "output of an operator");
    if (v.slot_) step.outputs.push_back(v.slot_);
  }
  if (step.outputs.empty()) return;
  step.back = std::move(back);
  steps_.push_back(std::move(step));
}

template <class T>
void Tape<T>::clear() {
  steps_.clear();
  ++pass_;
}

template <class T>
void Tape<T>::backward(const Var<T>& from, const Tensor& upstream) {
  backward(std::vector<std::pair<Var<T>, Tensor>>{{from, upstream}});
}

template <class T>
void Tape<T>::backward(const std::vector<std::pair<Var<T>, Tensor>>& from) {
  require(recording_, "backward: the tape does not record");
  require(!from.empty(), "backward: no value was given");
  for (const auto& [var, upstream] : from) {
    require(var.defined(), "backward: no value was given");
    require(var.needs_grad(), "backward: the value does not depend on any leaf");
    check_slot(var.slot_.get(), "backward");
    require(upstream.defined() || var.value().numel() == 1,
            "backward: a value of shape {} needs an upstream gradient", var.shape());
    if (!upstream.defined()) continue;
    check_type<T>(upstream, "upstream");
    require(upstream.shape() == var.shape(), "upstream: shape {} for a value of shape {}",
            upstream.shape(), var.shape());
  }
  // Should a step throw, the others are gone with it: what they would send on is not whole.
  std::vector<Step> steps = std::exchange(steps_, {});
  ++pass_;
  for (const auto& [var, upstream] : from) {
    var.slot_->add(upstream.defined() ? upstream : Tensor::full(var.shape(), 1, dtype_v<T>),
                   !upstream.defined());
  }
  while (!steps.empty()) {
    const Step step = std::move(steps.back());  // what it saved goes with it
    steps.pop_back();
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
