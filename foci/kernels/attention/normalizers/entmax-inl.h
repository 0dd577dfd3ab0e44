// α-entmax over strips (Peters, Niculae & Martins 2019): p = [(α−1)s − τ]₊^P with P = 1/(α−1) and
// Σ p = 1, for 1 < α < 2; 2 is sparsemax, and what lies above is solved in entmax_steep-inl.h.
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
#include <type_traits>

#include "foci/kernels/attention/normalizers/sparsemax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// ---- powers: e, proportional to [z + t]₊^P, and its slope e' = e·t/(z + t) ----------------------

// With kCurved, `terms` gives the numbers whose sums a step of Halley takes: [z + t]₊^P/t^P and the
// same of P − 1 and P − 2.

// α = 1.5. e = ((z + t)/t)².
struct SquarePower {
  static constexpr bool kCurved = true;
  static constexpr float kHalleyStep = 0x1p-9f;  // is followed by one below rounding
  HWY_INLINE VF operator()(VF z, VF t, VF inverse_t, VF& slope) const {
    slope = hn::Mul(hn::Max(hn::Add(z, t), hn::Zero(DF())), inverse_t);
    return hn::Mul(slope, slope);
  }
  HWY_INLINE void terms(VF z, VF t, VF inverse_t, VF (&e)[3]) const {
    const DF d;
    e[0] = (*this)(z, t, inverse_t, e[1]);
    e[2] = hn::IfThenElseZero(hn::Gt(e[1], hn::Zero(d)), hn::Set(d, 1.0f));
  }
  // ln(t·S^(α−1)) → 1 − 1/(t·S^(α−1))
  HWY_INLINE VF excess(VF t, VF sum) const {
    const VF one = hn::Set(DF(), 1.0f);
    return hn::Sub(one, hn::Div(one, hn::Mul(t, hn::Sqrt(sum))));
  }
  HWY_INLINE VF half_less_one() const { return hn::Set(DF(), 0.5f); }
};

// α < 2. e = (1 + z/t)^P as exp(P·ln(1 + z/t)). kSteady: from z/t itself where that is small, so
// that a P of hundreds (α near 1) magnifies no rounding: in the limit e = e^(s − max).
template <bool kSteady, bool kCurves>
struct FractionPower {
  static constexpr bool kCurved = kCurves;
  static constexpr float kHalleyStep = kSteady ? 0x1p-8f : 0x1p-9f;
  VF lowest;            // P − 2 if kCurved, or else P − 1
  VF less_one, factor;  // P − 1 and α − 1
  // (z + t)/t, and its power `exponent` where that is above 0.
  HWY_INLINE VF raise(VF z, VF t, VF inverse_t, VF exponent, VF& ratio) const {
    const DF d;
    ratio = hn::Mul(hn::Max(hn::Add(z, t), hn::Zero(d)), inverse_t);
    VF less = z;
    if constexpr (kSteady) less = hn::Mul(z, inverse_t);
    const VF x = hn::Mul(exponent, log_of_fraction<kSteady>(ratio, less));
    if constexpr (kSteady) {
      ratio =
          hn::IfThenElse(hn::Gt(less, hn::Set(d, -0.25f)), hn::Add(less, hn::Set(d, 1.0f)), ratio);
    }
    const hn::Mask<DF> in =
        hn::And(hn::Gt(ratio, hn::Zero(d)), hn::Ge(x, hn::Set(d, kLeastExponent)));
    return hn::IfThenElseZero(in, exp_in_range(x));
  }
  HWY_INLINE VF operator()(VF z, VF t, VF inverse_t, VF& slope) const {
    VF ratio;
    slope = raise(z, t, inverse_t, less_one, ratio);
    return hn::Mul(slope, ratio);
  }
  HWY_INLINE void terms(VF z, VF t, VF inverse_t, VF (&e)[3]) const {
    VF ratio;
    e[2] = raise(z, t, inverse_t, lowest, ratio);
    e[1] = hn::Mul(e[2], ratio);
    e[0] = hn::Mul(e[1], ratio);
  }
  HWY_INLINE VF excess(VF t, VF sum) const {
    const DF d;
    const VF log = hn::MulAdd(factor, log_positive(d, sum), log_positive(d, t));
    const VF least = hn::Set(d, kLeastExponent);
    return hn::Sub(hn::Set(d, 1.0f), exp_in_range(hn::Max(hn::Neg(log), least)));
  }
  HWY_INLINE VF half_less_one() const { return hn::Mul(less_one, hn::Set(DF(), 0.5f)); }
};

