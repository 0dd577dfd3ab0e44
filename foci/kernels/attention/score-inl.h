// From queries and keys to finished scores, and from the scores' gradients back:
//
//   product (dot, L2, additive) · scale → softcap → + biases
//
// A run of keys is either neighbours (from `begin`) or a list of key numbers.
#if defined(FOCI_KERNELS_ATTENTION_SCORE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_SCORE_INL_H_
#undef FOCI_KERNELS_ATTENTION_SCORE_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_SCORE_INL_H_
#endif

#include "foci/kernels/attention.h"

#include <cstring>
#include "foci/kernels/attention/pairs-inl.h"
#include "foci/kernels/attention/products-inl.h"
#include "foci/kernels/widen-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// ---- products -----------------------------------------------------------------------------------

// What dot's gradients of Q and K are multiplied by; those of the others carry it already.
HWY_INLINE float dot_scale(const Strip& s) {
  return s.score == ScoreKind::dot ? s.scale : 1.0f;
}

// strip [count][W] of the products of a run of keys, whose rows stand one after another, times
// `factor` for dot.
HWY_INLINE void product_strip(const Strip& s, const KeyRun& keys, const float* rows, int64_t stride,
                              const float* panel, float factor, float* strip) {
  switch (s.score) {
    case ScoreKind::dot:
      return score_strip(half_strip(s.mask.lanes), keys.count, s.D, rows, stride, panel, factor,
                         strip);
    case ScoreKind::l2:
      return l2_strip(s, keys.count, rows, stride, panel, strip);
    case ScoreKind::additive:
      return additive_strip(s, keys, rows, stride, panel, strip);
  }
}

// ---- scale and softcap --------------------------------------------------------------------------

inline HWY_NOINLINE void scale_strip(int64_t count, float scale, float* strip) {
  const DF d;
  const int64_t L = lanes();
  const VF factor = hn::Set(d, scale);
  for (int64_t at = 0; at < count * kVectors * L; at += L) {
    hn::Store(hn::Mul(hn::Load(d, strip + at), factor), d, strip + at);
  }
}

inline HWY_NOINLINE void cap_strip(int64_t count, float cap, float* strip) {
  const DF d;
  const int64_t L = lanes();
  const VF factor = hn::Set(d, cap);
  for (int64_t at = 0; at < count * kVectors * L; at += L) {
    hn::Store(hn::Mul(factor, tanh_of(hn::Div(hn::Load(d, strip + at), factor))), d, strip + at);
  }
}

// The strip's products become scores up to the softcap. `scaled`: they carry the scale already.
// `product` and `uncapped` (null: not wanted) get what backward needs: the products, and the scores
// that the softcap was taken of.
HWY_INLINE void cap_scores(const Strip& s, int64_t count, bool scaled, float* strip, float* product,
                           float* uncapped) {
  const size_t bytes = sizeof(float) * static_cast<size_t>(count * strip_width());
  if (product != nullptr) std::memcpy(product, strip, bytes);
  if (!scaled && s.scale != 1) scale_strip(count, s.scale, strip);
  if (uncapped != nullptr) std::memcpy(uncapped, strip, bytes);
  if (s.softcap > 0) cap_strip(count, s.softcap, strip);
}

// ---- biases -------------------------------------------------------------------------------------

// n ≤ kBiasRun neighbouring elements of a bias row as floats; `buffer` may serve.
inline constexpr int64_t kBiasRun = 64;
inline HWY_NOINLINE const float* bias_run(const StripBias& bias, int64_t at, int64_t n,
                                          float* buffer) {
  if (bias.dtype == DType::f32) return static_cast<const float*>(bias.data) + at;
  widen_run(bias.dtype, static_cast<const uint16_t*>(bias.data) + at, n, buffer);
  return buffer;
}

