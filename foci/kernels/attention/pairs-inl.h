// Scores that are no matrix product: −γ‖q−k‖² and w·tanh(q+k), and their gradients, pair by pair.
//
// tanh(q+k) = 1 − 2/(1 + e^(2q)·e^(2k)) takes its exponentials from beside Q and K, one reciprocal
// a number. That holds for entries up to kExpLimit; a query or key with a larger one (or a NaN) is
// "wide", and its pairs take tanh itself. Which way a pair goes depends on that pair alone.
#if defined(FOCI_KERNELS_ATTENTION_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_PAIRS_INL_H_
#undef FOCI_KERNELS_ATTENTION_PAIRS_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_PAIRS_INL_H_
#endif

#include "foci/kernels/attention.h"

#include <cstring>
#include <type_traits>
#include "foci/kernels/attention/products-inl.h"
#include "foci/kernels/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// A run of keys: numbers index[u], or begin + u where index is null.
struct KeyRun {
  int64_t begin;
  const int32_t* index;
  int64_t count;
  int64_t operator[](int64_t u) const { return index != nullptr ? index[u] : begin + u; }
};

// Floats of a query panel: [D][W] queries, and for additive as many exponentials behind them.
HWY_INLINE int64_t panel_floats(int64_t depth) {
  return 2 * depth * strip_width();
}

// to[i] = e^(2x) for n numbers up to kExpLimit in size, to half an ulp beyond rounding; in the
// place of a larger one, or a NaN, something finite.
inline HWY_NOINLINE RowSize exponentials(const float* x, int64_t n, float* to) {
  const DF d;
  const int64_t L = lanes();
  const VF limit = hn::Set(d, kExpLimit), magic = hn::Set(d, kRoundingMagic);
  bool wide = false, small = true;
  for (int64_t i = 0; i < n; i += L) {
    const auto count = static_cast<size_t>(HWY_MIN(L, n - i));
    VF v = load_first(d, count, x + i);
    const auto fits = hn::Le(hn::Abs(v), limit);
    wide = wide || !hn::AllTrue(d, fits);
    small = small && hn::AllTrue(d, hn::Le(hn::Abs(v), hn::Set(d, kSmallLimit)));
    v = hn::IfThenElseZero(fits, hn::Add(v, v));
    // As exp_nonpositive, with ln 2 in two parts, whose first makes products that are exact without
    // a fused multiply-add too.
    const VF shifted = hn::MulAdd(v, hn::Set(d, 1.44269504088896341f), magic);
    const VF k = hn::Sub(shifted, magic);
    VF r = hn::NegMulAdd(k, hn::Set(d, 0.693359375f), v);
    r = hn::NegMulAdd(k, hn::Set(d, -2.1219444e-4f), r);
    store_first(exp_of_reduced(d, shifted, r), d, count, to + i);
  }
  return wide ? RowSize::wide : (small ? RowSize::small : RowSize::usual);
}

// 1/x to about half an ulp, x in [1, 2¹²⁶).
HWY_INLINE VF reciprocal(VF x) {
  const DF d;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  const VF r = hn::ApproximateReciprocal(x);  // 12 bits at least; a step of Newton doubles them
  return hn::MulAdd(r, hn::NegMulAdd(x, r, hn::Set(d, 1.0f)), r);
#else
  return hn::Div(hn::Set(d, 1.0f), x);
#endif
}

// ---- scores -------------------------------------------------------------------------------------

template <int R>
HWY_INLINE void l2_rows(const Strip& s, const float* HWY_RESTRICT rows, int64_t stride,
                        const float* HWY_RESTRICT panel, float* HWY_RESTRICT strip) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  VF acc0[R];
  VF acc1[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) acc0[r] = acc1[r] = hn::Zero(d);
  for (int64_t i = 0; i < s.D; ++i) {
    const VF q0 = hn::Load(d, panel + i * W), q1 = hn::Load(d, panel + i * W + L);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const VF k = hn::Set(d, rows[r * stride + i]);
      const VF x0 = hn::Sub(q0, k), x1 = hn::Sub(q1, k);
      acc0[r] = hn::MulAdd(x0, x0, acc0[r]);
      acc1[r] = hn::MulAdd(x1, x1, acc1[r]);
    }
  }
  const VF factor = hn::Set(d, -s.gamma);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    hn::Store(hn::Mul(acc0[r], factor), d, strip + r * W);
    hn::Store(hn::Mul(acc1[r], factor), d, strip + r * W + L);
  }
}

