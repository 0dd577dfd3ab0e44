// Strips under a map with exact zeros: forward, backward and weights over the keys that have
// weight.
#if defined(FOCI_KERNELS_ATTENTION_SPARSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_SPARSE_INL_H_
#undef FOCI_KERNELS_ATTENTION_SPARSE_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_SPARSE_INL_H_
#endif

#include <cmath>
#include <cstring>

#include "foci/kernels/attention_softmax_forward-inl.h"
#include "foci/kernels/normalizers/sparsemax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// A sparsemax strip after its threshold is known: `count` rows of weights (−0 where none) with
// their keys. Shared by forward, backward and weights.
struct SparseStrip {
  float* weights;
  int32_t* index;
  int64_t count = 0;
  SparsemaxRows rows;
  uint32_t seen = 0;    // lanes whose row has keys
  uint32_t broken = 0;  // of those, lanes with a NaN or infinite score: their results are NaN
};

inline HWY_NOINLINE void solve_sparsemax(const Strip& s, const KeySpan& span, const float* panel,
                                         uint32_t* bits, SparseStrip& out) {
  const int64_t W = strip_width();
  for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
    const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
    float* part = out.weights + (lo - span.begin) * W;
    score_keys(s, span, lo, hi, panel, bits, part);
    if (s.careful) {
      for (int64_t j = 0; j < hi - lo; ++j) {
        for (int lane = 0; lane < s.mask.lanes; ++lane) {
          if (std::isnan(part[j * W + lane])) out.broken |= 1u << lane;
        }
      }
    }
  }
  const int64_t keys = span.end - span.begin;
  row_max(keys, out.weights, out.rows.max);
  out.count = compact_candidates(keys, span.begin, out.rows.max, out.weights, out.index);
  solve_tau(out.count, out.weights, out.rows);
  out.count = compact_weights(out.count, out.rows, out.weights, out.index);
  out.seen = lanes_that_see(s, span, bits);
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    if ((out.seen >> lane & 1u) && out.rows.support[lane] == 0) out.broken |= 1u << lane;
  }
  out.broken &= out.seen;
}

inline void forward_sparsemax(const Strip& s, const StripOutputs& o, std::byte* scratch) {
  const int64_t W = strip_width();
  const KeySpan span = span_of(s.mask);
  const int64_t keys = span.end - span.begin;
  Carver mem(scratch);
  float* panel = mem.take<float>(s.D * W);
  float* acc = mem.take<float>(s.Dv * W);
  SparseStrip p;
  p.weights = mem.take<float>((keys + 1) * W);
  uint32_t* bits = mem.take<uint32_t>(HWY_MAX(keys, kKeyBlock) + 1);
  p.index = mem.take<int32_t>(keys + 1);
  float* values = mem.take<float>(HWY_MIN(keys, kKeyBlock) * s.Dv);
  pack_panel(s.mask.lanes, s.D, s.q, s.q_stride, s.scale, panel);
  std::memset(acc, 0, sizeof(float) * static_cast<size_t>(s.Dv * W));

  solve_sparsemax(s, span, panel, bits, p);
  for (int64_t u = 0; u < p.count; u += kKeyBlock) {
    const int64_t n = HWY_MIN(p.count - u, kKeyBlock);
    copy_rows(n, p.index + u, s.Dv, s.v, s.v_stride, values);
    gather_strip(s.careful, n, s.Dv, values, s.Dv, p.weights + u * W, p.weights + u * W, acc);
  }

  HWY_ALIGN float factor[kMaxLanes] = {};
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    const bool any = p.seen >> lane & 1u;
    const bool broken = p.broken >> lane & 1u;
    factor[lane] = broken ? kNaN : (any ? 1.0f : 0.0f);
    const float max = p.rows.max[lane], tau = p.rows.tau[lane];
    if (o.row_stat) o.row_stat[lane] = broken ? kNaN : (any ? max + tau : kInf);
    if (o.max_weight) o.max_weight[lane] = broken ? kNaN : (any ? -tau : 0.0f);
    if (o.support) o.support[lane] = p.rows.support[lane];
    float entropy = 0;
    int64_t max_key = -1;
    float best = 0;
    if (o.entropy != nullptr || o.max_key != nullptr) {
      for (int64_t u = 0; u < p.count; ++u) {
        const float w = p.weights[u * W + lane];
        if (!(w > 0)) continue;
        entropy -= w * std::log(w);
        if (w > best) {
          best = w;
          max_key = p.index[u];
        }
      }
    }
    if (o.entropy) o.entropy[lane] = broken ? kNaN : entropy;
    if (o.max_key) o.max_key[lane] = max_key;
  }
  if (o.support != nullptr && p.broken != 0) {
    // Every key that a broken row may see has a weight, if NaN.
    HWY_ALIGN float seen[kMaxLanes];
    count_seen(s, span, bits, seen);
    for (int lane = 0; lane < s.mask.lanes; ++lane) {
      if (p.broken >> lane & 1u) o.support[lane] = seen[lane];
    }
  }
  if (o.y) unpack_panel(s.mask.lanes, s.Dv, acc, factor, o.y, o.y_stride);
  if (o.coverage != nullptr) {
    const DF d;
    const int64_t L = lanes();
    const VF f0 = hn::Load(d, factor), f1 = hn::Load(d, factor + L);
    for (int64_t u = 0; u < p.count; ++u) {
      const VF p0 = hn::Load(d, p.weights + u * W), p1 = hn::Load(d, p.weights + u * W + L);
      o.coverage[p.index[u]] += hn::GetLane(
          hn::SumOfLanes(d, hn::Add(hn::IfThenZeroElse(is_masked(p0), hn::Mul(p0, f0)),
                                    hn::IfThenZeroElse(is_masked(p1), hn::Mul(p1, f1)))));
    }
    // A broken row has no weights to add; what it reads is NaN.
    if (p.broken != 0) {
      for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
        const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
        lane_bits(s.mask, lo, hi, bits);
        for (int64_t j = lo; j < hi; ++j) {
          if (bits[j - lo] & p.broken) o.coverage[j] = kNaN;
        }
      }
    }
  }
}