// strip[j][lane] += bias of query `lane`, for n ≤ kBiasRun neighbouring keys from element `key` on.
inline HWY_NOINLINE void add_bias_rows(const Strip& s, int64_t key, int64_t n, float* strip) {
  const int64_t W = strip_width();
  const StripBias& bias = s.bias;
  int64_t lane = 0;
#if FOCI_HAS_FOURS
  const DF d;
  const int64_t L = lanes();
  HWY_ALIGN float wide[kMaxLanes / kVectors * kBiasRun];
  for (; lane + L <= s.mask.lanes; lane += L) {
    const float* rows = static_cast<const float*>(bias.data) + lane * bias.query_stride + key;
    int64_t stride = bias.query_stride;
    if (bias.dtype != DType::f32) {
      for (int64_t row = 0; row < L; ++row) {
        bias_run(bias, (lane + row) * bias.query_stride + key, n, wide + row * kBiasRun);
      }
      rows = wide;
      stride = kBiasRun;
    }
    int64_t j = 0;
    // Whole cache lines at a time: rows a power of two apart share a few places in the cache.
    constexpr int kSquare = static_cast<int>(hn::MaxLanes(DF()));
    for (; j + L <= n; j += L) {
      VF b[kSquare];
#pragma GCC unroll 16
      for (int row = 0; row < kSquare; ++row) b[row] = hn::LoadU(d, rows + row * stride + j);
      transpose_square(d, b);
      float* at = strip + j * W + lane;
#pragma GCC unroll 16
      for (int i = 0; i < kSquare; ++i) {
        hn::Store(hn::Add(hn::Load(d, at + i * W), b[i]), d, at + i * W);
      }
    }
    for (; j + 4 <= n; j += 4) {
      const Fours<VF> b = load_columns(d, rows + j, stride);
      float* at = strip + j * W + lane;
      hn::Store(hn::Add(hn::Load(d, at), b.a), d, at);
      hn::Store(hn::Add(hn::Load(d, at + W), b.b), d, at + W);
      hn::Store(hn::Add(hn::Load(d, at + 2 * W), b.c), d, at + 2 * W);
      hn::Store(hn::Add(hn::Load(d, at + 3 * W), b.e), d, at + 3 * W);
    }
    for (; j < n; ++j) {
      for (int64_t row = 0; row < L; ++row) strip[j * W + lane + row] += rows[row * stride + j];
    }
  }
#endif
  HWY_ALIGN float buffer[kBiasRun];
  for (; lane < s.mask.lanes; ++lane) {
    const float* values = bias_run(bias, lane * bias.query_stride + key, n, buffer);
    for (int64_t j = 0; j < n; ++j) strip[j * W + lane] += values[j];
  }
}

// strip += bias for keys [begin, begin + count).
inline HWY_NOINLINE void add_bias(const Strip& s, int64_t begin, int64_t count, float* strip) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const StripBias& bias = s.bias;
  HWY_ALIGN float buffer[kBiasRun];
  if (bias.key_stride == 0) {  // one number a query
    HWY_ALIGN float rows[kMaxLanes] = {};
    for (int lane = 0; lane < s.mask.lanes; ++lane) {
      rows[lane] = *bias_run(bias, lane * bias.query_stride, 1, buffer);
    }
    const VF b0 = hn::Load(d, rows), b1 = hn::Load(d, rows + L);
    for (int64_t j = 0; j < count; ++j) {
      float* row = strip + j * W;
      hn::Store(hn::Add(hn::Load(d, row), b0), d, row);
      hn::Store(hn::Add(hn::Load(d, row + L), b1), d, row + L);
    }
    return;
  }
  for (int64_t at = 0; at < count; at += kBiasRun) {
    const int64_t n = HWY_MIN(kBiasRun, count - at);
    const int64_t key = (begin + at) * bias.key_stride;
    if (bias.query_stride == 0) {  // one number a key
      const float* values = bias_run(bias, key, n, buffer);
      for (int64_t j = 0; j < n; ++j) {
        const VF b = hn::Set(d, values[j]);
        float* row = strip + (at + j) * W;
        hn::Store(hn::Add(hn::Load(d, row), b), d, row);
        hn::Store(hn::Add(hn::Load(d, row + L), b), d, row + L);
      }
      continue;
    }
    add_bias_rows(s, key, n, strip + at * W);
  }
}

