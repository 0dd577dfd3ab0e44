// Attention in double as a plain loop over rows: what the tape uses to check itself. It serves
// every spec. Private to autograd/.
#pragma once

#include <span>

#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"

namespace foci::ops {

// Tensors as in AttentionInputs, double. out.y must be given; the rest is made.
void attention_f64_forward(const AttentionSpec& spec, const AttentionInputs& in,
                           AttentionOutputs& out);
AttentionGradients attention_f64_backward(const AttentionSpec& spec, const AttentionInputs& in,
                                          const AttentionOutputs& saved,
                                          const AttentionUpstream& up);
Tensor attention_f64_weights(const AttentionSpec& spec, const AttentionInputs& in,
                             std::span<const int64_t> rows, std::span<const int64_t> heads);

}  // namespace foci::ops
