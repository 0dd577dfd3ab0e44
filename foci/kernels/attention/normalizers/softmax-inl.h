// Softmax over strips: online over blocks of keys in forward, from the saved log-sum-exp in
// backward. Source of the online form: Milakov & Gimelshein 2018, arXiv 1805.02867.
#if defined(FOCI_KERNELS_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_SOFTMAX_INL_H_
#undef FOCI_KERNELS_SOFTMAX_INL_H_
#else
#define FOCI_KERNELS_SOFTMAX_INL_H_
#endif

#include "foci/kernels/attention/philox-inl.h"
#include "foci/kernels/attention/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// A row's sums are taken over e^(s−m), m being a maximum that moves only when the largest score is
// more than kMaxLead above it. So a row is rescaled a few times at most, however often its largest
// score creeps up, and no more roundings add up than that.
inline constexpr float kMaxLead = 2;

// What is known of each lane's row so far.
struct SoftmaxRows {
  HWY_ALIGN float m[kMaxLanes];           // what scores are taken from
  HWY_ALIGN float best[kMaxLanes];        // the largest score
  HWY_ALIGN float correction[kMaxLanes];  // e^(old m − new m) of the last block
  HWY_ALIGN float l[kMaxLanes];           // of the last block: Σ e^(s−m)
  HWY_ALIGN float t[kMaxLanes];           // of the last block: Σ e^(s−m)·(s−m)
  double sum[kMaxLanes];                  // of all blocks
  double moment[kMaxLanes];
};

// −inf (nothing seen yet) stands in for 0, so that −inf − m is −inf and not NaN.
HWY_INLINE VF finite_max(VF m) {
  const DF d;
  return hn::IfThenZeroElse(hn::Eq(m, hn::Set(d, -kInf)), m);
}

// One row's part of it.
struct SoftmaxSums {
  float m = -kInf, best = -kInf;
  double sum = 0, moment = 0;
};

inline void softmax_begin(SoftmaxRows& rows) {
  for (int i = 0; i < kMaxLanes; ++i) {
    rows.m[i] = rows.best[i] = -kInf;
    rows.l[i] = rows.t[i] = 0;
    rows.sum[i] = rows.moment[i] = 0;
    rows.correction[i] = 1;
  }
}

// The sums of a block join those of earlier ones, whose m was `old`:
//   Σ e·(s − m) = correction · (moment + (old − m)·sum).
HWY_INLINE void softmax_join(float old, float m, double correction, double l, double t, double& sum,
                             double& moment) {
  // Where nothing was seen before, the sums are 0.
  const double shift = old == -kInf ? 0.0 : double{old} - double{m};
  moment = correction * (moment + shift * sum) + t;
  sum = correction * sum + l;
}

// key[lane] = `first` plus the number of the first row whose score is m, in lanes where m is above
// `old`.
inline HWY_NOINLINE void find_first_maxima(int64_t count, int64_t first, const float* strip,
                                           const float* m, VF old0, VF old1, int32_t* key) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF m0 = hn::Load(d, m), m1 = hn::Load(d, m + L);
  uint32_t open = bits_of(hn::Gt(m0, old0), hn::Gt(m1, old1));
  const auto is_max = [&](int64_t j, VF top, int64_t at)
                          HWY_ATTR { return hn::Eq(hn::Load(d, strip + j * W + at), top); };
  for (int64_t j = 0; j < count && open != 0;) {
    const int64_t stop = HWY_MIN(j + 4, count);
    if (stop == j + 4) {
      const auto low = hn::Or(hn::Or(is_max(j, m0, 0), is_max(j + 1, m0, 0)),
                              hn::Or(is_max(j + 2, m0, 0), is_max(j + 3, m0, 0)));
      const auto high = hn::Or(hn::Or(is_max(j, m1, L), is_max(j + 1, m1, L)),
                               hn::Or(is_max(j + 2, m1, L), is_max(j + 3, m1, L)));
      if (hn::AllFalse(d, hn::Or(low, high))) {
        j = stop;
        continue;
      }
    }
    for (; j < stop; ++j) {
      const uint32_t found = bits_of(is_max(j, m0, 0), is_max(j, m1, L)) & open;
      for (int64_t lane = 0; lane < W && found != 0; ++lane) {
        if (found >> lane & 1u) key[lane] = static_cast<int32_t>(first + j);
      }
      open &= ~found;
    }
  }
}

