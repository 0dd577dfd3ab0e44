// The three products that attention is made of, on transposed strips.
//
//   score_strip    strip[j][lane]  = f·Σ_d rows[j][d] · panel[d][lane]     S = KQᵀ, dP = V dYᵀ
//   gather_strip   out[d][lane]   += Σ_j rows[j][d] · strip[j][lane]     Yᵀ = VᵀP, dQᵀ = KᵀdS
//   scatter_strips out[j][d]      += Σ_lane strip[j][lane] · x[lane][d]  dV = P dY, dK = dS Q
//
// Each reads K, V and the strip in their natural order. The order of every element's additions is
// fixed, so its bits do not depend on the tile it falls into. Sums over keys and queries are cut
// (RunCut), so that their error does not grow with the length.
#if defined(FOCI_KERNELS_ATTENTION_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_PRODUCTS_INL_H_
#undef FOCI_KERNELS_ATTENTION_PRODUCTS_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_PRODUCTS_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "foci/kernels/attention.h"
#include "foci/kernels/math-inl.h"
#include "foci/kernels/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Vectors in a strip's row. Two, with kTileRows rows each, fill the registers: 12 accumulators of
// AVX2's 16, 24 of AVX-512's 32.
inline constexpr int kVectors = 2;
#if HWY_TARGET == HWY_AVX3
inline constexpr int kTileRows = 12;
#else
inline constexpr int kTileRows = 6;
#endif

HWY_INLINE int64_t strip_width() {
  return kVectors * lanes();
}

// Whether the second vector of a strip of so many queries has none.
HWY_INLINE bool half_strip(int queries) {
  return queries <= lanes();
}

inline constexpr float kInf = std::numeric_limits<float>::infinity();

// Masked entries of a weight strip hold −0 where the difference between "masked" and "weight 0"
// matters; adding −0 · x changes nothing otherwise.
HWY_INLINE hn::Mask<DF> is_masked(VF weight) {
  const DI di;
  return hn::MaskFromVec(hn::BitCast(DF(), hn::BroadcastSignBit(hn::BitCast(di, weight))));
}

// s > m ? s : m. A NaN score leaves the maximum alone (it comes back as a NaN weight), so that
// s − m ≤ 0 holds for every other key.
HWY_INLINE VF max_of_scores(VF s, VF m) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  return hn::Max(s, m);  // MAXPS gives its second operand where either is NaN
#else
  return hn::IfThenElse(hn::Gt(s, m), s, m);
#endif
}

// x in memory, where the compiler must fetch it anew: a constant that is needed after a loop alone
// would otherwise hold one of its registers, of which AVX2 has none to spare.
HWY_INLINE VF broadcast_late(float& x) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  asm volatile("" : "+m"(x));
#endif
  return hn::Set(DF(), x);
}

// Calls f(std::integral_constant<int, R>, at) for runs of R rows that cover [0, count) in order: R
// is kMost as long as what is left after it is not awkward, then 4, then whatever is left. A single
// row waits for its own multiply-adds, so that 8 rows are better taken as 4 and 4 than as 6, 1
// and 1.
template <int kMost, class F>
HWY_INLINE void for_tiles(int64_t count, const F& f) {
  int64_t at = 0;
  for (; count - at >= kMost && !(kMost == 6 && count - at == 8); at += kMost) {
    f(std::integral_constant<int, kMost>(), at);
  }
  for (; count - at >= 4; at += 4) f(std::integral_constant<int, 4>(), at);
  switch (count - at) {
    case 3:
      return f(std::integral_constant<int, 3>(), at);
    case 2:
      return f(std::integral_constant<int, 2>(), at);
    case 1:
      return f(std::integral_constant<int, 1>(), at);
    default:
      return;
  }
}

// ---- S = rows · panel -----------------------------------------------------------------------

