// Strips under a map with exact zeros: forward and weights over the keys that have weight.
#if defined(FOCI_KERNELS_ATTENTION_SPARSE_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_SPARSE_FORWARD_INL_H_
#undef FOCI_KERNELS_ATTENTION_SPARSE_FORWARD_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_SPARSE_FORWARD_INL_H_
#endif

#include <cmath>
#include <cstring>

#include "foci/kernels/attention/normalizers/entmax-inl.h"
#include "foci/kernels/attention/normalizers/entmax_steep-inl.h"
#include "foci/kernels/attention/normalizers/sparsemax-inl.h"
#include "foci/kernels/attention/normalizers/topk-inl.h"
#include "foci/kernels/attention/softmax_forward-inl.h"
#include "foci/kernels/attention/sparse_gather-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Buffers that solving a strip needs, from the front of the scratch.
struct SolveScratch {
  uint32_t* bits;  // [keys of the span]
  float* list;     // [keys + kMaxLanes], entmax with α > 2 alone
  // Top-k alone.
  float* block;  // [kKeyBlock][W] scores
  TopKBuffer buffer;
  TopKBlocks blocks;
};

// Entmax whose weights leave 0 with an infinite slope.
inline bool is_steep(const RowMap& map) {
  return map.kind == RowNormalizer::entmax && map.alpha > 2;
}

// Rows of the compact strip at most.
inline int64_t most_weights(const RowMap& map, int64_t keys) {
  return map.kind == RowNormalizer::top_k ? top_k_rows(map.k, keys) : keys;
}

inline void take_solve_scratch(const RowMap& map, int64_t keys, Carver& mem, SparseStrip& p,
                               SolveScratch& scratch) {
  const int64_t W = strip_width();
  const int64_t rows = most_weights(map, keys);
  p.weights = mem.take<float>((rows + 1) * W);
  p.index = mem.take<int32_t>(rows + 1);
  scratch.bits = mem.take<uint32_t>(HWY_MAX(keys, kKeyBlock) + 1);
  if (is_steep(map)) scratch.list = mem.take<float>(keys + kMaxLanes);
  if (map.kind != RowNormalizer::top_k) return;
  scratch.block = mem.take<float>(HWY_MIN(keys, kKeyBlock) * W);
  scratch.buffer.k = map.k;
  scratch.buffer.slots = top_k_slots(map.k, keys);
  scratch.buffer.score = mem.take<float>(scratch.buffer.slots * W);
  scratch.buffer.key = mem.take<int32_t>(scratch.buffer.slots * W);
  const int64_t blocks = most_blocks(keys);
  scratch.blocks.bound = mem.take<float>(blocks * W);
  scratch.blocks.centre = mem.take<float>(blocks * W);
  scratch.blocks.place = mem.take<int32_t>(blocks);
  scratch.blocks.runs = mem.take<int32_t>(2 * blocks);
}

inline size_t solve_scratch_bytes(const RowMap& map, int64_t keys) {
  const int64_t W = strip_width();
  const int64_t rows = most_weights(map, keys);
  const size_t bytes = Carver::bytes<float>((rows + 1) * W) + Carver::bytes<int32_t>(rows + 1) +
                       Carver::bytes<uint32_t>(HWY_MAX(keys, kKeyBlock) + 1) +
                       (is_steep(map) ? Carver::bytes<float>(keys + kMaxLanes) : 0);
  if (map.kind != RowNormalizer::top_k) return bytes;
  return bytes + Carver::bytes<float>(HWY_MIN(keys, kKeyBlock) * W) +
         2 * Carver::bytes<float>(top_k_slots(map.k, keys) * W) +
         2 * Carver::bytes<float>(most_blocks(keys) * W) +
         Carver::bytes<int32_t>(most_blocks(keys)) + Carver::bytes<int32_t>(2 * most_blocks(keys));
}

// For forward and for weights.
inline size_t sparse_scratch(const RowMap& map, int64_t keys, int64_t D, int64_t Dv) {
  const int64_t W = strip_width();
  return Carver::bytes<float>(panel_floats(D)) + solve_scratch_bytes(map, keys) +
         list_sums_bytes(keys, Dv) + Carver::bytes<float>(HWY_MIN(keys, kKeyBlock) * W);
}

