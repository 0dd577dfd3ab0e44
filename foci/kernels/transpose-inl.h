// Between rows (a query's numbers side by side) and strips (a number of all queries side by side),
// four numbers of each of lanes() rows at a time.
#if defined(FOCI_KERNELS_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_TRANSPOSE_INL_H_
#undef FOCI_KERNELS_TRANSPOSE_INL_H_
#else
#define FOCI_KERNELS_TRANSPOSE_INL_H_
#endif

#include <cstdint>

#include "foci/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// One lane has nothing to transpose: HWY_SCALAR goes by single numbers.
#undef FOCI_HAS_FOURS
#if HWY_TARGET == HWY_SCALAR
#define FOCI_HAS_FOURS 0
#else
#define FOCI_HAS_FOURS 1

// [row r, row r + 4, …]: four neighbouring numbers of lanes()/4 rows, `step` apart.
template <class D>
HWY_INLINE hn::Vec<D> load_fours(D d, const float* p, int64_t step) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return hn::LoadU(d, p);
  } else {
    const hn::Half<D> half;
    const int64_t blocks = static_cast<int64_t>(hn::Lanes(half)) / 4;
    return hn::Combine(d, load_fours(half, p + blocks * step, step), load_fours(half, p, step));
  }
}

// Four vectors whose 128-bit blocks are 4×4 matrices, transposed in place.
template <class V>
struct Fours {
  V a, b, c, e;
};
template <class D, class V = hn::Vec<D>>
HWY_INLINE Fours<V> transpose_fours(D d, const Fours<V>& x) {
  const V ac0 = hn::InterleaveLower(d, x.a, x.c), be0 = hn::InterleaveLower(d, x.b, x.e);
  const V ac1 = hn::InterleaveUpper(d, x.a, x.c), be1 = hn::InterleaveUpper(d, x.b, x.e);
  return {hn::InterleaveLower(d, ac0, be0), hn::InterleaveUpper(d, ac0, be0),
          hn::InterleaveLower(d, ac1, be1), hn::InterleaveUpper(d, ac1, be1)};
}

// Numbers p[0, 4) of lanes() rows, as four vectors with a row in each lane.
template <class D, class V = hn::Vec<D>>
HWY_INLINE Fours<V> load_columns(D d, const float* p, int64_t stride) {
  return transpose_fours(
      d, Fours<V>{load_fours(d, p, 4 * stride), load_fours(d, p + stride, 4 * stride),
                  load_fours(d, p + 2 * stride, 4 * stride),
                  load_fours(d, p + 3 * stride, 4 * stride)});
}

// The way back: f(address, four numbers) for each of lanes() rows.
template <class D, class F, class V = hn::Vec<D>>
HWY_INLINE void each_row(D d, const Fours<V>& columns, float* p, int64_t stride, F&& f) {
  const Fours<V> rows = transpose_fours(d, columns);
  const hn::CappedTag<float, 4> four;
  HWY_ALIGN float blocks[4 * hn::MaxLanes(D())];
  const auto L = static_cast<int64_t>(hn::Lanes(d));
  hn::Store(rows.a, d, blocks);
  hn::Store(rows.b, d, blocks + L);
  hn::Store(rows.c, d, blocks + 2 * L);
  hn::Store(rows.e, d, blocks + 3 * L);
  for (int64_t row = 0; row < L; ++row) {
    f(four, p + row * stride, hn::Load(four, blocks + row % 4 * L + row / 4 * 4));
  }
}

// x[i] becomes number i of all vectors, lanes() of them: rows to columns or back.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void transpose_square(D d, V* x) {
  constexpr int kBlocks = static_cast<int>(hn::MaxLanes(D())) / 4;
#pragma GCC unroll 4
  for (int g = 0; g < kBlocks; ++g) {
    V* rows = x + 4 * g;
    const Fours<V> t = transpose_fours(d, Fours<V>{rows[0], rows[1], rows[2], rows[3]});
    rows[0] = t.a;
    rows[1] = t.b;
    rows[2] = t.c;
    rows[3] = t.e;
  }
  // Now x[4g + m] holds, in block k, number 4k + m of vectors 4g to 4g + 3.
  if constexpr (kBlocks == 2) {
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) {
      const V low = x[m], high = x[4 + m];
      x[m] = hn::ConcatLowerLower(d, high, low);
      x[4 + m] = hn::ConcatUpperUpper(d, high, low);
    }
  }
#if HWY_TARGET == HWY_AVX3
  if constexpr (kBlocks == 4) {
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) {
      const V low0 = hn::ConcatLowerLower(d, x[4 + m], x[m]);
      const V low1 = hn::ConcatUpperUpper(d, x[4 + m], x[m]);
      const V high0 = hn::ConcatLowerLower(d, x[12 + m], x[8 + m]);
      const V high1 = hn::ConcatUpperUpper(d, x[12 + m], x[8 + m]);
      x[m] = V{_mm512_shuffle_f32x4(low0.raw, high0.raw, 0x88)};
      x[4 + m] = V{_mm512_shuffle_f32x4(low0.raw, high0.raw, 0xDD)};
      x[8 + m] = V{_mm512_shuffle_f32x4(low1.raw, high1.raw, 0x88)};
      x[12 + m] = V{_mm512_shuffle_f32x4(low1.raw, high1.raw, 0xDD)};
    }
  }
#endif
}

// The upper half of the blocks onto the lower, until one is left.
template <class D>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> fold_blocks([[maybe_unused]] D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return fold_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}
#endif

// to[i] += the sum of all lanes of x[i], for four neighbours; `negative`: −=.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void add_lane_sums(D d, const V* x, bool negative, float* to) {
#if FOCI_HAS_FOURS
  const hn::CappedTag<float, 4> four;
  const Fours<V> t = transpose_fours(d, Fours<V>{x[0], x[1], x[2], x[3]});
  const auto sums = fold_blocks(d, hn::Add(hn::Add(t.a, t.b), hn::Add(t.c, t.e)));
  const auto old = hn::LoadU(four, to);
  hn::StoreU(negative ? hn::Sub(old, sums) : hn::Add(old, sums), four, to);
#else
  for (int i = 0; i < 4; ++i) {
    const float sum = hn::GetLane(hn::SumOfLanes(d, x[i]));
    to[i] += negative ? -sum : sum;
  }
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
