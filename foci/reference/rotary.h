// Rotary positions in double: pairs of channels turned by an angle that grows with the position.
// Source: Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021.
#pragma once

#include "foci/core/tensor.h"

namespace foci::reference {

enum class RotaryPairs : uint8_t {
  half_split,  // channel c turns with channel c + R/2 (GPT-NeoX, Hugging Face Llama)
  interleaved  // channel 2c turns with channel 2c + 1 (RoFormer, GPT-J)
};

// x [B,H,N,D]; cosine and sine [B,N,R/2], R ≤ D even: the first R channels turn, the others stay.
// Double. Throws ArgumentError where shapes do not fit.
Tensor rotary(const Tensor& x, const Tensor& cosine, const Tensor& sine, RotaryPairs pairs);

}  // namespace foci::reference