template <int R, bool kHalf>
HWY_INLINE void score_rows(int64_t depth, const float* HWY_RESTRICT rows, int64_t stride,
                           const float* HWY_RESTRICT panel, float& factor,
                           float* HWY_RESTRICT strip) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  VF acc0[R];
  VF acc1[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc0[r] = acc1[r] = hn::Zero(d);
  for (int64_t i = 0; i < depth; ++i) {
    const VF b0 = hn::Load(d, panel + i * W);
    const VF b1 = kHalf ? b0 : hn::Load(d, panel + i * W + L);
    // Three rows to a base pointer: x86 addresses base, base + stride and base + 2·stride at once.
    const float* base = rows + i;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const VF a = hn::Set(d, base[(r % 3) * stride]);
      acc0[r] = hn::MulAdd(a, b0, acc0[r]);
      if constexpr (!kHalf) acc1[r] = hn::MulAdd(a, b1, acc1[r]);
      if (r % 3 == 2) base += 3 * stride;
    }
  }
  const VF f = broadcast_late(factor);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    hn::Store(hn::Mul(acc0[r], f), d, strip + r * W);
    hn::Store(hn::Mul(acc1[r], f), d, strip + r * W + L);
  }
}

template <bool kHalf>
HWY_NOINLINE void score_strip_as(int64_t count, int64_t depth, const float* rows, int64_t stride,
                                 const float* panel, float factor, float* strip) {
  const int64_t W = strip_width();
  for_tiles<kTileRows>(count, [&](auto tile, int64_t j) HWY_ATTR {
    score_rows<tile, kHalf>(depth, rows + j * stride, stride, panel, factor, strip + j * W);
  });
}

// strip [count][W] = factor · rows [count, depth] · panel [depth][W]. The factor comes last, so
// that equal sums stay equal. Lanes of a vector without a query (see half_strip) get 0.
HWY_INLINE void score_strip(bool half, int64_t count, int64_t depth, const float* rows,
                            int64_t stride, const float* panel, float factor, float* strip) {
  if (half) {
    score_strip_as<true>(count, depth, rows, stride, panel, factor, strip);
  } else {
    score_strip_as<false>(count, depth, rows, stride, panel, factor, strip);
  }
}

// ---- how sums over keys are cut -------------------------------------------------------------
//
// A chain of n additions in float32 is off by up to n/2 roundings, all in one direction where the
// terms are equal. So runs of kRunKeys keys add up in registers before they join the total of a
// block, and the totals of blocks are added in double. All of it is cut by key number, so that a
// row's bits depend neither on its strip nor on where that begins.

inline constexpr int64_t kRunKeys = 48;
static_assert(kKeyBlock % kRunKeys == 0 && kBackwardBlock % kRunKeys == 0);

// Calls f(begin, end) for the runs of rows [0, count) of a block, whose first is key `first`.
template <class F>
HWY_INLINE void for_runs(int64_t first, int64_t count, const F& f) {
  int64_t end = HWY_MIN(count, kRunKeys - first % kRunKeys);
  for (int64_t at = 0; at < count; at = end, end = HWY_MIN(count, at + kRunKeys)) f(at, end);
}

// The runs of one block of at most kKeyBlock rows.
struct RunCut {
  bool chain = false;  // one chain, which goes on from the total
  int count = 0;
  int32_t end[kKeyBlock];  // row after each run

  void add(int64_t row_after) { end[count++] = static_cast<int32_t>(row_after); }
};
inline void cut_runs(int64_t first, int64_t count, RunCut& cut) {
  cut.count = 0;
  for_runs(first, count, [&](int64_t, int64_t end) { cut.add(end); });
}

// ---- out += rowsᵀ · strip -------------------------------------------------------------------

