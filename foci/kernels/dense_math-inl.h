// Vector functions of float lanes: erf, exp, the normal distribution, activations. Each lane's
// result depends on that lane alone, so tails take the same function behind a mask.
#if defined(FOCI_KERNELS_DENSE_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_DENSE_MATH_INL_H_
#undef FOCI_KERNELS_DENSE_MATH_INL_H_
#else
#define FOCI_KERNELS_DENSE_MATH_INL_H_
#endif

#include "foci/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

// e^x for x ≤ 0, relative error below 2e-7; 0 below −87.3, where results would be subnormal.
// NaN stays NaN.
HWY_INLINE FloatVec exp_nonpositive(FloatVec x) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  // Adding 1.5·2²³ rounds to an integer that then stands in the low bits.
  const FloatVec magic = hn::Set(d, 12582912.0f);
  const FloatVec shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), magic);
  const FloatVec n = hn::Sub(shifted, magic);
  // ln 2 in two parts, the first with few enough bits that n·part is exact.
  FloatVec r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  // 1 + r + r²·(minimax of degree 4 on |r| ≤ ln 2 / 2, relative error 3.1e-9).
  FloatVec p = hn::Set(d, 0.001381432f);
  p = hn::MulAdd(p, r, hn::Set(d, 0.008368851f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0416684f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.1666652f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.49999994f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto power = hn::Add(hn::ShiftLeft<23>(hn::BitCast(di, shifted)), hn::Set(di, 0x3F800000));
  const FloatVec y = hn::Mul(p, hn::BitCast(d, power));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.3f)), y);
}

// erf(x/√2) by a rational function of x² fitted on |x| ≤ 5.4 (minimax 1.1e-8 there); rounding makes
// it 3e-7. Beyond, erf is ±1 in float.
HWY_INLINE FloatVec erf_scaled(FloatVec x) {
  const FloatTag d;
  const FloatVec u = hn::Mul(x, x);
  FloatVec p = hn::Set(d, 4.6773543e-08f);
  p = hn::MulAdd(p, u, hn::Set(d, 1.27200465e-05f));
  p = hn::MulAdd(p, u, hn::Set(d, 0.00032864328f));
  p = hn::MulAdd(p, u, hn::Set(d, 0.0093017025f));
  p = hn::MulAdd(p, u, hn::Set(d, 0.06674443f));
  p = hn::MulAdd(p, u, hn::Set(d, 0.79788446f));
  FloatVec q = hn::Set(d, 1.2165923e-06f);
  q = hn::MulAdd(q, u, hn::Set(d, 7.240018e-05f));
  q = hn::MulAdd(q, u, hn::Set(d, 0.0018589813f));
  q = hn::MulAdd(q, u, hn::Set(d, 0.028378682f));
  q = hn::MulAdd(q, u, hn::Set(d, 0.25031784f));
  q = hn::MulAdd(q, u, hn::Set(d, 1.0f));
  const FloatVec one = hn::Set(d, 1.0f);
  const FloatVec inside = hn::Div(hn::Mul(x, p), q);
  // A comparison with NaN is false, so NaN takes the inside.
  return hn::IfThenElse(hn::Gt(hn::Abs(x), hn::Set(d, 5.4f)), hn::CopySign(one, x), inside);
}

// Φ(x), the normal distribution function.
HWY_INLINE FloatVec normal_cdf(FloatVec x) {
  const FloatVec half = hn::Set(FloatTag(), 0.5f);
  return hn::MulAdd(half, erf_scaled(x), half);
}

HWY_INLINE FloatVec relu(FloatVec x) {
  // Not max(x, 0): that would swallow NaN.
  return hn::IfThenZeroElse(hn::Le(x, hn::Zero(FloatTag())), x);
}

HWY_INLINE FloatVec gelu(FloatVec x) {
  return hn::Mul(x, normal_cdf(x));
}

// Φ(x) + x·φ(x)
HWY_INLINE FloatVec gelu_derivative(FloatVec x) {
  const FloatTag d;
  const FloatVec density =
      hn::Mul(exp_nonpositive(hn::Mul(hn::Mul(x, x), hn::Set(d, -0.5f))), hn::Set(d, 0.39894228f));
  return hn::MulAdd(x, density, normal_cdf(x));
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
