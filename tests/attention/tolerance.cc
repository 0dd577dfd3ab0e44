// Norms, the error of a score, and how far a tensor lies from the expected one.
#include "attention/tolerance.h"

#include <algorithm>

namespace foci::testing {
namespace {

// The largest Euclidean norm of a row, of those that are finite.
double largest_norm(const Tensor& t) {
  const Tensor wide = t.to(DType::f64).contiguous();
  const int64_t columns = t.rank() == 0 ? 1 : t.shape().back();
  double most = 0;
  for (int64_t at = 0; at + columns <= wide.numel() && columns > 0; at += columns) {
    double sum = 0;
    for (int64_t n = 0; n < columns; ++n) sum += std::pow(wide.data<double>()[at + n], 2);
    if (std::isfinite(sum)) most = std::max(most, std::sqrt(sum));
  }
  return most;
}

double largest(const Tensor& t) {
  if (!t.defined()) return 0;
  const Tensor wide = t.to(DType::f64).contiguous();
  double most = 0;
  for (double x : wide.span<double>()) {
    if (std::isfinite(x)) most = std::max(most, std::abs(x));
  }
  return most;
}

}  // namespace

double score_error(const AttentionSpec& spec, const AttentionInputs& in) {
  const double q = largest_norm(in.q), k = largest_norm(in.k);
  const auto depth = static_cast<double>(in.q.shape().back());
  const double norms = std::visit(
      overloaded{[&](const Dot&) { return q * k; }, [](const Cosine&) { return 1.0; },
                 [&](const L2& l2) { return std::abs(l2.gamma) * (q + k) * (q + k); },
                 [&](const Additive&) { return largest_norm(in.score_w) * std::sqrt(depth); }},
      spec.score);
  const bool dot = std::holds_alternative<Dot>(spec.score);
  const double scale = std::visit(
      overloaded{[&](const AutoScale&) { return dot && depth > 0 ? 1 / std::sqrt(depth) : 1; },
                 [](double one) { return std::abs(one); },
                 [](const std::vector<double>& per_head) {
                   double most = 0;
                   for (double x : per_head) most = std::max(most, std::abs(x));
                   return most;
                 }},
      spec.scale);
  double biases = 0;
  for (const Tensor* t : {&in.bias, &in.table1d, &in.table2d}) biases += largest(*t);
  if (find_bias<Alibi>(spec)) {
    biases += largest(in.slopes) * static_cast<double>(std::max(in.q.dim(2), in.k.dim(2)));
  }
  return kEps * (norms * scale + biases);
}

Closeness closeness(const Tensor& actual, const Tensor& expected, double floor, NonFinite kinds) {
  const Tensor a = actual.to(DType::f64).contiguous(), e = expected.to(DType::f64).contiguous();
  Closeness c;
  c.scale = floor;
  for (double x : e.span<double>()) {
    if (std::isfinite(x)) c.scale = std::max(c.scale, std::abs(x) + floor);
  }
  for (int64_t n = 0; n < e.numel(); ++n) {
    const double x = a.data<double>()[n], y = e.data<double>()[n];
    double error = INFINITY;
    if (std::isfinite(x) && std::isfinite(y)) {
      const double stored = storage_tolerance(actual.dtype()) * std::abs(y);
      error = std::max(std::abs(x - y) - stored, 0.0);
    } else if (x == y || (std::isnan(x) && std::isnan(y)) ||
               (kinds == NonFinite::same_place && !std::isfinite(x) && !std::isfinite(y))) {
      error = 0;
    }
    if (error > c.error) {
      c.error = error;
      c.at = n;
    }
  }
  return c;
}

::testing::AssertionResult near(const Tensor& actual, const Tensor& expected, double tolerance,
                                double floor, NonFinite kinds) {
  if (!actual.defined() || !expected.defined()) {
    return ::testing::AssertionFailure() << "a tensor is undefined";
  }
  if (!(actual.shape() == expected.shape())) {
    return ::testing::AssertionFailure()
           << "shape " << actual.shape().str() << ", expected " << expected.shape().str();
  }
  const Closeness c = closeness(actual, expected, floor, kinds);
  if (c.error <= tolerance * c.scale) return ::testing::AssertionSuccess();
  const Tensor a = actual.to(DType::f64).contiguous(), e = expected.to(DType::f64).contiguous();
  return ::testing::AssertionFailure()
         << "element " << c.at << " of shape " << e.shape().str() << ": " << a.data<double>()[c.at]
         << ", expected " << e.data<double>()[c.at] << "; error " << c.error << " of scale "
         << c.scale << ", tolerance " << tolerance;
}

::testing::AssertionResult same_bits(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return ::testing::AssertionFailure() << "one is undefined";
  if (!a.defined()) return ::testing::AssertionSuccess();
  if (!(a.shape() == b.shape()) || a.dtype() != b.dtype()) {
    return ::testing::AssertionFailure() << "shapes " << a.shape().str() << ", " << b.shape().str();
  }
  const Tensor x = a.contiguous(), y = b.contiguous();
  const size_t size = size_of(x.dtype());
  // Of two NaN operands the processor hands on the first, sign and all, and which that is the
  // compiler chooses: a NaN is as good as any other.
  const auto is_nan = [](const Tensor& t, int64_t n) {
    return is_floating(t.dtype()) && std::isnan(t.reshape({-1}).item({n}));
  };
  for (int64_t n = 0; n < x.numel(); ++n) {
    if (std::memcmp(static_cast<const char*>(x.raw()) + n * size,
                    static_cast<const char*>(y.raw()) + n * size, size) != 0 &&
        !(is_nan(x, n) && is_nan(y, n))) {
      return ::testing::AssertionFailure()
             << "bits differ at element " << n << " of shape " << x.shape().str() << ": "
             << x.to(DType::f64).reshape({-1}).item({n}) << " and "
             << y.to(DType::f64).reshape({-1}).item({n});
    }
  }
  return ::testing::AssertionSuccess();
}

std::string failure(const std::string& name, const ::testing::AssertionResult& result) {
  return result ? "" : name + ": " + result.message() + "\n";
}

std::string differing_bits(const AttentionOutputs& a, const AttentionOutputs& b) {
  return failure("y", same_bits(a.y, b.y)) +
         failure("row_stat", same_bits(a.row_stat, b.row_stat)) +
         failure("entropy", same_bits(a.entropy, b.entropy)) +
         failure("max_weight", same_bits(a.max_weight, b.max_weight)) +
         failure("max_key", same_bits(a.max_key, b.max_key)) +
         failure("support", same_bits(a.support, b.support)) +
         failure("coverage", same_bits(a.coverage, b.coverage));
}

std::string differing_bits(const AttentionGradients& a, const AttentionGradients& b) {
  return failure("dq", same_bits(a.dq, b.dq)) + failure("dk", same_bits(a.dk, b.dk)) +
         failure("dv", same_bits(a.dv, b.dv)) + failure("dbias", same_bits(a.dbias, b.dbias)) +
         failure("dslopes", same_bits(a.dslopes, b.dslopes)) +
         failure("dtable1d", same_bits(a.dtable1d, b.dtable1d)) +
         failure("dtable2d", same_bits(a.dtable2d, b.dtable2d)) +
         failure("dscore_w", same_bits(a.dscore_w, b.dscore_w)) +
         failure("dscale", same_bits(a.dscale, b.dscale)) +
         failure("dalpha", same_bits(a.dalpha, b.dalpha));
}

}  // namespace foci::testing
