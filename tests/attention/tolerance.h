// Tolerances for float32 results against the oracle in double, and when a comparison is fair.
//
// Inputs are of unit size. A result that is a sum of n products then carries an error of about
// √n·eps (eps = 2^-24) of its terms, and passes through exp, a division and a second sum: 16·eps is
// typical, 2^-24 · 340 = 2e-5 of the largest element is the promise (`foci verify`'s default).
// Where a gradient is a sum whose terms cancel (dbias over a whole row is 0), the terms' size
// counts, not the sum's; `floor` gives it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "foci/core/tensor.h"
#include "foci/reference/attention.h"

namespace foci::testing {

constexpr double kTolerance = 2e-5;
// Results stored as float16 or bfloat16 round once more: 2^-11 and 2^-8 of each element.
inline double storage_tolerance(DType dtype) {
  return dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : 0;
}

// Infinities and NaN must agree in place and kind; the rest within tolerance · (largest expected
// absolute value + floor). Both may be of any dtype; shapes must be equal.
inline ::testing::AssertionResult near(const Tensor& actual, const Tensor& expected,
                                       double tolerance = kTolerance, double floor = 0) {
  if (!actual.defined() || !expected.defined()) {
    return ::testing::AssertionFailure() << "a tensor is undefined";
  }
  if (!(actual.shape() == expected.shape())) {
    return ::testing::AssertionFailure()
           << "shape " << actual.shape().str() << ", expected " << expected.shape().str();
  }
  const Tensor a = actual.to(DType::f64).contiguous(), e = expected.to(DType::f64).contiguous();
  double scale = floor;
  for (double x : e.span<double>()) {
    if (std::isfinite(x)) scale = std::max(scale, std::abs(x) + floor);
  }
  double worst = -1;
  int64_t worst_at = -1;
  for (int64_t n = 0; n < e.numel(); ++n) {
    const double x = a.data<double>()[n], y = e.data<double>()[n];
    const double stored = storage_tolerance(actual.dtype()) * std::abs(y);
    double error = 0;
    if (std::isnan(y)) {
      error = std::isnan(x) ? 0 : INFINITY;
    } else if (std::isinf(y)) {
      error = x == y ? 0 : INFINITY;
    } else {
      error = std::max(std::abs(x - y) - stored, 0.0);
      if (std::isnan(x)) error = INFINITY;
    }
    if (error > worst) {
      worst = error;
      worst_at = n;
    }
  }
  if (worst <= tolerance * scale) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "element " << worst_at << " of shape " << e.shape().str() << ": "
         << a.data<double>()[worst_at] << ", expected " << e.data<double>()[worst_at] << "; error "
         << worst << " of scale " << scale;
}

// Bit for bit, NaN included.
inline ::testing::AssertionResult same_bits(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return ::testing::AssertionFailure() << "one is undefined";
  if (!a.defined()) return ::testing::AssertionSuccess();
  if (!(a.shape() == b.shape()) || a.dtype() != b.dtype()) {
    return ::testing::AssertionFailure() << "shapes " << a.shape().str() << ", " << b.shape().str();
  }
  const Tensor x = a.contiguous(), y = b.contiguous();
  const size_t size = size_of(x.dtype());
  for (int64_t n = 0; n < x.numel(); ++n) {
    if (std::memcmp(static_cast<const char*>(x.raw()) + n * size,
                    static_cast<const char*>(y.raw()) + n * size, size) != 0) {
      return ::testing::AssertionFailure()
             << "bits differ at element " << n << " of shape " << x.shape().str();
    }
  }
  return ::testing::AssertionSuccess();
}

// How clearly a row's choices are made. A float32 result cannot follow where double decides by less
// than its rounding: whether a key is in a sparse map's support, among the k best, or the largest.
struct Margins {
  double support = INFINITY;  // least |(α−1)s − τ|, or gap between the last chosen and first left
  double largest = INFINITY;  // gap between the two largest scores
};

inline Margins margins(const AttentionSpec& spec, const reference::Forward& f, int64_t b, int64_t h,
                       int64_t i) {
  Margins m;
  std::vector<double> seen;
  for (int64_t j = 0; j < f.scores.dim(3); ++j) {
    if (f.allowed.at<bool>(b, h, i, j)) seen.push_back(f.scores.at<double>(b, h, i, j));
  }
  std::sort(seen.begin(), seen.end(), std::greater<>());
  if (seen.size() > 1) m.largest = seen[0] - seen[1];
  double alpha = 0;
  if (std::holds_alternative<Sparsemax>(spec.normalizer)) alpha = 2;
  if (const auto* e = std::get_if<Entmax>(&spec.normalizer)) alpha = e->alpha;
  if (alpha > 0) {
    const double tau = f.out.row_stat.at<double>(b, h, i);
    for (double s : seen) m.support = std::min(m.support, std::abs((alpha - 1) * s - tau));
  }
  if (const auto* t = std::get_if<TopK>(&spec.normalizer)) {
    const auto k = static_cast<size_t>(t->k);
    if (k < seen.size()) m.support = seen[k - 1] - seen[k];
  }
  return m;
}

}  // namespace foci::testing