template <int R, bool kCareful, bool kHalf>
HWY_INLINE void gather_rows(const RunCut& cut, const float* HWY_RESTRICT rows, int64_t stride,
                            const float* HWY_RESTRICT strip, const float* HWY_RESTRICT weights,
                            float* HWY_RESTRICT out) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  int64_t j = 0;
  for (int n = 0; n < cut.count; ++n) {
    VF acc0[R];
    VF acc1[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc0[r] = acc1[r] = hn::Zero(d);
    if (HWY_UNLIKELY(cut.chain)) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        acc0[r] = hn::Load(d, out + r * W);
        if constexpr (!kHalf) acc1[r] = hn::Load(d, out + r * W + L);
      }
    }
    const int64_t end = cut.end[n];
    for (; j < end; ++j) {
      const float* HWY_RESTRICT row = rows + j * stride;
      const VF b0 = hn::Load(d, strip + j * W);
      const VF b1 = kHalf ? b0 : hn::Load(d, strip + j * W + L);
      if constexpr (kCareful) {
        const hn::Mask<DF> skip0 = is_masked(hn::Load(d, weights + j * W));
        const hn::Mask<DF> skip1 = kHalf ? skip0 : is_masked(hn::Load(d, weights + j * W + L));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const VF a = hn::Set(d, row[r]);
          acc0[r] = hn::IfThenElse(skip0, acc0[r], hn::MulAdd(a, b0, acc0[r]));
          if constexpr (!kHalf) {
            acc1[r] = hn::IfThenElse(skip1, acc1[r], hn::MulAdd(a, b1, acc1[r]));
          }
        }
      } else {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const VF a = hn::Set(d, row[r]);
          acc0[r] = hn::MulAdd(a, b0, acc0[r]);
          if constexpr (!kHalf) acc1[r] = hn::MulAdd(a, b1, acc1[r]);
        }
      }
    }
    if (HWY_LIKELY(!cut.chain)) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        acc0[r] = hn::Add(hn::Load(d, out + r * W), acc0[r]);
        if constexpr (!kHalf) acc1[r] = hn::Add(hn::Load(d, out + r * W + L), acc1[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      hn::Store(acc0[r], d, out + r * W);
      if constexpr (!kHalf) hn::Store(acc1[r], d, out + r * W + L);
    }
  }
}

template <bool kCareful, bool kHalf>
HWY_NOINLINE void gather_strip_as(const RunCut& cut, int64_t depth, const float* rows,
                                  int64_t stride, const float* strip, const float* weights,
                                  float* out) {
  const int64_t W = strip_width();
  // 8 rows divide the usual head sizes and still fill AVX-512's pipes.
  constexpr int kRows = kTileRows == 12 ? 8 : kTileRows;
  for_tiles<kRows>(depth, [&](auto tile, int64_t i) HWY_ATTR {
    gather_rows<tile, kCareful, kHalf>(cut, rows + i, stride, strip, weights, out + i * W);
  });
}

// out [depth][W] += rows [count, depth]ᵀ · strip [count][W], but for the lanes of a vector without
// a query; `cut` has the runs of the `count` rows. In careful mode entries whose weight is −0
// (masked) are stepped over.
HWY_INLINE void gather_strip(bool half, bool careful, const RunCut& cut, int64_t depth,
                             const float* rows, int64_t stride, const float* strip,
                             const float* weights, float* out) {
  const auto as = [&](auto halved) {
    if (careful) {
      gather_strip_as<true, halved>(cut, depth, rows, stride, strip, weights, out);
    } else {
      gather_strip_as<false, halved>(cut, depth, rows, stride, strip, weights, out);
    }
  };
  if (half) {
    as(std::true_type());
  } else {
    as(std::false_type());
  }
}

// ---- out += strip · x -----------------------------------------------------------------------

// Up to three strips, whose queries add up among themselves before they join the sums.
struct StripSet {
  const float* strip[3];
  const float* weights[3];  // careful mode: −0 marks what to step over
  int count;
  int last_lanes;           // of the last strip, which alone may have fewer than W queries
  bool one_by_one = false;  // each strip's queries for themselves: shorter chains
};

// hi + lo += x, lo within half a rounding of hi: an infinite hi keeps a lo of 0.
HWY_INLINE VF add_exactly(VF x, VF hi, VF& lo) {
  const VF sum = hn::Add(hi, x);
  const VF back = hn::Sub(sum, hi);
  const VF error = hn::Add(hn::Sub(hi, hn::Sub(sum, back)), hn::Sub(x, back));
  const VF rest = hn::Add(lo, error);
  const VF total = hn::Add(sum, hn::IfThenElseZero(hn::Eq(rest, rest), rest));
  lo = hn::Sub(rest, hn::Sub(total, sum));
  lo = hn::IfThenElseZero(hn::Eq(lo, lo), lo);
  return total;
}

