// Sparsemax over strips (Martins & Astudillo 2016): p = [s − τ]₊ with Σ p = 1.
//
// Only scores above the row's maximum − 1 can have weight. Keys that are such a candidate in some
// lane are copied into a short, dense strip (with their numbers), τ is solved there, and the
// products that follow walk that strip alone.
#if defined(FOCI_KERNELS_SPARSEMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_SPARSEMAX_INL_H_
#undef FOCI_KERNELS_SPARSEMAX_INL_H_
#else
#define FOCI_KERNELS_SPARSEMAX_INL_H_
#endif

#include "foci/kernels/strips-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

struct SparsemaxRows {
  HWY_ALIGN float max[kMaxLanes];
  HWY_ALIGN float tau[kMaxLanes];      // of scores minus max, in [−1, 0); +inf in an empty row
  HWY_ALIGN float support[kMaxLanes];  // number of keys with weight
};

inline HWY_NOINLINE void row_max(int64_t count, const float* strip, float* max) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  VF m0 = hn::Set(d, -kInf), m1 = m0;
  for (int64_t j = 0; j < count; ++j) {
    m0 = max_of_scores(hn::Load(d, strip + j * W), m0);
    m1 = max_of_scores(hn::Load(d, strip + j * W + L), m1);
  }
  hn::Store(m0, d, max);
  hn::Store(m1, d, max + L);
}

// In place: scores of `count` keys become scores minus max of the keys that are a candidate in some
// lane; index[u] is the key (first + j) of row u. Returns how many there are.
inline HWY_NOINLINE int64_t compact_candidates(int64_t count, int64_t first, const float* max,
                                               float* strip, int32_t* index) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF m0 = hn::Load(d, max), m1 = hn::Load(d, max + L);
  const VF minus_one = hn::Set(d, -1.0f);
  int64_t u = 0;
  for (int64_t j = 0; j < count; ++j) {
    // A lane without keys has max −inf: its −inf − −inf is NaN, no candidate.
    const VF z0 = hn::Sub(hn::Load(d, strip + j * W), m0);
    const VF z1 = hn::Sub(hn::Load(d, strip + j * W + L), m1);
    const bool any =
        !hn::AllFalse(d, hn::Gt(z0, minus_one)) || !hn::AllFalse(d, hn::Gt(z1, minus_one));
    hn::Store(z0, d, strip + u * W);
    hn::Store(z1, d, strip + u * W + L);
    index[u] = static_cast<int32_t>(first + j);
    u += any ? 1 : 0;
  }
  return u;
}

// τ by Michelot's iteration from τ = −1 (every candidate in): τ rises to its fixed point, and a
// lane that has reached it stays, so that neighbours that take longer change nothing.
inline HWY_NOINLINE void solve_tau(int64_t count, const float* strip, SparsemaxRows& rows) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF one = hn::Set(d, 1.0f);
  VF tau0 = hn::Set(d, -1.0f), tau1 = tau0;
  VF k0 = hn::Zero(d), k1 = k0;
  for (;;) {
    VF sum0 = hn::Zero(d), sum1 = sum0;
    VF n0 = hn::Zero(d), n1 = n0;
    for (int64_t u = 0; u < count; ++u) {
      const VF z0 = hn::Load(d, strip + u * W), z1 = hn::Load(d, strip + u * W + L);
      const hn::Mask<DF> in0 = hn::Gt(z0, tau0), in1 = hn::Gt(z1, tau1);
      sum0 = hn::Add(sum0, hn::IfThenElseZero(in0, z0));
      sum1 = hn::Add(sum1, hn::IfThenElseZero(in1, z1));
      n0 = hn::Add(n0, hn::IfThenElseZero(in0, one));
      n1 = hn::Add(n1, hn::IfThenElseZero(in1, one));
    }
    // A set that did not shrink is the support. Counts are exact below 2²⁴ keys.
    const bool settled = hn::AllTrue(d, hn::Eq(n0, k0)) && hn::AllTrue(d, hn::Eq(n1, k1));
    k0 = n0;
    k1 = n1;
    if (settled) break;
    // Rounding must not push τ down again, nor past the largest candidate (which is 0).
    tau0 = hn::Max(tau0, hn::Div(hn::Sub(sum0, one), n0));
    tau1 = hn::Max(tau1, hn::Div(hn::Sub(sum1, one), n1));
    const VF below_zero = hn::Set(d, -1.17549435e-38f);
    tau0 = hn::IfThenElse(hn::Gt(n0, hn::Zero(d)), hn::Min(tau0, below_zero), tau0);
    tau1 = hn::IfThenElse(hn::Gt(n1, hn::Zero(d)), hn::Min(tau1, below_zero), tau1);
  }
  const VF inf = hn::Set(d, kInf);
  hn::Store(hn::IfThenElse(hn::Eq(k0, hn::Zero(d)), inf, tau0), d, rows.tau);
  hn::Store(hn::IfThenElse(hn::Eq(k1, hn::Zero(d)), inf, tau1), d, rows.tau + L);
  hn::Store(k0, d, rows.support);
  hn::Store(k1, d, rows.support + L);
}

// In place: candidates become weights z − τ, −0 where there is none; keys without weight in every
// lane leave the strip. Returns how many stay.
inline HWY_NOINLINE int64_t compact_weights(int64_t count, const SparsemaxRows& rows, float* strip,
                                            int32_t* index) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF tau0 = hn::Load(d, rows.tau), tau1 = hn::Load(d, rows.tau + L);
  const VF minus_zero = hn::Set(d, -0.0f);
  int64_t kept = 0;
  for (int64_t u = 0; u < count; ++u) {
    const VF z0 = hn::Load(d, strip + u * W), z1 = hn::Load(d, strip + u * W + L);
    const hn::Mask<DF> in0 = hn::Gt(z0, tau0), in1 = hn::Gt(z1, tau1);
    hn::Store(hn::IfThenElse(in0, hn::Sub(z0, tau0), minus_zero), d, strip + kept * W);
    hn::Store(hn::IfThenElse(in1, hn::Sub(z1, tau1), minus_zero), d, strip + kept * W + L);
    index[kept] = index[u];
    kept += hn::AllFalse(d, in0) && hn::AllFalse(d, in1) ? 0 : 1;
  }
  return kept;
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