inline size_t sparse_backward_scratch(const RowMap& map, int64_t keys, int64_t D, int64_t Dv) {
  const int64_t W = strip_width(), L = lanes();
  const int64_t block = HWY_MIN(keys, kKeyBlock);
  // Queries and their gradients; sums of pairs; dY.
  return Carver::bytes<float>(panel_floats(D)) + list_sums_bytes(keys, D) + pair_sums_bytes(D) +
         Carver::bytes<float>(Dv * W) + Carver::bytes<float>(W * round_up(D, L)) +
         Carver::bytes<float>(W * round_up(Dv, L)) +
         2 * Carver::bytes<float>((most_weights(map, keys) + 1) * W) +
         solve_scratch_bytes(map, keys) +
         // Rows of K or V; what dropout leaves of weights, products, scores before the softcap, and
         // gradients of rows that are NaN.
         Carver::bytes<float>(block * HWY_MAX(D, Dv)) + 4 * Carver::bytes<float>(block * W);
}

// From scores to the compact strip of weights. `panel` is the packed query panel; row_stat (null:
// not known) what forward gave the lanes, from where a solver may start, though for α > 2 it has
// not the digits; log_factors (null: not wanted): steep maps leave ln p^(2−α) there, as the weights
// lie.
inline HWY_NOINLINE void solve_rows(const RowMap& map, const Strip& s, const KeySpan& span,
                                    const float* panel, SolveScratch& scratch, SparseStrip& p,
                                    const float* row_stat = nullptr, float* log_factors = nullptr) {
  switch (map.kind) {
    case RowNormalizer::sparsemax:
      gather_candidates(s, span, panel, 1.0f, false, scratch.bits, p);
      solve_sparsemax(p);
      break;
    case RowNormalizer::entmax:
      gather_candidates(s, span, panel, static_cast<float>(map.alpha - 1), is_steep(map),
                        scratch.bits, p);
      is_steep(map) ? solve_entmax_steep(map.alpha, scratch.list, log_factors, p)
                    : solve_entmax(map.alpha, row_stat, s.mask.lanes, p);
      break;
    case RowNormalizer::top_k:
      solve_top_k(s, span, panel, most_weights(map, span.end - span.begin), scratch.bits,
                  scratch.block, scratch.buffer, scratch.blocks, p);
      break;
    case RowNormalizer::softmax:
      break;
  }
  finish_rows(s, span, scratch.bits, p);
}

// Calls visit(j, lanes) for every key that some broken lane may see.
template <class Visit>
HWY_INLINE void for_broken(const Strip& s, const KeySpan& span, uint32_t broken, uint32_t* bits,
                           const Visit& visit) {
  if (broken == 0) return;
  for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
    const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
    lane_bits(s.mask, lo, hi, bits);
    for (int64_t j = lo; j < hi; ++j) {
      if (bits[j - lo] & broken) visit(j, bits[j - lo] & broken);
    }
  }
}

// entropy = −Σ p ln p
inline HWY_NOINLINE void sparse_entropy(const SparseStrip& p, float* entropy) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  for (int v = 0; v < kVectors; ++v) {
    const float* weights = p.weights + v * L;
    VF sum[1] = {hn::Zero(d)};
    sum_rows(p.count, p.index, sum, [&](int64_t u, VF* part) HWY_ATTR {
      const VF w = hn::Load(d, weights + u * W);
      const VF h = hn::Mul(w, log_positive(d, w));
      part[0] = hn::Sub(part[0], hn::IfThenElseZero(hn::Gt(w, hn::Zero(d)), h));
    });
    hn::Store(sum[0], d, entropy + v * L);
  }
}

// coverage[key] += Σ_lanes weight
inline HWY_NOINLINE void add_sparse_coverage(const SparseStrip& p, double* coverage) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  for (int64_t u = 0; u < p.count; ++u) {
    const VF p0 = hn::Load(d, p.weights + u * W), p1 = hn::Load(d, p.weights + u * W + L);
    coverage[p.index[u]] += hn::GetLane(hn::SumOfLanes(d, hn::Add(p0, p1)));
  }
}