inline HWY_NOINLINE void l2_strip(const Strip& s, int64_t count, const float* rows, int64_t stride,
                                  const float* panel, float* strip) {
  const int64_t W = strip_width();
  int64_t j = 0;
  for (; j + 4 <= count; j += 4) l2_rows<4>(s, rows + j * stride, stride, panel, strip + j * W);
  for (; j < count; ++j) l2_rows<1>(s, rows + j * stride, stride, panel, strip + j * W);
}

// R keys of a run from key u on, by the exponentials.
template <int R>
HWY_INLINE void additive_rows(const Strip& s, const KeyRun& keys, int64_t u,
                              const float* HWY_RESTRICT panel, float* HWY_RESTRICT strip) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const float* row[R];
  VF acc0[R];
  VF acc1[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    row[r] = s.k_exp + keys[u + r] * s.D;
    acc0[r] = acc1[r] = hn::Zero(d);
  }
  const VF one = hn::Set(d, 1.0f), minus_two = hn::Set(d, -2.0f);
  for (int64_t i = 0; i < s.D; ++i) {
    const VF q0 = hn::Load(d, panel + i * W), q1 = hn::Load(d, panel + i * W + L);
    const VF w = hn::Set(d, s.score_w[i]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const VF k = hn::Set(d, row[r][i]);
      const VF t0 = hn::MulAdd(reciprocal(hn::MulAdd(q0, k, one)), minus_two, one);
      const VF t1 = hn::MulAdd(reciprocal(hn::MulAdd(q1, k, one)), minus_two, one);
      acc0[r] = hn::MulAdd(w, t0, acc0[r]);
      acc1[r] = hn::MulAdd(w, t1, acc1[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    hn::Store(acc0[r], d, strip + r * W);
    hn::Store(acc1[r], d, strip + r * W + L);
  }
}

// Lanes (vector v) whose pairs with a key take tanh itself.
class TanhLanes {
 public:
  explicit TanhLanes(const Strip& s) {
    if (s.score != ScoreKind::additive) return;
    set(s, RowSize::wide, wide_);
    set(s, RowSize::small, small_);
  }
  // Whether there are any for this key.
  bool any(RowSize key) const {
    return key == RowSize::wide || wide_.any || (key == RowSize::small && small_.any);
  }
  bool all(RowSize key) const {
    return key == RowSize::wide || (key == RowSize::small && small_.all);
  }
  hn::Mask<DF> mask(RowSize key, int v) const {
    const DF d;
    if (key == RowSize::wide) return hn::Eq(hn::Zero(d), hn::Zero(d));
    VF flags = hn::Load(d, wide_.of + v * lanes());
    if (key == RowSize::small) flags = hn::Add(flags, hn::Load(d, small_.of + v * lanes()));
    return hn::Gt(flags, hn::Zero(d));
  }

 private:
  struct Flags {
    HWY_ALIGN float of[kMaxLanes] = {};
    bool any = false, all = false;
  };
  static void set(const Strip& s, RowSize size, Flags& flags) {
    flags.all = true;
    for (int lane = 0; lane < s.mask.lanes; ++lane) {
      const bool is = s.q_size[lane] == size;
      flags.of[lane] = is ? 1.0f : 0.0f;
      flags.any = flags.any || is;
      flags.all = flags.all && is;
    }
  }
  Flags wide_, small_;
};

// One key's pairs that take tanh itself, again.
inline HWY_NOINLINE void tanh_row(const Strip& s, RowSize key, const TanhLanes& direct,
                                  const float* k, const float* panel, float* strip) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  for (int v = 0; v < kVectors; ++v) {
    VF acc = hn::Zero(d);
    for (int64_t i = 0; i < s.D; ++i) {
      const VF x = hn::Add(hn::Load(d, panel + i * W + v * L), hn::Set(d, k[i]));
      acc = hn::MulAdd(hn::Set(d, s.score_w[i]), tanh_of(x), acc);
    }
    float* at = strip + v * L;
    hn::Store(hn::IfThenElse(direct.mask(key, v), acc, hn::Load(d, at)), d, at);
  }
}

inline HWY_NOINLINE void additive_strip(const Strip& s, const KeyRun& keys, const float* rows,
                                        int64_t stride, const float* panel, float* strip) {
  const int64_t W = strip_width();
  const float* exp_panel = panel + s.D * W;
  int64_t u = 0;
  for (; u + 2 <= keys.count; u += 2) additive_rows<2>(s, keys, u, exp_panel, strip + u * W);
  for (; u < keys.count; ++u) additive_rows<1>(s, keys, u, exp_panel, strip + u * W);
  const TanhLanes direct(s);
  for (u = 0; u < keys.count; ++u) {
    const RowSize key = s.k_size[keys[u]];
    if (direct.any(key)) tanh_row(s, key, direct, rows + u * stride, panel, strip + u * W);
  }
}

// ---- gradients ----------------------------------------------------------------------------------

// The least and the largest of n numbers.
inline HWY_NOINLINE void widen_range(const float* x, int64_t n, float& least, float& most) {
  const DF d;
  const int64_t L = lanes();
  VF low = hn::Set(d, least), high = hn::Set(d, most);
  int64_t i = 0;
  for (; i + L <= n; i += L) {
    const VF v = hn::LoadU(d, x + i);
    low = hn::Min(low, v);
    high = hn::Max(high, v);
  }
  least = hn::GetLane(hn::MinOfLanes(d, low));
  most = hn::GetLane(hn::MaxOfLanes(d, high));
  for (; i < n; ++i) {
    least = HWY_MIN(least, x[i]);
    most = HWY_MAX(most, x[i]);
  }
}

// to[i] += factor[i] · the sum of all lanes of x[i], for four neighbours.
HWY_INLINE void add_scaled_lane_sums(const VF* x, const float* factor, float* to) {
  const DF d;
#if FOCI_HAS_FOURS
  const hn::CappedTag<float, 4> four;
  const Fours<VF> t = transpose_fours(d, Fours<VF>{x[0], x[1], x[2], x[3]});
  const auto sums = fold_blocks(d, hn::Add(hn::Add(t.a, t.b), hn::Add(t.c, t.e)));
  hn::StoreU(hn::MulAdd(sums, hn::LoadU(four, factor), hn::LoadU(four, to)), four, to);
#else
  for (int i = 0; i < 4; ++i) to[i] += hn::GetLane(hn::SumOfLanes(d, x[i])) * factor[i];
#endif
}

// A key's gradients, and the lanes that are stepped over whatever q and k hold: masked ones in
// careful mode, or else those without a gradient.
struct PairGradients {
  VF of[kVectors];
  hn::Mask<DF> none[kVectors];
  HWY_INLINE PairGradients(const Strip& s, const float* ds, const float* weights) {
    const DF d;
    for (int v = 0; v < kVectors; ++v) {
      of[v] = hn::Load(d, ds + v * lanes());
      none[v] =
          s.careful ? is_masked(hn::Load(d, weights + v * lanes())) : hn::Eq(of[v], hn::Zero(d));
    }
  }
  // Leaves the lanes that take tanh itself, or the others.
  HWY_INLINE void keep(const TanhLanes& direct, RowSize key, bool tanh) {
    for (int v = 0; v < kVectors; ++v) {
      const auto takes = direct.mask(key, v);
      none[v] = hn::Or(none[v], tanh ? hn::Not(takes) : takes);
    }
  }
  HWY_INLINE bool idle() const {
    const DF d;
    return hn::AllTrue(d, none[0]) && hn::AllTrue(d, none[1]);
  }
};

// One key's part of pair_gradients in the lanes that take tanh itself.
inline HWY_NOINLINE void tanh_gradients(const Strip& s, const PairGradients& g, const float* k,
                                        const float* panel, float* dq, float* dk, float* dw) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF zero = hn::Zero(d);
  for (int64_t i = 0; i < s.D; ++i) {
    VF sum = zero;
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = i * W + v * L;
      VF slope;
      const VF tanh = tanh_of(hn::Add(hn::Load(d, panel + at), hn::Set(d, k[i])), &slope);
      const VF gradient = hn::Mul(g.of[v], hn::Set(d, s.score_w[i]));
      const VF x = hn::IfThenZeroElse(g.none[v], hn::Mul(gradient, slope));
      hn::Store(hn::Add(hn::Load(d, dq + at), x), d, dq + at);
      sum = hn::Add(sum, x);
      if (dw == nullptr) continue;
      const VF t = hn::IfThenZeroElse(g.none[v], hn::Mul(g.of[v], tanh));
      hn::Store(hn::Add(hn::Load(d, dw + at), t), d, dw + at);
    }
    dk[i] += hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

// The part of pair_gradients that goes by exponentials, for keys `which` of a run. With
// E = e^(2q)·e^(2k), tanh' = 4E/(1+E)²: the 4 and score_w wait until all is summed. kFlat: some E
// may be so large or small that the slope counts as 0.
template <bool kFlat, bool kWeights>
HWY_NOINLINE void exp_gradients(const Strip& s, const KeyRun& keys, int64_t count,
                                const int32_t* which, const TanhLanes& direct,
                                const float* exp_panel, const float* ds, const float* weights,
                                float* dq, float* dk, int64_t dk_stride, float* dw) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  constexpr int64_t kChunk = 64;
  const VF one = hn::Set(d, 1.0f);
  HWY_ALIGN float dq_part[kChunk * kMaxLanes];
  HWY_ALIGN float dw_part[kWeights ? kChunk * kMaxLanes : 1];
  float factor[kChunk];
  for (int64_t c = 0; c < s.D; c += kChunk) {
    const int64_t n = HWY_MIN(kChunk, s.D - c);
    const size_t bytes = sizeof(float) * static_cast<size_t>(n * W);
    std::memset(dq_part, 0, bytes);
    if constexpr (kWeights) std::memset(dw_part, 0, bytes);
    for (int64_t i = 0; i < n; ++i) factor[i] = 4 * s.score_w[c + i];
    const float* panel = exp_panel + c * W;
    for (int64_t w = 0; w < count; ++w) {
      const int64_t u = which[w], j = keys[u];
      PairGradients g(s, ds + u * W, weights + u * W);
      if (direct.any(s.k_size[j])) g.keep(direct, s.k_size[j], false);
      // What exponentials give is finite, and adds 0 to these lanes.
      const VF g0 = hn::IfThenZeroElse(g.none[0], g.of[0]);
      const VF g1 = hn::IfThenZeroElse(g.none[1], g.of[1]);
      const float* k = s.k_exp + j * s.D + c;
      float* to = dk + j * dk_stride + c;
      const auto pair = [&](int64_t at, VF k_exp, VF gradient) HWY_ATTR {
        const VF q_exp = hn::Load(d, panel + at);
        const VF e = hn::Mul(q_exp, k_exp);
        const VF r = reciprocal(hn::MulAdd(q_exp, k_exp, one));
        VF slope = hn::Mul(hn::Mul(e, r), r);
        if constexpr (kFlat) {
          slope = hn::IfThenElseZero(hn::Ge(slope, hn::Set(d, kFlatTanh / 4)), slope);
        }
        if constexpr (kWeights) {
          const VF tanh = hn::MulAdd(r, hn::Set(d, -2.0f), one);
          hn::Store(hn::MulAdd(gradient, tanh, hn::Load(d, dw_part + at)), d, dw_part + at);
        }
        const VF x = hn::Mul(slope, gradient);
        hn::Store(hn::Add(hn::Load(d, dq_part + at), x), d, dq_part + at);
        return x;
      };
      const auto number = [&](int64_t i) HWY_ATTR {
        const VF k_exp = hn::Set(d, k[i]);
        const VF x = pair(i * W, k_exp, g0);
        return hn::Add(x, pair(i * W + L, k_exp, g1));
      };
      int64_t i = 0;
      for (; i + 4 <= n; i += 4) {
        VF sums[4];
#pragma GCC unroll 4
        for (int m = 0; m < 4; ++m) sums[m] = number(i + m);
        add_scaled_lane_sums(sums, factor + i, to + i);
      }
      for (; i < n; ++i) to[i] += hn::GetLane(hn::SumOfLanes(d, number(i))) * factor[i];
    }
    for (int64_t i = 0; i < n; ++i) {
      const VF f = hn::Set(d, factor[i]);
      for (int64_t at = i * W; at < (i + 1) * W; at += L) {
        float* to = dq + c * W + at;
        hn::Store(hn::MulAdd(hn::Load(d, dq_part + at), f, hn::Load(d, to)), d, to);
        if constexpr (kWeights) {
          float* sums = dw + c * W + at;
          hn::Store(hn::Add(hn::Load(d, sums), hn::Load(d, dw_part + at)), d, sums);
        }
      }
    }
  }
}

