// The gradient for entmax's α, row by row, from a strip's weights and the gradients of them.
//
// With β = α − 1, u = p^β, f = p^(2−α) = p/u, F = Σf and H the entropy, differentiating
// β ln p_j = ln(β s_j − τ) gives
//   ∂p_j/∂α = (p_j (1/β − ln p_j) − (1/β + H) f_j/F)/β.
// Near α = 1 the 1/β² in it cancel: up to α = 2 it is taken as f_j (ā − a_j),
// a = (1 − u(1 − ln u))/β², whose mean ā is weighted with f.
#if defined(FOCI_KERNELS_ATTENTION_ALPHA_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_ALPHA_GRADIENT_INL_H_
#undef FOCI_KERNELS_ATTENTION_ALPHA_GRADIENT_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_ALPHA_GRADIENT_INL_H_
#endif

#include <cmath>

#include "foci/kernels/attention/sparse_upstream-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// a of a weight whose logarithm is given: by its series in z = −β ln p below 1, where the
// difference would cancel.
HWY_INLINE VF alpha_term(VF log_p, float beta) {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  const VF z = hn::Mul(hn::Set(d, -beta), log_p);
  // Σ (−z)^k (k + 1)/(k + 2)!
  VF series = hn::Set(d, 11.0f / 479001600);
  constexpr float kTerms[] = {-10.0f / 39916800, 9.0f / 3628800, -8.0f / 362880, 7.0f / 40320,
                              -6.0f / 5040,      5.0f / 720,     -4.0f / 120,    3.0f / 24,
                              -2.0f / 6,         1.0f / 2};
  for (float term : kTerms) series = hn::MulAdd(series, z, hn::Set(d, term));
  series = hn::Mul(hn::Mul(log_p, log_p), series);
  const VF u = exp_nonpositive(d, hn::Neg(hn::Max(z, hn::Zero(d))));
  const VF whole = hn::Mul(hn::NegMulAdd(u, hn::Add(one, z), one),
                           hn::Set(d, static_cast<float>(1 / (double{beta} * beta))));
  return hn::IfThenElse(hn::Lt(z, one), series, whole);
}

// to[lane], lanes < used: the row's part. f: sparse_factors of the strip, or their logarithms where
// α > 2; dp: as sparse_score_gradients takes it.
inline HWY_NOINLINE void alpha_gradients(double alpha, const SparseStrip& p, const float* f,
                                         const SparseUpstream& up, const float* dcoverage,
                                         const float* dp, int used, float* to) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const bool steep = alpha > 2;
  const auto beta = static_cast<float>(alpha - 1);
  const VF power = hn::Set(d, static_cast<float>(1 / (alpha - 1))), zero = hn::Zero(d);
  HWY_ALIGN float factors[kMaxLanes], entropies[kMaxLanes], means[kMaxLanes], totals[kMaxLanes];
  HWY_ALIGN float largest[kMaxLanes];  // of the logarithms; F counts f in units of that one
  for (int v = 0; v < kVectors; ++v) {
    const float* weights = p.weights + v * L;
    const float* own = f + v * L;
    const float* g = dp + v * L;
    const WeightGradient gradient(p, up, dcoverage, v);
    VF most = hn::Set(d, -kInf);
    for (int64_t u = 0; steep && u < p.count; ++u) {
      const VF w = hn::Load(d, weights + u * W), log = hn::Load(d, own + u * W);
      most = hn::IfThenElse(hn::Gt(w, zero), hn::Max(most, log), most);
    }
    const auto factor_of = [&](int64_t u, hn::Mask<DF> in) HWY_ATTR {
      VF x = hn::Load(d, own + u * W);
      if (steep) x = exp_nonpositive(d, hn::Min(hn::Sub(x, most), zero));
      return hn::IfThenElseZero(in, x);
    };
    // F, H, what ā and the mean of g are weighted sums of.
    VF sums[4] = {zero, zero, zero, zero};
    sum_rows(p.count, p.index, sums, [&](int64_t u, VF* part) HWY_ATTR {
      const VF w = hn::Load(d, weights + u * W), log_p = log_positive(d, w);
      const hn::Mask<DF> in = hn::Gt(w, zero);
      const VF factor = factor_of(u, in);
      part[0] = hn::Add(part[0], factor);
      part[1] = hn::Sub(part[1], hn::IfThenElseZero(in, hn::Mul(w, log_p)));
      if (!steep) {
        const VF a = hn::Mul(factor, alpha_term(log_p, beta));
        part[2] = hn::Add(part[2], hn::IfThenElseZero(in, a));
      }
      part[3] = hn::MulAdd(factor, gradient(u, w, hn::Load(d, g + u * W)), part[3]);
    });
    const VF mean = hn::Div(sums[2], sums[0]), mean_g = hn::Div(sums[3], sums[0]);
    const VF shift = hn::Div(hn::Add(power, sums[1]), sums[0]);
    VF total[1] = {zero};
    sum_rows(p.count, p.index, total, [&](int64_t u, VF* part) HWY_ATTR {
      const VF w = hn::Load(d, weights + u * W), log_p = log_positive(d, w);
      const hn::Mask<DF> in = hn::Gt(w, zero);
      const VF factor = factor_of(u, in);
      const VF x = hn::Sub(gradient(u, w, hn::Load(d, g + u * W)), mean_g);
      VF moved;
      if (steep) {
        const VF free = hn::Mul(w, hn::Sub(power, log_p));
        moved = hn::Mul(power, hn::NegMulAdd(shift, factor, free));
      } else {
        moved = hn::Mul(factor, hn::Sub(mean, alpha_term(log_p, beta)));
      }
      part[0] = hn::Add(part[0], hn::IfThenElseZero(in, hn::Mul(moved, x)));
    });
    hn::Store(sums[0], d, factors + v * L);
    hn::Store(sums[1], d, entropies + v * L);
    hn::Store(mean, d, means + v * L);
    hn::Store(total[0], d, totals + v * L);
    hn::Store(most, d, largest + v * L);
  }
  for (int lane = 0; lane < used; ++lane) {
    if (p.broken >> lane & 1u) {
      to[lane] = kNaN;
    } else if (!(p.seen >> lane & 1u)) {
      to[lane] = 0;
    } else {
      double sum = totals[lane];
      if (up.drow_stat[lane] != 0) {
        // u being that of the largest score m, ∂τ/∂α = m + (1 − u)(1/β + H)/F − β ā u.
        const double b = alpha - 1, log_u = b * std::log(double{p.max_weight[lane]});
        double shift = (1 / b + entropies[lane]) / factors[lane];
        if (steep) shift *= std::exp(-double{largest[lane]});
        const double moved = steep ? shift - std::exp(log_u) / b
                                   : -std::expm1(log_u) * shift - b * means[lane] * std::exp(log_u);
        sum += up.drow_stat[lane] * (p.max[lane] + moved);
      }
      to[lane] = static_cast<float>(sum);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
