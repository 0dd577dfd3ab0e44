// The scores themselves, all N × M of them.
//
// This one stands apart on purpose. Attention in foci never forms n × n: outputs, gradients,
// statistics and the weights of chosen rows (Bound::weights) come from memory linear in N + M. Some
// callers need the scores as such (ONNX's qk_matmul_output, a heat map of a short sequence), and
// they ask for them here, by name: unfused, without a gradient, B·H·N·M floats long.
#pragma once

#include <cstdint>

#include "foci/attention/plan.h"
#include "foci/core/api.h"

namespace foci {

// How far the scores have come. ONNX Attention's qk_matmul_output_mode numbers the same stages.
enum class ScoreStage : uint8_t {
  scaled,  // 0: scale · score(q, k)
  capped,  // 1: after softcap
  masked,  // 2: after biases and masks; −inf where a key is not seen (DropKey too)
  weights  // 3: after the normaliser, before dropout; 0 where a key is not seen
};

// [B,H,N,M] float32, whatever the storage of q and k. Up to `capped` masks do not matter, so that
// every pair is read; from `masked` on what a mask hides is not. Throws ArgumentError where so many
// scores cannot be addressed.
FOCI_API Tensor raw_scores(const Bound& bound, ScoreStage stage);

}  // namespace foci