// L numbers of at most half a unit in the last place of `hi`, as add_exactly leaves them, in 16
// bits each: whole multiples of 2^-15 of that. (bfloat16 would lose digits over tens of thousands
// of additions.) Beside an infinite or NaN hi they are 0.
HWY_INLINE VF load_low(VF hi, const int16_t* from) {
  const DF d;
  const DI di;
  const hn::Rebind<int16_t, DI> half;
  const VF power = hn::BitCast(d, hn::And(hn::BitCast(di, hi), hn::Set(di, 0x7F800000)));
  const VF x = hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(half, from)));
  const VF lo = hn::Mul(hn::Mul(x, hn::Set(d, 0x1p-39f)), power);
  return hn::IfThenElseZero(hn::Lt(power, hn::Set(d, kInf)), lo);
}
HWY_INLINE void store_low(VF hi, VF lo, int16_t* to) {
  const DF d;
  const DI di;
  const hn::Rebind<int16_t, DI> half;
  const VI exponent = hn::And(hn::BitCast(di, hi), hn::Set(di, 0x7F800000));
  const VF inverse = hn::BitCast(d, hn::Sub(hn::Set(di, 254 << 23), exponent));
  const VF x = hn::Mul(hn::Mul(lo, inverse), hn::Set(d, 0x1p39f));
  hn::StoreU(hn::DemoteTo(half, hn::NearestInt(x)), half, to);
}

template <int R, int C, bool kCareful, bool kExact>
HWY_INLINE void scatter_rows(const StripSet& set, int64_t offset, const float* HWY_RESTRICT x,
                             int64_t x_stride, float* const* HWY_RESTRICT out,
                             int16_t* const* HWY_RESTRICT low) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  VF acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r][c] = hn::Zero(d);
  }
  for (int t = 0; t < set.count; ++t) {
    const float* HWY_RESTRICT strip = set.strip[t] + offset;
    const float* HWY_RESTRICT weights = set.weights[t] + offset;
    const int64_t queries = t + 1 < set.count ? W : set.last_lanes;
    // Unrolled, tiles of few rows would spill.
#pragma GCC unroll 1
    for (int64_t lane = 0; lane < queries; ++lane, x += x_stride) {
      VF b[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) b[c] = hn::Load(d, x + c * L);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const VF a = hn::Set(d, strip[r * W + lane]);
        if constexpr (kCareful) {
          const hn::Mask<DF> skip = is_masked(hn::Set(d, weights[r * W + lane]));
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) {
            acc[r][c] = hn::IfThenElse(skip, acc[r][c], hn::MulAdd(a, b[c], acc[r][c]));
          }
        } else {
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) acc[r][c] = hn::MulAdd(a, b[c], acc[r][c]);
        }
      }
    }
    if (t + 1 < set.count && !set.one_by_one) continue;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const VF sum = hn::Load(d, out[r] + c * L);
        if constexpr (kExact) {
          VF lo = load_low(sum, low[r] + c * L);
          const VF total = add_exactly(acc[r][c], sum, lo);
          hn::Store(total, d, out[r] + c * L);
          store_low(total, lo, low[r] + c * L);
        } else {
          hn::Store(hn::Add(sum, acc[r][c]), d, out[r] + c * L);
        }
        acc[r][c] = hn::Zero(d);
      }
    }
  }
}

// With or without an index at compile time: a compiler that turns the choice into masked loads from
// a null pointer makes the processor suppress a fault for each of them.
template <int C, bool kCareful, bool kIndexed, bool kExact>
HWY_INLINE void scatter_columns(const StripSet& set, int64_t count, const int32_t* index,
                                const float* x, int64_t x_stride, float* out, int64_t out_stride,
                                int16_t* low) {
  const int64_t W = strip_width();
  for_tiles<kTileRows>(count, [&](auto tile, int64_t j) HWY_ATTR {
    float* rows[tile];
    int16_t* lows[tile];
    for (int r = 0; r < tile; ++r) {
      const int64_t key = kIndexed ? index[j + r] : j + r;
      rows[r] = out + key * out_stride;
      if constexpr (kExact) lows[r] = low + key * out_stride;
    }
    scatter_rows<tile, C, kCareful, kExact>(set, j * W, x, x_stride, rows, lows);
  });
}

