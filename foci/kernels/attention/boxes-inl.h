// Boxes around blocks of neighbouring keys, and what no dot score of a key in a block exceeds.
//
// A block's box is a middle m and a half-width h per coordinate: |k_d − m_d| ≤ h_d for every key k
// of the block. So q·k ≤ q·m + |q|·h. Floats round, in the score and in the bound, and the bound
// must still not be below any score as score_strip gives it. With u = 2⁻²⁴, γ = Du/(1 − Du) and
// a_d = |m_d| + h_d, at least any |k_d|:
//
//   fl(q·k)  ≤ q·k + γ Σ|q||k|      ≤ Σq m + Σ|q|h + γ Σ|q|a
//   fl(q·m)  ≥ Σq m − γ Σ|q||m|
//   fl(|q|·h′) ≥ (1 − γ) Σ|q|h′     for a stored half-width h′ ≥ 0
//   fl(x + y)  ≥ x + y − u|x + y|,   |x + y| ≤ about Σ|q|a here
//
// so that fl(fl(q·m) + fl(|q|·h′)) ≥ fl(q·k) if Σ|q|h′ (1 − γ) ≥ Σ|q|(h + γ(h + a + |m|) + 1.1 u
// a), for which h′ = h + c·a with c ≥ (2γ + 1.1 u)/(1 − γ) is enough. Computing m, h, a and h′
// rounds too, by at most 6 u a in all. kDeepestBox keeps D·u below 5·10⁻⁴, where all of it stays
// below c = (2.5 D + 16) u. What underflows, at most 2⁻¹⁵⁰ a product or 2⁻¹²⁶ where the processor
// flushes, is smaller than the 2⁻¹²⁶ added to h′ times |q|, or than the D·2⁻¹²⁶ added to the bound.
//
// The score is fl(f·fl(q·k)), and rounding is monotone: fl(f·bound) bounds it where f ≥ 0. Where
// f < 0 the least q·k counts, at least q·m − |q|·h, by the same argument.
#if defined(FOCI_KERNELS_ATTENTION_BOXES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_BOXES_INL_H_
#undef FOCI_KERNELS_ATTENTION_BOXES_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_BOXES_INL_H_
#endif

#include <cmath>
#include <limits>

#include "foci/kernels/attention.h"
#include "foci/kernels/attention/score-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// box[0, D): the middle of `count` ≥ 1 rows; box[D, 2D): its half-width, widened as said above.
inline HWY_NOINLINE void box_rows(const float* rows, int64_t stride, int64_t count, int64_t depth,
                                  float* box) {
  const DF d;
  const int64_t L = lanes();
  const VF half = hn::Set(d, 0.5f);
  const VF wider = hn::Set(d, (2.5f * static_cast<float>(depth) + 16) * 0x1p-24f);
  const VF least = hn::Set(d, std::numeric_limits<float>::min());
  for (int64_t i = 0; i < depth; i += L) {
    const auto n = static_cast<size_t>(HWY_MIN(L, depth - i));
    const bool whole = n == static_cast<size_t>(L);
    const auto load = [&](const float* from)
                          HWY_ATTR { return whole ? hn::LoadU(d, from) : load_first(d, n, from); };
    VF low = load(rows + i), high = low;
    for (int64_t j = 1; j < count; ++j) {
      const VF x = load(rows + j * stride + i);
      low = hn::Min(low, x);
      high = hn::Max(high, x);
    }
    const VF middle = hn::MulAdd(low, half, hn::Mul(high, half));
    const VF width = hn::Max(hn::Sub(high, middle), hn::Sub(middle, low));
    const VF farthest = hn::Add(hn::Abs(middle), width);
    const VF widened = hn::Add(hn::MulAdd(farthest, wider, width), least);
    if (whole) {
      hn::StoreU(middle, d, box + i);
      hn::StoreU(widened, d, box + depth + i);
    } else {
      store_first(middle, d, n, box + i);
      store_first(widened, d, n, box + depth + i);
    }
  }
}

// For R boxes: centre[r][lane] = f·(q·m), bound[r][lane] ≥ f·(q·k) of every key k of the box.
template <int R>
HWY_INLINE void bound_rows(int64_t depth, const float* HWY_RESTRICT boxes,
                           const float* HWY_RESTRICT panel, float factor,
                           float* HWY_RESTRICT centre, float* HWY_RESTRICT bound) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  VF mid0[R], mid1[R], half0[R], half1[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) mid0[r] = mid1[r] = half0[r] = half1[r] = hn::Zero(d);
  for (int64_t i = 0; i < depth; ++i) {
    const VF q0 = hn::Load(d, panel + i * W), q1 = hn::Load(d, panel + i * W + L);
    const VF a0 = hn::Abs(q0), a1 = hn::Abs(q1);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float* box = boxes + 2 * r * depth + i;
      const VF m = hn::Set(d, box[0]), h = hn::Set(d, box[depth]);
      mid0[r] = hn::MulAdd(m, q0, mid0[r]);
      mid1[r] = hn::MulAdd(m, q1, mid1[r]);
      half0[r] = hn::MulAdd(h, a0, half0[r]);
      half1[r] = hn::MulAdd(h, a1, half1[r]);
    }
  }
  const VF f = hn::Set(d, factor), side = hn::Set(d, factor < 0 ? -1.0f : 1.0f);
  const VF more = hn::Set(d, static_cast<float>(depth) * std::numeric_limits<float>::min());
  for (int r = 0; r < R; ++r) {
    hn::Store(hn::Mul(mid0[r], f), d, centre + r * W);
    hn::Store(hn::Mul(mid1[r], f), d, centre + r * W + L);
    const VF far0 = hn::MulAdd(hn::Add(half0[r], more), side, mid0[r]);
    const VF far1 = hn::MulAdd(hn::Add(half1[r], more), side, mid1[r]);
    hn::Store(hn::Mul(far0, f), d, bound + r * W);
    hn::Store(hn::Mul(far1, f), d, bound + r * W + L);
  }
}

// In place: what cap_scores makes of such numbers. tanh_of is monotone up to its error of about an
// ulp, which is given to the bound many times over.
inline HWY_NOINLINE void cap_bounds(int64_t count, float cap, float* centre, float* bound) {
  const DF d;
  const int64_t L = lanes();
  cap_strip(count, cap, centre);
  cap_strip(count, cap, bound);
  const VF ulps = hn::Set(d, 0x1p-19f), least = hn::Set(d, std::numeric_limits<float>::min());
  for (int64_t at = 0; at < count * kVectors * L; at += L) {
    const VF b = hn::Load(d, bound + at);
    hn::Store(hn::Add(hn::MulAdd(hn::Abs(b), ulps, b), least), d, bound + at);
  }
}

// Strips [count][W] of centres and bounds for `count` boxes, [2D] each.
inline HWY_NOINLINE void bound_strip(const Strip& s, const float* boxes, int64_t count,
                                     const float* panel, float* centre, float* bound) {
  const int64_t W = strip_width();
  constexpr int kRows = kTileRows / 2;
  int64_t b = 0;
  for (; b + kRows <= count; b += kRows) {
    bound_rows<kRows>(s.D, boxes + 2 * b * s.D, panel, s.scale, centre + b * W, bound + b * W);
  }
  for (; b < count; ++b) {
    bound_rows<1>(s.D, boxes + 2 * b * s.D, panel, s.scale, centre + b * W, bound + b * W);
  }
  if (s.softcap > 0) cap_bounds(count, s.softcap, centre, bound);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
