// Vector functions of float lanes: exp, log, powers, the normal distribution, activations.
// Each lane's result depends on that lane alone, so tails take the same function behind a mask.
#if defined(FOCI_KERNELS_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_MATH_INL_H_
#undef FOCI_KERNELS_MATH_INL_H_
#else
#define FOCI_KERNELS_MATH_INL_H_
#endif

#include "foci/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

// 1.5 · 2²³: adding it to a float rounds to a whole number, which then stands in the low bits.
inline constexpr float kRoundingMagic = 12582912.0f;

// 2ⁿ·e^r, |r| ≤ ln 2 / 2, where `shifted` is n + kRoundingMagic: a polynomial of degree 6, minimax
// in relative error (3e-9 before rounding) with the first two coefficients held at 1.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_of_reduced(D d, V shifted, V r) {
  const hn::RebindToSigned<D> di;
  V p = hn::MulAdd(hn::Set(d, 0.0013814540579915047f), r, hn::Set(d, 0.00836874544620514f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.04166838899254799f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.1666652113199234f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.4999999403953552f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto power = hn::Add(hn::ShiftLeft<23>(hn::BitCast(di, shifted)), hn::Set(di, 0x3F800000));
  return hn::Mul(p, hn::BitCast(d, power));
}

// Below it e^x would be subnormal, and counts as 0.
inline constexpr float kLeastExponent = -87.3f;

// Steps between powers of two that the table of exp_in_range holds: as many as one instruction
// finds in a register. 0: no table.
#if HWY_TARGET == HWY_AVX3
inline constexpr int kExpSteps = 16;
#elif HWY_TARGET == HWY_AVX2
inline constexpr int kExpSteps = 8;
#else
inline constexpr int kExpSteps = 0;
#endif

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
// The bits of 2^(i/kExpSteps), i = k mod kExpSteps, less what the rest of a shifted k adds to them:
// table[k mod kExpSteps] + (k << (23 − log2 kExpSteps)) are the bits of 2^(k/kExpSteps).
HWY_INLINE VF power_of_step(VI k) {
  const DI di;
#if HWY_TARGET == HWY_AVX3
  HWY_ALIGN static constexpr int32_t kTable[16] = {0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3,
                                                   0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
                                                   0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                                                   0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d};
  const VI found{_mm512_permutexvar_epi32(k.raw, hn::Load(di, kTable).raw)};
  return hn::BitCast(DF(), hn::Add(found, hn::ShiftLeft<19>(k)));
#else
  HWY_ALIGN static constexpr int32_t kTable[8] = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                                  0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};
  const VI found{_mm256_permutevar8x32_epi32(hn::Load(di, kTable).raw, k.raw)};
  return hn::BitCast(DF(), hn::Add(found, hn::ShiftLeft<20>(k)));
#endif
}
#endif

// e^x for kLeastExponent ≤ x ≤ 87; garbage below, and perhaps a sign on NaN. Relative error below
// 3e-7 for x ≤ 2, exactly 1 at 0.
//
// x = n·ln 2/steps + r; float(ln 2) is off by only 1.9e-9, so that one multiply-add reduces the
// argument. With a table of 2^(i/steps) a polynomial of degree 3 is enough for e^r (minimax in
// relative error, the first two coefficients held at 1: 1.6e-9 of 16 steps, 2.6e-8 of 8).
HWY_INLINE FloatVec exp_in_range(FloatVec x) {
  const FloatTag d;
  const FloatVec magic = hn::Set(d, kRoundingMagic);
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  constexpr float kSteps = kExpSteps;
  const FloatVec shifted = hn::MulAdd(x, hn::Set(d, 1.44269504088896341f * kSteps), magic);
  const FloatVec n = hn::Sub(shifted, magic);
  const FloatVec r = hn::NegMulAdd(n, hn::Set(d, 0.69314718055994531f / kSteps), x);
  FloatVec p =
      hn::MulAdd(hn::Set(d, kExpSteps == 16 ? 0.16666719317436218f : 0.1666685789823532f), r,
                 hn::Set(d, kExpSteps == 16 ? 0.5000161528587341f : 0.500064492225647f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  return hn::Mul(p, power_of_step(hn::BitCast(DI(), shifted)));
#else
  const FloatVec shifted = hn::MulAdd(x, hn::Set(d, 1.44269504088896341f), magic);
  const FloatVec n = hn::Sub(shifted, magic);
  const FloatVec r = hn::NegMulAdd(n, hn::Set(d, 0.69314718055994531f), x);
  return exp_of_reduced(d, shifted, r);
#endif
}

// e^x for x ≤ 0 (and small x above it), relative error below 3e-7; exactly 1 at 0, exactly 0 below
// −87.3 (where results would be subnormal) and at −inf. NaN stays NaN, with a clear sign bit.
HWY_INLINE FloatVec exp_nonpositive(FloatTag d, FloatVec x) {
  return hn::Abs(hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, kLeastExponent)), exp_in_range(x)));
}

