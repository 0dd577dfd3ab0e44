// Backward of a tile of strips under softmax, one pass, five products:
//   S = KQᵀ → P;  dP = V dYᵀ;  dV += P dY;  dS = P∘(dP − δ);  dQᵀ += KᵀdS;  dK += dS Q.
//
// With dP including what the statistics' upstream gradients add, softmax has
//   δ_i = Σ_j P_ij dP_ij = dY_i·Y_i + dmax_i·max_i + Σ_j P_ij dcoverage_j,
// and beside P∘(dP − δ) the terms P·dlse and −dH·P∘(ln P + H), H being the row's entropy.
#if defined(FOCI_KERNELS_ATTENTION_SOFTMAX_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_SOFTMAX_BACKWARD_INL_H_
#undef FOCI_KERNELS_ATTENTION_SOFTMAX_BACKWARD_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_SOFTMAX_BACKWARD_INL_H_
#endif

#include "foci/kernels/attention/score_gradient-inl.h"
#include "foci/kernels/attention/softmax_forward-inl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Keys after which what has been added to dQ is folded into a sum in double. A panel of keys, and a
// strip's first block, begin at multiples of kBackwardBlock, so that a row's sums are cut by key
// number alone.
inline constexpr int64_t kFoldKeys = 4 * kBackwardBlock;

// Keys whose scores are held from the pass that finds row constants to the one that uses them. More
// are scored twice.
inline constexpr int64_t kHeldKeys = 4 * kKeyBlock;

inline size_t backward_scratch(int64_t keys, int64_t D, int64_t Dv) {
  const int64_t W = strip_width(), L = lanes();
  // Per strip: queries, their gradients and dY as panels; weights, their gradients, and what
  // dropout leaves of them.
  return size_t{kMaxStrips} * (Carver::bytes<float>(panel_floats(D)) + Carver::bytes<float>(D * W) +
                               Carver::bytes<double>(D * W) + Carver::bytes<float>(Dv * W) +
                               3 * Carver::bytes<float>(kBackwardBlock * W) +
                               Carver::bytes<float>(HWY_MIN(keys, kHeldKeys) * W)) +
         Carver::bytes<float>(kMaxStrips * W * round_up(D, L)) +
         Carver::bytes<float>(kMaxStrips * W * round_up(Dv, L)) +
         Carver::bytes<float>(kKeyBlock * W) + Carver::bytes<uint32_t>(kKeyBlock) +
         // Y; scaled V; products and uncapped scores; sums of pairs.
         Carver::bytes<float>(Dv * W) + Carver::bytes<float>(kBackwardBlock * Dv) +
         2 * Carver::bytes<float>(kBackwardBlock * W) + pair_sums_bytes(D);
}

// One strip's panels and row constants.
struct BackwardStrip {
  KeySpan span;
  float* q_panel;  // scaled
  float* dy_panel;
  float* dq;       // [D][W] of the blocks since the last fold
  double* wide;    // [D][W] of those before, where there are any
  bool folds;      // whether there are, or may be
  float* weights;  // [block][W]
  float* dscores;  // [block][W]
  float* kept;     // [block][W] weights after dropout, or `weights` itself
  float* held;     // [..][W] finished scores of the span's first keys, or null: may not be held
  int64_t held_end = 0;  // the key at which they end
  RowSums sums;
  HWY_ALIGN float delta[kMaxLanes];  // dY·Y
  HWY_ALIGN float m[kMaxLanes];      // p = e^(s − m) · inverse
  HWY_ALIGN float inverse[kMaxLanes];
  HWY_ALIGN float shift[kMaxLanes];  // dS = p · (dP + … − shift)
  HWY_ALIGN float dentropy[kMaxLanes];
  HWY_ALIGN float dmax[kMaxLanes];
  int32_t max_key[kMaxLanes];
};

// delta = Σ_d dY·Y, by the same chain of multiply-adds that makes dP of V: where a row has one key,
// Y is V and dP − δ is exactly 0. `y_panel` is scratch [Dv][W].
inline HWY_NOINLINE void row_delta(const Strip& s, const TileGradients& g, int64_t first,
                                   const float* dy_panel, float* y_panel, float* delta) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  pack_panel(s.mask.lanes, s.Dv, g.y + first * g.y_stride, g.y_stride, 1.0f, y_panel);
  VF d0 = hn::Zero(d), d1 = d0;
  for (int64_t i = 0; i < s.Dv; ++i) {
    d0 = hn::MulAdd(hn::Load(d, y_panel + i * W), hn::Load(d, dy_panel + i * W), d0);
    d1 = hn::MulAdd(hn::Load(d, y_panel + i * W + L), hn::Load(d, dy_panel + i * W + L), d1);
  }
  hn::Store(d0, d, delta);
  hn::Store(d1, d, delta + L);
}

