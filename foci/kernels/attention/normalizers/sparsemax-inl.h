// Sparsemax over strips (Martins & Astudillo 2016): p = [s − τ]₊ with Σ p = 1.
#if defined(FOCI_KERNELS_SPARSEMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_SPARSEMAX_INL_H_
#undef FOCI_KERNELS_SPARSEMAX_INL_H_
#else
#define FOCI_KERNELS_SPARSEMAX_INL_H_
#endif

#include "foci/kernels/attention/normalizers/sparse-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// τ (of scores minus max) of one vector of lanes by Michelot's iteration from τ = −1, every
// candidate in: τ rises to its fixed point. What is summed is z − τ, whose total is near 1 at the
// end, so that the last step finds τ to its own rounding, however many keys there are. A lane that
// has reached it stays, so that neighbours that take longer change nothing.
inline VF sparsemax_threshold(int64_t count, const float* strip, const int32_t* index,
                              VF& support) {
  const DF d;
  const int64_t W = strip_width();
  const VF one = hn::Set(d, 1.0f), zero = hn::Zero(d);
  VF tau = hn::Set(d, -1.0f);
  VF n = zero;
  hn::Mask<DF> open = hn::Eq(one, one);
  do {
    VF sums[2] = {zero, zero};
    sum_rows(count, index, sums, [&](int64_t u, VF* part) HWY_ATTR {
      const VF over = hn::Max(hn::Sub(hn::Load(d, strip + u * W), tau), zero);
      part[0] = hn::Add(part[0], over);
      part[1] = hn::Add(part[1], hn::IfThenElseZero(hn::Gt(over, zero), one));
    });
    // A set that did not shrink is the support. Counts are exact below 2²⁴ keys.
    const hn::Mask<DF> settled = hn::Eq(sums[1], n);
    const VF step = hn::Div(hn::Sub(sums[0], one), sums[1]);
    // Rounding must not push τ down again while keys leave, nor past the largest candidate (0).
    VF next = hn::Add(tau, hn::IfThenElse(settled, step, hn::Max(step, zero)));
    next = hn::Min(next, hn::Set(d, -1.17549435e-38f));
    tau = hn::IfThenElse(hn::And(open, hn::Gt(sums[1], zero)), next, tau);
    n = hn::IfThenElse(open, sums[1], n);
    open = hn::AndNot(settled, open);
  } while (!hn::AllFalse(d, open));
  support = n;
  return tau;
}

// Candidates become weights z − τ.
inline HWY_NOINLINE void solve_sparsemax(SparseStrip& p) {
  const DF d;
  const int64_t L = lanes();
  for (int v = 0; v < kVectors; ++v) {
    float* strip = p.weights + v * L;
    VF n = hn::Zero(d);
    const VF tau = sparsemax_threshold(p.count, strip, p.index, n);
    hn::Store(hn::Neg(tau), d, p.max_weight + v * L);
    hn::Store(hn::Add(hn::Load(d, p.max + v * L), tau), d, p.row_stat + v * L);
  }
  const VF tau0 = hn::Neg(hn::Load(d, p.max_weight)), tau1 = hn::Neg(hn::Load(d, p.max_weight + L));
  const VF zero = hn::Zero(d), one = hn::Set(d, 1.0f);
  VF n0 = zero, n1 = zero;
  keep_weights(p, [&](VF z0, VF z1, VF& w0, VF& w1) HWY_ATTR {
    w0 = hn::Sub(z0, tau0);
    w1 = hn::Sub(z1, tau1);
    n0 = hn::Add(n0, hn::IfThenElseZero(hn::Gt(w0, zero), one));
    n1 = hn::Add(n1, hn::IfThenElseZero(hn::Gt(w1, zero), one));
  });
  hn::Store(n0, d, p.support);
  hn::Store(n1, d, p.support + L);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
