// The k-th largest of a strip's rows in every lane: a bracket around it is made narrower by
// counting the scores that reach a number inside, which is chosen as if scores were normal.
#if defined(FOCI_KERNELS_TOPK_LEAST_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_TOPK_LEAST_INL_H_
#undef FOCI_KERNELS_TOPK_LEAST_INL_H_
#else
#define FOCI_KERNELS_TOPK_LEAST_INL_H_
#endif

#include <cstring>

#include "foci/kernels/attention/normalizers/sparse-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Integers in the order of the floats. −0 stands just below +0.
HWY_INLINE int32_t ordered(float x) {
  int32_t i;
  std::memcpy(&i, &x, sizeof(i));
  return i ^ ((i >> 31) & 0x7FFFFFFF);
}
HWY_INLINE float from_ordered(int32_t i) {
  i ^= (i >> 31) & 0x7FFFFFFF;
  float x;
  std::memcpy(&x, &i, sizeof(x));
  return x;
}

// Runs of rows of a strip: begin, end, begin, end, …
struct RowRuns {
  const int32_t* ends;
  int64_t count;
};
template <class F>
HWY_INLINE void each_row(const RowRuns& runs, const F& f) {
  for (int64_t n = 0; n < runs.count; ++n) {
    const int64_t end = runs.ends[2 * n + 1];
    for (int64_t r = runs.ends[2 * n]; r < end; ++r) f(r);
  }
}

template <class Mask>
HWY_INLINE VI count_if(VI n, const Mask& mask) {
  const DI di;
  return hn::Sub(n, hn::VecFromMask(di, hn::RebindMask(di, mask)));
}

HWY_INLINE VI ordered(VF x) {
  const DI di;
  const VI i = hn::BitCast(di, x);
  return hn::Xor(i, hn::And(hn::ShiftRight<31>(i), hn::Set(di, 0x7FFFFFFF)));
}
HWY_INLINE VF from_ordered(VI i) {
  const DI di;
  return hn::BitCast(DF(), hn::Xor(i, hn::And(hn::ShiftRight<31>(i), hn::Set(di, 0x7FFFFFFF))));
}

// About how many deviations above the mean of normal numbers a share `p` of them lies, 0 < p < 1
// (Abramowitz and Stegun 26.2.22).
HWY_INLINE VF normal_quantile(VF p) {
  const DF d;
  const VF one = hn::Set(d, 1.0f);
  const hn::Mask<DF> lower = hn::Gt(p, hn::Set(d, 0.5f));
  const VF tail = hn::IfThenElse(lower, hn::Sub(one, p), p);
  const VF t = hn::Sqrt(hn::Mul(hn::Set(d, -2.0f), log_positive(d, tail)));
  const VF above = hn::MulAdd(t, hn::Set(d, 0.27061f), hn::Set(d, 2.30753f));
  const VF below = hn::MulAdd(hn::MulAdd(t, hn::Set(d, 0.04481f), hn::Set(d, 0.99229f)), t, one);
  const VF z = hn::Sub(t, hn::Div(above, below));
  return hn::IfThenElse(lower, hn::Neg(z), z);
}

// One vector of lanes on the way to its k-th largest score: at least k scores reach `low`, fewer
// than k lie above `high`, and both are somewhere between the least and the largest.
struct LeastBracket {
  VF low, high;
  VF low_count, n;   // scores that reach `low`; all
  VF low_z, high_z;  // where normal scores of such counts would lie
  VF middle;         // next to be tried, in (low, high]
  bool open;

  void begin(VF bottom, VF top, VI count, VF k) {
    const DF d;
    const VF half = hn::Set(d, 0.5f), minus_inf = hn::Set(d, -kInf);
    n = hn::ConvertTo(d, count);
    const hn::Mask<DF> all = hn::Le(n, k);
    low = hn::IfThenElse(all, minus_inf, bottom);
    high = hn::IfThenElse(all, minus_inf, top);
    low_count = n;
    high_z = normal_quantile(hn::Div(half, n));
    low_z = hn::Neg(high_z);
  }

  // Between `low` and `high` where the scores would be normal; by halves, as numbers and at last
  // as bits, every few steps and where that is not to be had.
  void choose(int step, VF k_z) {
    const DF d;
    const VF width = hn::Sub(high, low);
    open = !hn::AllTrue(d, hn::Ge(low, high));
    const auto between = [&](VF x) HWY_ATTR { return hn::And(hn::Gt(x, low), hn::Le(x, high)); };
    const VI l = ordered(low), h = ordered(high);
    middle = from_ordered(hn::Sub(hn::Or(l, h), hn::ShiftRight<1>(hn::Xor(l, h))));
    if (step >= kNumberSteps) return;
    const VF mean = hn::MulAdd(width, hn::Set(d, 0.5f), low);
    middle = hn::IfThenElse(between(mean), mean, middle);
    if (step % 4 == 3) return;
    const VF share = hn::Div(hn::Sub(k_z, low_z), hn::Sub(high_z, low_z));
    const VF normal = hn::MulAdd(width, share, low);
    middle = hn::IfThenElse(between(normal), normal, middle);
  }

  // `count` scores reach `middle`; `at` is the least of these, or less, `below` the largest of the
  // others, or more.
  void take(VI count, VF k, VF at, VF below) {
    const DF d;
    const VF c = hn::ConvertTo(d, count);
    const hn::Mask<DF> undone = hn::Lt(low, high);
    const hn::Mask<DF> reach = hn::And(undone, hn::Ge(c, k));
    const hn::Mask<DF> few = hn::And(undone, hn::Lt(c, k));
    const VF z = normal_quantile(hn::Div(hn::Max(c, hn::Set(d, 0.5f)), n));
    low = hn::IfThenElse(reach, at, low);
    low_count = hn::IfThenElse(reach, c, low_count);
    low_z = hn::IfThenElse(reach, z, low_z);
    high = hn::IfThenElse(few, below, high);
    high_z = hn::IfThenElse(few, z, high_z);
    high = hn::IfThenElse(hn::And(reach, hn::Eq(c, k)), low, high);
  }

