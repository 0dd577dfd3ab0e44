// Counts wrong elements, finds the worst one, and says so in words.
#include "foci/verify/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace foci::verify {
namespace {

double error_of(double got, double want) {
  if (std::isnan(want) && std::isnan(got)) return 0;
  if (std::isinf(want) && got == want) return 0;
  if (!std::isfinite(want) || !std::isfinite(got)) return std::numeric_limits<double>::infinity();
  return std::abs(got - want);
}

Dims index_of(int64_t element, const Dims& shape) {
  Dims index = shape;
  for (int d = shape.size() - 1; d >= 0; --d) {
    index[d] = element % shape[d];
    element /= shape[d];
  }
  return index;
}

}  // namespace

std::optional<Difference> difference(const Tensor& got, const Tensor& want, double tolerance) {
  Difference d;
  d.elements = want.numel();
  if (!got.defined() || got.shape() != want.shape()) {
    d.error = std::numeric_limits<double>::infinity();
    d.wrong = d.elements;
    d.message = fmt::format("has shape {}, expected {}", got.defined() ? got.shape().str() : "none",
                            want.shape().str());
    return d;
  }
  const Tensor g = got.to(DType::f64).contiguous(), w = want.to(DType::f64).contiguous();
  double largest = 0;
  for (double x : w.span<double>()) {
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  }
  d.allowed = tolerance * largest;
  int64_t worst = -1;
  for (int64_t e = 0; e < d.elements; ++e) {
    const double error = error_of(g.data<double>()[e], w.data<double>()[e]);
    if (error <= d.allowed) continue;
    ++d.wrong;
    if (worst < 0 || error > d.error) {
      worst = e;
      d.error = error;
    }
  }
  if (worst < 0) return std::nullopt;
  d.index = index_of(worst, want.shape());
  d.got = g.data<double>()[worst];
  d.want = w.data<double>()[worst];
  d.message = fmt::format(
      "{} is {:.9g}, expected {:.9g} (error {:.3g}, allowed {:.3g}; {} of {} "
      "elements differ)",
      d.index.str(), d.got, d.want, d.error, d.allowed, d.wrong, d.elements);
  return d;
}

}  // namespace foci::verify
