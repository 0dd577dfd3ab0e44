// Builds the tensors of a row, compares what comes out, and makes tests of all rows.
#include "reference/reported_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "foci/reference/attention.h"

namespace foci::testing {

AttentionInputs zero_logits(int64_t queries, std::initializer_list<float> v) {
  const auto keys = static_cast<int64_t>(v.size());
  return {.q = Tensor::zeros({1, 1, queries, 1}),
          .k = Tensor::zeros({1, 1, keys, 1}),
          .v = floats(v, {1, 1, keys, 1})};
}

AttentionInputs given_scores(std::initializer_list<float> scores) {
  const auto keys = static_cast<int64_t>(scores.size());
  AttentionInputs in{.q = floats({1}, {1, 1, 1, 1}),
                     .k = floats(scores, {1, 1, keys, 1}),
                     .v = Tensor::zeros({1, 1, keys, 1})};
  for (int64_t j = 0; j < keys; ++j) in.v.data<float>()[j] = static_cast<float>(j);
  return in;
}

std::string differs(const char* what, const Tensor& got, const std::vector<double>& want,
                    double tolerance) {
  if (!got.defined()) return fmt::format("{} is missing", what);
  if (got.numel() != static_cast<int64_t>(want.size())) {
    return fmt::format("{} has shape {}, {} numbers were expected", what, got.shape().str(),
                       want.size());
  }
  const Tensor g = got.to(DType::f64).contiguous();
  for (size_t x = 0; x < want.size(); ++x) {
    const double value = g.data<double>()[x];
    const bool equal = std::isinf(want[x])
                           ? value == want[x]
                           : std::abs(value - want[x]) <=
                                 tolerance * std::max(1.0, std::abs(want[x]));  // false for NaN
    if (!equal) return fmt::format("{}[{}] is {}, expected {}", what, x, value, want[x]);
  }
  return "";
}

std::string differs(const char* what, const Tensor& got, const Tensor& want, double tolerance) {
  if (!got.defined()) return fmt::format("{} is missing", what);
  if (got.shape() != want.shape()) {
    return fmt::format("{} has shape {}, expected {}", what, got.shape().str(), want.shape().str());
  }
  const Tensor w = want.to(DType::f64).contiguous();
  const auto values = w.span<double>();
  return differs(what, got, std::vector<double>(values.begin(), values.end()), tolerance);
}

std::string bits_differ(const char* what, const Tensor& a, const Tensor& b) {
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) {
    return fmt::format("{}: shapes {} and {}", what, a.shape().str(), b.shape().str());
  }
  const Tensor x = a.contiguous(), y = b.contiguous();
  if (x.nbytes() == 0 || std::memcmp(x.raw(), y.raw(), x.nbytes()) == 0) return "";
  return fmt::format("{}: bits differ", what);
}

std::string not_all_zero(const char* what, const Tensor& t) {
  if (!t.defined()) return fmt::format("{} is missing", what);
  const Tensor d = t.to(DType::f64).contiguous();
  for (double x : d.span<double>()) {
    if (x != 0) return fmt::format("{} holds {}, expected exact zeros", what, x);
  }
  return "";
}

std::string not_finite(const char* what, const Tensor& t) {
  if (!t.defined()) return fmt::format("{} is missing", what);
  const Tensor d = t.to(DType::f64).contiguous();
  for (double x : d.span<double>()) {
    if (!std::isfinite(x)) return fmt::format("{} holds {}", what, x);
  }
  return "";
}

std::string y_differs(const Engine& e, const AttentionSpec& spec, const AttentionInputs& in,
                      const std::vector<double>& want, double tolerance) {
  return differs("y", e.forward(spec, in).y, want, tolerance);
}

std::string weights_differ(const Engine& e, const AttentionSpec& spec, const AttentionInputs& in,
                           const std::vector<double>& want, double tolerance) {
  return differs("weights", e.weights(spec, in), want, tolerance);
}

AttentionUpstream ones_like_y(const AttentionInputs& in) {
  return {.dy =
              Tensor::full({in.q.dim(0), in.q.dim(1), in.q.dim(2), in.v.dim(3)}, 1, in.q.dtype())};
}

std::string y_differs_on_any_path(const Engine& e, AttentionSpec spec, const AttentionInputs& in,
                                  const std::vector<double>& want) {
  spec.statistics = {};
  const Tensor bare = e.forward(spec, in).y;
  const Tensor weights = e.weights(spec, in);
  spec.statistics = Statistics::all();
  const Tensor with_statistics = e.forward(spec, in).y;
  // Σ w v of the returned weights is y again, for one head and no dropout; and so is, with an
  // upstream gradient of 1 for one row alone, Σ dv · v.
  std::vector<double> from_weights, from_gradient;
  const Tensor v = in.v.to(DType::f64), w = weights.to(DType::f64);
  for (int64_t i = 0; i < in.q.dim(2); ++i) {
    AttentionUpstream up{.dy = Tensor::zeros(bare.shape(), in.q.dtype())};
    up.dy.slice(2, i, i + 1).fill(1);
    const Tensor dv = e.backward(spec, in, up, {}).dv.to(DType::f64);
    double a = 0, b = 0;
    for (int64_t j = 0; j < in.k.dim(2); ++j) {
      const double value = v.item({0, 0, j, 0});
      if (w.item({0, 0, i, j}) != 0) a += w.item({0, 0, i, j}) * value;
      if (dv.item({0, 0, j, 0}) != 0) b += dv.item({0, 0, j, 0}) * value;
    }
    from_weights.push_back(a);
    from_gradient.push_back(b);
  }
  const Tensor y1 = Tensor::from(from_weights, bare.shape());
  const Tensor y2 = Tensor::from(from_gradient, bare.shape());
  return first({differs("y", bare, want), differs("y with statistics", with_statistics, want),
                differs("weights · v", y1, want), differs("dv · v", y2, want)});
}

Engine reference_engine() {
  return {.forward =
              [](const AttentionSpec& spec, const AttentionInputs& in) {
                return reference::attention_forward(spec, in).out;
              },
          .weights =
              [](const AttentionSpec& spec, const AttentionInputs& in) {
                return reference::attention_forward(spec, in).weights;
              },
          .backward =
              [](const AttentionSpec& spec, const AttentionInputs& in, const AttentionUpstream& up,
                 const AttentionWanted&) { return reference::attention_backward(spec, in, up); }};
}

std::vector<ReportedCase> reported_cases() {
  std::vector<ReportedCase> all;
  for (const auto& part : {reported_masks(), reported_positions(), reported_scores(),
                           reported_shapes(), fixed_numbers()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

namespace {

class ReportedTest : public ::testing::Test {
 public:
  ReportedTest(ReportedCase row, std::function<Engine()> factory)
      : row_(std::move(row)), factory_(std::move(factory)) {}
  void TestBody() override { EXPECT_EQ(row_.run(factory_()), ""); }

 private:
  ReportedCase row_;
  std::function<Engine()> factory_;
};

}  // namespace

void register_reported_tests(const std::string& suffix, const std::function<Engine()>& factory) {
  for (const ReportedCase& row : reported_cases()) {
    const std::string suite = row.suite + (suffix.empty() ? "" : "_" + suffix);
    ::testing::RegisterTest(
        suite.c_str(), row.name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
        [row, factory]() -> ::testing::Test* { return new ReportedTest(row, factory); });
  }
}

}  // namespace foci::testing
