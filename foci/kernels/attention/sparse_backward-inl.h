// Backward of strips under a map with exact zeros, over the keys that have weight.
#if defined(FOCI_KERNELS_ATTENTION_SPARSE_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_SPARSE_BACKWARD_INL_H_
#undef FOCI_KERNELS_ATTENTION_SPARSE_BACKWARD_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_SPARSE_BACKWARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>

#include "foci/kernels/attention/alpha_gradient-inl.h"
#include "foci/kernels/attention/score_gradient-inl.h"
#include "foci/kernels/attention/sparse_forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// A map's f in ∂p_j/∂s_k = f_j (δ_jk − f_k/Σf): 1 on sparsemax's support, p^(2−α) under entmax with
// α < 2. For top-k it is p itself. Broken lanes have no weights here, and need none.
inline HWY_NOINLINE void sparse_factors(const RowMap& map, int64_t count, const float* weights,
                                        float* f) {
  const DF d;
  const int64_t L = lanes();
  const VF exponent = hn::Set(d, static_cast<float>(2 - map.alpha));
  for (int64_t n = 0; n < count * kVectors; ++n) {
    const VF w = hn::Load(d, weights + n * L);
    VF x = hn::Set(d, 1.0f);
    if (map.kind == RowNormalizer::entmax) {
      x = map.alpha == 1.5 ? hn::Sqrt(w) : power_positive(d, w, exponent);
    }
    hn::Store(hn::IfThenElseZero(hn::Gt(w, hn::Zero(d)), x), d, f + n * L);
  }
}

// e^x·y, also where e^x alone has no room in a float.
HWY_INLINE VF scaled_exp(VF x, VF y) {
  const DF d;
  const VF half = hn::Mul(x, hn::Set(d, 0.5f)), most = hn::Set(d, 87.0f);
  VF e = exp_nonpositive(d, hn::Min(half, most));
  e = hn::IfThenElse(hn::Gt(half, most), hn::Set(d, kInf), e);
  const VF z = hn::Mul(hn::Mul(y, e), e);
  return hn::IfThenElse(hn::Eq(y, hn::Zero(d)), y, z);
}

