// Vector functions over arrays, compiled once a SIMD target.
#include "kernels/math_probe.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/math_probe.cc"
#include "foci/core/highway_targets.h"
// After foci's choice of targets.
#include <hwy/foreach_target.h>

#include "foci/kernels/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

template <class F>
HWY_INLINE void for_vectors(int64_t n, const F& f) {
  const auto step = static_cast<int64_t>(hn::Lanes(FloatTag()));
  for (int64_t i = 0; i < n; i += step) {
    f(i, static_cast<size_t>(HWY_MIN(step, n - i)));
  }
}

void log_positive_of(int64_t n, const float* x, float* y) {
  const FloatTag d;
  for_vectors(n, [&](int64_t i, size_t count) HWY_ATTR {
    store_first(log_positive(d, load_first(d, count, x + i)), d, count, y + i);
  });
}

void power_positive_of(int64_t n, const float* x, const float* a, float* y) {
  const FloatTag d;
  for_vectors(n, [&](int64_t i, size_t count) HWY_ATTR {
    const FloatVec p = power_positive(d, load_first(d, count, x + i), load_first(d, count, a + i));
    store_first(p, d, count, y + i);
  });
}

void log_near_one_of(int64_t n, const float* f, float* y) {
  const FloatTag d;
  for_vectors(n, [&](int64_t i, size_t count) HWY_ATTR {
    store_first(log_near_one(d, load_first(d, count, f + i)), d, count, y + i);
  });
}

const MathProbe* math_probe_table() {
  static constexpr MathProbe table{log_positive_of, power_positive_of, log_near_one_of};
  return &table;
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foci::kernels {
FOCI_KERNEL_TABLE(MathProbe, math_probe_table, math_probe)
}  // namespace foci::kernels
#endif
