// Logarithm and powers of vectors against double, on every target.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/dense_testing.h"
#include "kernels/math_probe.h"

namespace foci::kernels {
namespace {

TEST(Math, LogarithmOfPositiveNumbers) {
  Floats x = {1, std::nextafter(1.0f, 0.0f), std::nextafter(1.0f, 2.0f), 0x1p-126f, 3e38f};
  for (uint64_t i = 0; i < 20000; ++i) {
    Rng rng(1, i);
    x.push_back(static_cast<float>(std::exp(rng.normal() * (i % 2 ? 20 : 0.01))));
  }
  on_every_target([&](SimdTarget target) {
    Floats y(x.size());
    math_probe(target).log_positive(static_cast<int64_t>(x.size()), x.data(), y.data());
    EXPECT_EQ(y[0], 0);
    double worst = 0;
    for (size_t i = 1; i < x.size(); ++i) {
      const double want = std::log(double{x[i]});
      worst = std::max(worst, std::abs(y[i] / want - 1));
    }
    EXPECT_LT(worst, 2e-7);
  });
}

// Far smaller f than a float beside 1 could hold.
TEST(Math, LogarithmNearOne) {
  Floats f = {0};
  for (uint64_t i = 0; i < 20000; ++i) {
    Rng rng(2, i);
    const double size = i % 2 ? 1 : std::exp(-30 * rng.uniform());
    f.push_back(static_cast<float>((rng.uniform() * 0.707 - 0.2928) * size));
  }
  on_every_target([&](SimdTarget target) {
    Floats y(f.size());
    math_probe(target).log_near_one(static_cast<int64_t>(f.size()), f.data(), y.data());
    EXPECT_EQ(y[0], 0);
    double worst = 0;
    for (size_t i = 1; i < f.size(); ++i) {
      worst = std::max(worst, std::abs(y[i] / std::log1p(double{f[i]}) - 1));
    }
    EXPECT_LT(worst, 1.2e-7);
  });
}

TEST(Math, Powers) {
  Floats x, a;
  for (uint64_t i = 0; i < 20000; ++i) {
    Rng rng(3, i);
    x.push_back(static_cast<float>(i % 3 ? rng.uniform() + 1e-9 : std::exp(-80 * rng.uniform())));
    const double powers[] = {0.11, 0.5, 0.99, 5, 20, 100, -0.5, -8};
    a.push_back(static_cast<float>(powers[i / 3 % std::size(powers)]));
  }
  on_every_target([&](SimdTarget target) {
    Floats y(x.size());
    math_probe(target).power_positive(static_cast<int64_t>(x.size()), x.data(), a.data(), y.data());
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exponent = double{a[i]} * std::log(double{x[i]});
      if (exponent > 86.9) continue;
      if (exponent < -87.4) {
        EXPECT_EQ(y[i], 0);
      } else if (exponent > -87.2) {
        const double error = std::abs(y[i] / std::exp(exponent) - 1);
        worst = std::max(worst, error / (4 + 4 * std::abs(exponent)));
      }
    }
    EXPECT_LT(worst, 1e-7);
  });
}

}  // namespace
}  // namespace foci::kernels