// Above this |log-sum-exp| its float is too coarse to recompute weights from (their relative error
// is about 6e-8 · |lse|), and maximum and sum are found again.
inline constexpr float kCoarse = 16.0f;

// What arrives for the statistics of a row's weights.
inline void take_row_upstream(const Strip& s, const TileGradients& g, int64_t first,
                              BackwardStrip& b) {
  for (int lane = 0; lane < kMaxLanes; ++lane) {
    b.dentropy[lane] = b.dmax[lane] = 0;
    b.max_key[lane] = -1;
    if (lane >= s.mask.lanes) continue;
    if (g.dentropy) b.dentropy[lane] = g.dentropy[first + lane];
    if (g.dmax_weight) {
      b.dmax[lane] = g.dmax_weight[first + lane];
      b.max_key[lane] = static_cast<int32_t>(g.max_key[first + lane]);
    }
  }
}

// Of an earlier panel's call. Lanes without a query have weights 0.
inline void take_row_constants(const Strip& s, const RowConstants* from, BackwardStrip& b) {
  for (int lane = 0; lane < kMaxLanes; ++lane) {
    const RowConstants c = lane < s.mask.lanes ? from[lane] : RowConstants{kInf, 1, 0};
    b.m[lane] = c.m;
    b.inverse[lane] = c.inverse;
    b.shift[lane] = c.shift;
  }
}

// Fills m, inverse and shift. Rows whose log-sum-exp is coarse, and an upstream gradient of the
// coverage (whose part of δ is Σ p·dcoverage), need a pass over the scores first.
inline HWY_NOINLINE void softmax_row_constants(const Strip& s, const TileGradients& g,
                                               int64_t first, uint32_t* bits, float* strip,
                                               BackwardStrip& b) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  bool recompute = g.dcoverage != nullptr;
  for (int lane = 0; lane < W; ++lane) {
    const bool used = lane < s.mask.lanes;
    const float lse = used ? g.row_stat[first + lane] : -kInf;
    // An empty row (−inf), or a lane without a query: every weight is e^−inf = 0.
    b.m[lane] = lse == -kInf ? kInf : lse;
    b.inverse[lane] = 1;
    recompute = recompute || (used && std::abs(lse) > kCoarse && lse != -kInf);
  }
  double covered[kMaxLanes] = {};
  if (recompute) {
    SoftmaxRows r;
    softmax_begin(r);
    const int64_t first_block = b.span.begin / kKeyBlock * kKeyBlock;
    for (int64_t at = first_block; at < b.span.end; at += kKeyBlock) {
      const int64_t lo = HWY_MAX(at, b.span.begin), hi = HWY_MIN(at + kKeyBlock, b.span.end);
      score_keys(s, b.span, lo, hi, b.q_panel, bits, strip);
      if (b.held != nullptr && hi - b.span.begin <= kHeldKeys) {
        std::memcpy(b.held + (lo - b.span.begin) * W, strip,
                    sizeof(float) * static_cast<size_t>((hi - lo) * W));
        b.held_end = hi;
      }
      softmax_block(false, scores_of(s, b.span, lo, hi), hi - lo, strip, r, nullptr, lo);
      if (s.careful) mask_strip(hi - lo, bits, -0.0f, strip);
      if (g.dcoverage == nullptr) continue;
      HWY_ALIGN float part[kMaxLanes];
      for (int lane = 0; lane < W; ++lane) covered[lane] *= r.correction[lane];
      for_runs(lo, hi - lo, [&](int64_t from, int64_t to) HWY_ATTR {
        VF c0 = hn::Zero(d), c1 = c0;
        for (int64_t j = from; j < to; ++j) {
          const VF c = hn::Set(d, g.dcoverage[lo + j]);
          const VF e0 = hn::Load(d, strip + j * W), e1 = hn::Load(d, strip + j * W + L);
          c0 = hn::IfThenElse(is_masked(e0), c0, hn::MulAdd(e0, c, c0));
          c1 = hn::IfThenElse(is_masked(e1), c1, hn::MulAdd(e1, c, c1));
        }
        hn::Store(c0, d, part);
        hn::Store(c1, d, part + L);
        for (int lane = 0; lane < W; ++lane) covered[lane] += part[lane];
      });
    }
    for (int lane = 0; lane < s.mask.lanes; ++lane) {
      const float lse = g.row_stat[first + lane];
      const auto inverse = static_cast<float>(1 / r.sum[lane]);
      covered[lane] = lse == -kInf ? 0.0 : covered[lane] / r.sum[lane];
      if (std::abs(lse) > kCoarse && lse != -kInf) {
        b.m[lane] = r.m[lane];
        b.inverse[lane] = inverse;
      }
    }
  }
  for (int lane = 0; lane < W; ++lane) {
    b.shift[lane] = 0;
    if (lane >= s.mask.lanes) continue;
    const int64_t i = first + lane;
    // Summed in the order in which score_gradients adds to dP, so that equal terms cancel exactly.
    float shift = b.delta[lane];
    if (g.dmax_weight) shift += g.dmax_weight[i] * g.max_weight[i];
    shift += static_cast<float>(covered[lane]);
    if (g.drow_stat) shift -= g.drow_stat[i];
    if (g.dentropy) {
      // dS gets −dH·p·(ln p + H), and ln p = (s − m) + ln(inverse): constants join the shift.
      shift += g.dentropy[i] * (g.entropy[i] + std::log(b.inverse[lane]));
    }
    b.shift[lane] = shift;
    if (g.constants) g.constants[i] = {b.m[lane], b.inverse[lane], shift};
  }
}