inline HWY_NOINLINE void additive_gradients(const Strip& s, const KeyRun& keys, const float* rows,
                                            int64_t stride, const float* panel, const float* ds,
                                            const float* weights, float* dq, float* dk,
                                            int64_t dk_stride, float* dw) {
  const int64_t W = strip_width();
  const TanhLanes direct(s);
  const float* exp_panel = panel + s.D * W;
  float q_least = exp_panel[0], q_most = q_least, k_least = kInf, k_most = 0;
  widen_range(exp_panel, s.D * W, q_least, q_most);
  HWY_ALIGN int32_t which[kKeyBlock];
  int64_t count = 0;
  for (int64_t u = 0; u < keys.count; ++u) {
    const int64_t j = keys[u];
    const RowSize key = s.k_size[j];
    PairGradients g(s, ds + u * W, weights + u * W);
    if (g.idle()) continue;
    if (direct.any(key)) {
      PairGradients tanh = g;
      tanh.keep(direct, key, true);
      g.keep(direct, key, false);
      if (!tanh.idle()) {
        tanh_gradients(s, tanh, rows + u * stride, panel, dq, dk + j * dk_stride, dw);
      }
      if (g.idle()) continue;
    }
    widen_range(s.k_exp + j * s.D, s.D, k_least, k_most);
    which[count++] = static_cast<int32_t>(u);
  }
  // Where E is beyond 2⁵⁴ or below 2⁻⁵⁴, the slope is below 2⁻⁵².
  const bool flat = q_most * k_most > 0x1p54f || q_least * k_least < 0x1p-54f;
  const auto run = [&](auto flats, auto wanted) {
    exp_gradients<flats, wanted>(s, keys, count, which, direct, exp_panel, ds, weights, dq, dk,
                                 dk_stride, dw);
  };
  if (dw != nullptr) {
    flat ? run(std::true_type(), std::true_type()) : run(std::false_type(), std::true_type());
  } else {
    flat ? run(std::true_type(), std::false_type()) : run(std::false_type(), std::false_type());
  }
}