// As sparse_score_gradients, of entmax with α > 2. log_f = ln f, f = p^(2−α), of which that of a
// small weight outgrows the others', and every number: so sums count f in units of the largest, and
// g is taken against that of the largest f, whose own gradient is what the others leave.
inline HWY_NOINLINE void steep_score_gradients(double alpha, const SparseStrip& p,
                                               const float* log_f, const SparseUpstream& up,
                                               const float* dcoverage, float* ds) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF zero = hn::Zero(d), lowest = hn::Set(d, -kInf);
  for (int v = 0; v < kVectors; ++v) {
    const float* weights = p.weights + v * L;
    const float* logs = log_f + v * L;
    float* g = ds + v * L;
    const WeightGradient gradient(p, up, dcoverage, v);
    VF largest = lowest, origin = zero;
    for (int64_t u = 0; u < p.count; ++u) {
      const VF w = hn::Load(d, weights + u * W), log = hn::Load(d, logs + u * W);
      const VF x = gradient(u, w, hn::Load(d, g + u * W));
      hn::Store(x, d, g + u * W);
      const hn::Mask<DF> more = hn::And(hn::Gt(w, zero), hn::Gt(log, largest));
      largest = hn::IfThenElse(more, log, largest);
      origin = hn::IfThenElse(more, x, origin);
    }
    const VF unknown = hn::Sub(origin, origin);  // 0, or NaN where it is not finite
    origin = hn::IfThenElse(hn::Eq(unknown, zero), origin, zero);
    VF most = lowest;  // of log_f where g is not the origin
    VF sums[1] = {zero};
    sum_rows(p.count, p.index, sums, [&](int64_t u, VF* part) HWY_ATTR {
      const VF w = hn::Load(d, weights + u * W), log = hn::Load(d, logs + u * W);
      const hn::Mask<DF> in = hn::Gt(w, zero);
      const VF x = hn::IfThenElseZero(in, hn::Sub(hn::Load(d, g + u * W), origin));
      hn::Store(x, d, g + u * W);
      const VF f = hn::IfThenElseZero(in, exp_nonpositive(d, hn::Sub(log, largest)));
      part[0] = hn::Add(part[0], f);
      most = hn::Max(most, hn::IfThenElse(hn::Eq(x, zero), lowest, log));
    });
    VF means[1] = {zero};
    sum_rows(p.count, p.index, means, [&](int64_t u, VF* part) HWY_ATTR {
      const VF x = hn::Load(d, g + u * W), log = hn::Load(d, logs + u * W);
      const VF f = exp_nonpositive(d, hn::Min(hn::Sub(log, most), zero));
      part[0] = hn::Add(part[0], hn::IfThenElse(hn::Eq(x, zero), zero, hn::Mul(f, x)));
    });
    const VF mean = hn::Div(means[0], sums[0]);
    const hn::Mask<DF> flat = hn::Eq(means[0], zero);
    const VF shift = hn::IfThenZeroElse(
        flat, hn::Mul(mean, exp_nonpositive(d, hn::Min(hn::Sub(most, largest), zero))));
    const VF factor = hn::Set(d, static_cast<float>(alpha - 1));
    const VF stat = hn::Div(hn::Mul(factor, hn::Load(d, up.drow_stat + v * L)), sums[0]);
    for (int64_t u = 0; u < p.count; ++u) {
      const VF w = hn::Load(d, weights + u * W), log = hn::Load(d, logs + u * W);
      const VF x = hn::Load(d, g + u * W), below = hn::Sub(log, largest);
      const hn::Mask<DF> same = hn::Eq(x, zero);
      const VF y = hn::IfThenElse(same, hn::IfThenZeroElse(flat, hn::Neg(mean)), hn::Sub(x, shift));
      const VF exponent = hn::IfThenElse(same, hn::Add(below, most), log);
      VF to = scaled_exp(exponent, y);
      to = hn::MulAdd(exp_nonpositive(d, hn::Min(below, zero)), stat, to);
      hn::Store(hn::IfThenElse(is_masked(w), hn::Set(d, -0.0f), to), d, g + u * W);
    }
  }
}

// ds holds dP = V dYᵀ and becomes dS = f·(g − (Σ f·g − c·dstat)/Σf), where g is dP plus what the
// statistics ask for, and c is ∂stat/∂s in units of f/Σf: α − 1 for τ, 1 for the log-sum-exp.
//
// The mean is taken twice, the second time of what the first leaves, so that rounding of numbers
// far from 0 does not stay in f·(g − mean).
inline HWY_NOINLINE void sparse_score_gradients(const RowMap& map, const SparseStrip& p,
                                                const float* f, const SparseUpstream& up,
                                                const float* dcoverage, float* ds) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const bool top_k = map.kind == RowNormalizer::top_k;
  const auto stat = top_k ? 1.0f : static_cast<float>(map.alpha - 1);
  for (int v = 0; v < kVectors; ++v) {
    const float* weights = p.weights + v * L;
    const float* factors = f + v * L;
    float* g = ds + v * L;
    const WeightGradient gradient(p, up, dcoverage, v);
    VF sums[2] = {hn::Zero(d), hn::Zero(d)};
    sum_rows(p.count, p.index, sums, [&](int64_t u, VF* part) HWY_ATTR {
      const VF w = hn::Load(d, weights + u * W), factor = hn::Load(d, factors + u * W);
      const VF x = gradient(u, w, hn::Load(d, g + u * W));
      hn::Store(x, d, g + u * W);
      part[0] = hn::Add(part[0], factor);
      part[1] = hn::MulAdd(factor, x, part[1]);
    });
    const VF mean = hn::Div(sums[1], sums[0]);
    VF rest[1] = {hn::Zero(d)};
    sum_rows(p.count, p.index, rest, [&](int64_t u, VF* part) HWY_ATTR {
      const VF w = hn::Load(d, weights + u * W), factor = hn::Load(d, factors + u * W);
      const VF x = hn::IfThenZeroElse(is_masked(w), hn::Sub(hn::Load(d, g + u * W), mean));
      hn::Store(x, d, g + u * W);
      part[0] = hn::MulAdd(factor, x, part[0]);
    });
    const VF dstat = hn::Mul(hn::Set(d, stat), hn::Load(d, up.drow_stat + v * L));
    const VF shift = hn::Div(hn::Sub(rest[0], dstat), sums[0]);
    for (int64_t u = 0; u < p.count; ++u) {
      const VF w = hn::Load(d, weights + u * W), factor = hn::Load(d, factors + u * W);
      const VF x = hn::Mul(factor, hn::Sub(hn::Load(d, g + u * W), shift));
      hn::Store(hn::IfThenElse(is_masked(w), hn::Set(d, -0.0f), x), d, g + u * W);
    }
  }
}

