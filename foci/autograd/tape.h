// The tape: what was computed, so that gradients can travel back through it.
//
//   Tape<float> tape;
//   Var<float> x = tape.parameter(p);
//   Var<float> loss = ops::softmax_cross_entropy(tape, ops::linear(tape, x, w, b), labels, 0);
//   tape.backward(loss);                     // p.grad has grown by dloss/dp
//
// T is float (SIMD kernels) or double (plain loops, for checks). Operators stand in ops.h, one .cc
// file each, with forward and backward side by side. What an operator saved for its backward is
// freed as soon as backward has passed it.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "foci/core/api.h"
#include "foci/core/tensor.h"

namespace foci {

template <class T>
class Tape;

// A trained tensor. Operators add into `grad`; whoever steps the optimiser sets it to zero.
template <class T>
struct Parameter {
  std::string name;    // its path in the module tree, "layer.0.attention.query.weight"
  Tensor value, grad;  // of one shape; grad may stay undefined until the first backward
  bool decay = true;   // whether weight decay applies: not to biases, norms, embeddings, positions
};

namespace detail {

// Where the gradient of one value collects.
template <class T>
struct FOCI_API GradSlot {
  Dims shape;
  Tensor grad;         // undefined until something arrives; contiguous
  bool owned = false;  // nobody else holds `grad`, so it may be written in place
  // A view keeps no gradient of its own: it writes into its part of the base's.
  std::shared_ptr<GradSlot> base;
  std::function<Tensor(const Tensor&)> view;
  bool whole = false;  // the view holds every element of the base, in the same order
  uint64_t tape = 0;   // whose value it is (Tape's number), and of which pass; 0: a leaf, which
  uint64_t pass = 0;   // serves in every pass

  bool has() const { return base ? base->has() : grad.defined(); }
  // Whether the next gradient to arrive would be the first, and could be taken as it is.
  bool awaits_first() const { return base ? whole && base->awaits_first() : !grad.defined(); }
  // The gradient as a tensor to add into, made of zeros where nothing has arrived yet.
  Tensor buffer();
  // Adds g (of this shape, any strides). `fresh`: the caller gives g away, contiguous.
  void add(const Tensor& g, bool fresh);
  // Likewise for an operator that adds while it computes: write(so_far, sum) puts its gradient plus
  // so_far into sum, both contiguous in this shape. so_far is null where nothing has arrived, and
  // may be sum.
  void add_by(const std::function<void(const T* so_far, T* sum)>& write);
  // Likewise for an operator that adds to what is there, contiguous in this shape.
  void add_onto(const std::function<void(T* sum)>& add_to);
};

}  // namespace detail

// A value on the tape: a cheap handle. An undefined Var stands for "not given".
template <class T>
class FOCI_API Var {
 public:
  Var() = default;
  // A constant: no gradient reaches it. Throws ArgumentError where the tensor does not hold T.
  explicit Var(Tensor value);

  bool defined() const { return value_.defined(); }
  const Tensor& value() const { return value_; }
  const Dims& shape() const { return value_.shape(); }
  int64_t dim(int i) const { return value_.dim(i); }
  int rank() const { return value_.rank(); }
  bool needs_grad() const { return slot_ != nullptr; }
  // What has arrived so far; undefined where nothing has.
  Tensor grad() const;

  // For operators: where gradients go. Null where none is needed.
  const std::shared_ptr<detail::GradSlot<T>>& slot() const { return slot_; }

 private:
  friend class Tape<T>;
  Tensor value_;
  std::shared_ptr<detail::GradSlot<T>> slot_;
};

template <class T>
class FOCI_API Tape {
 public:
  // With recording off nothing is saved and every Var is a constant, those of other tapes too.
  explicit Tape(bool recording = true);
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  bool recording() const { return recording_; }

  Var<T> constant(Tensor value) const { return Var<T>(std::move(value)); }
  // A leaf whose gradient is wanted and can be read from the Var. Throws ArgumentError for an
  // undefined tensor and where it does not hold T.
  Var<T> leaf(Tensor value);
  // A leaf whose gradient is added into p.grad. Throws ArgumentError where p has no value or one
  // whose elements share memory, and where its gradient is not contiguous of the value's shape.
  Var<T> parameter(Parameter<T>& p);

  // Sends `upstream` (ones where undefined: the value must then have one element) back from `from`
  // to every leaf. Empties the tape: afterwards leaves may be used again, other values may not.
  // Throws ArgumentError, before anything is added, for values of another tape or of a pass that
  // was sent back already, and for an upstream of another shape or type.
  void backward(const Var<T>& from, const Tensor& upstream = {});
  // Likewise from several values at once.
  void backward(const std::vector<std::pair<Var<T>, Tensor>>& from);

  // Bytes of tensors are freed when the steps that saved them go.
  size_t steps() const { return steps_.size(); }
  // Forgets the steps; as after backward, leaves alone may be used again.
  void clear();

  // ---- for operators ----

  // Throws ArgumentError, calling the value `name`, where it is undefined, and where the tape
  // records and the value is of another tape or of a pass that is over.
  void check(const Var<T>& value, const char* name) const;
  // The same, but "not given" is fine.
  void check_if_given(const Var<T>& value, const char* name) const {
    if (value.defined()) check(value, name);
  }
  // The result of an operator; it takes part in backward if one of the inputs does.
  Var<T> result(Tensor value, std::initializer_list<const Var<T>*> inputs);
  Var<T> result(Tensor value, bool needs_grad);
  // A view of x that shares memory and gradient with it. `view` must give the same part of any
  // tensor shaped like x; `whole` says that it only reshapes.
  Var<T> view(const Var<T>& x, const std::function<Tensor(const Tensor&)>& view,
              bool whole = false);
  // `back` runs in backward, if a gradient has reached one of `outputs`.
  void record(const std::vector<Var<T>>& outputs, std::function<void()> back);

 private:
  struct Step {
    std::vector<std::shared_ptr<detail::GradSlot<T>>> outputs;
    std::function<void()> back;
  };
  void check_slot(const detail::GradSlot<T>* slot, const char* name) const;

  bool recording_;
  uint64_t number_;    // no two tapes of a process have the same, one after the other neither
  uint64_t pass_ = 1;  // backward and clear() end one
  std::vector<Step> steps_;
};

extern template class Tape<float>;
extern template class Tape<double>;
extern template class Var<float>;
extern template class Var<double>;

}  // namespace foci