// ---- t for α < 2 --------------------------------------------------------------------------------
//
// The sums Σ [z + t]₊^p are smooth in p, so that those of p = m, 2m, 3m, 4m, which cost a
// multiplication each, tell that of P to a few thousandths by interpolating their logarithms. From
// the root of that, a step or two with the true power do.

// Nodes of the interpolation, and how much each counts at P and at P − 1.
struct PowerNodes {
  bool counts;    // nodes 0, 1, 2, 3 instead
  int squarings;  // m = 2^squarings
  float at_power[4], at_less_one[4];
};
inline PowerNodes power_nodes(double power) {
  PowerNodes nodes{power < 2, 0, {}, {}};
  double node[4];
  double m = 1;
  for (; power > 3.5 * m; m *= 2) ++nodes.squarings;
  for (int i = 0; i < 4; ++i) node[i] = m * (nodes.counts ? i : i + 1);
  const auto weigh = [&](double at, int first, float* weight) {
    for (int i = first; i < 4; ++i) {
      double w = 1;
      for (int j = first; j < 4; ++j) w *= j == i ? 1 : (at - node[j]) / (node[i] - node[j]);
      weight[i] = static_cast<float>(w);
    }
  };
  // The number of keys jumps, and is no help where others stand on both sides.
  weigh(power, nodes.counts ? 1 : 0, nodes.at_power);
  weigh(power - 1, 0, nodes.at_less_one);
  return nodes;
}

// t of one vector of lanes to about a hundredth, by Newton steps on the interpolated norm. `rows`
// (null: all) are a sample of which every key counts `times`.
template <bool kCounts, bool kSample>
HWY_NOINLINE void approach_t(const PowerNodes& nodes, float factor, float times, int64_t count,
                             const int32_t* rows, const float* strip, float* at) {
  const DF d;
  const int64_t W = strip_width();
  const VF one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  VF t = hn::Load(d, at);
  hn::Mask<DF> active = hn::Eq(one, one);
  for (int step = 0; step < 7 && !hn::AllFalse(d, active); ++step) {
    const VF inverse_t = hn::Div(one, t);
    VF sums[4] = {zero, zero, zero, zero};
    for (int64_t u = 0; u < count; ++u) {
      const float* row = strip + (kSample ? int64_t{rows[u]} : u) * W;
      const VF over = hn::Max(hn::Add(hn::Load(d, row), t), zero);
      VF x = hn::Mul(over, inverse_t);
      if constexpr (!kCounts) {
        for (int i = 0; i < nodes.squarings; ++i) x = hn::Mul(x, x);
      }
      const VF x2 = hn::Mul(x, x);
      if constexpr (kCounts) {
        sums[0] = hn::Add(sums[0], hn::IfThenElseZero(hn::Gt(x, zero), one));
        sums[1] = hn::Add(sums[1], x);
        sums[2] = hn::Add(sums[2], x2);
        sums[3] = hn::MulAdd(x2, x, sums[3]);
      } else {
        sums[0] = hn::Add(sums[0], x);
        sums[1] = hn::Add(sums[1], x2);
        sums[2] = hn::MulAdd(x2, x, sums[2]);
        sums[3] = hn::MulAdd(x2, x2, sums[3]);
      }
    }
    VF log_sum = zero, log_slope = zero;
    for (int i = 0; i < 4; ++i) {
      const VF log = log_positive(d, hn::Mul(sums[i], hn::Set(d, times)));
      log_sum = hn::MulAdd(hn::Set(d, nodes.at_power[i]), log, log_sum);
      log_slope = hn::MulAdd(hn::Set(d, nodes.at_less_one[i]), log, log_slope);
    }
    const auto power_of = [&](VF x) HWY_ATTR {
      return exp_in_range(hn::Max(hn::Min(x, hn::Set(d, 80.0f)), hn::Set(d, -80.0f)));
    };
    const VF log_norm = hn::MulAdd(hn::Set(d, factor), log_sum, log_positive(d, t));
    const VF excess = hn::Sub(one, power_of(hn::Neg(log_norm)));
    const VF fall = hn::Mul(hn::Mul(excess, t), power_of(hn::Sub(log_sum, log_slope)));
    const VF next = hn::Min(hn::Max(hn::Sub(t, fall), hn::Mul(t, hn::Set(d, 0.1f))), one);
    const VF moved = hn::Abs(hn::Sub(next, t));
    t = hn::IfThenElse(active, next, t);
    active = hn::And(active, hn::Gt(moved, hn::Mul(t, hn::Set(d, 0.05f))));
  }
  hn::Store(t, d, at);
}

