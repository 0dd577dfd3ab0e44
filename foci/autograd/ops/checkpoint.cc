// y = block(x), of which only x is kept.
//
// Backward runs the block again, on a tape of its own, and that tape back. The block's operators do
// the same sums in the same order as they would on the outer tape, so gradients have the same bits.
#include "foci/autograd/ops.h"

namespace foci::ops {

template <class T>
Var<T> checkpoint(Tape<T>& tape, const Block<T>& block, const std::vector<Var<T>>& inputs) {
  require(block != nullptr, "checkpoint: the block is an empty function");
  for (const Var<T>& x : inputs) tape.check_if_given(x, "checkpoint: an input");
  if (!tape.recording()) return block(tape, inputs);
  std::vector<Var<T>> constants;
  constants.reserve(inputs.size());
  for (const Var<T>& x : inputs) constants.emplace_back(x.value());
  Tape<T> off(false);
  // Parameters that the block uses want gradients, whatever its inputs do.
  const Var<T> first = block(off, constants);
  require(first.defined(), "checkpoint: the block gave no value");
  Var<T> out = tape.result(first.value(), true);
  tape.record({out}, [block, inputs, self = out.slot()] {
    Tape<T> again;
    std::vector<Var<T>> leaves;
    leaves.reserve(inputs.size());
    for (const Var<T>& x : inputs) {
      leaves.push_back(x.needs_grad() ? again.leaf(x.value()) : again.constant(x.value()));
    }
    const Var<T> y = block(again, leaves);
    if (!y.needs_grad()) return;
    again.backward(y, self->grad);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (leaves[i].needs_grad() && leaves[i].slot()->has()) {
        inputs[i].slot()->add(leaves[i].grad(), leaves[i].slot()->owned);
      }
    }
  });
  return out;
}

template Var<float> checkpoint(Tape<float>&, const Block<float>&, const std::vector<Var<float>>&);
template Var<double> checkpoint(Tape<double>&, const Block<double>&,
                                const std::vector<Var<double>>&);

}  // namespace foci::ops
