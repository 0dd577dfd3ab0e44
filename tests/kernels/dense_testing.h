// What the tests of dense operators share: random matrices with padding between rows, every SIMD
// target, every number of threads, comparison bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "foci/core/rng.h"
#include "foci/core/simd_target.h"
#include "foci/core/threads.h"
#include "foci/kernels/dense.h"

namespace foci::kernels {

using Floats = std::vector<float>;

inline Floats random_floats(int64_t n, uint64_t seed, double spread = 1.0) {
  Rng rng(seed);
  Floats v(static_cast<size_t>(n));
  for (float& x : v) x = static_cast<float>(spread * (2 * rng.uniform() - 1));
  return v;
}

// Equal bits, so that NaN equals itself and −0 differs from 0.
inline bool same_bits(const float* a, const float* b, int64_t n) {
  return n == 0 || std::memcmp(a, b, static_cast<size_t>(n) * sizeof(float)) == 0;
}
inline bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), static_cast<int64_t>(a.size()));
}

// Calls f(target) on every target of the machine, named in failures.
template <class F>
void on_every_target(const F& f) {
  for (const SimdTarget target : supported_targets()) {
    SCOPED_TRACE(std::string(name_of(target)));
    f(target);
  }
}

// f() must give the same bits with every number of threads.
template <class F>
void expect_same_with_any_threads(const F& f) {
  const int before = num_threads();
  set_num_threads(1);
  const Floats once = f();
  for (const int threads : {2, 3, 5}) {
    set_num_threads(threads);
    EXPECT_TRUE(same_bits(once, f())) << threads << " threads";
  }
  set_num_threads(before);
}

inline constexpr double kEps = std::numeric_limits<float>::epsilon();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Rounding of a sum of n products whose magnitudes sum to `norm`: errors add up like a random walk.
inline double product_tolerance(int64_t n, double norm) {
  return kEps * (4 + 2 * std::sqrt(static_cast<double>(n))) * norm;
}

}  // namespace foci::kernels