// Keys of the gradients that a row of NaN weights reaches: NaN, whatever else is added to them.
inline HWY_NOINLINE void break_keys_of(const Strip& s, uint32_t broken, bool has_dy, float* dk,
                                       int64_t dk_stride, float* dv, int64_t dv_stride) {
  const KeySpan span = span_of(s.mask);
  uint32_t bits[kSumBlock], kept[kSumBlock];
  for (int64_t lo = span.begin; lo < span.end; lo += kSumBlock) {
    const int64_t hi = HWY_MIN(lo + kSumBlock, span.end);
    lane_bits(s.mask, lo, hi, bits);
    std::fill(kept, kept + (hi - lo), ~0u);
    if (s.dropout.threshold > 0) dropout_lanes(s.dropout, lo, nullptr, hi - lo, kept);
    for (int64_t j = lo; j < hi; ++j) {
      const uint32_t seen = bits[j - lo] & broken;
      if (seen == 0) continue;
      if (has_dy && (seen & kept[j - lo]) != 0) {
        for (int64_t i = 0; i < s.Dv; ++i) dv[j * dv_stride + i] = kNaN;
      }
      for (int64_t i = 0; i < s.D; ++i) dk[j * dk_stride + i] = kNaN;
    }
  }
}

// Rows that are NaN have no weights to go by: everything that passes through them is NaN. The
// buffers hold kKeyBlock keys, or all if there are fewer.
inline HWY_NOINLINE void break_gradients(const Strip& s, const TileGradients& g, int64_t first,
                                         const KeySpan& span, uint32_t broken, uint32_t* bits,
                                         float* product, float* uncapped, float* ds,
                                         RowSums& sums) {
  const int64_t W = strip_width();
  if (g.dq != nullptr && g.part == nullptr) {
    break_keys_of(s, broken, g.dy != nullptr, g.dk, g.dk_stride, g.dv, g.dv_stride);
  }
  if (g.dscore_w != nullptr) std::fill(g.dscore_w, g.dscore_w + s.D, double{kNaN});
  if (!wants_score_gradients(s, g)) return;
  for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
    const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
    lane_bits(s.mask, lo, hi, bits);
    for (int64_t j = lo; j < hi; ++j) {
      const uint32_t seen = bits[j - lo] & broken;
      for (int64_t lane = 0; lane < W; ++lane) {
        ds[(j - lo) * W + lane] = seen >> lane & 1u ? kNaN : -0.0f;
      }
    }
    score_gradients_to_products(s, g, first, {lo, nullptr, hi - lo}, product, uncapped, sums, ds);
  }
}