inline HWY_NOINLINE void l2_gradients(const Strip& s, const KeyRun& keys, const float* rows,
                                      int64_t stride, const float* panel, const float* ds,
                                      const float* weights, float* dq, float* dk,
                                      int64_t dk_stride) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF factor = hn::Set(d, 2 * s.gamma);
  for (int64_t u = 0; u < keys.count; ++u) {
    const PairGradients g(s, ds + u * W, weights + u * W);
    if (g.idle()) continue;
    const float* k_row = rows + u * stride;
    float* to = dk + keys[u] * dk_stride;
    VF gradient[kVectors];
    for (int v = 0; v < kVectors; ++v) gradient[v] = hn::Mul(g.of[v], factor);
    // Number i of q and k: adds to dq, and returns what dk loses, lane by lane.
    const auto number = [&](int64_t i) HWY_ATTR {
      const VF k = hn::Set(d, k_row[i]);
      VF sum = hn::Zero(d);
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = i * W + v * L;
        const VF part = hn::Mul(gradient[v], hn::Sub(k, hn::Load(d, panel + at)));
        const VF x = hn::IfThenZeroElse(g.none[v], part);
        hn::Store(hn::Add(hn::Load(d, dq + at), x), d, dq + at);
        sum = hn::Add(sum, x);
      }
      return sum;
    };
    int64_t i = 0;
    for (; i + 4 <= s.D; i += 4) {
      const VF sums[4] = {number(i), number(i + 1), number(i + 2), number(i + 3)};
      add_lane_sums(d, sums, true, to + i);
    }
    for (; i < s.D; ++i) to[i] -= hn::GetLane(hn::SumOfLanes(d, number(i)));
  }
}

