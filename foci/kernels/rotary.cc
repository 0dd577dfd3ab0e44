// Rotary positions, compiled once a SIMD target.
#define HWY_TARGET_INCLUDE "foci/kernels/rotary.cc"
#include "foci/core/highway_targets.h"
// After foci's choice of targets.
#include <hwy/foreach_target.h>

#include <cstring>

#include "foci/kernels/rotary.h"
#include "foci/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {
namespace {

using Tag = hn::ScalableTag<float>;
using Vector = hn::Vec<Tag>;

struct Pair {
  Vector u, v;
};

// (u, v) turned. Body and tail call it, so that a channel's bits do not depend on the row's length.
HWY_INLINE Pair turned(Vector u, Vector v, Vector c, Vector s) {
  return {hn::NegMulAdd(v, s, hn::Mul(u, c)), hn::MulAdd(u, s, hn::Mul(v, c))};
}

HWY_INLINE Vector signed_sine(Vector s, bool transposed) {
  return transposed ? hn::Neg(s) : s;
}

void half_split(int64_t half, const float* cosine, const float* sine, bool transposed,
                const float* x, float* y) {
  const Tag d;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  int64_t r = 0;
  for (; r + step <= half; r += step) {
    const Pair p = turned(hn::LoadU(d, x + r), hn::LoadU(d, x + half + r), hn::LoadU(d, cosine + r),
                          signed_sine(hn::LoadU(d, sine + r), transposed));
    hn::StoreU(p.u, d, y + r);
    hn::StoreU(p.v, d, y + half + r);
  }
  if (r == half) return;
  const auto rest = static_cast<size_t>(half - r);
  const Pair p = turned(load_first(d, rest, x + r), load_first(d, rest, x + half + r),
                        load_first(d, rest, cosine + r),
                        signed_sine(load_first(d, rest, sine + r), transposed));
  store_first(p.u, d, rest, y + r);
  store_first(p.v, d, rest, y + half + r);
}

HWY_INLINE void turn_interleaved(Vector c, Vector s, const float* x, float* y) {
  const Tag d;
  Vector u, v;
  hn::LoadInterleaved2(d, x, u, v);
  const Pair p = turned(u, v, c, s);
  hn::StoreInterleaved2(p.u, p.v, d, y);
}

void interleaved(int64_t half, const float* cosine, const float* sine, bool transposed,
                 const float* x, float* y) {
  const Tag d;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  int64_t r = 0;
  for (; r + step <= half; r += step) {
    turn_interleaved(hn::LoadU(d, cosine + r), signed_sine(hn::LoadU(d, sine + r), transposed),
                     x + 2 * r, y + 2 * r);
  }
  if (r == half) return;
  const auto rest = static_cast<size_t>(half - r);
  HWY_ALIGN float pairs[2 * hn::MaxLanes(Tag())] = {};
  std::memcpy(pairs, x + 2 * r, 2 * rest * sizeof(float));
  turn_interleaved(load_first(d, rest, cosine + r),
                   signed_sine(load_first(d, rest, sine + r), transposed), pairs, pairs);
  std::memcpy(y + 2 * r, pairs, 2 * rest * sizeof(float));
}

}  // namespace

const RotaryKernels* rotary_table() {
  static constexpr RotaryKernels table{.half_split = half_split, .interleaved = interleaved};
  return &table;
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foci::kernels {
FOCI_KERNEL_TABLE(RotaryKernels, rotary_table, rotary_kernels)
}  // namespace foci::kernels
#endif
