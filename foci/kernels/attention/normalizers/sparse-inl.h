// What the maps with exact zeros (sparsemax, entmax, top-k) share: the compact strip of the keys
// that have weight, and how a row's candidates are found.
//
// Keys that can have weight in some lane are kept, in ascending order, in a short, dense strip; the
// products walk that strip alone. A lane's numbers do not depend on which other keys its neighbours
// keep: where it has no weight, it adds exact zeros, and sums are cut by key number.
#if defined(FOCI_KERNELS_SPARSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_SPARSE_INL_H_
#undef FOCI_KERNELS_SPARSE_INL_H_
#else
#define FOCI_KERNELS_SPARSE_INL_H_
#endif

#include <cstring>

#include "foci/kernels/attention/strip-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

struct SparseStrip {
  float* weights;     // [count][W]; −0 where a lane gives the key no weight
  int32_t* index;     // [count] keys, ascending
  int64_t count = 0;  // keys with a weight in some lane
  // Per lane; in lanes that see nothing or are broken there are no weights, and only `max` is set.
  HWY_ALIGN float max[kMaxLanes];         // largest score; +inf where there is none to weigh
  HWY_ALIGN float row_stat[kMaxLanes];    // τ or log-sum-exp
  HWY_ALIGN float max_weight[kMaxLanes];  // of the key with the largest score
  HWY_ALIGN int32_t max_key[kMaxLanes];   // if it is wanted
  HWY_ALIGN float support[kMaxLanes];
  bool wants_key = false;
  uint32_t seen = 0;    // lanes whose row has keys
  uint32_t broken = 0;  // of those, lanes whose results are NaN: a NaN score, or no finite largest
};

HWY_INLINE hn::Mask<DF> is_nan(VF x) {
  return hn::Not(hn::Eq(x, x));  // Ne is an ordered comparison on some targets
}

// Keys that add up among themselves before they join a row's sum, and keys whose blocks do: the
// error of long sums is that of 512 keys, however many there are.
inline constexpr int32_t kSumBlock = 64;
inline constexpr int64_t kSumBlocks = 8 * kSumBlock;

// total[n] += Σ over rows of what `row(u, part)` adds to part[n].
template <int N, class Row>
HWY_INLINE void sum_rows(int64_t count, const int32_t* index, VF (&total)[N], const Row& row) {
  const DF d;
  VF lost[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) lost[n] = hn::Zero(d);
  for (int64_t u = 0; u < count;) {
    const int64_t end = (int64_t{index[u]} / kSumBlocks + 1) * kSumBlocks;
    VF blocks[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) blocks[n] = hn::Zero(d);
    while (u < count && index[u] < end) {
      const int64_t stop = (int64_t{index[u]} / kSumBlock + 1) * kSumBlock;
      VF part[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) part[n] = hn::Zero(d);
      for (; u < count && index[u] < stop; ++u) row(u, part);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) blocks[n] = hn::Add(blocks[n], part[n]);
    }
    // What rounding takes from the sum is kept beside it (Knuth's two-sum) until the end: blocks in
    // which a lane has nothing then change nothing of it.
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const VF sum = hn::Add(total[n], blocks[n]), back = hn::Sub(sum, total[n]);
      lost[n] = hn::Add(lost[n],
                        hn::Add(hn::Sub(total[n], hn::Sub(sum, back)), hn::Sub(blocks[n], back)));
      total[n] = sum;
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    // Of infinity, nothing.
    total[n] = hn::Add(total[n], hn::IfThenElseZero(hn::Eq(lost[n], lost[n]), lost[n]));
  }
}

// Lanes without a query start with a maximum that nothing comes near.
inline void begin_rows(const Strip& s, SparseStrip& p) {
  p.count = 0;
  for (int lane = 0; lane < kMaxLanes; ++lane) {
    p.max[lane] = lane < s.mask.lanes ? -kInf : kInf;
    p.row_stat[lane] = p.max_weight[lane] = p.support[lane] = 0;
    p.max_key[lane] = -1;
  }
}

// In place: of `count` rows of scores, those whose z = factor·(s − max) is above −1 in some lane.
// With kFinish they become z.
template <bool kFinish>
HWY_NOINLINE int64_t keep_candidates(int64_t count, float factor, const SparseStrip& p,
                                     float* strip, int32_t* index) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF m0 = hn::Load(d, p.max), m1 = hn::Load(d, p.max + L);
  const VF c = hn::Set(d, factor), minus_one = hn::Set(d, -1.0f);
  int64_t kept = 0;
  for (int64_t u = 0; u < count; ++u) {
    const VF s0 = hn::Load(d, strip + u * W), s1 = hn::Load(d, strip + u * W + L);
    // A lane without scores has max −inf: its −inf − −inf is NaN, no candidate.
    const VF z0 = hn::Mul(c, hn::Sub(s0, m0)), z1 = hn::Mul(c, hn::Sub(s1, m1));
    const bool any = !hn::AllFalse(d, hn::Or(hn::Gt(z0, minus_one), hn::Gt(z1, minus_one)));
    const int32_t key = index[u];
    hn::Store(kFinish ? z0 : s0, d, strip + kept * W);
    hn::Store(kFinish ? z1 : s1, d, strip + kept * W + L);
    index[kept] = key;
    kept += any ? 1 : 0;
  }
  return kept;
}