// Through the scores from the products' gradients ds: dq panel [D][W] +=, dk[key] +=, and for
// additive dw panel [D][W] += (null: not wanted). `rows` are the run's keys, one after another. In
// careful mode entries whose weight is −0 (masked) are stepped over. What a pair adds to dq, and in
// which order, depends on that pair and its row's alone.
HWY_INLINE void pair_gradients(const Strip& s, const KeyRun& keys, const float* rows,
                               int64_t stride, const float* panel, const float* ds,
                               const float* weights, float* dq, float* dk, int64_t dk_stride,
                               float* dw) {
  if (s.score == ScoreKind::l2) {
    l2_gradients(s, keys, rows, stride, panel, ds, weights, dq, dk, dk_stride);
  } else {
    additive_gradients(s, keys, rows, stride, panel, ds, weights, dq, dk, dk_stride, dw);
  }
}

// dscore_w += the lanes of the dw panel.
HWY_INLINE void add_score_w(int64_t depth, const float* dw, double* dscore_w) {
  const int64_t W = strip_width();
  for (int64_t i = 0; i < depth; ++i) {
    double sum = 0;
    for (int64_t lane = 0; lane < W; ++lane) sum += dw[i * W + lane];
    dscore_w[i] += sum;
  }
}

// Panels [D][W] of what one run of keys adds to dq and to the gradient of score_w, zero between
// runs.
struct PairSums {
  float* dq = nullptr;
  float* dw = nullptr;
};
inline size_t pair_sums_bytes(int64_t depth) {
  return 2 * Carver::bytes<float>(depth * strip_width());
}
inline void take_pair_sums(int64_t depth, Carver& mem, PairSums& sums) {
  for (float** panel : {&sums.dq, &sums.dw}) {
    *panel = mem.take<float>(depth * strip_width());
    std::memset(*panel, 0, sizeof(float) * static_cast<size_t>(depth * strip_width()));
  }
}