template <bool kCareful, bool kIndexed, bool kExact>
HWY_NOINLINE void scatter_strips_as(const StripSet& set, int64_t count, const int32_t* index,
                                    int64_t depth, const float* x, int64_t x_stride, float* out,
                                    int64_t out_stride, int16_t* low) {
  const int64_t L = lanes();
  int64_t c = 0;
  for (; c + 2 * L <= depth; c += 2 * L) {
    scatter_columns<2, kCareful, kIndexed, kExact>(set, count, index, x + c, x_stride, out + c,
                                                   out_stride, low + c);
  }
  for (; c < depth; c += L) {
    scatter_columns<1, kCareful, kIndexed, kExact>(set, count, index, x + c, x_stride, out + c,
                                                   out_stride, low + c);
  }
}

// out[index[j]] (index null: row j) += Σ over strips and lanes of strip[j][lane] · x[lane].
// x [strips · W, x_stride] and out's rows are padded to whole vectors: depth is rounded up.
HWY_INLINE void scatter_strips(bool careful, const StripSet& set, int64_t count,
                               const int32_t* index, int64_t depth, const float* x,
                               int64_t x_stride, float* out, int64_t out_stride) {
  const auto as = [&](auto indexed) {
    if (careful) {
      scatter_strips_as<true, indexed, false>(set, count, index, depth, x, x_stride, out,
                                              out_stride, nullptr);
    } else {
      scatter_strips_as<false, indexed, false>(set, count, index, depth, x, x_stride, out,
                                               out_stride, nullptr);
    }
  };
  if (index != nullptr) {
    as(std::true_type());
  } else {
    as(std::false_type());
  }
}

// The same for rows `index` of a sum that thousands of strips add to: out + low, where low holds
// what roundings of out left (store_low), with out's stride.
HWY_INLINE void scatter_exactly(bool careful, const StripSet& set, int64_t count,
                                const int32_t* index, int64_t depth, const float* x,
                                int64_t x_stride, float* out, int64_t out_stride, int16_t* low) {
  if (careful) {
    scatter_strips_as<true, true, true>(set, count, index, depth, x, x_stride, out, out_stride,
                                        low);
  } else {
    scatter_strips_as<false, true, true>(set, count, index, depth, x, x_stride, out, out_stride,
                                         low);
  }
}

// ---- sums in double -------------------------------------------------------------------------

// wide [depth][W] = wide · factor[lane] + panel, and panel = 0. `factor` null: 1.
inline HWY_NOINLINE void fold_panel(int64_t depth, const float* factor, float* panel,
                                    double* wide) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> half;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  const int64_t W = strip_width();
  HWY_ALIGN double factors[kMaxLanes];
  for (int64_t lane = 0; lane < W; ++lane) factors[lane] = factor != nullptr ? factor[lane] : 1;
  for (int64_t at = 0; at < depth * W; at += W) {
    for (int64_t lane = 0; lane < W; lane += step) {
      const auto x = hn::PromoteTo(d, hn::Load(half, panel + at + lane));
      double* to = wide + at + lane;
      hn::Store(hn::MulAdd(hn::Load(d, to), hn::Load(d, factors + lane), x), d, to);
      hn::Store(hn::Zero(half), half, panel + at + lane);
    }
  }
}

// panel = wide, rounded. (Highway's DemoteTo makes the largest float of infinity on some targets.)
inline HWY_NOINLINE void unfold_panel(int64_t depth, const double* wide, float* panel) {
  const int64_t count = depth * strip_width();
  for (int64_t i = 0; i < count; ++i) panel[i] = static_cast<float>(wide[i]);
}

// ---- packing and masks ----------------------------------------------------------------------

