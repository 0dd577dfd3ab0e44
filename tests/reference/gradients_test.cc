// Every gradient of the oracle against finite differences in double, over the sweep.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "foci/reference/attention.h"
#include "reference/sweep.h"

namespace foci {
namespace {

using testing::SweepCase;

// A number to differentiate: every output times its upstream gradient. Rows without a key have an
// infinite row statistic, which no gradient passes through.
double loss(const SweepCase& c, const reference::Forward& f) {
  double sum = 0;
  const auto add = [&](const Tensor& out, const Tensor& up) {
    const auto o = out.span<double>(), u = up.span<double>();
    for (size_t x = 0; x < o.size(); ++x) sum += std::isinf(o[x]) ? 0 : o[x] * u[x];
  };
  add(f.out.y, c.up.dy);
  add(f.out.row_stat, c.up.drow_stat);
  add(f.out.entropy, c.up.dentropy);
  add(f.out.max_weight, c.up.dmax_weight);
  add(f.out.coverage, c.up.dcoverage);
  return sum;
}

// Which keys have weight and which has most: between two points with the same pattern the loss is
// smooth.
std::vector<int64_t> pattern(const reference::Forward& f) {
  std::vector<int64_t> bits;
  for (double w : f.weights.span<double>()) bits.push_back(w > 0);
  for (int64_t k : f.out.max_key.span<int64_t>()) bits.push_back(k);
  return bits;
}

struct Tally {
  int64_t checked = 0, skipped = 0, blunt = 0;
};

void check_tensor(const SweepCase& c, const char* name, const Tensor& x, const Tensor& gradient,
                  Tally& tally) {
  if (!x.defined()) {
    EXPECT_FALSE(gradient.defined()) << name;
    return;
  }
  ASSERT_TRUE(gradient.defined()) << name;
  ASSERT_EQ(gradient.shape(), x.shape()) << name;
  const std::vector<int64_t> here = pattern(reference::attention_forward(c.spec, c.in));
  for (int64_t e = 0; e < x.numel(); ++e) {
    double& at = x.data<double>()[e];
    const double value = at;
    bool smooth = std::isfinite(value);
    const auto difference = [&](double h) {
      at = value + h;
      const reference::Forward more = reference::attention_forward(c.spec, c.in);
      at = value - h;
      const reference::Forward less = reference::attention_forward(c.spec, c.in);
      at = value;
      smooth = smooth && pattern(more) == here && pattern(less) == here;
      return (loss(c, more) - loss(c, less)) / (2 * h);
    };
    const double got = gradient.data<double>()[e];
    if (std::isinf(value)) {  // a mask entry of the bias
      EXPECT_EQ(got, 0) << name << "[" << e << "]\n" << c.text;
      continue;
    }
    const double coarse = difference(2e-5), fine = difference(1e-5);
    if (!smooth) {
      ++tally.skipped;
      continue;
    }
    // Richardson's step removes the h² term; the change it makes bounds what is left.
    const double want = fine + (fine - coarse) / 3;
    const double doubt = std::abs(fine - coarse);
    ++tally.checked;
    if (doubt > 1e-5 * (1 + std::abs(got))) ++tally.blunt;
    ASSERT_NEAR(got, want, 1e-6 * (1 + std::abs(got)) + doubt) << name << "[" << e << "]\n"
                                                               << c.text;
  }
}

class Gradients : public ::testing::TestWithParam<int> {};

TEST_P(Gradients, EqualFiniteDifferences) {
  constexpr int kCasesPerBlock = 20;
  Tally tally;
  for (int n = 0; n < kCasesPerBlock && !HasFatalFailure(); ++n) {
    SweepCase c = testing::sweep_case(GetParam() * kCasesPerBlock + n, DType::f64);
    const AttentionGradients g = reference::attention_backward(c.spec, c.in, c.up);
    check_tensor(c, "dq", c.in.q, g.dq, tally);
    check_tensor(c, "dk", c.in.k, g.dk, tally);
    check_tensor(c, "dv", c.in.v, g.dv, tally);
    check_tensor(c, "dbias", c.in.bias, g.dbias, tally);
    check_tensor(c, "dslopes", c.in.slopes, g.dslopes, tally);
    check_tensor(c, "dtable1d", c.in.table1d, g.dtable1d, tally);
    check_tensor(c, "dtable2d", c.in.table2d, g.dtable2d, tally);
    check_tensor(c, "dscore_w", c.in.score_w, g.dscore_w, tally);
  }
  EXPECT_GT(tally.checked, 300);
  EXPECT_LT(tally.skipped, tally.checked / 10);
  EXPECT_LT(tally.blunt, tally.checked / 50);
}
INSTANTIATE_TEST_SUITE_P(Sweep, Gradients, ::testing::Range(0, 8));

// What lives in the spec, not in a tensor: `values` against the gradient that came for them; `set`
// puts moved ones into the spec. How many were smooth enough to be checked.
int check_numbers(SweepCase c, const std::vector<double>& values, const Tensor& gradient,
                  const std::function<void(AttentionSpec&, const std::vector<double>&)>& set) {
  EXPECT_EQ(gradient.numel(), static_cast<int64_t>(values.size()));
  int checked = 0;
  const std::vector<int64_t> here = pattern(reference::attention_forward(c.spec, c.in));
  for (size_t h = 0; h < values.size(); ++h) {
    bool smooth = true;
    const auto difference = [&](double step) {
      double side[2];
      for (int s = 0; s < 2; ++s) {
        std::vector<double> moved = values;
        moved[h] += s ? -step : step;
        set(c.spec, moved);
        const reference::Forward f = reference::attention_forward(c.spec, c.in);
        smooth = smooth && pattern(f) == here;
        side[s] = loss(c, f);
      }
      return (side[0] - side[1]) / (2 * step);
    };
    const double coarse = difference(2e-5), fine = difference(1e-5);
    if (!smooth) continue;
    const double got = gradient.at<double>(h);
    ++checked;
    EXPECT_NEAR(got, fine + (fine - coarse) / 3,
                1e-6 * (1 + std::abs(got)) + std::abs(fine - coarse))
        << c.text;
  }
  return checked;
}

TEST(ScaleGradient, EqualsFiniteDifferences) {
  int checked = 0;
  for (int n = 0; n < 120; ++n) {
    const SweepCase c = testing::sweep_case(n, DType::f64);
    const AttentionGradients g = reference::attention_backward(c.spec, c.in, c.up);
    std::vector<double> scales;
    bool per_head = false;
    std::visit(overloaded{[&](const AutoScale&) {
                            const bool dot = std::holds_alternative<Dot>(c.spec.score);
                            scales = {dot ? 1 / std::sqrt(double(c.in.q.dim(3))) : 1};
                          },
                          [&](double s) { scales = {s}; },
                          [&](const std::vector<double>& s) {
                            scales = s;
                            per_head = true;
                          }},
               c.spec.scale);
    checked += check_numbers(c, scales, g.dscale,
                             [&](AttentionSpec& spec, const std::vector<double>& moved) {
                               spec.scale = per_head ? Scale(moved) : Scale(moved[0]);
                             });
  }
  EXPECT_GT(checked, 100);
}

TEST(AlphaGradient, EqualsFiniteDifferences) {
  int checked = 0;
  for (int n = 0; n < 300; ++n) {
    const SweepCase c = testing::sweep_case(n, DType::f64);
    const AttentionGradients g = reference::attention_backward(c.spec, c.in, c.up);
    const auto* entmax = std::get_if<Entmax>(&c.spec.normalizer);
    EXPECT_EQ(g.dalpha.defined(), entmax != nullptr);
    if (entmax == nullptr) continue;
    const bool per_head = !entmax->per_head.empty();
    const std::vector<double> alphas = per_head ? entmax->per_head : std::vector{entmax->alpha};
    checked += check_numbers(
        c, alphas, g.dalpha, [&](AttentionSpec& spec, const std::vector<double>& moved) {
          spec.normalizer = per_head ? Entmax{.per_head = moved} : Entmax{moved[0]};
        });
  }
  EXPECT_GT(checked, 50);
}

}  // namespace
}  // namespace foci