// dscores = weights ∘ (dscores + dcoverage − dentropy·x − shift), x = s − m. Without dentropy and
// dcoverage the pointers are null.
template <bool kStatistics>
HWY_NOINLINE void score_gradients(int64_t count, const float* weights, const float* x,
                                  const float* dcoverage, const BackwardStrip& b, float* dscores) {
  const DF d;
  const int64_t L = lanes();
  for (int v = 0; v < kVectors; ++v) {
    const VF shift = hn::Load(d, b.shift + v * L);
    const VF dentropy = hn::Load(d, b.dentropy + v * L);
    const VF m = hn::Load(d, b.m + v * L);
    const VF floor = hn::Set(d, -1e30f);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t at = (j * kVectors + v) * L;
      VF g = hn::Load(d, dscores + at);
      if constexpr (kStatistics) {
        if (dcoverage != nullptr) g = hn::Add(g, hn::Set(d, dcoverage[j]));
        if (x != nullptr) {
          // Masked and empty: −inf, whose product with a zero weight must be 0.
          const VF y = hn::Max(hn::Sub(hn::Load(d, x + at), m), floor);
          g = hn::NegMulAdd(dentropy, y, g);
        }
      }
      hn::Store(hn::Mul(hn::Load(d, weights + at), hn::Sub(g, shift)), d, dscores + at);
    }
  }
}

