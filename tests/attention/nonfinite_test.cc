// NaN and infinity: where they may be seen they arrive, where they may not they never contribute,
// forward and backward.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/compare.h"
#include "attention/fairness.h"
#include "attention/generate.h"
#include "attention/tolerance.h"
#include "foci/attention/plan.h"
#include "foci/core/rng.h"
#include "foci/core/simd_target.h"
#include "foci/reference/attention.h"

namespace foci {
namespace {

using testing::near;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

class NonFinite : public ::testing::TestWithParam<Implementation> {
 protected:
  // Each case of a sweep on another target.
  Bound bind_it(uint64_t n, const AttentionSpec& spec, const AttentionInputs& in) const {
    const auto& targets = supported_targets();
    return Plan::make(spec, shape_of(in),
                      {.implementation = GetParam(), .target = targets[n % targets.size()]})
        .bind(in);
  }
};
INSTANTIATE_TEST_SUITE_P(, NonFinite,
                         ::testing::Values(Implementation::plain, Implementation::fused),
                         [](const auto& which) {
                           return which.param == Implementation::plain ? "Plain" : "Fused";
                         });

// NaN or infinity in about one row of eight.
void poison(const Tensor& t, Rng& rng) {
  const int64_t columns = t.shape().back();
  const std::span<float> x = t.span<float>();
  for (size_t row = 0; row + columns <= x.size(); row += static_cast<size_t>(columns)) {
    if (rng.below(8) > 0) continue;
    const float values[] = {kNan, kInf, -kInf};
    x[row + static_cast<size_t>(rng.below(columns))] = values[rng.below(3)];
  }
}

// Infinities become NaN: inf − inf and inf are both right, depending on which formula of a gradient
// one writes down.
Tensor no_infinities(const Tensor& t) {
  Tensor c = t.to(DType::f64).clone();
  for (double& x : c.span<double>()) x = std::isinf(x) ? std::nan("") : x;
  return c;
}

TEST_P(NonFinite, ArrivesWhereTheOracleHasIt) {
  for (uint64_t n = 20000; n < 20800 && !HasFailure(); ++n) {
    testing::SweepCase c = testing::attention_case(n);
    SCOPED_TRACE(c.text);
    Rng rng(n);
    if (n % 2) poison(c.in.v, rng);
    if (n % 3 == 0) poison(c.in.k, rng);
    if (n % 5 == 0) poison(c.in.q, rng);
    const reference::Forward expected = reference::attention_forward(c.spec, c.in);
    const testing::Fairness fairness = testing::make_fair(c, expected);
    if (fairness.count > 0) continue;
    const Bound bound = bind_it(n, c.spec, c.in);
    const AttentionOutputs out = bound.forward();
    EXPECT_TRUE(near(out.y, expected.out.y));
    EXPECT_TRUE(near(out.row_stat, expected.out.row_stat));
    EXPECT_TRUE(near(out.coverage, expected.out.coverage));
    EXPECT_TRUE(near(out.support, expected.out.support, 0));
    AttentionUpstream up;
    up.dy = c.up.dy;
    AttentionUpstream up64;
    if (up.dy.defined()) up64.dy = up.dy.to(DType::f64);
    const AttentionGradients g = bound.backward(out, up);
    const AttentionGradients e = reference::attention_backward(c.spec, c.in, up64);
    EXPECT_TRUE(near(no_infinities(g.dq), no_infinities(e.dq), testing::kTolerance, 0.01));
    EXPECT_TRUE(near(no_infinities(g.dk), no_infinities(e.dk), testing::kTolerance, 0.01));
    EXPECT_TRUE(near(no_infinities(g.dv), no_infinities(e.dv), testing::kTolerance, 0.01));
  }
}

// Whatever masked keys, and queries of empty rows, hold: not one bit changes.
TEST_P(NonFinite, MaskedKeysAndEmptyQueriesNeverContribute) {
  const testing::SweepLimits limits{
      .batch = 2, .kv_heads = 2, .group = 2, .queries = 20, .keys = 60, .head = 20, .value = 20};
  int poisoned = 0;
  for (uint64_t n = 30000; n < 30120 && !HasFailure(); ++n) {
    testing::SweepCase c = testing::attention_case(n, DType::f32, limits);
    SCOPED_TRACE(c.text);
    const reference::Forward f = reference::attention_forward(c.spec, c.in);
    AttentionInputs bad = c.in;
    bad.q = c.in.q.clone(), bad.k = c.in.k.clone(), bad.v = c.in.v.clone();
    AttentionUpstream bad_up = c.up;
    if (c.up.dy.defined()) bad_up.dy = c.up.dy.clone();
    const int64_t B = bad.q.dim(0), H = bad.q.dim(1), Hk = bad.k.dim(1);
    const int64_t N = bad.q.dim(2), M = bad.k.dim(2);
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t i = 0; i < N; ++i) {
          bool empty = true;
          for (int64_t j = 0; j < M; ++j) empty = empty && !f.allowed.at<bool>(b, h, i, j);
          if (!empty) continue;
          ++poisoned;
          bad.q.select(0, b).select(0, h).select(0, i).fill(kNan);
          if (bad_up.dy.defined()) bad_up.dy.select(0, b).select(0, h).select(0, i).fill(kInf);
        }
      }
      for (int64_t g = 0; g < Hk; ++g) {
        for (int64_t j = 0; j < M; ++j) {
          bool seen = false;
          for (int64_t h = g * (H / Hk); h < (g + 1) * (H / Hk); ++h) {
            for (int64_t i = 0; i < N; ++i) seen = seen || f.allowed.at<bool>(b, h, i, j);
          }
          if (seen) continue;
          ++poisoned;
          bad.k.select(0, b).select(0, g).select(0, j).fill(j % 2 ? kNan : kInf);
          bad.v.select(0, b).select(0, g).select(0, j).fill(j % 3 ? kNan : kInf);
        }
      }
    }
    const Bound good_bound = bind_it(n, c.spec, c.in), bad_bound = bind_it(n, c.spec, bad);
    const AttentionOutputs good = good_bound.forward(), out = bad_bound.forward();
    EXPECT_EQ(testing::differing_bits(out, good), "");
    EXPECT_EQ(testing::differing_bits(bad_bound.backward(out, bad_up, testing::kEverything),
                                      good_bound.backward(good, c.up, testing::kEverything)),
              "");
  }
  EXPECT_GT(poisoned, 1000);
}

}  // namespace
}  // namespace foci
