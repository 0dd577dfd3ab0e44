// The oracle: attention as its definition reads, in double, one row at a time. No SIMD, no threads,
// no tiling, no code shared with kernels/ or attention/. Clarity is its only goal.
#pragma once

#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"

namespace foci::reference {

struct Forward {
  AttentionOutputs out;  // double; every statistic is filled, asked for or not
  Tensor scores;         // [B,H,N,M] after scale, softcap, biases; before masks
  Tensor allowed;        // [B,H,N,M] bool, the masks (with −inf biases and DropKey)
  Tensor weights;        // [B,H,N,M] before dropout
};

// Inputs of any floating dtype, read exactly. Throws ArgumentError as Plan does for bad shapes.
Forward attention_forward(const AttentionSpec& spec, const AttentionInputs& in);

// All gradients (those of tensors that the spec does not read stay undefined), double.
AttentionGradients attention_backward(const AttentionSpec& spec, const AttentionInputs& in,
                                      const AttentionUpstream& up);

}  // namespace foci::reference
