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

// What is known of each lane's row so far: m the maximum, l = Σ e^(s−m), t = Σ e^(s−m)·(s−m).
struct SoftmaxRows {
  HWY_ALIGN float m[kMaxLanes];
  HWY_ALIGN float l[kMaxLanes];
  HWY_ALIGN float t[kMaxLanes];
  HWY_ALIGN float correction[kMaxLanes];  // e^(old m − new m) of the last block
};

// −inf (nothing seen yet) stands in for 0, so that −inf − m is −inf and not NaN.
HWY_INLINE VF finite_max(VF m) {
  const DF d;
  return hn::IfThenZeroElse(hn::Eq(m, hn::Set(d, -kInf)), m);
}

HWY_INLINE void softmax_begin(SoftmaxRows& rows) {
  for (int i = 0; i < kMaxLanes; ++i) {
    rows.m[i] = -kInf;
    rows.l[i] = rows.t[i] = 0;
    rows.correction[i] = 1;
  }
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

// Scores of `count` keys from `first` (masked ones −inf) become e^(s−m); m, l, t and correction
// move on, and so does `key` of the largest score, unless it is null. Without kNan no score may be
// NaN, and without kMasked none −inf.
template <bool kEntropy, bool kMasked, bool kNan>
HWY_NOINLINE void softmax_block_as(int64_t count, float* strip, SoftmaxRows& rows, int32_t* key,
                                   int64_t first) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF old0 = hn::Load(d, rows.m), old1 = hn::Load(d, rows.m + L);
  VF m0 = old0, m1 = old1;
  for (int64_t j = 0; j < count; ++j) {
    m0 = max_of_scores(hn::Load(d, strip + j * W), m0);
    m1 = max_of_scores(hn::Load(d, strip + j * W + L), m1);
  }
  hn::Store(m0, d, rows.m);
  hn::Store(m1, d, rows.m + L);
  if (key != nullptr) find_first_maxima(count, first, strip, rows.m, old0, old1, key);
  const VF safe0 = finite_max(m0), safe1 = finite_max(m1);
  const VF c0 = exp_nonpositive(d, hn::Sub(old0, safe0)),
           c1 = exp_nonpositive(d, hn::Sub(old1, safe1));
  hn::Store(c0, d, rows.correction);
  hn::Store(c1, d, rows.correction + L);
  VF l0 = hn::Mul(hn::Load(d, rows.l), c0), l1 = hn::Mul(hn::Load(d, rows.l + L), c1);
  VF t0 = hn::Zero(d), t1 = t0;
  if constexpr (kEntropy) {
    // Σ e·(s − m_new) = correction · (t + (m_old − m_new)·l); an untouched lane has l = t = 0.
    const VF shift0 = hn::Sub(finite_max(old0), safe0), shift1 = hn::Sub(finite_max(old1), safe1);
    t0 = hn::MulAdd(shift0, l0, hn::Mul(hn::Load(d, rows.t), c0));
    t1 = hn::MulAdd(shift1, l1, hn::Mul(hn::Load(d, rows.t + L), c1));
  }
  for (int64_t j = 0; j < count; ++j) {
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
  hn::Store(l0, d, rows.l);
  hn::Store(l1, d, rows.l + L);
  hn::Store(t0, d, rows.t);
  hn::Store(t1, d, rows.t + L);
}

// What a block of scores may hold: −inf where keys are masked, and NaN.
enum class BlockScores : uint8_t { finite, masked, any };

HWY_INLINE void softmax_block(bool entropy, BlockScores scores, int64_t count, float* strip,
                              SoftmaxRows& rows, int32_t* key = nullptr, int64_t first = 0) {
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
    // Rounding can lift s − lse above 0 by an ulp of lse, which the exponential takes in its
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