// Per-lane integers of a strip, zero beyond its lanes.
struct LaneNumbers {
  HWY_ALIGN int32_t of[kMaxLanes];
  LaneNumbers(const int32_t* from, int count) {
    for (int lane = 0; lane < kMaxLanes; ++lane) of[lane] = lane < count ? from[lane] : 0;
  }
  VI vector(int v) const { return hn::Load(DI(), of + v * lanes()); }
};

HWY_INLINE VF abs_distance(VI key, VI query) {
  return hn::Abs(hn::ConvertTo(DF(), hn::Sub(key, query)));
}
HWY_INLINE VI table_entry(VI key, VI query, VI farthest) {
  const VI distance = hn::Sub(key, query);
  return hn::Add(hn::Min(hn::Max(distance, hn::Neg(farthest)), farthest), farthest);
}
HWY_INLINE VI grid_entry(VI key, VI query, VI centre) {
  return hn::Add(hn::Sub(key, query), centre);
}

// strip[u][lane] += f(key number, query vector index) for keys from `begin`.
template <class F>
HWY_INLINE void add_by_position(int64_t count, float* strip, F&& f) {
  const DF d;
  const int64_t L = lanes();
  for (int v = 0; v < kVectors; ++v) {
    for (int64_t j = 0; j < count; ++j) {
      float* at = strip + (j * kVectors + v) * L;
      hn::Store(f(j, v, hn::Load(d, at)), d, at);
    }
  }
}

inline HWY_NOINLINE void add_positional(const Strip& s, int64_t begin, int64_t count,
                                        float* strip) {
  const DF d;
  const DI di;
  const StripPositions& p = s.positions;
  if (p.alibi || p.table1d != nullptr) {
    const LaneNumbers query(p.query, s.mask.lanes);
    const int32_t* key = p.key + begin;
    if (p.alibi) {
      const VF slope = hn::Set(d, p.slope);
      add_by_position(count, strip, [&](int64_t j, int v, VF x) HWY_ATTR {
        return hn::NegMulAdd(slope, abs_distance(hn::Set(di, key[j]), query.vector(v)), x);
      });
    }
    if (p.table1d != nullptr) {
      const VI farthest = hn::Set(di, p.max_distance);
      add_by_position(count, strip, [&](int64_t j, int v, VF x) HWY_ATTR {
        const VI at = table_entry(hn::Set(di, key[j]), query.vector(v), farthest);
        return hn::Add(x, hn::GatherIndex(d, p.table1d, at));
      });
    }
  }
  if (p.table2d != nullptr) {
    const LaneNumbers query(p.query_cell, s.mask.lanes);
    const int32_t* key = p.key_cell + begin;
    const VI centre = hn::Set(di, p.centre);
    add_by_position(count, strip, [&](int64_t j, int v, VF x) HWY_ATTR {
      const VI at = grid_entry(hn::Set(di, key[j]), query.vector(v), centre);
      return hn::Add(x, hn::GatherIndex(d, p.table2d, at));
    });
  }
}

HWY_INLINE bool has_positional(const Strip& s) {
  return s.positions.alibi || s.positions.table1d != nullptr || s.positions.table2d != nullptr;
}

// strip = finished scores of keys [begin, begin + count), unmasked.
HWY_INLINE void finished_scores(const Strip& s, int64_t begin, int64_t count, const float* panel,
                                float* strip, float* product = nullptr, float* uncapped = nullptr) {
  const bool scaled = s.score == ScoreKind::dot && product == nullptr;
  product_strip(s, {begin, nullptr, count}, s.k + begin * s.k_stride, s.k_stride, panel,
                scaled ? s.scale : 1.0f, strip);
  if (!scaled || uncapped != nullptr || s.softcap > 0) {
    cap_scores(s, count, scaled, strip, product, uncapped);
  }
  if (s.bias.data != nullptr) add_bias(s, begin, count, strip);
  if (has_positional(s)) add_positional(s, begin, count, strip);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