// weights[lane][j], j over the span; zero elsewhere was written by the caller.
inline void sparse_strip_weights(const Strip& s, float* weights, int64_t stride,
                                 std::byte* scratch) {
  const int64_t W = strip_width();
  const KeySpan span = span_of(s.mask);
  const int64_t keys = span.end - span.begin;
  if (keys == 0) return;
  Carver mem(scratch);
  float* panel = mem.take<float>(s.D * W);
  mem.take<float>(s.Dv * W);
  SparseStrip p;
  p.weights = mem.take<float>((keys + 1) * W);
  uint32_t* bits = mem.take<uint32_t>(HWY_MAX(keys, kKeyBlock) + 1);
  p.index = mem.take<int32_t>(keys + 1);
  pack_panel(s.mask.lanes, s.D, s.q, s.q_stride, s.scale, panel);
  solve_sparsemax(s, span, panel, bits, p);
  if (p.broken != 0) lane_bits(s.mask, span.begin, span.end, bits);
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    if (p.broken >> lane & 1u) {
      for (int64_t j = 0; j < keys; ++j) {
        if (bits[j] >> lane & 1u) weights[lane * stride + span.begin + j] = kNaN;
      }
      continue;
    }
    for (int64_t u = 0; u < p.count; ++u) {
      const float w = p.weights[u * W + lane];
      if (w > 0) weights[lane * stride + p.index[u]] = w;
    }
  }
}