// panel[d][lane] = rows[lane][d] · scale; lanes beyond `count` are 0.
inline HWY_NOINLINE void pack_panel(int64_t count, int64_t depth, const float* rows, int64_t stride,
                                    float scale, float* panel) {
  const int64_t W = strip_width();
  if (count < W) std::memset(panel, 0, sizeof(float) * static_cast<size_t>(depth * W));
  int64_t lane = 0;
#if FOCI_HAS_FOURS
  const DF d;
  const int64_t L = lanes();
  const VF factor = hn::Set(d, scale);
  for (; lane + L <= count; lane += L) {
    const float* from = rows + lane * stride;
    float* to = panel + lane;
    int64_t i = 0;
    for (; i + 4 <= depth; i += 4) {
      const Fours<VF> x = load_columns(d, from + i, stride);
      hn::Store(hn::Mul(x.a, factor), d, to + i * W);
      hn::Store(hn::Mul(x.b, factor), d, to + (i + 1) * W);
      hn::Store(hn::Mul(x.c, factor), d, to + (i + 2) * W);
      hn::Store(hn::Mul(x.e, factor), d, to + (i + 3) * W);
    }
    for (; i < depth; ++i) {
      for (int64_t n = 0; n < L; ++n) to[i * W + n] = from[n * stride + i] * scale;
    }
  }
#endif
  for (; lane < count; ++lane) {
    for (int64_t i = 0; i < depth; ++i) panel[i * W + lane] = rows[lane * stride + i] * scale;
  }
}

// x[lane][d] = rows[lane][d] · scale, lanes beyond `count` and columns beyond depth are 0.
inline HWY_NOINLINE void pack_rows(int64_t count, int64_t depth, const float* rows, int64_t stride,
                                   float scale, float* x, int64_t x_stride) {
  std::memset(x, 0, sizeof(float) * static_cast<size_t>(strip_width() * x_stride));
  for (int64_t lane = 0; lane < count; ++lane) {
    for (int64_t i = 0; i < depth; ++i) x[lane * x_stride + i] = rows[lane * stride + i] * scale;
  }
}

// Where a lane mask holds for no lane alone: keys [begin, end) are seen by some lane; those in
// [full_begin, full_end) by every lane, if the mask is only ranges.
struct KeySpan {
  int64_t begin, end, full_begin, full_end;
};

inline KeySpan span_of(const LaneMask& mask) {
  KeySpan s{std::numeric_limits<int64_t>::max(), 0, 0, std::numeric_limits<int64_t>::max()};
  for (int lane = 0; lane < mask.lanes; ++lane) {
    const bool empty = mask.begin[lane] >= mask.end[lane];
    if (!empty) {
      s.begin = HWY_MIN(s.begin, mask.begin[lane]);
      s.end = HWY_MAX(s.end, mask.end[lane]);
    }
    s.full_begin =
        HWY_MAX(s.full_begin, empty ? std::numeric_limits<int64_t>::max() : mask.begin[lane]);
    s.full_end = HWY_MIN(s.full_end, empty ? 0 : mask.end[lane]);
  }
  if (s.end == 0) s.begin = 0;
  if (!mask.only_ranges()) s.full_end = 0;
  s.full_begin = HWY_MIN(s.full_begin, s.end);
  s.full_end = HWY_MAX(HWY_MIN(s.full_end, s.end), s.full_begin);
  return s;
}

HWY_INLINE hn::Mask<DF> lane_mask(uint32_t bits, int vector) {
  const uint32_t shifted = bits >> (vector * static_cast<int>(hn::Lanes(DF())));
  uint8_t bytes[8] = {};
  std::memcpy(bytes, &shifted, sizeof(shifted));  // LoadMaskBits reads whole bytes, low lane first
  return hn::LoadMaskBits(DF(), bytes);
}

// strip[j] = `fill` in every lane that bits[j] leaves out.
inline HWY_NOINLINE void mask_strip(int64_t count, const uint32_t* bits, float fill, float* strip) {
  const DF d;
  const int64_t L = lanes();
  const VF vfill = hn::Set(d, fill);
  for (int64_t j = 0; j < count; ++j) {
    float* row = strip + j * 2 * L;
    hn::Store(hn::IfThenElse(lane_mask(bits[j], 0), hn::Load(d, row), vfill), d, row);
    hn::Store(hn::IfThenElse(lane_mask(bits[j], 1), hn::Load(d, row + L), vfill), d, row + L);
  }
}

// Scratch handed out from the front, each piece aligned to a cache line.
class Carver {
 public:
  explicit Carver(std::byte* at) : at_(at) {}
  template <class T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(at_);
    at_ += bytes<T>(count);
    return p;
  }
  template <class T>
  static size_t bytes(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  }

 private:
  std::byte* at_;
};

HWY_INLINE int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