// pair_gradients run by run: `wide` is the dq panel [D][W] in double, and dscore_w [D] may be null.
inline HWY_NOINLINE void add_pair_gradients(const Strip& s, const KeyRun& keys, const float* rows,
                                            int64_t stride, const float* panel, const float* ds,
                                            const float* weights, double* wide, float* dk,
                                            int64_t dk_stride, double* dscore_w,
                                            const PairSums& sums) {
  const int64_t W = strip_width();
  for (int64_t at = 0, end; at < keys.count; at = end) {
    const int64_t boundary = (keys[at] / kRunKeys + 1) * kRunKeys;
    for (end = at + 1; end < keys.count && keys[end] < boundary;) ++end;
    const KeyRun run{keys.index == nullptr ? keys.begin + at : 0,
                     keys.index == nullptr ? nullptr : keys.index + at, end - at};
    pair_gradients(s, run, rows + at * stride, stride, panel, ds + at * W, weights + at * W,
                   sums.dq, dk, dk_stride, dscore_w != nullptr ? sums.dw : nullptr);
    fold_panel(s.D, nullptr, sums.dq, wide);
    if (dscore_w == nullptr) continue;
    add_score_w(s.D, sums.dw, dscore_w);
    std::memset(sums.dw, 0, sizeof(float) * static_cast<size_t>(s.D * W));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
