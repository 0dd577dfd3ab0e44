// α-entmax over strips (Peters, Niculae & Martins 2019): p = [(α−1)s − τ]₊^P with P = 1/(α−1) and
// Σ p = 1, for any α > 1 but 2, which is sparsemax.
//
// Scores are shifted and scaled to z = (α−1)(s − max) ≤ 0, and the unknown is t = −τ in (0, 1]:
//   Σ [z + t]₊^P = 1.
// The weights that are handed on are divided by their sum, so that what error t keeps enters each
// of them at second order only, and they add to 1 whatever α is.
#if defined(FOCI_KERNELS_ENTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ENTMAX_INL_H_
#undef FOCI_KERNELS_ENTMAX_INL_H_
#else
#define FOCI_KERNELS_ENTMAX_INL_H_
#endif

#include <cmath>

#include "foci/kernels/attention/normalizers/sparsemax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// ---- powers: e, proportional to [z + t]₊^P, and its slope e' = e·t/(z + t) ----------------------

// α = 1.5. e = ((z + t)/t)².
struct SquarePower {
  HWY_INLINE VF operator()(VF z, VF t, VF inverse_t, VF& slope) const {
    slope = hn::Mul(hn::Max(hn::Add(z, t), hn::Zero(DF())), inverse_t);
    return hn::Mul(slope, slope);
  }
  // ln(t·S^(α−1)) > 0 → 1 − 1/(t·S^(α−1))
  HWY_INLINE VF excess(VF t, VF sum) const {
    const VF one = hn::Set(DF(), 1.0f);
    return hn::Sub(one, hn::Div(one, hn::Mul(t, hn::Sqrt(sum))));
  }
};

// α < 2. e = (1 + z/t)^P as exp(P·ln(1 + z/t)): relative to t, and with z/t itself where that is
// small, so that a P of hundreds (α near 1) magnifies no rounding: in the limit e = e^(s − max).
struct SteadyPower {
  VF less_one, factor;  // P − 1 and α − 1
  HWY_INLINE VF operator()(VF z, VF t, VF inverse_t, VF& slope) const {
    const DF d;
    const VF over = hn::Add(z, t);  // exact where it is small
    VF ratio = hn::Mul(over, inverse_t);
    const VF less = hn::Mul(z, inverse_t);
    VF k;
    VF f = split_for_log(d, ratio, k);
    const hn::Mask<DF> near = hn::Gt(less, hn::Set(d, -0.25f));
    f = hn::IfThenElse(near, less, f);
    k = hn::IfThenZeroElse(near, k);
    ratio = hn::IfThenElse(near, hn::Add(less, hn::Set(d, 1.0f)), ratio);
    const VF log = hn::MulAdd(k, hn::Set(d, 0.69314718055994531f), log_near_one(d, f));
    slope =
        hn::IfThenElseZero(hn::Gt(over, hn::Zero(d)), exp_nonpositive(d, hn::Mul(less_one, log)));
    return hn::Mul(slope, hn::Max(ratio, hn::Zero(d)));
  }
  HWY_INLINE VF excess(VF t, VF sum) const {
    const DF d;
    const VF log = hn::MulAdd(factor, log_positive(d, sum), log_positive(d, t));
    return hn::Sub(hn::Set(d, 1.0f), exp_nonpositive(d, hn::Neg(log)));
  }
};

// α > 2. e = (z + t)^P, which leaves 0 with an infinite slope.
struct SteepPower {
  VF power;
  HWY_INLINE VF operator()(VF z, VF t, VF, VF& slope) const {
    const DF d;
    const VF over = hn::Add(z, t);
    const hn::Mask<DF> in = hn::Gt(over, hn::Zero(d));
    const VF e = hn::IfThenElseZero(in, power_positive(d, over, power));
    slope = hn::IfThenElseZero(in, hn::Div(e, over));
    return e;
  }
};

template <class Power>
HWY_INLINE void sum_powers(const Power& power, int64_t count, const float* strip,
                           const int32_t* index, VF t, VF inverse_t, VF& sum, VF& slope) {
  const DF d;
  const int64_t W = strip_width();
  VF sums[2] = {hn::Zero(d), hn::Zero(d)};
  sum_rows(count, index, sums, [&](int64_t u, VF* part) HWY_ATTR {
    VF de;
    const VF e = power(hn::Load(d, strip + u * W), t, inverse_t, de);
    part[0] = hn::Add(part[0], e);
    part[1] = hn::Add(part[1], de);
  });
  sum = sums[0];
  slope = sums[1];
}

// ---- t for α < 2 --------------------------------------------------------------------------------