// First from one key in eight of the first thousands, in lanes that have many of them. Which keys,
// and which lanes, hangs on key numbers and the lane's own scores, so that neighbours' candidates
// change nothing. A row of few large weights is misled, and comes back from there.
template <bool kCounts>
void approach_by_sample(const PowerNodes& nodes, float factor, const SparseStrip& p, float* t) {
  constexpr int64_t kStep = 8, kMost = 256, kEnough = 8;
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  int32_t rows[kMost];
  int64_t count = 0;
  for (int64_t u = 0; u < p.count && p.index[u] < kStep * kMost; ++u) {
    if (p.index[u] % kStep == 0) rows[count++] = static_cast<int32_t>(u);
  }
  for (int v = 0; v < kVectors; ++v) {
    const float* strip = p.weights + v * L;
    float* at = t + v * L;
    if (count >= kEnough) {
      const VF one = hn::Set(d, 1.0f), before = hn::Load(d, at);
      VF own = hn::Zero(d);
      for (int64_t n = 0; n < count; ++n) {
        const hn::Mask<DF> in = hn::Gt(hn::Load(d, strip + rows[n] * W), hn::Neg(one));
        own = hn::Add(own, hn::IfThenElseZero(in, one));
      }
      approach_t<kCounts, true>(nodes, factor, kStep, count, rows, strip, at);
      const hn::Mask<DF> many = hn::Ge(own, hn::Set(d, float{kEnough}));
      hn::Store(hn::IfThenElse(many, hn::Load(d, at), before), d, at);
    }
    approach_t<kCounts, false>(nodes, factor, 1, p.count, nullptr, strip, at);
  }
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
    const bool any = !hn::AllFalse(d, hn::Or(hn::Gt(z0, tau0), hn::Gt(z1, tau1)));
    hn::Store(z0, d, p.weights + kept * W);
    hn::Store(z1, d, p.weights + kept * W + L);
    p.index[kept] = p.index[u];
    kept += any ? 1 : 0;
  }
  p.count = kept;
}

// The root of N(t) = ‖[z + t]₊‖_P = 1 for one vector of lanes, from any t. N is convex: after its
// first step Newton's method falls to the root from above. Where P ≥ 2 the first three steps are
// Halley's, which cube the error. A lane is settled when what is left after its step lies below
// rounding, or when t no longer falls; from then on it is left alone, however long its neighbours
// take.
template <class Power>
HWY_NOINLINE void settle_t(const Power& power, float enough, int steps, int64_t count,
                           const float* strip, const int32_t* index, float* at) {
  const DF d;
  const int64_t W = strip_width();
  const VF one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  constexpr int kTerms = Power::kCurved ? 3 : 2, kHalley = Power::kCurved ? 3 : 0;
  VF t = hn::Load(d, at);
  hn::Mask<DF> active = hn::Eq(one, one);
  for (int step = 0; step < steps && !hn::AllFalse(d, active); ++step) {
    const VF inverse_t = hn::Div(one, t);
    VF sums[kTerms];
#pragma GCC unroll 4
    for (VF& sum : sums) sum = zero;
    sum_rows(count, index, sums, [&](int64_t u, VF* part) HWY_ATTR {
      const VF z = hn::Load(d, strip + u * W);
      if constexpr (Power::kCurved) {
        VF e[3];
        power.terms(z, t, inverse_t, e);
#pragma GCC unroll 4
        for (int i = 0; i < 3; ++i) part[i] = hn::Add(part[i], e[i]);
      } else {
        VF slope;
        part[0] = hn::Add(part[0], power(z, t, inverse_t, slope));
        part[1] = hn::Add(part[1], slope);
      }
    });
    VF fall = hn::Div(hn::Mul(power.excess(t, sums[0]), sums[0]), sums[1]);  // in units of t
    VF last = hn::Set(d, enough);
    if constexpr (Power::kCurved) {
      if (step < kHalley) {
        const VF curve = hn::Sub(hn::Div(sums[2], sums[1]), hn::Div(sums[1], sums[0]));
        const VF bend = hn::Mul(hn::Mul(power.half_less_one(), curve), fall);
        const VF halley = hn::Div(fall, hn::Sub(one, bend));
        fall = hn::IfThenElse(hn::Lt(hn::Abs(bend), hn::Set(d, 0.5f)), halley, fall);
        last = hn::Set(d, Power::kHalleyStep);
      }
    }
    VF next = hn::NegMulAdd(fall, t, t);
    next = hn::Min(hn::Max(next, hn::Mul(t, hn::Set(d, 0.05f))), one);
    // False for lanes without candidates, where `fall` is NaN.
    active = hn::And(active, hn::Eq(fall, fall));
    if (step > kHalley) active = hn::And(active, hn::Lt(next, t));
    t = hn::IfThenElse(active, next, t);
    active = hn::And(active, hn::Gt(hn::Abs(fall), last));
  }
  hn::Store(t, d, at);
}

