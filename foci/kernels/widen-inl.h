// Float16 and bfloat16 storage as floats.
#if defined(FOCI_KERNELS_WIDEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_WIDEN_INL_H_
#undef FOCI_KERNELS_WIDEN_INL_H_
#else
#define FOCI_KERNELS_WIDEN_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "foci/core/dtype.h"
#include "foci/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// A vector of float16 or bfloat16 numbers, exactly.
HWY_INLINE VF widen_vector(DType dtype, const uint16_t* from) {
  const DF d;
  if (dtype == DType::f16) {
    const hn::Rebind<hwy::float16_t, DF> dh;
    const VF wide = hn::PromoteTo(d, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(from)));
#if HWY_TARGET <= HWY_AVX2
    return wide;  // by an instruction
#else
    // Highway's own steps take infinity and NaN for large numbers.
    const DI di;
    const auto exponent = hn::Set(di, 0x7C00);
    const auto bits = hn::PromoteTo(di, hn::LoadU(hn::Rebind<uint16_t, DF>(), from));
    const auto repaired = hn::Or(hn::BitCast(di, wide), hn::Set(di, 0x7F800000));
    return hn::IfThenElse(hn::RebindMask(d, hn::Eq(hn::And(bits, exponent), exponent)),
                          hn::BitCast(d, repaired), wide);
#endif
  }
  // bfloat16 is the upper half of a float.
  const hn::Rebind<uint16_t, DF> dh;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(DI(), hn::LoadU(dh, from))));
}

// to[0, n) = from[0, n), n of them in float16 or bfloat16.
inline HWY_NOINLINE void widen_run(DType dtype, const uint16_t* from, int64_t n, float* to) {
  const DF d;
  const int64_t L = lanes();
  int64_t i = 0;
  for (; i + L <= n; i += L) hn::StoreU(widen_vector(dtype, from + i), d, to + i);
  if (i == n) return;
  uint16_t rest[hn::MaxLanes(DF())] = {};
  HWY_ALIGN float wide[hn::MaxLanes(DF())];
  std::memcpy(rest, from + i, sizeof(uint16_t) * static_cast<size_t>(n - i));
  hn::Store(widen_vector(dtype, rest), d, wide);
  std::memcpy(to + i, wide, sizeof(float) * static_cast<size_t>(n - i));
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
