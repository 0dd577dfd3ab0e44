// α-entmax over strips for α > 2: p = [(α−1)s − τ]₊^P with P = 1/(α−1) below 1 leaves 0 with an
// infinite slope, so that τ can lie nearer to a score than numbers lie to each other, and the
// weight of that score still be large: a distance of 1e-60 is a weight of 0.06 at α = 50.
//
// So what is looked for is the smallest score v that has weight, and that weight w. With c = α−1,
// τ = c·v − w^c, and
//   p_j = (c·(s_j − v) + w^c)^P for s_j > v, w for s_j = v:
// differences of scores, which lose no digits. v is the lowest score for which those above it do
// not add to 1 yet; Σp is convex in w, with a slope of 1 or more, whatever α is.
//
// Each lane is solved on a dense list of its own candidates.
#if defined(FOCI_KERNELS_ENTMAX_STEEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ENTMAX_STEEP_INL_H_
#undef FOCI_KERNELS_ENTMAX_STEEP_INL_H_
#else
#define FOCI_KERNELS_ENTMAX_STEEP_INL_H_
#endif

#include <cmath>
#include <limits>

#include "foci/kernels/attention/normalizers/sparse-inl.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// x^a for 0 ≤ x ≤ 2, 0 < a < 1, in lanes of float or double.
HWY_INLINE VF power_for_sum(VF x, VF a) {
  return power_positive(DF(), x, a);
}
using DD = hn::ScalableTag<double>;
using VD = hn::Vec<DD>;
HWY_INLINE VD power_for_sum(VD x, VD a) {
  const DD d;
  return hn::Exp(d, hn::Mul(a, hn::Log(d, x)));
}
HWY_INLINE VF load_scores(DF d, const float* from) {
  return hn::LoadU(d, from);
}
HWY_INLINE VD load_scores(DD d, const float* from) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, DD>(), from));
}

// A lane's candidates: `count` scores, followed by a vector of −inf.
struct ScoreList {
  float* score;
  int64_t count;

  void end() {
    for (int64_t n = count; n < count + lanes(); ++n) score[n] = -kInf;
  }
  // Leaves those from `least` up, in their order.
  void keep_from(float least) {
    int64_t kept = 0;
    for (int64_t n = 0; n < count; ++n) {
      const float x = score[n];
      score[kept] = x;
      kept += x >= least ? 1 : 0;
    }
    count = kept;
    end();
  }
};

struct SteepSums {
  double sum = 0, slope = 0;  // Σp if v is the smallest score that has weight, and ∂/∂w
  double equal = 0;           // how many scores are v
  float below = -kInf;        // the next lower score
};

// In lanes of T. w = 0: Σ of what the scores above v have.
template <class T>
HWY_NOINLINE SteepSums sum_steep(const ScoreList& list, float v, double w, double c) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const auto N = static_cast<int64_t>(hn::Lanes(d));
  const double delta = w > 0 ? std::pow(w, c) : 0;
  const V at = hn::Set(d, T{v}), one = hn::Set(d, T{1}), zero = hn::Zero(d);
  const V factor = hn::Set(d, static_cast<T>(c)), power = hn::Set(d, static_cast<T>(1 / c));
  const V from_v = hn::Set(d, static_cast<T>(delta));
  constexpr int64_t kBlock = 512;
  SteepSums s;
  V below = hn::Set(d, -std::numeric_limits<T>::infinity()), equal = zero;
  for (int64_t lo = 0; lo < list.count; lo += kBlock) {
    const int64_t hi = HWY_MIN(lo + kBlock, list.count);
    V sum = zero, slope = zero;
    for (int64_t n = lo; n < hi; n += N) {
      const V x = load_scores(d, list.score + n);
      const auto above = hn::Gt(x, at), same = hn::Eq(x, at);
      below = hn::Max(below, hn::IfThenElse(hn::Lt(x, at), x, below));
      equal = hn::Add(equal, hn::IfThenElseZero(same, one));
      if (hn::AllFalse(d, above)) continue;
      const V over = hn::IfThenElse(above, hn::MulAdd(factor, hn::Sub(x, at), from_v), one);
      const V p = hn::IfThenElseZero(above, power_for_sum(over, power));
      sum = hn::Add(sum, p);
      slope = hn::Add(slope, hn::Div(p, over));
    }
    s.sum += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, sum)));
    s.slope += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, slope)));
  }
  s.below = static_cast<float>(hn::GetLane(hn::MaxOfLanes(d, below)));
  s.equal = static_cast<double>(hn::GetLane(hn::SumOfLanes(d, equal)));
  s.sum += w * s.equal;
  s.slope = s.equal + (delta > 0 ? s.slope * (delta / w) : 0);
  return s;
}

// `in` is a score known to have weight, with its sums; scores of `out` and below have none. Ends
// when no score is left between them.
struct SteepBracket {
  float in, out;
  SteepSums sums;