// ---- weights ------------------------------------------------------------------------------------

// z becomes weights.
template <class Power>
HWY_NOINLINE void weigh_powers(const Power& power, double factor, const float* at, SparseStrip& p) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  HWY_ALIGN float inverses[kMaxLanes];
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
    hn::Store(inverse, d, inverses + v * L);
    VF slope;
    hn::Store(hn::Mul(power(zero, t, inverse_t, slope), inverse), d, p.max_weight + v * L);
    hn::Store(sums[1], d, p.support + v * L);
  }
  for (int64_t lane = 0; lane < W; ++lane) {
    p.row_stat[lane] = static_cast<float>(factor * p.max[lane] - at[lane]);
  }
  const VF i0 = hn::Load(d, inverses), i1 = hn::Load(d, inverses + L);
  keep_weights(p, [&](VF e0, VF e1, VF& w0, VF& w1) HWY_ATTR {
    w0 = hn::Mul(e0, i0);
    w1 = hn::Mul(e1, i1);
  });
}

// `enough`: what the last step of Newton may be, as a part of t.
template <class Power>
void settle_and_weigh(const Power& power, float enough, double factor, float* t, SparseStrip& p) {
  const int64_t L = lanes();
  const auto settle = [&](int steps) HWY_ATTR {
    for (int v = 0; v < kVectors; ++v) {
      settle_t(power, enough, steps, p.count, p.weights + v * L, p.index, t + v * L);
    }
  };
  if (!Power::kCurved) {
    // More steps to come, and after one of Newton's no root is above t, but for rounding.
    settle(1);
    HWY_ALIGN float above[kMaxLanes];
    for (int lane = 0; lane < kMaxLanes; ++lane) above[lane] = t[lane] * 1.00001f;
    keep_above(above, p);
  }
  settle(64);
  weigh_powers(power, factor, t, p);
}

// Candidates, as gather_candidates leaves them, become weights. row_stat: τ of the first `used`
// lanes to the digits of a float, or null.
inline void solve_entmax(double alpha, const float* row_stat, int used, SparseStrip& p) {
  const DF d;
  HWY_ALIGN float t[kMaxLanes];
  const auto factor = static_cast<float>(alpha - 1);
  const auto power = static_cast<float>(1 / (alpha - 1));
  for (int lane = 0; lane < kMaxLanes; ++lane) {
    const bool known = row_stat != nullptr && lane < used;
    const double start = known ? (alpha - 1) * double{p.max[lane]} - double{row_stat[lane]} : 1;
    t[lane] = start > 0 && start < 1 ? HWY_MAX(static_cast<float>(start), 1e-30f) : 1.0f;
  }
  // With P ≥ 2 slopes change smoothly, and a step of 2^-13 is followed by one of about 2^-26.
  // Below, keys that leave within a step x change the slope by x^(P−1), and what is left is x^P.
  const auto enough = static_cast<float>(std::exp2(-HWY_MAX(13.0, 22 * (alpha - 1))));
  if (alpha == 1.5) return settle_and_weigh(SquarePower{}, enough, alpha - 1, t, p);
  const PowerNodes nodes = power_nodes(1 / (alpha - 1));
  if (row_stat == nullptr) {
    nodes.counts ? approach_by_sample<true>(nodes, factor, p, t)
                 : approach_by_sample<false>(nodes, factor, p, t);
  }
  const auto solve = [&](auto steady, auto curved) {
    const VF less_one = hn::Set(d, static_cast<float>(1 / (alpha - 1) - 1));
    const VF lowest = hn::Set(d, static_cast<float>(1 / (alpha - 1) - (curved ? 2 : 1)));
    settle_and_weigh(FractionPower<steady, curved>{lowest, less_one, hn::Set(d, factor)}, enough,
                     alpha - 1, t, p);
  };
  if (alpha > 1.5) return solve(std::false_type(), std::false_type());
  return power >= 4 ? solve(std::true_type(), std::true_type())
                    : solve(std::false_type(), std::true_type());
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
