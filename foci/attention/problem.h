// Problem: what bind found out about one call, in the form both implementations work from.
#pragma once

#include <cstdint>
#include <vector>

#include "foci/attention/plan.h"

namespace foci {

// The masks of a spec, but for −inf biases and DropKey, as one key range per (batch, query) plus
// what a range cannot say: keep bits, and segments whose keys do not lie together.
struct KeyMask {
  int64_t B = 0, N = 0, M = 0;
  std::vector<int64_t> begin,
      end;  // [B,N]: keys outside [begin, end) are masked; empty: begin == end

  // Undefined where there is no Keep mask, else bool viewed as [B,H,N,M] (broadcast strides are 0).
  Tensor keep;

  // Filled only where some segment's keys do not lie together: key j of batch b is seen by query i
  // iff k_segment[b,j] == q_segment[b,i] and local_begin[b,i] ≤ k_local[b,j] < local_end[b,i].
  bool scattered = false;
  std::vector<uint8_t> scattered_batch;         // [B] whether that batch entry has such a segment
  std::vector<int32_t> q_segment, k_segment;    // [B,N], [B,M]
  std::vector<int64_t> k_local;                 // [B,M]
  std::vector<int64_t> local_begin, local_end;  // [B,N]

  // Whether keys inside [begin, end) may be masked all the same.
  bool only_ranges() const { return !keep.defined() && !scattered; }
  // The exact answer for one pair, in any case.
  bool allows(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t row = b * N + i;
    if (j < begin[row] || j >= end[row]) return false;
    if (scattered) {
      const int64_t key = b * M + j;
      if (k_segment[key] != q_segment[row] || k_local[key] < local_begin[row] ||
          k_local[key] >= local_end[row]) {
        return false;
      }
    }
    if (!keep.defined()) return true;
    const Dims& s = keep.strides();
    return static_cast<const uint8_t*>(keep.raw())[b * s[0] + h * s[1] + i * s[2] + j * s[3]] != 0;
  }
};

// Positions for ALiBi and Relative1D: distance = k_position[b,j] − q_position[b,i]. Inside segments
// both count from the segment's start. Empty where the spec has no such bias.
struct Positions {
  std::vector<int64_t> q;  // [B,N], p of each query
  std::vector<int64_t> k;  // [B,M]
};

struct Problem {
  AttentionSpec spec;
  AttentionShape shape;
  AttentionInputs in;  // as given: strided; q, k, v share a dtype (f32, f16 or bf16)
  SimdTarget target;
  std::vector<float> scale;  // [H], resolved
  KeyMask mask;
  Positions positions;
  // in.bias viewed as [B,H,N,M] (broadcast strides are 0), f32, f16 or bf16; or undefined
  Tensor bias;
};

// The unfused implementation (plain_forward.cc, plain_backward.cc): GEMM and row operators over a
// float32 score matrix, one (batch, head) at a time. Outputs are already allocated, float32 or the
// inputs' dtype for y; dq, dk, dv likewise.
void plain_forward(const Problem& problem, AttentionOutputs& out);
void plain_backward(const Problem& problem, const AttentionOutputs& saved,
                    const AttentionUpstream& up, const AttentionWanted& wanted,
                    AttentionGradients& grads);
// [B, heads, rows, M]: weights before dropout of chosen rows.
void plain_weights(const Problem& problem, const AttentionOutputs& saved,
                   std::span<const int64_t> rows, std::span<const int64_t> heads, Tensor& weights);

}  // namespace foci
