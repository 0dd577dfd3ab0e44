// MultiHeadAttention: projections, the attention operator with a spec of the caller's, and an
// output projection.
#pragma once

#include <array>
#include <memory>
#include <optional>

#include "foci/core/api.h"
#include "foci/nn/layers.h"
#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"

namespace foci::nn {

struct AttentionConfig {
  int64_t channels = 64;       // C of queries and of the output
  int64_t kv_channels = 0;     // C of keys and values; 0 means channels
  int64_t heads = 4;           // H
  int64_t kv_heads = 0;        // Hk, divides H; 0 means heads
  int64_t head_size = 0;       // D; 0 means channels / heads
  int64_t value_size = 0;      // Dv; 0 means D
  bool shared_values = false;  // one projection of values serves all heads
  bool bias = true;            // of the four projections
  bool output = true;          // whether there is an output projection [C, H·Dv]
  AttentionSpec spec;          // its dropout acts in training only, with a seed of the pass
};

// Checks and fills in the zeros; throws ArgumentError naming the field.
FOCI_API AttentionConfig resolved(AttentionConfig config);

template <class T>
class FOCI_API MultiHeadAttention : public Module<T> {
 public:
  explicit MultiHeadAttention(const AttentionConfig& config);

  // x [B, N, C], or packed [tokens, C], which then need segments. Masks given here (key_lengths,
  // segments, keep) act besides those of the spec: a spec need not name them.
  Var<T> forward(Context<T>& context, const Var<T>& x, const AttentionInputs& masks = {}) {
    return forward(context, x, x, masks);
  }
  // Cross-attention: queries from x, keys and values from `memory` [B, M, kv C] or [tokens, kv C].
  Var<T> forward(Context<T>& context, const Var<T>& x, const Var<T>& memory,
                 const AttentionInputs& masks = {}) {
    return forward(context, x, memory, memory, masks);
  }
  Var<T> forward(Context<T>& context, const Var<T>& queries, const Var<T>& keys,
                 const Var<T>& values, const AttentionInputs& masks = {},
                 const Var<T>& residual = {});  // of the result's shape: added to it

  const AttentionConfig& config() const { return config_; }

 private:
  // Weight and bias of all three projections as one, where they take the same input and lie one
  // after the other in memory, as FlatParameters lays them.
  std::optional<std::array<Var<T>, 2>> joined(Context<T>& context, const Var<T>& queries,
                                              const Var<T>& keys, const Var<T>& values);

  AttentionConfig config_;  // resolved
  int64_t value_heads_;

 public:
  Linear<T> query, key, value;
  std::unique_ptr<Linear<T>> output;  // null where the config has none
};

}  // namespace foci::nn