// Up to `steps` Newton steps of one vector of lanes on N(t) = ‖[z + t]₊‖_P = 1. A norm is convex in
// t, so that t falls to the root from any start above it. A lane is settled when t no longer falls,
// or fell by so little that the next step is below rounding; from then on it is left alone, however
// long its neighbours take: open[] is 0.
template <class Power>
HWY_NOINLINE void lower_t(const Power& power, float enough, int steps, int64_t count,
                          const float* strip, const int32_t* index, float* at, float* open) {
  const DF d;
  VF t = hn::Load(d, at);
  hn::Mask<DF> active = hn::Gt(hn::Load(d, open), hn::Zero(d));
  for (int step = 0; step < steps && !hn::AllFalse(d, active); ++step) {
    VF sum, slope;
    sum_powers(power, count, strip, index, t, hn::Div(hn::Set(d, 1.0f), t), sum, slope);
    const VF fall = hn::Div(hn::Mul(hn::Mul(power.excess(t, sum), t), sum), slope);
    const VF next = hn::Sub(t, fall);
    // False for lanes without candidates, where `fall` is NaN.
    active = hn::And(active, hn::And(hn::Lt(next, t), hn::Gt(next, hn::Zero(d))));
    t = hn::IfThenElse(active, next, t);
    active = hn::And(active, hn::Gt(fall, hn::Mul(t, hn::Set(d, enough))));
  }
  hn::Store(t, d, at);
  hn::Store(hn::IfThenElseZero(active, hn::Set(d, 1.0f)), d, open);
}

// In place: rows with z > −t in some lane. t only falls, so the others are out for good.
inline HWY_NOINLINE void keep_above(const float* t, SparseStrip& p) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF tau0 = hn::Neg(hn::Load(d, t)), tau1 = hn::Neg(hn::Load(d, t + L));
  int64_t kept = 0;
  for (int64_t u = 0; u < p.count; ++u) {
    const VF z0 = hn::Load(d, p.weights + u * W), z1 = hn::Load(d, p.weights + u * W + L);
    const bool any = !hn::AllFalse(d, hn::Gt(z0, tau0)) || !hn::AllFalse(d, hn::Gt(z1, tau1));
    hn::Store(z0, d, p.weights + kept * W);
    hn::Store(z1, d, p.weights + kept * W + L);
    p.index[kept] = p.index[u];
    kept += any ? 1 : 0;
  }
  p.count = kept;
}

// From t, which no lane's root is above.
template <class Power>
void solve_steady(const Power& power, float enough, SparseStrip& p, float* t) {
  const int64_t L = lanes();
  HWY_ALIGN float open[kMaxLanes];
  for (float& x : open) x = 1;
  // The first steps leave few keys to be summed.
  for (int steps : {2, 2, 60}) {
    for (int v = 0; v < kVectors; ++v) {
      lower_t(power, enough, steps, p.count, p.weights + v * L, p.index, t + v * L, open + v * L);
    }
    if (steps == 2) keep_above(t, p);
  }
}

// ---- t for α > 2 --------------------------------------------------------------------------------

// Newton steps inside a bracket, by halves where they leave it. Where a key is about to leave, the
// weight [z + t]₊^P it still has can hang on digits of t that float32 does not hold; so the lanes
// whose weights do not yet add to 1 move the origin of z to the lower end of their bracket, from
// where small distances have all their digits, and go on.
//
// at[] holds an upper bound of t, and receives t from the new origin; z changes, `offset` is by how
// much.
inline HWY_NOINLINE void bracket_t(const SteepPower& power, float factor, int64_t count,
                                   float* strip, const int32_t* index, float* offset, float* at) {
  const DF d;
  const int64_t W = strip_width();
  const VF one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  VF high = hn::Load(d, at), n = zero;
  for (int64_t u = 0; u < count; ++u) {
    const hn::Mask<DF> in = hn::Gt(hn::Load(d, strip + u * W), hn::Neg(high));
    n = hn::Add(n, hn::IfThenElseZero(in, one));
  }
  // At most n equal scores share 1: t ≥ n^(1−α).
  VF low = hn::Max(power_positive(d, hn::Max(n, one), hn::Set(d, -factor)), hn::Set(d, 1e-37f));
  low = hn::Mul(low, hn::Set(d, 0.999f));
  VF t = hn::Mul(high, hn::Set(d, 0.5f)), shift = zero;
  hn::Mask<DF> open = hn::Gt(n, zero);
  for (int round = 0; round < 3 && !hn::AllFalse(d, open); ++round) {
    hn::Mask<DF> active = open;
    for (int step = 0; step < 32 && !hn::AllFalse(d, active); ++step) {
      VF sum, slope;
      sum_powers(power, count, strip, index, t, one, sum, slope);
      const hn::Mask<DF> done = hn::Le(hn::Abs(hn::Sub(sum, one)), hn::Set(d, 5e-7f));
      open = hn::AndNot(hn::And(active, done), open);
      active = hn::AndNot(done, active);
      const hn::Mask<DF> below = hn::Lt(sum, one);
      low = hn::IfThenElse(hn::And(active, below), t, low);
      high = hn::IfThenElse(hn::AndNot(below, active), t, high);
      // On N = S^(α−1), which for one key is straight: (1 − N)/N' = (S^(2−α) − S)/S'.
      const VF bend = power_positive(d, hn::Max(sum, hn::Set(d, 1e-37f)), hn::Set(d, 1 - factor));
      VF next = hn::Add(t, hn::Div(hn::Sub(bend, sum), slope));
      VF half = hn::MulAdd(hn::Sub(high, low), hn::Set(d, 0.5f), low);
      // A bracket that spans powers of two is cut by its exponents.
      half = hn::IfThenElse(
          hn::Gt(high, hn::Mul(low, hn::Set(d, 4.0f))),
          hn::Sqrt(hn::Mul(high, hn::Max(low, hn::Mul(high, hn::Set(d, 0x1p-20f))))), half);
      const hn::Mask<DF> inside = hn::And(hn::Gt(next, low), hn::Lt(next, high));
      next = step % 3 == 2 ? half : hn::IfThenElse(inside, next, half);
      active = hn::And(active, hn::And(hn::Gt(next, low), hn::Lt(next, high)));
      t = hn::IfThenElse(active, next, t);
    }
    const VF move = hn::IfThenElseZero(open, low);
    for (int64_t u = 0; u < count; ++u) {
      hn::Store(hn::Add(hn::Load(d, strip + u * W), move), d, strip + u * W);
    }
    shift = hn::Add(shift, move);
    high = hn::Sub(high, move);
    low = hn::Sub(low, move);
    t = hn::IfThenElse(open, hn::Mul(high, hn::Set(d, 0.5f)), t);
  }
  hn::Store(shift, d, offset);
  hn::Store(t, d, at);
}

