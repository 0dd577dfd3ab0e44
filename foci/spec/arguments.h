// The tensors that go with a spec: what attention reads, writes, and takes and gives in backward.
// Both the engine (attention/) and the oracle (reference/) speak in these.
#pragma once

#include "foci/core/tensor.h"

namespace foci {

// Undefined tensors are those the spec does not read; others that it does not read are not looked
// at: a mask counts only if spec.masks names it. Any stride but the last may be anything.
struct AttentionInputs {
  Tensor q{};             // [B,H,N,D]
  Tensor k{};             // [B,Hk,M,D], q's dtype
  Tensor v{};             // [B,Hk,M,Dv], q's dtype
  Tensor key_lengths{};   // [B] int64, in [0, M]                       (KeyLengths)
  Tensor past_lengths{};  // [B] int64, ≥ 0                             (Align::past)
  Tensor q_segments{};    // [B,N] int32                                (Segments)
  Tensor k_segments{};    // [B,M] int32                                (Segments)
  Tensor keep{};          // bool, broadcasts to [B,H,N,M]              (Keep)
  Tensor bias{};          // floating, broadcasts to [B,H,N,M]          (TensorBias)
  Tensor slopes{};        // [H]                                        (Alibi)
  Tensor table1d{};       // [H, 2·max_distance+1]                      (Relative1D)
  Tensor table2d{};       // [H, 2·height−1, 2·width−1]                 (Relative2D)
  Tensor score_w{};       // [D]                                        (Additive)
};

// Statistics that the spec did not ask for stay undefined.
struct AttentionOutputs {
  Tensor y{};           // [B,H,N,Dv]
  Tensor row_stat{};    // [B,H,N] log-sum-exp (softmax, top-k) or τ (sparsemax, entmax);
                        // an empty row holds −inf or +inf
  Tensor entropy{};     // [B,H,N]
  Tensor max_weight{};  // [B,H,N]
  Tensor max_key{};     // [B,H,N] int64
  Tensor support{};     // [B,H,N]
  Tensor coverage{};    // [B,H,M]
  // Of the pairs (batch, head, query, key) that the masks let through (Bound::visible_pairs), those
  // whose score forward did not compute, because a bound showed that top-k would not choose the
  // key. What the other outputs hold does not depend on it. 0 under other normalisers.
  int64_t skipped_pairs = 0;
  // Forward saw that all it read is finite, and so small that products of it are: backward of the
  // same inputs need not look again.
  bool ordinary = false;
};

// Gradients that arrive from above. Undefined ones are zero.
struct AttentionUpstream {
  Tensor dy{};           // [B,H,N,Dv]
  Tensor drow_stat{};    // [B,H,N]
  Tensor dentropy{};     // [B,H,N]
  Tensor dmax_weight{};  // [B,H,N]; goes to the weight at max_key
  Tensor dcoverage{};    // [B,H,M]
};

// Gradients that backward gives; which ones, the caller chooses (AttentionWanted).
struct AttentionGradients {
  Tensor dq{}, dk{}, dv{};  // as q, k, v; the last stride 1
  Tensor dbias{};           // in bias's own shape
  Tensor dslopes{};         // [H]
  Tensor dtable1d{};        // as table1d
  Tensor dtable2d{};        // as table2d
  Tensor dscore_w{};        // [D]
  Tensor dscale{};          // [1] for one scale (or auto), [H] for one per head
  Tensor dalpha{};          // [1] for one alpha, [H] for one per head    (Entmax)
};

// Which gradients backward computes.
struct AttentionWanted {
  bool qkv = true;
  bool bias = false;
  bool slopes = false;
  bool tables = false;
  bool score_w = false;
  bool scale = false;
  bool alpha = false;
};

}  // namespace foci