inline void backward_softmax(const Strip* strips, int count, const TileGradients& g,
                             std::byte* scratch) {
  const int64_t W = strip_width(), L = lanes();
  const Strip& s0 = strips[0];
  const int64_t D = s0.D, Dv = s0.Dv;
  const int64_t q_stride = round_up(D, L), dy_stride = round_up(Dv, L);
  Carver mem(scratch);
  const bool dropout = s0.dropout.threshold > 0;
  const bool detour = wants_score_gradients(s0, g);
  const bool pairs = s0.score != ScoreKind::dot;
  // The careful path needs the masks' bits again, and others the products.
  const bool hold = !s0.careful && s0.softcap == 0 && !(detour && g.row_scale);
  int64_t most_keys = 0;
  for (int t = 0; t < count; ++t) {
    const KeySpan span = span_of(strips[t].mask);
    most_keys = HWY_MAX(most_keys, span.end - span.begin);
  }
  BackwardStrip b[kMaxStrips];
  for (int t = 0; t < count; ++t) {
    b[t].q_panel = mem.take<float>(panel_floats(D));
    b[t].dq = mem.take<float>(D * W);
    b[t].dy_panel = mem.take<float>(Dv * W);
    b[t].weights = mem.take<float>(kBackwardBlock * W);
    b[t].dscores = mem.take<float>(kBackwardBlock * W);
    b[t].kept = dropout ? mem.take<float>(kBackwardBlock * W) : b[t].weights;
    b[t].held = hold ? mem.take<float>(HWY_MIN(most_keys, kHeldKeys) * W) : nullptr;
  }
  float* q_rows = mem.take<float>(count * W * q_stride);
  float* dy_rows = mem.take<float>(count * W * dy_stride);
  float* scores = mem.take<float>(HWY_MAX(kKeyBlock, kBackwardBlock) * W);
  uint32_t* bits = mem.take<uint32_t>(HWY_MAX(kKeyBlock, kBackwardBlock));
  float* y_panel = mem.take<float>(Dv * W);
  float* product = detour && g.row_scale ? mem.take<float>(kBackwardBlock * W) : nullptr;
  float* uncapped = s0.softcap > 0 ? mem.take<float>(kBackwardBlock * W) : nullptr;
  float* scaled_v = dropout ? mem.take<float>(kBackwardBlock * Dv) : nullptr;
  // Behind what every block reads and writes: rarely touched.
  for (int t = 0; t < count; ++t) b[t].wide = mem.take<double>(D * W);
  PairSums pair_sums;
  if (pairs) take_pair_sums(D, mem, pair_sums);
  RunCut cut;

  int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
  for (int t = 0; t < count; ++t) {
    const Strip& s = strips[t];
    b[t].span = span_of(s.mask);
    pack_queries(s, b[t].q_panel);
    pack_rows(s.mask.lanes, D, s.q, s.q_stride, dot_scale(s), q_rows + t * W * q_stride, q_stride);
    std::memset(b[t].dq, 0, sizeof(float) * static_cast<size_t>(D * W));
    if (g.dy != nullptr) {
      const float* dy = g.dy + t * W * g.dy_stride;
      pack_panel(s.mask.lanes, Dv, dy, g.dy_stride, 1.0f, b[t].dy_panel);
      if (!g.later_panel) row_delta(s, g, t * W, b[t].dy_panel, y_panel, b[t].delta);
      pack_rows(s.mask.lanes, Dv, dy, g.dy_stride, kept_scale(s.dropout),
                dy_rows + t * W * dy_stride, dy_stride);
    } else {
      std::fill(b[t].delta, b[t].delta + W, 0.0f);
    }
    take_row_upstream(s, g, t * W, b[t]);
    if (g.later_panel) {
      take_row_constants(s, g.constants + t * W, b[t]);
    } else {
      softmax_row_constants(s, g, t * W, bits, scores, b[t]);
    }
    if (b[t].span.begin < b[t].span.end) {
      begin = HWY_MIN(begin, b[t].span.begin);
      end = HWY_MAX(end, b[t].span.end);
    }
  }
  begin = HWY_MAX(begin, g.key_begin);
  end = HWY_MIN(end, g.key_end);
  for (int t = 0; t < count; ++t) {
    b[t].folds = pairs || (begin < end && begin / kFoldKeys != (end - 1) / kFoldKeys);
    if (b[t].folds) std::memset(b[t].wide, 0, sizeof(double) * static_cast<size_t>(D * W));
  }
  for (int64_t at = begin, stop; at < end; at = stop) {
    stop = HWY_MIN((at / kBackwardBlock + 1) * kBackwardBlock, end);
    StripSet weights{}, dscores{};
    weights.count = dscores.count = count;
    weights.last_lanes = dscores.last_lanes = strips[count - 1].mask.lanes;
    weights.one_by_one = dscores.one_by_one = g.many_queries;
    const float* v = s0.v + at * s0.v_stride;
    int64_t v_stride = s0.v_stride;
    if (dropout && g.dy != nullptr) {
      // Scaled as Y was, so that dP and δ meet the same roundings.
      scale_rows(stop - at, Dv, v, v_stride, kept_scale(s0.dropout), scaled_v);
      v = scaled_v;
      v_stride = Dv;
    }
    for (int t = 0; t < count; ++t) {
      const Strip& s = strips[t];
      weights.strip[t] = weights.weights[t] = b[t].kept;
      dscores.strip[t] = b[t].dscores;
      dscores.weights[t] = b[t].weights;
      const int64_t lo = HWY_MIN(stop, HWY_MAX(at, b[t].span.begin));
      const int64_t hi = HWY_MAX(lo, HWY_MIN(stop, b[t].span.end));
      // Keys that only the tile's other strips see: −0, which is zero and "masked" in one.
      for (float* strip : {b[t].weights, b[t].dscores, b[t].kept}) {
        std::fill(strip, strip + (lo - at) * W, -0.0f);
        std::fill(strip + (hi - at) * W, strip + (stop - at) * W, -0.0f);
      }
      if (lo >= hi) continue;
      const KeyRun keys{lo, nullptr, hi - lo};
      float* p = b[t].weights + (lo - at) * W;
      float* ds = b[t].dscores + (lo - at) * W;
      const int64_t held = HWY_MAX(lo, HWY_MIN(hi, b[t].held_end));
      if (lo < held) {
        std::memcpy(p, b[t].held + (lo - b[t].span.begin) * W,
                    sizeof(float) * static_cast<size_t>((held - lo) * W));
      }
      if (held < hi) {
        score_keys(s, b[t].span, held, hi, b[t].q_panel, bits, p + (held - lo) * W, product,
                   uncapped);
      }
      if (g.dentropy) std::memcpy(scores, p, sizeof(float) * static_cast<size_t>((hi - lo) * W));
      softmax_weights(s.careful, hi - lo, b[t].m, b[t].inverse, p);
      if (g.dy != nullptr) {
        score_strip(half_strip(s.mask.lanes), hi - lo, Dv, v + (lo - at) * v_stride, v_stride,
                    b[t].dy_panel, 1.0f, ds);
      } else {
        std::fill(ds, ds + (hi - lo) * W, 0.0f);
      }
      float* left = b[t].kept + (lo - at) * W;
      if (dropout) drop_gradients(s.dropout, lo, hi - lo, p, left, ds);
      if (g.dmax_weight) {
        for (int lane = 0; lane < s.mask.lanes; ++lane) {
          const int64_t j = b[t].max_key[lane];
          if (j >= lo && j < hi) ds[(j - lo) * W + lane] += b[t].dmax[lane];
        }
      }
      if (g.dentropy || g.dcoverage) {
        score_gradients<true>(hi - lo, p, g.dentropy ? scores : nullptr,
                              g.dcoverage ? g.dcoverage + lo : nullptr, b[t], ds);
      } else {
        score_gradients<false>(hi - lo, p, nullptr, nullptr, b[t], ds);
      }
      if (s.careful) {
        mask_strip(hi - lo, bits, -0.0f, p);
        mask_strip(hi - lo, bits, -0.0f, ds);
        if (dropout) mask_strip(hi - lo, bits, -0.0f, left);
      }
      if (detour) {
        if (g.row_scale != nullptr || g.row_slope != nullptr) {
          add_means(s, g, keys, p, ds, product, uncapped, scores, b[t].sums);
        }
        score_gradients_to_products(s, g, t * W, keys, product, uncapped, b[t].sums, ds);
      }
      if (g.dq == nullptr) continue;
      const float* rows = s.k + lo * s.k_stride;
      if (pairs) {
        add_pair_gradients(s, keys, rows, s.k_stride, b[t].q_panel, ds, p, b[t].wide, g.dk,
                           g.dk_stride, g.dscore_w, pair_sums);
      } else {
        cut_runs(lo, hi - lo, cut);
        gather_strip(half_strip(s.mask.lanes), s.careful, cut, D, rows, s.k_stride, ds, p, b[t].dq);
      }
      if (b[t].folds && stop % kFoldKeys == 0) fold_panel(D, nullptr, b[t].dq, b[t].wide);
    }
    if (g.dq == nullptr) continue;
    if (g.dy != nullptr) {
      scatter_strips(s0.careful, weights, stop - at, nullptr, Dv, dy_rows, dy_stride,
                     g.dv + (at - g.key_begin) * g.dv_stride, g.dv_stride);
    }
    if (pairs) continue;
    scatter_strips(s0.careful, dscores, stop - at, nullptr, D, q_rows, q_stride,
                   g.dk + (at - g.key_begin) * g.dk_stride, g.dk_stride);
  }
  for (int t = 0; t < count; ++t) {
    if (detour) store_row_sums(strips[t], g, t * W, true, b[t].sums);
    if (g.dq == nullptr) continue;
    HWY_ALIGN float factor[kMaxLanes];
    for (float& x : factor) x = dot_scale(strips[t]);
    float* dq = g.dq + t * W * g.dq_stride;
    if (b[t].folds) {
      fold_panel(D, nullptr, b[t].dq, b[t].wide);
      unfold_panel(D, b[t].wide, b[t].dq);
    }
    if (g.later_panel) {
      unpack_panel<true>(strips[t].mask.lanes, D, b[t].dq, factor, dq, g.dq_stride);
    } else {
      unpack_panel(strips[t].mask.lanes, D, b[t].dq, factor, dq, g.dq_stride);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
