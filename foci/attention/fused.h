// The fused implementation: how a problem is cut into strips for kernels/attention.h.
//
// Memory beside inputs and outputs grows with N + M: strips hold one block of keys (or one row's
// keys, for sparse normalisers and coverage), never an N×M matrix.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "foci/attention/problem.h"
#include "foci/kernels/attention.h"

namespace foci {

// Why fused does not serve this spec; nullopt where it does.
std::optional<std::string> fused_refuses(const AttentionSpec& spec, const AttentionShape& shape);
size_t fused_workspace_bytes(const AttentionSpec& spec, const AttentionShape& shape,
                             SimdTarget target, bool backward);
void fused_forward(const Problem& problem, AttentionOutputs& out);
void fused_backward(const Problem& problem, const AttentionOutputs& saved,
                    const AttentionUpstream& up, const AttentionWanted& wanted,
                    AttentionGradients& grads);
void fused_weights(const Problem& problem, const AttentionOutputs& saved,
                   std::span<const int64_t> rows, std::span<const int64_t> heads, Tensor& weights);

// ---- shared by fused_*.cc ---------------------------------------------------------------------

namespace fused {

// Queries and keys that belong together: a batch entry, or one packed segment of it. Cutting
// starts anew in each, so that a packed segment gives the bits that it gives alone.
struct Sequence {
  int64_t batch, query_begin, queries, key_begin, keys;
};
std::vector<Sequence> sequences_of(const Problem& problem);

// Queries of one sequence that share partial sums (dK, dV, coverage). Their number depends on the
// sequence alone.
int64_t queries_per_chunk(int64_t queries, int64_t tile);

// Q, K, V as the kernels read them: for cosine, rows divided by their norm in buffers of our own.
struct Operands {
  Tensor q, k, v;                         // [B,H,N,D], [B,Hk,M,D], [B,Hk,M,Dv] float32
  Tensor q_inverse_norm, k_inverse_norm;  // [B,H,N], [B,Hk,M], for cosine only
  bool careful = false;                   // a NaN or infinity somewhere
};
Operands operands_of(const Problem& problem, const Tensor* dy);

kernels::RowMap row_map_of(const AttentionSpec& spec);

// The strip of queries [first, first + count) of a sequence, for query head h. Lives as long as
// problem and operands.
void make_strip(const Problem& problem, const Operands& operands, const Sequence& sequence,
                int64_t h, int64_t first, int64_t count, kernels::Strip& strip);

}  // namespace fused
}  // namespace foci
