// From the gradients of finished scores back to those of products, with the parts of biases,
// positional tables, slopes and the scale.
#if defined(FOCI_KERNELS_ATTENTION_SCORE_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_SCORE_GRADIENT_INL_H_
#undef FOCI_KERNELS_ATTENTION_SCORE_GRADIENT_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_SCORE_GRADIENT_INL_H_
#endif

#include <cstring>

#include "foci/kernels/attention/score-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// A sum per lane with the rounding errors of its additions beside it (Knuth's two-sum): terms that
// grow with the distance, and nearly cancel, would leave little of a plain float.
struct LaneSum {
  HWY_ALIGN float sum[kMaxLanes] = {};
  HWY_ALIGN float error[kMaxLanes] = {};
};
struct TwoSum {
  VF sum, error;
  TwoSum(const LaneSum& from, int v)
      : sum(hn::Load(DF(), from.sum + v * lanes())),
        error(hn::Load(DF(), from.error + v * lanes())) {}
  HWY_INLINE void add(VF x) {
    const VF s = hn::Add(sum, x);
    const VF back = hn::Sub(s, sum);
    error = hn::Add(error, hn::Add(hn::Sub(sum, hn::Sub(s, back)), hn::Sub(x, back)));
    sum = s;
  }
  void store(LaneSum& to, int v) const {
    hn::Store(sum, DF(), to.sum + v * lanes());
    hn::Store(error, DF(), to.error + v * lanes());
  }
};

// What one strip sums over its keys, per lane.
struct RowSums {
  LaneSum scale, slope;
  // Under softmax the gradients of a row's scores add up to dlse, but for one rounding of δ that
  // all of them share, times their weights. So does what that rounding adds to a sum Σ ds·x: Σ p·x
  // times as much. `excess` is Σ ds.
  LaneSum excess, mean_scale, mean_slope;
};

// Whether anything beside Q, K and V wants the scores' gradients, or the scores must be finished
// again to get back to the products.
HWY_INLINE bool wants_score_gradients(const Strip& s, const TileGradients& g) {
  return s.softcap > 0 || s.score != ScoreKind::dot || g.dbias != nullptr ||
         g.key_sums != nullptr || g.row_scale != nullptr || g.row_slope != nullptr ||
         g.dtable1d != nullptr || g.dtable2d != nullptr;
}

// dbias += the strip's gradients; `first` is the strip's first query in the tile.
inline HWY_NOINLINE void add_bias_gradient(const TileGradients& g, int64_t first, int lanes_used,
                                           const KeyRun& keys, const float* ds) {
  const int64_t W = strip_width();
  float* to = g.dbias + first * g.dbias_query_stride;
  int64_t done = 0;  // lanes
#if FOCI_HAS_FOURS
  const DF d;
  const int64_t L = lanes();
  for (; keys.index == nullptr && g.dbias_key_stride == 1 && done + L <= lanes_used; done += L) {
    float* rows = to + done * g.dbias_query_stride + keys.begin;
    const float* from = ds + done;
    int64_t u = 0;
    constexpr int kSquare = static_cast<int>(hn::MaxLanes(DF()));
    for (; u + L <= keys.count; u += L) {
      VF x[kSquare];
#pragma GCC unroll 16
      for (int i = 0; i < kSquare; ++i) x[i] = hn::Load(d, from + (u + i) * W);
      transpose_square(d, x);
#pragma GCC unroll 16
      for (int i = 0; i < kSquare; ++i) {
        float* at = rows + i * g.dbias_query_stride + u;
        hn::StoreU(hn::Add(hn::LoadU(d, at), x[i]), d, at);
      }
    }
    for (; u + 4 <= keys.count; u += 4) {
      const Fours<VF> x{hn::Load(d, from + u * W), hn::Load(d, from + (u + 1) * W),
                        hn::Load(d, from + (u + 2) * W), hn::Load(d, from + (u + 3) * W)};
      each_row(d, x, rows + u, g.dbias_query_stride, [](auto four, float* at, auto v) HWY_ATTR {
        hn::StoreU(hn::Add(hn::LoadU(four, at), v), four, at);
      });
    }
    for (; u < keys.count; ++u) {
      for (int64_t n = 0; n < L; ++n) rows[n * g.dbias_query_stride + u] += from[u * W + n];
    }
  }
#endif
  for (int64_t at = 0; at < keys.count; at += kBiasRun) {
    const int64_t n = HWY_MIN(kBiasRun, keys.count - at);
    for (auto lane = static_cast<int>(done); lane < lanes_used; ++lane) {
      float* row = to + lane * g.dbias_query_stride;
      const float* column = ds + at * W + lane;
      for (int64_t u = 0; u < n; ++u) row[keys[at + u] * g.dbias_key_stride] += column[u * W];
    }
  }
}

inline HWY_NOINLINE void add_key_sums(const KeyRun& keys, const float* ds, double* sums) {
  const DF d;
  const int64_t L = lanes();
  for (int64_t u = 0; u < keys.count; ++u) {
    const VF both = hn::Add(hn::Load(d, ds + u * 2 * L), hn::Load(d, ds + (u * 2 + 1) * L));
    sums[keys[u]] += hn::GetLane(hn::SumOfLanes(d, both));
  }
}

// sums[lane] += Σ ds·x, entries of zero gradient left out whatever x holds.
inline HWY_NOINLINE void add_products(int64_t count, const float* ds, const float* x,
                                      LaneSum& sums) {
  const DF d;
  const int64_t L = lanes();
  for (int v = 0; v < kVectors; ++v) {
    TwoSum sum(sums, v);
    for (int64_t u = 0; u < count; ++u) {
      const int64_t at = (u * kVectors + v) * L;
      const VF gradient = hn::Load(d, ds + at);
      const hn::Mask<DF> none = hn::Eq(gradient, hn::Zero(d));
      sum.add(hn::IfThenZeroElse(none, hn::Mul(gradient, hn::Load(d, x + at))));
    }
    sum.store(sums, v);
  }
}