inline void add_part(const SparsePart& p, bool careful, int64_t key_begin, int64_t key_end,
                     int64_t D, int64_t Dv, float* dk, float* dv, int16_t* dk_low,
                     int16_t* dv_low) {
  const int64_t W = strip_width(), L = lanes();
  const int64_t q_stride = round_up(D, L), dy_stride = round_up(Dv, L);
  const int32_t* begin = std::lower_bound(p.index, p.index + p.count, key_begin);
  const int32_t* end = std::lower_bound(begin, p.index + p.count, key_end);
  const int64_t at = begin - p.index, count = end - begin;
  const float* weights = p.weights + at * W;
  // Gradients of 0 are stepped over: rows of Q that are not finite have no others.
  constexpr int64_t kMarked = 64;
  HWY_ALIGN float marks[kMarked * kMaxLanes];
  for (int64_t u = 0, n = 0; u < count; u += n) {
    n = careful ? HWY_MIN(kMarked, count - u) : count;
    const float* from = p.dscores + (at + u) * W;
    for (int64_t i = 0; careful && i < n * W; ++i) marks[i] = from[i] == 0 ? -0.0f : 0.0f;
    const StripSet dscores{{from}, {careful ? marks : from}, 1, p.lanes};
    scatter_exactly(careful, dscores, n, begin + u, D, p.q_rows, q_stride, dk, q_stride, dk_low);
  }
  if (p.dy_rows == nullptr) return;
  const StripSet kept{{weights}, {weights}, 1, p.lanes};
  scatter_exactly(careful, kept, count, begin, Dv, p.dy_rows, dy_stride, dv, dy_stride, dv_low);
}

inline void break_keys(const Strip& s, uint32_t broken, bool has_dy, float* dk, float* dv) {
  const int64_t L = lanes();
  break_keys_of(s, broken, has_dy, dk, round_up(s.D, L), dv, round_up(s.Dv, L));
}