// The same bits for two operations less, where x is no NaN (of which it makes 0).
HWY_INLINE FloatVec exp_of_number(FloatTag d, FloatVec x) {
  return hn::IfThenElseZero(hn::Ge(x, hn::Set(d, kLeastExponent)), exp_in_range(x));
}

// ln(x) = k·ln 2 + log_near_one(f) for normal x > 0: f = x/2^k − 1 with x/2^k in [√½, √2).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V split_for_log(D d, V x, V& k) {
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(di, x);
  const auto exponent = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(di, 0x3F3504F3)));
  k = hn::ConvertTo(d, exponent);
  return hn::Sub(hn::BitCast(d, hn::Sub(bits, hn::ShiftLeft<23>(exponent))), hn::Set(d, 1.0f));
}

// ln(1 + f) for 1 + f in [√½, √2): relative error below 1.2e-7, for tiny f too. f − f²/2 + f³·r(f)
// with r a polynomial of degree 7, fitted for the least relative error of the whole (6e-9).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V log_near_one(D d, V f) {
  // Estrin's order: half the depth of Horner's.
  const V f2 = hn::Mul(f, f), f4 = hn::Mul(f2, f2);
  const V r01 = hn::MulAdd(hn::Set(d, -0.2500081956386566f), f, hn::Set(d, 0.3333333134651184f));
  const V r23 = hn::MulAdd(hn::Set(d, -0.16623356938362122f), f, hn::Set(d, 0.20001226663589478f));
  const V r45 = hn::MulAdd(hn::Set(d, -0.13160182535648346f), f, hn::Set(d, 0.14201757311820984f));
  const V r67 = hn::MulAdd(hn::Set(d, -0.07634496688842773f), f, hn::Set(d, 0.1276157647371292f));
  const V low = hn::MulAdd(r23, f2, r01), high = hn::MulAdd(r67, f2, r45);
  const V r = hn::MulAdd(high, f4, low);
  return hn::MulAdd(f2, hn::MulAdd(r, f, hn::Set(d, -0.5f)), f);
}

