// What every Highway kernel file includes, once a target: the operations foci uses, written to
// Highway 1.0.3, and the way a file hands out its table of functions for a chosen target.
//
//   #define HWY_TARGET_INCLUDE "foci/kernels/NAME.cc"
//   #include "foci/core/highway_targets.h"
//   #include <hwy/foreach_target.h>
//   #include "foci/kernels/simd-inl.h"
//   HWY_BEFORE_NAMESPACE(); namespace foci::kernels { namespace HWY_NAMESPACE {
//     … kernels …
//     const NameKernels* name_table() { static constexpr NameKernels t{…}; return &t; }
//   }} HWY_AFTER_NAMESPACE();
//   #if HWY_ONCE
//   namespace foci::kernels { FOCI_KERNEL_TABLE(NameKernels, name_table, name_kernels) }
//   #endif
//
// NameKernels and the declaration of name_kernels live in a header outside the target namespaces.
// The baseline is SSE2 with Highway 1.2, EMU128 (four lanes) with 1.0.3, and with 1.0.3 and g++
// before 12.3, Debian 12's, HWY_SCALAR: *one* lane, no shuffles. Kernels must be right for that
// too.
#if defined(FOCI_KERNELS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_SIMD_INL_H_
#undef FOCI_KERNELS_SIMD_INL_H_
#else
#define FOCI_KERNELS_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstring>

#include "foci/core/simd_target.h"

#ifndef FOCI_KERNEL_TABLE
#if HWY_TARGETS & HWY_AVX3
#define FOCI_CASE_AVX512(table) \
  case SimdTarget::avx512:      \
    return N_AVX3::table();
#else
#define FOCI_CASE_AVX512(table)
#endif
#if HWY_TARGETS & HWY_AVX2
#define FOCI_CASE_AVX2(table) \
  case SimdTarget::avx2:      \
    return N_AVX2::table();
#else
#define FOCI_CASE_AVX2(table)
#endif
// Defines `const Type& name(SimdTarget)` over the per-target functions `table()`.
#define FOCI_KERNEL_TABLE(Type, table, name)   \
  const Type& name(SimdTarget target) {        \
    const auto pick = [&]() -> const Type* {   \
      switch (target) {                        \
        FOCI_CASE_AVX512(table)                \
        FOCI_CASE_AVX2(table)                  \
        default:                               \
          return HWY_STATIC_DISPATCH(table)(); \
      }                                        \
    };                                         \
    return *pick();                            \
  }
#endif

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Whole vectors of floats, and of as many integers.
using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
HWY_INLINE int64_t lanes() {
  return static_cast<int64_t>(hn::Lanes(DF()));
}

// The first n lanes from p, n ≤ Lanes(d); the others are 0. Nothing beyond p[n) is touched, which
// MaskedLoad and BlendedStore promise only where the target has masked memory access.
template <class D>
HWY_INLINE hn::Vec<D> load_first(D d, size_t n, const hn::TFromD<D>* p) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  return hn::MaskedLoad(hn::FirstN(d, n), d, p);
#else
  HWY_ALIGN hn::TFromD<D> buffer[hn::MaxLanes(D())] = {};
  std::memcpy(buffer, p, n * sizeof(buffer[0]));
  return hn::Load(d, buffer);
#endif
}
template <class D>
HWY_INLINE void store_first(hn::Vec<D> v, D d, size_t n, hn::TFromD<D>* p) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  hn::BlendedStore(v, hn::FirstN(d, n), d, p);
#else
  HWY_ALIGN hn::TFromD<D> buffer[hn::MaxLanes(D())];
  hn::Store(v, d, buffer);
  std::memcpy(p, buffer, n * sizeof(buffer[0]));
#endif
}
}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