  static constexpr int kNumberSteps = 24;
};

// `least[lane]`: the k-th largest score of the rows, so that a row's choice is every score above it
// and the first `ties[lane]` equal to it. Scores of −inf are not there; lanes with no more than k
// others choose them all: −inf. No score is −0.
inline HWY_NOINLINE void find_least(const RowRuns& rows, int64_t k, const float* score,
                                    float* least, int32_t* ties) {
  const DF d;
  const DI di;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF inf = hn::Set(d, kInf), minus_inf = hn::Set(d, -kInf);
  const VF wanted = hn::Set(d, static_cast<float>(k));
  VF bottom0 = inf, bottom1 = inf, top0 = minus_inf, top1 = minus_inf;
  VI n0 = hn::Zero(di), n1 = n0;
  each_row(rows, [&](int64_t r) HWY_ATTR {
    const VF s0 = hn::Load(d, score + r * W), s1 = hn::Load(d, score + r * W + L);
    const hn::Mask<DF> there0 = hn::Gt(s0, minus_inf), there1 = hn::Gt(s1, minus_inf);
    bottom0 = hn::IfThenElse(hn::And(there0, hn::Lt(s0, bottom0)), s0, bottom0);
    bottom1 = hn::IfThenElse(hn::And(there1, hn::Lt(s1, bottom1)), s1, bottom1);
    top0 = max_of_scores(s0, top0);
    top1 = max_of_scores(s1, top1);
    n0 = count_if(n0, there0);
    n1 = count_if(n1, there1);
  });
  LeastBracket b0, b1;
  b0.begin(bottom0, top0, n0, wanted);
  b1.begin(bottom1, top1, n1, wanted);
  const VF z0 = normal_quantile(hn::Div(wanted, hn::Max(b0.n, wanted)));
  const VF z1 = normal_quantile(hn::Div(wanted, hn::Max(b1.n, wanted)));
  // Where scores repeat, counts do not come to k: brackets then move from score to score.
  constexpr int kBlindSteps = 6;
  for (int step = 0;; ++step) {
    b0.choose(step, z0);
    b1.choose(step, z1);
    if (!b0.open && !b1.open) break;
    const VF m0 = b0.middle, m1 = b1.middle;
    n0 = n1 = hn::Zero(di);
    if (step < kBlindSteps) {
      each_row(rows, [&](int64_t r) HWY_ATTR {
        n0 = count_if(n0, hn::Ge(hn::Load(d, score + r * W), m0));
        n1 = count_if(n1, hn::Ge(hn::Load(d, score + r * W + L), m1));
      });
      const VI one = hn::Set(di, 1);
      b0.take(n0, wanted, m0, from_ordered(hn::Sub(ordered(m0), one)));
      b1.take(n1, wanted, m1, from_ordered(hn::Sub(ordered(m1), one)));
      continue;
    }
    VF at0 = inf, at1 = inf, below0 = minus_inf, below1 = minus_inf;
    each_row(rows, [&](int64_t r) HWY_ATTR {
      const VF s0 = hn::Load(d, score + r * W), s1 = hn::Load(d, score + r * W + L);
      const hn::Mask<DF> reach0 = hn::Ge(s0, m0), reach1 = hn::Ge(s1, m1);
      n0 = count_if(n0, reach0);
      n1 = count_if(n1, reach1);
      at0 = hn::IfThenElse(hn::And(reach0, hn::Lt(s0, at0)), s0, at0);
      at1 = hn::IfThenElse(hn::And(reach1, hn::Lt(s1, at1)), s1, at1);
      below0 = hn::IfThenElse(hn::And(hn::Lt(s0, m0), hn::Gt(s0, below0)), s0, below0);
      below1 = hn::IfThenElse(hn::And(hn::Lt(s1, m1), hn::Gt(s1, below1)), s1, below1);
    });
    b0.take(n0, wanted, at0, below0);
    b1.take(n1, wanted, at1, below1);
  }
  VF at0 = inf, at1 = inf;
  n0 = n1 = hn::Zero(di);
  each_row(rows, [&](int64_t r) HWY_ATTR {
    const VF s0 = hn::Load(d, score + r * W), s1 = hn::Load(d, score + r * W + L);
    at0 = hn::IfThenElse(hn::And(hn::Ge(s0, b0.low), hn::Lt(s0, at0)), s0, at0);
    at1 = hn::IfThenElse(hn::And(hn::Ge(s1, b1.low), hn::Lt(s1, at1)), s1, at1);
    n0 = count_if(n0, hn::Gt(s0, b0.low));
    n1 = count_if(n1, hn::Gt(s1, b1.low));
  });
  const auto finish = [&](const LeastBracket& b, VF at, VI above, float* to,
                          int32_t* equal) HWY_ATTR {
    const hn::Mask<DF> all = hn::Eq(b.low, minus_inf);
    hn::Store(hn::IfThenElse(all, minus_inf, at), d, to);
    // k scores that reach the least leave no tie out.
    const VF left = hn::IfThenElse(hn::Eq(b.low_count, wanted), wanted,
                                   hn::Sub(wanted, hn::ConvertTo(d, above)));
    hn::Store(hn::ConvertTo(di, hn::IfThenElse(all, hn::Zero(d), left)), di, equal);
  };
  finish(b0, at0, n0, least, ties);
  finish(b1, at1, n1, least + L, ties + L);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