// max_key of each lane: the first key of z = 0, or (raw) of the largest score.
inline HWY_NOINLINE void find_max_keys(bool raw, SparseStrip& p) {
  const DF d;
  const DI di;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  for (int v = 0; v < kVectors; ++v) {
    VI key = hn::Set(di, -1);
    const VF most = raw ? hn::Load(d, p.max + v * L) : hn::Zero(d);
    for (int64_t u = p.count - 1; u >= 0; --u) {
      const hn::Mask<DF> top = hn::Eq(hn::Load(d, p.weights + u * W + v * L), most);
      key = hn::IfThenElse(hn::RebindMask(di, top), hn::Set(di, p.index[u]), key);
    }
    hn::Store(key, di, p.max_key + v * L);
  }
}

// The candidates of p = [factor·s − τ]₊^…: keys with z = factor·(s − max) > −1, since τ is at least
// factor·max − 1. The strip then holds z, or (raw) the scores. Lanes with a NaN score are left
// without candidates; of raw scores their max, +inf, tells.
inline HWY_NOINLINE void gather_candidates(const Strip& s, const KeySpan& span, const float* panel,
                                           float factor, bool raw, uint32_t* bits, SparseStrip& p) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  begin_rows(s, p);
  uint32_t nan = 0;
  for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
    const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
    float* part = p.weights + p.count * W;
    score_keys(s, span, lo, hi, panel, bits, part);
    VF m0 = hn::Load(d, p.max), m1 = hn::Load(d, p.max + L);
    hn::Mask<DF> nan0 = is_nan(m0), nan1 = is_nan(m1);  // none
    for (int64_t j = 0; j < hi - lo; ++j) {
      const VF s0 = hn::Load(d, part + j * W), s1 = hn::Load(d, part + j * W + L);
      nan0 = hn::Or(nan0, is_nan(s0));
      nan1 = hn::Or(nan1, is_nan(s1));
      m0 = max_of_scores(s0, m0);
      m1 = max_of_scores(s1, m1);
      p.index[p.count + j] = static_cast<int32_t>(lo + j);
    }
    nan |= bits_of(nan0, nan1);
    hn::Store(m0, d, p.max);
    hn::Store(m1, d, p.max + L);
    const bool more = hi < span.end;
    p.count += more ? keep_candidates<false>(hi - lo, factor, p, part, p.index + p.count) : hi - lo;
  }
  p.broken = nan;
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    if (nan >> lane & 1u) p.max[lane] = kInf;
  }
  p.count = raw ? keep_candidates<false>(p.count, factor, p, p.weights, p.index)
                : keep_candidates<true>(p.count, factor, p, p.weights, p.index);
  if (p.wants_key) find_max_keys(raw, p);
}

// Which rows there are, once their support is known.
inline void finish_rows(const Strip& s, const KeySpan& span, uint32_t* bits, SparseStrip& p) {
  p.seen = lanes_that_see(s, span, bits);
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    if ((p.seen >> lane & 1u) && p.support[lane] == 0) p.broken |= 1u << lane;
  }
  p.broken &= p.seen;
}

// In place: of the numbers in the strip, `weigh` makes weights (numbers that are not above 0: none,
// −0); rows with a weight in some lane are kept.
template <class Weigh>
HWY_INLINE void keep_weights(SparseStrip& p, const Weigh& weigh) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF zero = hn::Zero(d), none = hn::Set(d, -0.0f);
  int64_t kept = 0;
  for (int64_t u = 0; u < p.count; ++u) {
    VF w0, w1;
    weigh(hn::Load(d, p.weights + u * W), hn::Load(d, p.weights + u * W + L), w0, w1);
    const hn::Mask<DF> in0 = hn::Gt(w0, zero), in1 = hn::Gt(w1, zero);
    hn::Store(hn::IfThenElse(in0, w0, none), d, p.weights + kept * W);
    hn::Store(hn::IfThenElse(in1, w1, none), d, p.weights + kept * W + L);
    p.index[kept] = p.index[u];
    kept += hn::AllFalse(d, hn::Or(in0, in1)) ? 0 : 1;
  }
  p.count = kept;
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