// Within the support, dS = g − mean(g) + dτ/|support| with g = dP + the statistics' parts
// (Martins & Astudillo 2016, section 2.5); outside it, 0.
inline void backward_sparsemax_strip(const Strip& s, const TileGradients& g, int64_t first,
                                     std::byte* scratch) {
  const int64_t W = strip_width(), L = lanes();
  const int64_t D = s.D, Dv = s.Dv;
  const int64_t q_stride = round_up(D, L), dy_stride = round_up(Dv, L);
  const KeySpan span = span_of(s.mask);
  const int64_t keys = span.end - span.begin;
  Carver mem(scratch);
  float* q_panel = mem.take<float>(D * W);
  float* dq = mem.take<float>(D * W);
  float* dy_panel = mem.take<float>(Dv * W);
  float* q_rows = mem.take<float>(W * q_stride);
  float* dy_rows = mem.take<float>(W * dy_stride);
  SparseStrip p;
  p.weights = mem.take<float>((keys + 1) * W);
  float* ds = mem.take<float>((keys + 1) * W);
  uint32_t* bits = mem.take<uint32_t>(HWY_MAX(keys + 1, kKeyBlock));
  p.index = mem.take<int32_t>(keys + 1);
  float* rows = mem.take<float>(HWY_MIN(keys, kKeyBlock) * HWY_MAX(D, Dv));
  const float* dy = g.dy + first * g.dy_stride;
  pack_panel(s.mask.lanes, D, s.q, s.q_stride, s.scale, q_panel);
  pack_panel(s.mask.lanes, Dv, dy, g.dy_stride, 1.0f, dy_panel);
  pack_rows(s.mask.lanes, D, s.q, s.q_stride, s.scale, q_rows, q_stride);
  pack_rows(s.mask.lanes, Dv, dy, g.dy_stride, 1.0f, dy_rows, dy_stride);
  std::memset(dq, 0, sizeof(float) * static_cast<size_t>(D * W));

  solve_sparsemax(s, span, q_panel, bits, p);
  for (int64_t u = 0; u < p.count; u += kKeyBlock) {
    const int64_t n = HWY_MIN(p.count - u, kKeyBlock);
    copy_rows(n, p.index + u, Dv, s.v, s.v_stride, rows);
    score_strip(n, Dv, rows, Dv, dy_panel, ds + u * W);
  }
  for (int64_t lane = 0; lane < W; ++lane) {
    const bool used = lane < s.mask.lanes;
    const int64_t i = first + lane;
    const float dH = used && g.dentropy ? g.dentropy[i] : 0;
    const float dmax = used && g.dmax_weight ? g.dmax_weight[i] : 0;
    const int64_t max_key = used && g.dmax_weight ? g.max_key[i] : -1;
    float sum = 0;
    for (int64_t u = 0; u < p.count; ++u) {
      const float w = p.weights[u * W + lane];
      if (!(w > 0)) continue;
      float x = ds[u * W + lane];
      if (g.dcoverage) x += g.dcoverage[p.index[u]];
      if (dH != 0) x -= dH * (std::log(w) + 1);
      if (p.index[u] == max_key) x += dmax;
      ds[u * W + lane] = x;
      sum += x;
    }
    const float n = p.rows.support[lane];
    const float dtau = used && g.drow_stat ? g.drow_stat[i] : 0;
    const float shift = n > 0 ? (sum - dtau) / n : 0;
    const bool broken = p.broken >> lane & 1u;
    for (int64_t u = 0; u < p.count; ++u) {
      const float w = p.weights[u * W + lane];
      ds[u * W + lane] = used && w > 0 ? (broken ? kNaN : ds[u * W + lane] - shift) : -0.0f;
      if (!used) p.weights[u * W + lane] = -0.0f;
    }
  }
  for (int64_t u = 0; u < p.count; u += kKeyBlock) {
    const int64_t n = HWY_MIN(p.count - u, kKeyBlock);
    copy_rows(n, p.index + u, D, s.k, s.k_stride, rows);
    gather_strip(s.careful, n, D, rows, D, ds + u * W, p.weights + u * W, dq);
  }
  StripSet weights{}, dscores{};
  weights.count = dscores.count = 1;
  weights.strip[0] = weights.weights[0] = dscores.weights[0] = p.weights;
  dscores.strip[0] = ds;
  scatter_strips(s.careful, weights, p.count, p.index, Dv, dy_rows, dy_stride, g.dv, g.dv_stride);
  scatter_strips(s.careful, dscores, p.count, p.index, D, q_rows, q_stride, g.dk, g.dk_stride);
  // A broken row's weights, and with them every gradient that passes through them, are NaN.
  if (p.broken != 0) {
    for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
      const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
      lane_bits(s.mask, lo, hi, bits);
      for (int64_t j = lo; j < hi; ++j) {
        if (!(bits[j - lo] & p.broken)) continue;
        for (int64_t i = 0; i < Dv; ++i) g.dv[j * g.dv_stride + i] = kNaN;
        for (int64_t i = 0; i < D; ++i) g.dk[j * g.dk_stride + i] = kNaN;
      }
    }
  }
  HWY_ALIGN float factor[kMaxLanes];
  for (int lane = 0; lane < kMaxLanes; ++lane) factor[lane] = p.broken >> lane & 1u ? kNaN : 1.0f;
  unpack_panel(s.mask.lanes, D, dq, factor, g.dq + first * g.dq_stride, g.dq_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