// Scores of `count` keys from `first` (masked ones −inf) become e^(s−m); what is known of the rows
// moves on, and so does `key` of the largest score, unless it is null. Without kNan no score may be
// NaN, and without kMasked none −inf.
template <bool kEntropy, bool kMasked, bool kNan>
HWY_NOINLINE void softmax_block_as(int64_t count, float* strip, SoftmaxRows& rows, int32_t* key,
                                   int64_t first) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF best0 = hn::Load(d, rows.best), best1 = hn::Load(d, rows.best + L);
  VF m0 = best0, m1 = best1;
  for (int64_t j = 0; j < count; ++j) {
    m0 = max_of_scores(hn::Load(d, strip + j * W), m0);
    m1 = max_of_scores(hn::Load(d, strip + j * W + L), m1);
  }
  hn::Store(m0, d, rows.best);
  hn::Store(m1, d, rows.best + L);
  if (key != nullptr) find_first_maxima(count, first, strip, rows.best, best0, best1, key);
  HWY_ALIGN float old[kMaxLanes];
  const VF old0 = hn::Load(d, rows.m), old1 = hn::Load(d, rows.m + L);
  hn::Store(old0, d, old);
  hn::Store(old1, d, old + L);
  const VF lead = hn::Set(d, kMaxLead);
  m0 = hn::IfThenElse(hn::Gt(m0, hn::Add(old0, lead)), m0, old0);
  m1 = hn::IfThenElse(hn::Gt(m1, hn::Add(old1, lead)), m1, old1);
  hn::Store(m0, d, rows.m);
  hn::Store(m1, d, rows.m + L);
  const VF safe0 = finite_max(m0), safe1 = finite_max(m1);
  hn::Store(exp_nonpositive(d, hn::Sub(old0, safe0)), d, rows.correction);
  hn::Store(exp_nonpositive(d, hn::Sub(old1, safe1)), d, rows.correction + L);
  const VF zero = hn::Zero(d);
  for (float* x : {rows.l, rows.t}) {
    hn::Store(zero, d, x);
    hn::Store(zero, d, x + L);
  }
  for_runs(first, count, [&](int64_t begin, int64_t end) HWY_ATTR {
    VF l0 = zero, l1 = zero, t0 = zero, t1 = zero;
    for (int64_t j = begin; j < end; ++j) {
      float* row = strip + j * W;
      const VF x0 = hn::Sub(hn::Load(d, row), safe0), x1 = hn::Sub(hn::Load(d, row + L), safe1);
      const VF e0 = kNan ? exp_nonpositive(d, x0) : exp_of_number(d, x0);
      const VF e1 = kNan ? exp_nonpositive(d, x1) : exp_of_number(d, x1);
      l0 = hn::Add(l0, e0);
      l1 = hn::Add(l1, e1);
      if constexpr (kEntropy) {
        // A masked key has e = 0 and x = −inf, whose product must be 0; so has any below the floor.
        const VF floor = hn::Set(d, kLeastExponent);
        t0 = hn::MulAdd(e0, kMasked || kNan ? hn::Max(x0, floor) : x0, t0);
        t1 = hn::MulAdd(e1, kMasked || kNan ? hn::Max(x1, floor) : x1, t1);
      }
      hn::Store(e0, d, row);
      hn::Store(e1, d, row + L);
    }
    const auto join = [&](VF low, VF high, float* total) HWY_ATTR {
      hn::Store(hn::Add(hn::Load(d, total), low), d, total);
      hn::Store(hn::Add(hn::Load(d, total + L), high), d, total + L);
    };
    join(l0, l1, rows.l);
    if constexpr (kEntropy) join(t0, t1, rows.t);
  });
  const VF none = hn::Set(d, -kInf);
  if (hn::AllTrue(d, hn::And(hn::Eq(old0, none), hn::Eq(old1, none)))) {
    // The first block of every row: what softmax_join makes of empty sums.
    for (int64_t i = 0; i < W; ++i) {
      rows.sum[i] = rows.l[i];
      rows.moment[i] = rows.t[i];
    }
    return;
  }
  for (int64_t i = 0; i < W; ++i) {
    softmax_join(old[i], rows.m[i], rows.correction[i], rows.l[i], rows.t[i], rows.sum[i],
                 rows.moment[i]);
  }
}

// What a block of scores may hold: −inf where keys are masked, and NaN.
enum class BlockScores : uint8_t { finite, masked, any };

HWY_INLINE void softmax_block(bool entropy, BlockScores scores, int64_t count, float* strip,
                              SoftmaxRows& rows, int32_t* key, int64_t first) {
  const bool nan = scores == BlockScores::any;
  if (!entropy) {
    nan ? softmax_block_as<false, true, true>(count, strip, rows, key, first)
        : softmax_block_as<false, true, false>(count, strip, rows, key, first);
  } else if (scores == BlockScores::finite) {
    softmax_block_as<true, false, false>(count, strip, rows, key, first);
  } else {
    nan ? softmax_block_as<true, true, true>(count, strip, rows, key, first)
        : softmax_block_as<true, true, false>(count, strip, rows, key, first);
  }
}

// p = e^(s − m) · inverse, s in place: weights from known row constants (m = lse, inverse = 1 in
// the usual case). Masked scores are −inf and become 0.
template <bool kNan>
HWY_NOINLINE void softmax_weights_as(int64_t count, const float* m, const float* inverse,
                                     float* strip) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF m0 = hn::Load(d, m), m1 = hn::Load(d, m + L);
  const VF i0 = hn::Load(d, inverse), i1 = hn::Load(d, inverse + L);
  for (int64_t j = 0; j < count; ++j) {
    float* row = strip + j * W;
    const VF s0 = hn::Load(d, row), s1 = hn::Load(d, row + L);
    // s − m may lie above 0 (kMaxLead, or the rounding of lse), which the exponential takes in its
    // stride.
    const VF x0 = hn::Sub(s0, m0), x1 = hn::Sub(s1, m1);
    const VF e0 = kNan ? exp_nonpositive(d, x0) : exp_of_number(d, x0);
    const VF e1 = kNan ? exp_nonpositive(d, x1) : exp_of_number(d, x1);
    hn::Store(hn::Mul(e0, i0), d, row);
    hn::Store(hn::Mul(e1, i1), d, row + L);
  }
}

HWY_INLINE void softmax_weights(bool careful, int64_t count, const float* m, const float* inverse,
                                float* strip) {
  careful ? softmax_weights_as<true>(count, m, inverse, strip)
          : softmax_weights_as<false>(count, m, inverse, strip);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