// ln(x) for normal x > 0 where x is about 1 or less: absolute error below 4e-8, beside rounding (of
// x·c, which stays below 6e-8 of x). kSteady: `less` is x − 1 to all its digits, and down to 3/4
// the error is as small beside |ln x| itself. x ≤ 0 gives some finite number.
//
// x = 2^k·y, y in a cell around 1/c: ln x = k·ln 2 − ln c + ln(1 + f), f = y·c − 1, with as many
// cells to an octave as one instruction finds in a register. 1 lies inside the cell of c = 1; ln(1
// + f) is a polynomial of the least absolute error whose first coefficient is held at 1.
template <bool kSteady>
HWY_INLINE FloatVec log_of_fraction(FloatVec x, FloatVec less) {
  const FloatTag d;
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  const DI di;
#if HWY_TARGET == HWY_AVX3
  constexpr int kShift = 19;
  constexpr int32_t kLowest = 0x3F32AAAB;  // the first cell's least y
  HWY_ALIGN static constexpr float kInverse[16] = {
      1.40234375f,  1.34179688f,  1.2890625f,   1.23828125f, 1.19335938f,  1.15039062f,
      1.109375f,    1.07226562f,  1.03710938f,  1.0f,        0.951171875f, 0.896484375f,
      0.849609375f, 0.806640625f, 0.767578125f, 0.732421875f};
  HWY_ALIGN static constexpr float kLog[16] = {
      -0.338144958f, -0.294009656f,  -0.25391522f,  -0.21372433f, -0.176772341f, -0.140101552f,
      -0.103796795f, -0.0697738156f, -0.036437396f, 0.0f,         0.0500605032f, 0.109274417f,
      0.16297859f,   0.214877039f,   0.264515013f,  0.311398596f};
#else
  constexpr int kShift = 20;
  constexpr int32_t kLowest = 0x3F355556;
  HWY_ALIGN static constexpr float kInverse[8] = {
      1.3515625f, 1.24609375f, 1.15625f, 1.078125f, 1.0f, 0.90625f, 0.814453125f, 0.73828125f};
  HWY_ALIGN static constexpr float kLog[8] = {-0.301261336f,  -0.220013663f, -0.145182014f,
                                              -0.0752234235f, 0.0f,          0.0984400734f,
                                              0.205238402f,   0.303430438f};
#endif
  const VI bits = hn::BitCast(di, x);
  const VI above = hn::Sub(bits, hn::Set(di, kLowest));
  const VI cell = hn::ShiftRight<kShift>(above);
  const VF y =
      hn::BitCast(d, hn::Sub(bits, hn::And(above, hn::Set(di, static_cast<int32_t>(0xFF800000u)))));
  const VF k = hn::ConvertTo(d, hn::ShiftRight<23>(above));
#if HWY_TARGET == HWY_AVX3
  const VF c{_mm512_permutexvar_ps(cell.raw, hn::Load(d, kInverse).raw)};
  const VF log{_mm512_permutexvar_ps(cell.raw, hn::Load(d, kLog).raw)};
#else
  const VF c{_mm256_permutevar8x32_ps(hn::Load(d, kInverse).raw, cell.raw)};
  const VF log{_mm256_permutevar8x32_ps(hn::Load(d, kLog).raw, cell.raw)};
#endif
  const VF one = hn::Set(d, 1.0f);
  VF f = hn::MulSub(y, c, one);
  if constexpr (kSteady) {
    // c has few digits, so that c − 1 is exact.
    f = hn::IfThenElse(hn::Gt(less, hn::Set(d, -0.25f)), hn::MulAdd(less, c, hn::Sub(c, one)), f);
  }
  constexpr bool kWide = HWY_TARGET == HWY_AVX2;  // cells that need one more coefficient
  VF p;
  if constexpr (kSteady || kWide) {
    p = hn::MulAdd(hn::Set(d, kWide ? -0.2501627207f : -0.2495126873f), f,
                   hn::Set(d, kWide ? 0.3338914812f : 0.3334862888f));
    p = hn::MulAdd(p, f, hn::Set(d, kWide ? -0.5000001788f : -0.5000002384f));
  } else {
    p = hn::MulAdd(hn::Set(d, 0.3330900669f), f, hn::Set(d, -0.5001809001f));
  }
  const VF rest = hn::MulAdd(hn::Mul(f, f), p, f);
  return hn::Add(hn::MulAdd(k, hn::Set(d, 0.69314718055994531f), log), rest);
#else
  FloatVec k;
  FloatVec f = split_for_log(d, x, k);
  if constexpr (kSteady) {
    const hn::Mask<FloatTag> near = hn::Gt(less, hn::Set(d, -0.25f));
    f = hn::IfThenElse(near, less, f);
    k = hn::IfThenZeroElse(near, k);
  }
  return hn::MulAdd(k, hn::Set(d, 0.69314718055994531f), log_near_one(d, f));
#endif
}

// ln(x) for normal x > 0, relative error below 2e-7 (also near 1); exactly 0 at 1. Zero and
// subnormal x read as about 2^-127; negative x, infinity and NaN give garbage.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V log_positive(D d, V x) {
  V k;
  const V f = split_for_log(d, x, k);
  return hn::MulAdd(k, hn::Set(d, 0.69314718055994531f), log_near_one(d, f));
}

// x^a for normal x > 0 where a·ln x ≤ 87: relative error below (4 + 4·|a·ln x|)·1e-7; 0 where that
// is below e^-87.3.
HWY_INLINE FloatVec power_positive(FloatTag d, FloatVec x, FloatVec a) {
  return exp_nonpositive(d, hn::Min(hn::Mul(a, log_positive(d, x)), hn::Set(d, 87.0f)));
}