  // The weight of `in` is at most this, since Σp grows with it by `equal` at least.
  double most_weight() const { return (1 - sums.sum) / sums.equal; }
  bool closed(double c) const {
    // What lies farther below `in` than τ at its lowest is out as well.
    return !(sums.below > out) || c * (double{in} - sums.below) >= std::pow(most_weight(), c);
  }
};

// A score in doubt, from which the bracket goes on: where Σp^c, which is straight where no key
// leaves, would be 1, or (every other step) at the mean of those in doubt; or next below.
inline HWY_NOINLINE float pivot_of(const ScoreList& list, bool at_mean, double guess,
                                   const SteepBracket& b) {
  const DF d;
  const int64_t L = lanes();
  const VF in = hn::Set(d, b.in), out = hn::Set(d, b.out), zero = hn::Zero(d);
  if (at_mean) {
    VF sum = zero, count = zero;
    for (int64_t n = 0; n < list.count; n += L) {
      const VF x = hn::LoadU(d, list.score + n);
      const hn::Mask<DF> doubt = hn::And(hn::Gt(x, out), hn::Lt(x, in));
      sum = hn::Add(sum, hn::IfThenElseZero(doubt, hn::Sub(x, in)));
      count = hn::Add(count, hn::IfThenElseZero(doubt, hn::Set(d, 1.0f)));
    }
    guess = b.in + double{hn::GetLane(hn::SumOfLanes(d, sum))} /
                       double{hn::GetLane(hn::SumOfLanes(d, count))};
  }
  const VF most = hn::Set(d, static_cast<float>(guess));
  VF pivot = hn::Set(d, -kInf), least = in;
  for (int64_t n = 0; n < list.count; n += L) {
    const VF x = hn::LoadU(d, list.score + n);
    const hn::Mask<DF> doubt = hn::And(hn::Gt(x, out), hn::Lt(x, in));
    least = hn::Min(least, hn::IfThenElse(doubt, x, least));
    pivot = hn::Max(pivot, hn::IfThenElse(hn::And(doubt, hn::Le(x, most)), x, pivot));
  }
  const float found = hn::GetLane(hn::MaxOfLanes(d, pivot));
  return found > -kInf ? found : hn::GetLane(hn::MinOfLanes(d, least));
}

template <class T>
void close_bracket(ScoreList& list, double c, SteepBracket& b) {
  double above = 0;  // Σp at b.out, where it is known
  for (int step = 0; !b.closed(c); ++step) {
    const double lowest = double{b.in} - std::pow(b.most_weight(), c) / c;
    if (lowest >= b.out) {
      b.out = HWY_MAX(b.out, std::nextafter(static_cast<float>(lowest), -kInf));
      above = 0;
    }
    const double low = std::pow(b.sums.sum, c), high = std::pow(above, c);
    const double guess = b.in - (double{b.in} - b.out) * (1 - low) / (high - low);
    const float pivot = pivot_of(list, above == 0 || step % 3 == 2, guess, b);
    const SteepSums s = sum_steep<T>(list, pivot, 0, c);
    if (s.sum < 1) {
      b.in = pivot;
      b.sums = s;
    } else {
      b.out = pivot;
      above = s.sum;
      list.keep_from(pivot);
    }
  }
}

// Newton's method on Σp, from a weight above the root, to which it falls.
template <class T>
double fall_to_root(const ScoreList& list, float v, double c, double w) {
  for (int step = 0; step < 60; ++step) {
    const SteepSums s = sum_steep<T>(list, v, w, c);
    const double next = w - (s.sum - 1) / s.slope;
    if (!(next < w) || next <= 0) break;
    const bool last = w - next <= (sizeof(T) == sizeof(float) ? 1e-4 : 1e-9) * w;
    w = next;
    if (last) break;  // what is left is the square of that
  }
  return w;
}

struct Smallest {
  float score;    // v
  double weight;  // w
};

// Of the scores in the list, whose largest is `max`.
inline HWY_NOINLINE Smallest solve_steep_lane(ScoreList& list, float max, double c) {
  constexpr int64_t kLong = 64;
  SteepBracket b{max, -kInf, sum_steep<double>(list, max, 0, c)};
  if (list.count > kLong && !b.closed(c)) {
    // Float, which is faster, finds where to look, and double takes the last step: unless so little
    // weight is left that double has to decide whether there is any.
    SteepBracket rough = b;
    close_bracket<float>(list, c, rough);
    const double near = fall_to_root<float>(list, rough.in, c, rough.most_weight());
    const SteepSums s = sum_steep<double>(list, rough.in, near, c);
    const double w = near - (s.sum - 1) / s.slope;
    if (w > 1e-5 && std::abs(w - near) <= 1e-4 * w &&
        c * (double{rough.in} - s.below) > 1.001 * std::pow(w, c)) {
      return {rough.in, w};
    }
    const SteepSums at = sum_steep<double>(list, rough.in, 0, c);
    if (at.sum < 1) {
      b.in = rough.in;
      b.sums = at;
    } else {
      b.out = rough.in;
    }
  }
  close_bracket<double>(list, c, b);
  return {b.in, fall_to_root<double>(list, b.in, c, b.most_weight())};
}