// ---- weights
// --------------------------------------------------------------------------------------

// z becomes weights. `offset`: the z of the largest score.
template <class Power>
HWY_NOINLINE void weigh_powers(const Power& power, float factor, const float* offset,
                               const float* at, SparseStrip& p) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  for (int v = 0; v < kVectors; ++v) {
    float* strip = p.weights + v * L;
    const VF t = hn::Load(d, at + v * L), inverse_t = hn::Div(one, t);
    VF sums[2] = {zero, zero};
    sum_rows(p.count, p.index, sums, [&](int64_t u, VF* part) HWY_ATTR {
      const VF z = hn::Load(d, strip + u * W);
      VF slope;
      const VF e = power(z, t, inverse_t, slope);
      part[0] = hn::Add(part[0], e);
      part[1] = hn::Add(part[1], hn::IfThenElseZero(hn::Gt(hn::Add(z, t), zero), one));
      hn::Store(e, d, strip + u * W);
    });
    const VF inverse = hn::Div(one, sums[0]);
    for (int64_t u = 0; u < p.count; ++u) {
      const VF w = hn::Mul(hn::Load(d, strip + u * W), inverse);
      hn::Store(hn::IfThenElse(hn::Gt(w, zero), w, hn::Set(d, -0.0f)), d, strip + u * W);
    }
    VF slope;
    hn::Store(hn::Mul(power(hn::Load(d, offset + v * L), t, inverse_t, slope), inverse), d,
              p.max_weight + v * L);
    hn::Store(sums[1], d, p.support + v * L);
  }
  for (int64_t lane = 0; lane < W; ++lane) {
    const double t = double{offset[lane]} + at[lane];
    p.row_stat[lane] = static_cast<float>(double{factor} * p.max[lane] - t);
  }
  keep_weights(p);
}

// Candidates, as gather_candidates leaves them, become weights.
inline void solve_entmax(double alpha, SparseStrip& p) {
  const DF d;
  const int64_t L = lanes();
  HWY_ALIGN float t[kMaxLanes];
  HWY_ALIGN float offset[kMaxLanes] = {};
  const auto factor = static_cast<float>(alpha - 1);
  const auto power = static_cast<float>(1 / (alpha - 1));
  // What the last step may leave. With P ≥ 2 slopes change smoothly, and a step of 2^-13 is
  // followed by one of about 2^-26. Below, slopes jump where keys leave.
  constexpr float kSmooth = 0x1p-13f, kJumping = 0x1p-22f;
  if (alpha < 2) {
    for (float& x : t) x = 1;
    // Every [z + t]₊ is at most 1, so that a smaller P has the smaller t: the cheap square's t is
    // an upper bound where P < 2.
    if (alpha >= 1.5) solve_steady(SquarePower{}, kSmooth, p, t);
    if (alpha == 1.5) return weigh_powers(SquarePower{}, factor, offset, t, p);
    const SteadyPower steady{hn::Set(d, static_cast<float>(1 / (alpha - 1) - 1)),
                             hn::Set(d, factor)};
    solve_steady(steady, alpha < 1.5 ? kSmooth : kJumping, p, t);
    return weigh_powers(steady, factor, offset, t, p);
  }
  const SteepPower steep{hn::Set(d, power)};
  // And where P < 1, that of sparsemax is.
  for (int v = 0; v < kVectors; ++v) {
    VF n;
    const VF tau = sparsemax_threshold(p.count, p.weights + v * L, p.index, n);
    hn::Store(hn::Mul(tau, hn::Set(d, -1.00001f)), d, t + v * L);
  }
  keep_above(t, p);
  for (int v = 0; v < kVectors; ++v) {
    bracket_t(steep, factor, p.count, p.weights + v * L, p.index, offset + v * L, t + v * L);
  }
  weigh_powers(steep, factor, offset, t, p);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