inline void backward_sparse_strip(const RowMap& map, const Strip& s, const TileGradients& g,
                                  int64_t first, std::byte* memory) {
  const int64_t W = strip_width(), L = lanes();
  const int64_t D = s.D, Dv = s.Dv;
  const int64_t q_stride = round_up(D, L), dy_stride = round_up(Dv, L);
  const KeySpan span = span_of(s.mask);
  const int64_t keys = span.end - span.begin, block = HWY_MIN(keys, kKeyBlock);
  const bool dropout = s.dropout.threshold > 0;
  const bool detour = wants_score_gradients(s, g);
  Carver mem(memory);
  float* q_panel = mem.take<float>(panel_floats(D));
  ListSums sums_q;
  take_list_sums(keys, D, mem, sums_q);
  PairSums pair_sums;
  take_pair_sums(D, mem, pair_sums);
  float* dy_panel = mem.take<float>(Dv * W);
  float* q_rows = mem.take<float>(W * q_stride);
  float* dy_rows = mem.take<float>(W * dy_stride);
  float* ds = mem.take<float>((most_weights(map, keys) + 1) * W);
  float* f = mem.take<float>((most_weights(map, keys) + 1) * W);
  SparseStrip p;
  SolveScratch scratch;
  take_solve_scratch(map, keys, mem, p, scratch);
  float* rows = mem.take<float>(block * HWY_MAX(D, Dv));
  float* dropped = mem.take<float>(block * W);
  float* product = mem.take<float>(block * W);
  float* uncapped = mem.take<float>(block * W);
  float* broken_ds = mem.take<float>(block * W);
  pack_queries(s, q_panel);
  pack_rows(s.mask.lanes, D, s.q, s.q_stride, dot_scale(s), q_rows, q_stride);
  if (g.dy != nullptr) {
    const float* dy = g.dy + first * g.dy_stride;
    const float kept = kept_scale(s.dropout);
    pack_panel(s.mask.lanes, Dv, dy, g.dy_stride, kept, dy_panel);
    pack_rows(s.mask.lanes, Dv, dy, g.dy_stride, kept, dy_rows, dy_stride);
  }

  solve_rows(map, s, span, q_panel, scratch, p, g.row_stat + first, f);
  if (g.dy == nullptr) std::fill(ds, ds + p.count * W, 0.0f);
  for (int64_t u = 0; u < p.count && g.dy != nullptr; u += kKeyBlock) {
    const int64_t n = HWY_MIN(p.count - u, kKeyBlock);
    const RowBlock v = rows_together(n, p.index + u, Dv, s.v, s.v_stride, rows);
    score_strip(half_strip(s.mask.lanes), n, Dv, v.rows, v.stride, dy_panel, 1.0f, ds + u * W);
    if (!dropout) continue;
    uint32_t kept[kKeyBlock];
    dropout_lanes(s.dropout, 0, p.index + u, n, kept);
    mask_strip(n, kept, 0.0f, ds + u * W);
  }
  SparseUpstream up;
  take_upstream(g, first, s.mask.lanes, up);
  if (map.kind == RowNormalizer::top_k) {
    f = p.weights;
  } else if (!is_steep(map)) {
    sparse_factors(map, p.count, p.weights, f);
  }
  if (g.row_alpha != nullptr) {
    alpha_gradients(map.alpha, p, f, up, g.dcoverage, ds, s.mask.lanes, g.row_alpha + first);
  }
  if (is_steep(map)) {
    steep_score_gradients(map.alpha, p, f, up, g.dcoverage, ds);
  } else {
    sparse_score_gradients(map, p, f, up, g.dcoverage, ds);
  }

  RowSums sums;
  std::memset(sums_q.wide, 0, sizeof(double) * static_cast<size_t>(D * W));
  for (int64_t u = 0; u < p.count; u += kKeyBlock) {
    const KeyRun run{0, p.index + u, HWY_MIN(p.count - u, kKeyBlock)};
    float* part = ds + u * W;
    RowBlock k{};
    if (detour || s.score != ScoreKind::dot) {
      k = rows_together(run.count, run.index, D, s.k, s.k_stride, rows);
    }
    if (detour) {
      if (s.softcap > 0 || g.row_scale != nullptr) {
        product_strip(s, run, k.rows, k.stride, q_panel, 1.0f, dropped);
        cap_scores(s, run.count, false, dropped, product, uncapped);
      }
      score_gradients_to_products(s, g, first, run, product, uncapped, sums, part);
    }
    if (g.dq == nullptr) continue;
    const float* weights = p.weights + u * W;
    if (s.score == ScoreKind::dot) {
      if (g.part != nullptr) continue;
      const StripSet dscores{{part}, {weights}, 1, s.mask.lanes};
      scatter_strips(s.careful, dscores, run.count, run.index, D, q_rows, q_stride, g.dk,
                     g.dk_stride);
    } else {
      add_pair_gradients(s, run, k.rows, k.stride, q_panel, part, weights, sums_q.wide, g.dk,
                         g.dk_stride, g.dscore_w, pair_sums);
    }
    if (g.dy == nullptr) continue;
    if (dropout) {
      drop_weights(s.dropout, 0, run.index, run.count, weights, dropped);
      weights = dropped;
    }
    const StripSet left{{weights}, {weights}, 1, s.mask.lanes};
    scatter_strips(s.careful, left, run.count, run.index, Dv, dy_rows, dy_stride, g.dv,
                   g.dv_stride);
  }
  if (g.dq != nullptr && s.score == ScoreKind::dot) {
    gather_list(map, s, p, D, s.k, s.k_stride, sums_q, [&](int64_t u, int64_t) {
      return ListPiece{ds + u * W, p.weights + u * W};
    });
  } else if (g.dq != nullptr) {
    unfold_panel(D, sums_q.wide, sums_q.few);
  }
  if (g.part != nullptr) {
    *g.part = {p.count,      p.index, ds, p.weights, q_rows, g.dy != nullptr ? dy_rows : nullptr,
               s.mask.lanes, p.broken};
    // Masked entries keep their mark, −0, and dropped ones get it: neither adds anything.
    if (dropout) drop_weights(s.dropout, 0, p.index, p.count, p.weights, p.weights);
  }
  if (p.broken != 0) {
    break_gradients(s, g, first, span, p.broken, scratch.bits, product, uncapped, broken_ds, sums);
  }
  if (detour) store_row_sums(s, g, first, false, sums);
  if (g.dq != nullptr) {
    HWY_ALIGN float factor[kMaxLanes];
    for (int lane = 0; lane < kMaxLanes; ++lane) {
      factor[lane] = p.broken >> lane & 1u ? kNaN : dot_scale(s);
    }
    unpack_panel(s.mask.lanes, D, sums_q.few, factor, g.dq + first * g.dq_stride, g.dq_stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