inline void forward_sparse(const RowMap& map, const Strip& s, const StripOutputs& o,
                           std::byte* memory) {
  const int64_t W = strip_width();
  const KeySpan span = span_of(s.mask);
  const int64_t keys = span.end - span.begin;
  Carver mem(memory);
  float* panel = mem.take<float>(panel_floats(s.D));
  SparseStrip p;
  SolveScratch scratch;
  take_solve_scratch(map, keys, mem, p, scratch);
  ListSums sums;
  take_list_sums(keys, s.Dv, mem, sums);
  float* dropped = mem.take<float>(HWY_MIN(keys, kKeyBlock) * W);
  pack_queries(s, panel);

  p.wants_key = o.max_key != nullptr;
  scratch.blocks.counts_skipped = o.skipped_pairs != nullptr;
  solve_rows(map, s, span, panel, scratch, p);
  if (o.skipped_pairs != nullptr) {
    *o.skipped_pairs = map.kind == RowNormalizer::top_k ? scratch.blocks.skipped : 0;
  }
  HWY_ALIGN float factor[kMaxLanes] = {};
  HWY_ALIGN float entropy[kMaxLanes];
  const float empty = map.kind == RowNormalizer::top_k ? -kInf : kInf;
  if (o.entropy) sparse_entropy(p, entropy);
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    const bool any = p.seen >> lane & 1u;
    const bool broken = p.broken >> lane & 1u;
    factor[lane] = broken ? kNaN : (any ? 1.0f : 0.0f);
    if (o.row_stat) o.row_stat[lane] = broken ? kNaN : (any ? p.row_stat[lane] : empty);
    if (o.max_weight) o.max_weight[lane] = broken ? kNaN : (any ? p.max_weight[lane] : 0.0f);
    if (o.max_key) o.max_key[lane] = any && !broken ? p.max_key[lane] : -1;
    if (o.entropy) o.entropy[lane] = broken ? kNaN : (any ? entropy[lane] : 0.0f);
    if (o.support) o.support[lane] = any && !broken ? p.support[lane] : 0.0f;
  }
  if (o.coverage != nullptr) add_sparse_coverage(p, o.coverage);
  // Every key that a broken row may see has a weight, if NaN.
  for_broken(s, span, p.broken, scratch.bits, [&](int64_t j, uint32_t lanes) {
    if (o.coverage) o.coverage[j] = kNaN;
    for (int lane = 0; lane < s.mask.lanes; ++lane) {
      if (!(lanes >> lane & 1u)) continue;
      if (o.support) o.support[lane] += 1;
      if (o.max_key && o.max_key[lane] < 0) o.max_key[lane] = j;
    }
  });

  if (o.y == nullptr) return;
  gather_list(map, s, p, s.Dv, s.v, s.v_stride, sums, [&](int64_t u, int64_t n) {
    const float* weights = p.weights + u * W;
    if (s.dropout.threshold > 0) {
      drop_weights(s.dropout, 0, p.index + u, n, weights, dropped);
      weights = dropped;
    }
    return ListPiece{weights, weights};
  });
  const uint32_t reached = p.broken != 0 ? lanes_with_kept_keys(s, span, scratch.bits) : ~0u;
  const float kept = kept_scale(s.dropout);
  for (int lane = 0; lane < kMaxLanes; ++lane) {
    factor[lane] = reached >> lane & 1u ? factor[lane] * kept : 0.0f;
  }
  unpack_panel(s.mask.lanes, s.Dv, sums.few, factor, o.y, o.y_stride);
}

// weights[lane][j], j over the span; zero elsewhere was written by the caller.
inline void sparse_strip_weights(const RowMap& map, const Strip& s, float* weights, int64_t stride,
                                 std::byte* memory) {
  const int64_t W = strip_width();
  const KeySpan span = span_of(s.mask);
  if (span.end == span.begin) return;
  Carver mem(memory);
  float* panel = mem.take<float>(panel_floats(s.D));
  SparseStrip p;
  SolveScratch scratch;
  take_solve_scratch(map, span.end - span.begin, mem, p, scratch);
  pack_queries(s, panel);
  solve_rows(map, s, span, panel, scratch, p);
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    for (int64_t u = 0; u < p.count; ++u) {
      const float w = p.weights[u * W + lane];
      if (w > 0) weights[lane * stride + p.index[u]] = w;
    }
  }
  for_broken(s, span, p.broken, scratch.bits, [&](int64_t j, uint32_t lanes) {
    for (int lane = 0; lane < s.mask.lanes; ++lane) {
      if (lanes >> lane & 1u) weights[lane * stride + j] = kNaN;
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