// Φ(x), the normal distribution function, within 1.5e-7, and *bell = e^(−x²/2). Φ(−z) = bell·r(z)
// for z ≥ 0 with r of degree 10, r(0) = ½, fitted on z ≤ 5.6 for the least error of the product
// (7e-8); beyond, bell alone makes it vanish.
HWY_INLINE FloatVec normal_cdf(FloatVec x, FloatVec* bell) {
  const FloatTag d;
  const FloatVec exponent = hn::Mul(hn::Mul(x, x), hn::Set(d, -0.5f));
  *bell = hn::IfThenZeroElse(hn::Lt(exponent, hn::Set(d, kLeastExponent)), exp_in_range(exponent));
  const FloatVec z = hn::Min(hn::Abs(x), hn::Set(d, 5.6f));
  // Estrin's order: a third of the depth of Horner's.
  const FloatVec z2 = hn::Mul(z, z), z4 = hn::Mul(z2, z2), z8 = hn::Mul(z4, z4);
  const FloatVec r01 = hn::MulAdd(hn::Set(d, -0.3989383578300476f), z, hn::Set(d, 0.5f));
  const FloatVec r23 =
      hn::MulAdd(hn::Set(d, -0.13256259262561798f), z, hn::Set(d, 0.24993102252483368f));
  const FloatVec r45 =
      hn::MulAdd(hn::Set(d, -0.024410134181380272f), z, hn::Set(d, 0.061244383454322815f));
  const FloatVec r67 =
      hn::MulAdd(hn::Set(d, -0.002000307897105813f), z, hn::Set(d, 0.008002669550478458f));
  const FloatVec r89 =
      hn::MulAdd(hn::Set(d, -3.604038283810951e-05f), z, hn::Set(d, 0.0003459867730271071f));
  const FloatVec low = hn::MulAdd(r23, z2, r01), middle = hn::MulAdd(r67, z2, r45);
  const FloatVec high = hn::MulAdd(hn::Set(d, 1.6782485090516275e-06f), z2, r89);
  const FloatVec r = hn::MulAdd(high, z8, hn::MulAdd(middle, z4, low));
  const FloatVec tail = hn::Mul(*bell, r);  // NaN where x is
  return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(hn::Set(d, 1.0f), tail));
}

// Below this slope tanh is ±1 in double precision too, and its slope 0.
inline constexpr float kFlatTanh = 1.1e-16f;

// tanh and its slope 1 − tanh², both to about one ulp of their own size. Below 1 tanh is
// x + x³·P(x²), P minimax (4.6e-9 of tanh); from there 1 − 2e/(1+e) with e = e^(−2|x|). The slope
// is 4e/(1+e)², which keeps its digits where tanh rounds to 1.
HWY_INLINE FloatVec tanh_of(FloatVec x, FloatVec* slope = nullptr) {
  const FloatTag d;
  const FloatVec one = hn::Set(d, 1.0f), two = hn::Set(d, 2.0f);
  const FloatVec a = hn::Abs(x);
  const FloatVec e = exp_nonpositive(d, hn::Mul(a, hn::Set(d, -2.0f)));
  const FloatVec inverse = hn::Div(one, hn::Add(one, e));
  const FloatVec part = hn::Mul(hn::Add(e, e), inverse);
  const FloatVec large = hn::CopySign(hn::Sub(one, part), x);
  if (slope != nullptr) {
    const FloatVec x2 = hn::Mul(hn::Mul(two, part), inverse);
    *slope = hn::IfThenZeroElse(hn::Lt(x2, hn::Set(d, kFlatTanh)), x2);
  }
  const FloatVec u = hn::Mul(x, x);
  FloatVec p = hn::Set(d, -0.00035845203092321754f);
  p = hn::MulAdd(p, u, hn::Set(d, 0.0023013646714389324f));
  p = hn::MulAdd(p, u, hn::Set(d, -0.007946106605231762f));
  p = hn::MulAdd(p, u, hn::Set(d, 0.021486656740307808f));
  p = hn::MulAdd(p, u, hn::Set(d, -0.05387980118393898f));
  p = hn::MulAdd(p, u, hn::Set(d, 0.13332344591617584f));
  p = hn::MulAdd(p, u, hn::Set(d, -0.33333295583724976f));
  // NaN is not below 1, and NaN − 1 is NaN.
  return hn::IfThenElse(hn::Lt(a, one), hn::MulAdd(hn::Mul(p, u), x, x), large);
}

HWY_INLINE FloatVec relu(FloatVec x) {
  // Not max(x, 0): that would swallow NaN.
  return hn::IfThenZeroElse(hn::Le(x, hn::Zero(FloatTag())), x);
}

// x·Φ(x); *slope = Φ(x) + x·φ(x), which shares all of its parts.
HWY_INLINE FloatVec gelu(FloatVec x, FloatVec* slope = nullptr) {
  const FloatTag d;
  FloatVec bell;
  const FloatVec cdf = normal_cdf(x, &bell);
  if (slope != nullptr) {
    *slope = hn::MulAdd(x, hn::Mul(bell, hn::Set(d, 0.39894228f)), cdf);
  }
  return hn::Mul(x, cdf);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