// The slope's gradient is −Σ ds·|distance|.
inline HWY_NOINLINE void add_slope_gradient(const Strip& s, const KeyRun& keys, const float* ds,
                                            LaneSum& sums) {
  const DF d;
  const DI di;
  const int64_t L = lanes();
  const LaneNumbers query(s.positions.query, s.mask.lanes);
  for (int v = 0; v < kVectors; ++v) {
    TwoSum sum(sums, v);
    for (int64_t u = 0; u < keys.count; ++u) {
      const VF distance = abs_distance(hn::Set(di, s.positions.key[keys[u]]), query.vector(v));
      sum.add(hn::Neg(hn::Mul(hn::Load(d, ds + (u * kVectors + v) * L), distance)));
    }
    sum.store(sums, v);
  }
}

inline HWY_NOINLINE void add_table_gradients(const Strip& s, const TileGradients& g,
                                             const KeyRun& keys, const float* ds) {
  const int64_t W = strip_width();
  const StripPositions& p = s.positions;
  for (int64_t u = 0; u < keys.count; ++u) {
    const int64_t j = keys[u];
    for (int lane = 0; lane < s.mask.lanes; ++lane) {
      const float x = ds[u * W + lane];
      if (x == 0) continue;
      if (g.dtable1d != nullptr) {
        const int32_t distance = p.key[j] - p.query[lane];
        g.dtable1d[HWY_MIN(HWY_MAX(distance, -p.max_distance), p.max_distance) + p.max_distance] +=
            x;
      }
      if (g.dtable2d != nullptr) g.dtable2d[p.key_cell[j] - p.query_cell[lane] + p.centre] += x;
    }
  }
}

// ds *= 1 − tanh²(uncapped/cap); a zero keeps its sign.
inline HWY_NOINLINE void uncap_gradients(int64_t count, float cap, const float* uncapped,
                                         float* ds) {
  const DF d;
  const int64_t L = lanes();
  const VF vcap = hn::Set(d, cap);
  for (int64_t at = 0; at < count * kVectors * L; at += L) {
    VF slope;
    tanh_of(hn::Div(hn::Load(d, uncapped + at), vcap), &slope);
    const VF gradient = hn::Load(d, ds + at);
    const hn::Mask<DF> none = hn::Eq(gradient, hn::Zero(d));
    hn::Store(hn::IfThenElse(none, gradient, hn::Mul(gradient, slope)), d, ds + at);
  }
}

// What store_row_sums needs to take δ's rounding out of the scale's and the slope's gradients, from
// softmax's weights p. `spare` is a strip of the run's size.
inline void add_means(const Strip& s, const TileGradients& g, const KeyRun& keys, const float* p,
                      const float* ds, const float* product, const float* uncapped, float* spare,
                      RowSums& sums) {
  const DF d;
  const int64_t L = lanes();
  for (int v = 0; v < kVectors; ++v) {
    TwoSum sum(sums.excess, v);
    for (int64_t u = 0; u < keys.count; ++u) {
      sum.add(hn::Load(d, ds + (u * kVectors + v) * L));
    }
    sum.store(sums.excess, v);
  }
  if (g.row_slope != nullptr) add_slope_gradient(s, keys, p, sums.mean_slope);
  if (g.row_scale == nullptr) return;
  if (s.softcap > 0) {
    std::memcpy(spare, p, sizeof(float) * static_cast<size_t>(keys.count * strip_width()));
    uncap_gradients(keys.count, s.softcap, uncapped, spare);
    p = spare;
  }
  add_products(keys.count, p, product, sums.mean_scale);
}

// ds, the gradients of finished scores (zero where masked), become those of products. `product` and
// `uncapped` are what cap_scores gave; product is read for the scale alone, uncapped under a
// softcap.
inline void score_gradients_to_products(const Strip& s, const TileGradients& g, int64_t first,
                                        const KeyRun& keys, const float* product,
                                        const float* uncapped, RowSums& sums, float* ds) {
  if (g.dbias != nullptr) add_bias_gradient(g, first, s.mask.lanes, keys, ds);
  if (g.key_sums != nullptr) add_key_sums(keys, ds, g.key_sums);
  if (g.row_slope != nullptr) add_slope_gradient(s, keys, ds, sums.slope);
  if (g.dtable1d != nullptr || g.dtable2d != nullptr) add_table_gradients(s, g, keys, ds);
  if (s.softcap > 0) uncap_gradients(keys.count, s.softcap, uncapped, ds);
  if (g.row_scale != nullptr) add_products(keys.count, ds, product, sums.scale);
  if (s.score != ScoreKind::dot && s.scale != 1) scale_strip(keys.count, s.scale, ds);
}

// `balanced`: add_means was called for all keys.
HWY_INLINE void store_row_sums(const Strip& s, const TileGradients& g, int64_t first, bool balanced,
                               const RowSums& sums) {
  const auto total = [](const LaneSum& sum, int lane) { return sum.sum[lane] + sum.error[lane]; };
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    const float dlse = g.drow_stat != nullptr ? g.drow_stat[first + lane] : 0;
    const float excess = balanced ? total(sums.excess, lane) - dlse : 0;
    if (g.row_slope != nullptr) {
      g.row_slope[first + lane] = total(sums.slope, lane) - excess * total(sums.mean_slope, lane);
    }
    if (g.row_scale != nullptr) {
      g.row_scale[first + lane] = total(sums.scale, lane) - excess * total(sums.mean_scale, lane);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
