// What arrives for a strip's weights in backward: dP, and what the gradients of statistics ask for.
#if defined(FOCI_KERNELS_ATTENTION_SPARSE_UPSTREAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_SPARSE_UPSTREAM_INL_H_
#undef FOCI_KERNELS_ATTENTION_SPARSE_UPSTREAM_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_SPARSE_UPSTREAM_INL_H_
#endif

#include "foci/kernels/attention/normalizers/sparse-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Upstream gradients of a strip's statistics, one a lane.
struct SparseUpstream {
  HWY_ALIGN float dentropy[kMaxLanes] = {};
  HWY_ALIGN float dmax_weight[kMaxLanes] = {};
  HWY_ALIGN float drow_stat[kMaxLanes] = {};
  HWY_ALIGN int32_t max_key[kMaxLanes];
};

inline void take_upstream(const TileGradients& g, int64_t first, int lanes, SparseUpstream& up) {
  for (int32_t& key : up.max_key) key = -1;
  for (int lane = 0; lane < lanes; ++lane) {
    const int64_t i = first + lane;
    if (g.dentropy) up.dentropy[lane] = g.dentropy[i];
    if (g.drow_stat) up.drow_stat[lane] = g.drow_stat[i];
    if (g.dmax_weight) {
      up.dmax_weight[lane] = g.dmax_weight[i];
      up.max_key[lane] = static_cast<int32_t>(g.max_key[i]);
    }
  }
}

// g: dP and what the statistics ask for, of row u of the strip, whose weights are w. Masked: 0.
struct WeightGradient {
  const SparseStrip& p;
  const float* dcoverage;
  VF dentropy, dmax;
  VI max_key;
  bool entropy;

  WeightGradient(const SparseStrip& strip, const SparseUpstream& up, const float* coverage, int v)
      : p(strip), dcoverage(coverage) {
    const int64_t L = lanes();
    dentropy = hn::Load(DF(), up.dentropy + v * L);
    dmax = hn::Load(DF(), up.dmax_weight + v * L);
    max_key = hn::Load(DI(), up.max_key + v * L);
    entropy = !hn::AllTrue(DF(), hn::Eq(dentropy, hn::Zero(DF())));
  }
  HWY_INLINE VF operator()(int64_t u, VF w, VF x) const {
    const DF d;
    if (dcoverage) x = hn::Add(x, hn::Set(d, dcoverage[p.index[u]]));
    const VI key = hn::Set(DI(), p.index[u]);
    x = hn::Add(x, hn::IfThenElseZero(hn::RebindMask(d, hn::Eq(key, max_key)), dmax));
    if (entropy) {
      // ∂(−p ln p)/∂p = −ln p − 1, and the 1 cancels in the mean.
      const VF y = hn::Mul(dentropy, log_positive(d, w));
      x = hn::Sub(x, hn::IfThenElseZero(hn::Gt(w, hn::Zero(d)), y));
    }
    return hn::IfThenZeroElse(is_masked(w), x);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