// Scores of candidates, as gather_candidates leaves them, become weights. log_factors (null: not
// wanted) receives ln p^(2−α), from the scores' distances to τ, which have the digits that the
// weights to so high a power have not.
inline HWY_NOINLINE void solve_entmax_steep(double alpha, float* list_memory, float* log_factors,
                                            SparseStrip& p) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const double c = alpha - 1;
  HWY_ALIGN float score[kMaxLanes];   // v; NaN where a lane has no candidates
  HWY_ALIGN float weight[kMaxLanes];  // w
  HWY_ALIGN float delta[kMaxLanes];   // w^c
  HWY_ALIGN float log_f[kMaxLanes];   // ln w^(2−α)
  for (int64_t lane = 0; lane < W; ++lane) {
    const float max = p.max[lane];
    ScoreList list{list_memory, 0};
    for (int64_t u = 0; u < p.count && max < kInf; ++u) {
      const float s = p.weights[u * W + lane];
      list.score[list.count] = s;
      list.count += c * (double{s} - max) > -1 ? 1 : 0;
    }
    score[lane] = std::numeric_limits<float>::quiet_NaN();
    weight[lane] = delta[lane] = log_f[lane] = 0;
    if (list.count == 0) continue;
    list.end();
    const Smallest least = solve_steep_lane(list, max, c);
    const double power = std::pow(least.weight, c);
    score[lane] = least.score;
    weight[lane] = static_cast<float>(least.weight);
    delta[lane] = static_cast<float>(power);
    log_f[lane] = static_cast<float>((1 - c) * std::log(least.weight));
    p.row_stat[lane] = static_cast<float>(c * least.score - power);
  }
  const VF factor = hn::Set(d, static_cast<float>(c)),
           power = hn::Set(d, static_cast<float>(1 / c));
  const VF less_one = hn::Set(d, static_cast<float>(1 / c - 1)), one = hn::Set(d, 1.0f);
  const auto weigh = [&](VF s, int v, VF& log) HWY_ATTR {
    const VF at = hn::Load(d, score + v * L);
    const VF over = hn::MulAdd(factor, hn::Sub(s, at), hn::Load(d, delta + v * L));
    log = log_positive(d, over);
    const VF x = exp_nonpositive(d, hn::Min(hn::Mul(power, log), hn::Set(d, 1.0f)));
    const hn::Mask<DF> last = hn::Eq(s, at);
    log = hn::IfThenElse(last, hn::Load(d, log_f + v * L), hn::Mul(less_one, log));
    return hn::IfThenElse(last, hn::Load(d, weight + v * L), x);
  };
  // w was solved for in double, but the powers of float32 err by some 1e-6, most of it alike: the
  // weights are divided by their sum.
  const VF none = hn::Set(d, -0.0f);
  VF support[kVectors] = {hn::Zero(d), hn::Zero(d)};
  int64_t kept = 0;
  sum_rows(p.count, p.index, support, [&](int64_t u, VF* part) HWY_ATTR {
    const VF s0 = hn::Load(d, p.weights + u * W), s1 = hn::Load(d, p.weights + u * W + L);
    const hn::Mask<DF> in0 = hn::Ge(s0, hn::Load(d, score));
    const hn::Mask<DF> in1 = hn::Ge(s1, hn::Load(d, score + L));
    if (hn::AllFalse(d, hn::Or(in0, in1))) return;
    VF log0, log1;
    const VF e0 = weigh(s0, 0, log0), e1 = weigh(s1, 1, log1);
    part[0] = hn::Add(part[0], hn::IfThenElseZero(in0, one));
    part[1] = hn::Add(part[1], hn::IfThenElseZero(in1, one));
    hn::Store(hn::IfThenElse(in0, e0, none), d, p.weights + kept * W);
    hn::Store(hn::IfThenElse(in1, e1, none), d, p.weights + kept * W + L);
    if (log_factors != nullptr) {
      hn::Store(log0, d, log_factors + kept * W);
      hn::Store(log1, d, log_factors + kept * W + L);
    }
    p.index[kept++] = p.index[u];
  });
  p.count = kept;
  for (int v = 0; v < kVectors; ++v) {
    float* weights = p.weights + v * L;
    VF sum[1] = {hn::Zero(d)};
    sum_rows(p.count, p.index, sum, [&](int64_t u, VF* part) HWY_ATTR {
      part[0] = hn::Add(part[0], hn::Load(d, weights + u * W));
    });
    // Lanes without candidates have no weights to divide.
    const VF inverse = hn::Div(one, hn::IfThenElse(hn::Gt(sum[0], hn::Zero(d)), sum[0], one));
    for (int64_t u = 0; u < p.count; ++u) {
      hn::Store(hn::Mul(hn::Load(d, weights + u * W), inverse), d, weights + u * W);
    }
    VF log;
    const VF largest = weigh(hn::Load(d, p.max + v * L), v, log);
    hn::Store(hn::Mul(largest, inverse), d, p.max_weight + v * L);
    hn::Store(support[v], d, p.support + v * L);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
