// Entmax and its gradient in float32 against numbers of mpmath: unfused, fused on every SIMD
// target, and the row map alone, over α from 1.01 to 1e6.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/generate.h"
#include "attention/tolerance.h"
#include "foci/attention/normalize.h"
#include "foci/attention/plan.h"
#include "foci/core/simd_target.h"
#include "foci/reference/attention.h"
#include "reference/entmax_table.h"

namespace foci {
namespace {

using testing::EntmaxCase;
using testing::EntmaxKey;

struct Way {
  Implementation implementation;
  SimdTarget target;
  std::string name;
};
std::vector<Way> ways() {
  std::vector<Way> all;
  for (const SimdTarget target : supported_targets()) {
    all.push_back({Implementation::fused, target, "fused_" + std::string(name_of(target))});
  }
  all.push_back({Implementation::plain, supported_targets().back(), "plain"});
  return all;
}

// One row whose scores are the keys, so that none is rounded: q = 1, D = 1, scale 1, with v_j the
// upstream gradient of weight j, so that dk is that of the scores.
struct Solved {
  AttentionSpec spec;
  AttentionInputs in;
  Bound bound;
  AttentionOutputs out;
};
Solved solve(const EntmaxCase& c, const Way& way) {
  const auto M = static_cast<int64_t>(c.scores.size());
  AttentionSpec spec;
  spec.normalizer = Entmax{c.alpha};
  spec.scale = 1.0;
  spec.statistics = Statistics::all();
  AttentionInputs in;
  in.q = Tensor::full({1, 1, 1, 1}, 1);
  in.k = Tensor::from<float>(c.scores, {1, 1, M, 1});
  in.v = Tensor::empty({1, 1, M, 1});
  for (int64_t j = 0; j < M; ++j) in.v.data<float>()[j] = testing::entmax_upstream(j);
  Bound bound = Plan::make(spec, {1, 1, 1, 1, M, 1, 1}, {way.implementation, way.target}).bind(in);
  AttentionOutputs out = bound.forward();
  return {spec, in, std::move(bound), out};
}

// How far a gradient may lie off: as much of itself and of the largest that is finite.
double scale_of(const EntmaxCase& c, double EntmaxKey::*what) {
  double scale = 0;
  for (const EntmaxKey& key : c.keys) {
    if (std::abs(key.*what) < 3e38) scale = std::max(scale, std::abs(key.*what));
  }
  return scale;
}
// ±inf where float32 ends.
double error_of(float got, double want, double scale) {
  if (std::abs(want) > std::numeric_limits<float>::max()) {
    return got == static_cast<float>(want) ? 0 : INFINITY;
  }
  return std::abs(got - want) / std::max(scale, 1e-30);
}

class EntmaxTable : public ::testing::TestWithParam<Way> {};
std::string way_name(const ::testing::TestParamInfo<Way>& way) {
  return way.param.name;
}
INSTANTIATE_TEST_SUITE_P(Ways, EntmaxTable, ::testing::ValuesIn(ways()), way_name);

TEST_P(EntmaxTable, Forward) {
  double worst = 0;
  for (const EntmaxCase& c : testing::entmax_table()) {
    SCOPED_TRACE(c.name);
    const Solved r = solve(c, GetParam());
    const std::vector<int64_t> zero = {0};
    const Tensor weights = r.bound.weights(r.out, zero, zero);
    double sum = 0;
    int64_t count = 0;
    for (size_t j = 0; j < c.scores.size(); ++j) {
      sum += weights.at<float>(0, 0, 0, j);
      count += weights.at<float>(0, 0, 0, j) > 0;
    }
    EXPECT_NEAR(sum, 1, 2e-6);
    // Keys whose weight is below rounding may be counted or not.
    const auto tiny = std::count_if(c.keys.begin(), c.keys.end(),
                                    [](const EntmaxKey& key) { return key.p < 1e-6; });
    if (tiny == 0) {
      EXPECT_EQ(r.out.support.at<float>(0, 0, 0), static_cast<float>(c.support));
      EXPECT_EQ(count, c.support);
    }
    for (const EntmaxKey& key : c.keys) {
      const float w = weights.at<float>(0, 0, 0, key.j);
      EXPECT_NEAR(w, key.p, 4e-6) << key.j;
      worst = std::max(worst, std::abs(w - key.p));  // --gtest_output=xml shows it
    }
    EXPECT_NEAR(r.out.max_weight.at<float>(0, 0, 0), c.largest, 4e-6);
    EXPECT_NEAR(r.out.entropy.at<float>(0, 0, 0), c.entropy, 2e-5);
    const double stat = 4e-7 * std::max(1.0, std::abs(c.tau));
    EXPECT_NEAR(r.out.row_stat.at<float>(0, 0, 0), c.tau, stat);
  }
  RecordProperty("worst_weight", fmt::format("{:.1e}", worst));
}

TEST_P(EntmaxTable, Backward) {
  double worst = 0;
  std::string at;
  for (const EntmaxCase& c : testing::entmax_table()) {
    SCOPED_TRACE(c.name);
    const Solved r = solve(c, GetParam());
    AttentionUpstream up;
    up.dy = Tensor::full({1, 1, 1, 1}, 1);
    const AttentionGradients g = r.bound.backward(r.out, up);
    up.dy = Tensor::zeros({1, 1, 1, 1});
    up.drow_stat = Tensor::full({1, 1, 1}, 1);
    const AttentionGradients h = r.bound.backward(r.out, up);
    const double ds = scale_of(c, &EntmaxKey::ds), dtau = scale_of(c, &EntmaxKey::dtau);
    for (const EntmaxKey& key : c.keys) {
      const double e = error_of(g.dk.at<float>(0, 0, key.j, 0), key.ds, ds);
      if (e > worst) {
        worst = e;
        at = c.name;
      }
      EXPECT_LT(e, 2e-5) << key.j << ": " << g.dk.at<float>(0, 0, key.j, 0) << ", right " << key.ds;
      const double f = error_of(h.dk.at<float>(0, 0, key.j, 0), key.dtau, dtau);
      EXPECT_LT(f, 2e-5) << key.j << ": " << h.dk.at<float>(0, 0, key.j, 0) << ", right "
                         << key.dtau;
    }
  }
  RecordProperty("worst_gradient", fmt::format("{:.1e} in {}", worst, at));
}

// The row map alone. Its backward goes by the scores, or by float32 weights alone, whose rounding
// the power 2 − α magnifies: by so much as docs/attention.md says.
TEST(EntmaxTableRows, AloneAndBack) {
  for (const EntmaxCase& c : testing::entmax_table()) {
    SCOPED_TRACE(c.name);
    const auto M = static_cast<int64_t>(c.scores.size());
    const Tensor scores = Tensor::from<float>(c.scores, {M});
    const Tensor weights = normalize(Entmax{c.alpha}, scores), up = Tensor::empty({M});
    double sum = 0;
    for (int64_t j = 0; j < M; ++j) {
      sum += weights.at<float>(j);
      up.at<float>(j) = testing::entmax_upstream(j);
    }
    EXPECT_NEAR(sum, 1, 1e-6);
    const Tensor ds = normalize_backward(Entmax{c.alpha}, weights, up, scores);
    const Tensor rough = normalize_backward(Entmax{c.alpha}, weights, up);
    const double scale = scale_of(c, &EntmaxKey::ds);
    const bool finite = std::all_of(c.keys.begin(), c.keys.end(), [](const EntmaxKey& key) {
      return std::abs(key.ds) < std::numeric_limits<float>::max();
    });
    for (const EntmaxKey& key : c.keys) {
      EXPECT_NEAR(weights.at<float>(key.j), key.p, 1e-7) << key.j;
      EXPECT_LT(error_of(ds.at<float>(key.j), key.ds, scale), 1e-6) << key.j;
      if (finite) {
        EXPECT_LT(error_of(rough.at<float>(key.j), key.ds, scale), 1e-6 + 1.2e-7 * c.alpha)
            << key.j;
      }
    }
  }
}

// What the last place of a score is worth, as docs/attention.md says: two keys near each other and
// near τ exchange weights of up to ((α−1)ε)^(1/(α−1)), however exactly they are computed.
TEST(EntmaxTableRows, OneRoundingOfAScore) {
  for (const double alpha : {2.5, 3.0, 5.0, 8.0}) {
    SCOPED_TRACE(alpha);
    const double c = alpha - 1, most = std::pow(c * 0x1p-24, 1 / c);
    // Beside the first key there is so much weight left for the others.
    const auto low = static_cast<float>(1 - std::pow(1 - most, c) / c);
    const float high = low + 0x1p-24f;
    const Tensor tie = normalize(Entmax{alpha}, Tensor::from<float>({1, low, low}, {3}));
    const Tensor parted = normalize(Entmax{alpha}, Tensor::from<float>({1, low, high}, {3}));
    const double moved = parted.at<float>(2) - tie.at<float>(2);
    EXPECT_LE(moved, most);
    EXPECT_GE(moved, 0.3 * most);
  }
}

// Rows of many kinds side by side, in vectors that they share, against the oracle. K is the
// identity, so that scores are the numbers in Q.
TEST(EntmaxTogether, IsTheOracle) {
  constexpr int64_t kN = 70, kM = 90;
  AttentionInputs in;
  Rng rng(5);
  in.q = testing::random_normal(rng, {1, 1, kN, kM});
  in.k = Tensor::zeros({1, 1, kM, kM});
  in.v = testing::random_normal(rng, {1, 1, kM, 3});
  for (int64_t j = 0; j < kM; ++j) in.k.at<float>(0, 0, j, j) = 1;
  for (int64_t i = 0; i < kN; ++i) {
    for (int64_t j = 0; j < kM; ++j) {
      float& s = in.q.at<float>(0, 0, i, j);
      if (i % 5 == 1) s *= 1e-3f;                     // all near one another
      if (i % 5 == 2) s = 0.25f * std::round(4 * s);  // ties
      if (i % 5 == 3) s = std::nextafter(1 + 0.1f * std::round(s), j % 3 == 0 ? 2.0f : 0.0f);
    }
  }
  AttentionSpec spec;
  spec.scale = 1.0;
  spec.masks = {Window{60, 5}};
  spec.statistics = Statistics::all();
  AttentionUpstream up;
  up.dy = testing::random_normal(rng, {1, 1, kN, 3});
  up.drow_stat = testing::random_normal(rng, {1, 1, kN});
  up.dentropy = testing::random_normal(rng, {1, 1, kN});
  for (const double alpha : {1.3, 2.2, 3.0, 6.0, 12.0, 30.0, 100.0, 1e4}) {
    spec.normalizer = Entmax{alpha};
    const reference::Forward want = reference::attention_forward(spec, in);
    const AttentionGradients g = reference::attention_backward(spec, in, up);
    for (const Way& way : ways()) {
      SCOPED_TRACE(fmt::format("{} alpha {}", way.name, alpha));
      const Bound bound =
          Plan::make(spec, {1, 1, 1, kN, kM, kM, 3}, {way.implementation, way.target}).bind(in);
      const AttentionOutputs out = bound.forward();
      EXPECT_TRUE(testing::near(out.y, want.out.y, 2e-6));
      EXPECT_TRUE(testing::near(out.entropy, want.out.entropy, 2e-6));
      EXPECT_TRUE(testing::near(out.max_weight, want.out.max_weight, 2e-6));
      EXPECT_TRUE(testing::near(out.row_stat, want.out.row_stat, 1e-6));
      EXPECT_TRUE(testing::near(out.support, want.out.support, 0));
      const AttentionGradients got = bound.backward(out, up);
      int compared = 0;
      // dQ is that of the scores; each row against its own largest, for rows differ by powers.
      for (int64_t i = 0; i < kN; ++i) {
        double scale = 0;
        for (int64_t j = 0; j < kM; ++j) {
          const double x = std::abs(g.dq.at<double>(0, 0, i, j));
          scale = x < 1e30 ? std::max(scale, x) : std::numeric_limits<double>::infinity();
        }
        // Infinity in float32, and NaN where it meets the zeros in K.
        if (std::isinf(scale)) continue;
        ++compared;
        for (int64_t j = 0; j < kM; ++j) {
          ASSERT_NEAR(got.dq.at<float>(0, 0, i, j), g.dq.at<double>(0, 0, i, j), 2e-5 * scale)
              << i << ", " << j;
        }
      }
      EXPECT_GE(compared, kN / 4);
    }
  }
}

// Sums over as many keys as there are: the error does not grow with the row.
TEST(EntmaxLong, EqualKeysOfALongRow) {
  for (const int64_t M : {65'536, 200'001}) {
    AttentionInputs in;
    in.q = Tensor::full({1, 1, 1, 1}, 1);
    in.k = Tensor::full({1, 1, M, 1}, 0.3f);
    in.v = Tensor::full({1, 1, M, 1}, 1);
    const double m = static_cast<double>(M);
    for (const double alpha : {1.25, 1.5, 1.75, 2.0, 3.0, 20.0}) {
      AttentionSpec spec;
      spec.scale = 1.0;
      spec.normalizer = Entmax{alpha};
      spec.statistics = Statistics::all();
      AttentionUpstream up;
      up.drow_stat = Tensor::full({1, 1, 1}, 1);
      for (const Way& way : ways()) {
        SCOPED_TRACE(fmt::format("{} alpha {} M {}", way.name, alpha, M));
        const Bound bound =
            Plan::make(spec, {1, 1, 1, 1, M, 1, 1}, {way.implementation, way.target}).bind(in);
        const AttentionOutputs out = bound.forward();
        EXPECT_EQ(out.support.at<float>(0, 0, 0), static_cast<float>(M));
        EXPECT_NEAR(out.max_weight.at<float>(0, 0, 0) * m, 1, 1e-6);
        EXPECT_NEAR(out.entropy.at<float>(0, 0, 0) / std::log(m), 1, 1e-6);
        const double tau = (alpha - 1) * double{0.3f} - std::pow(m, 1 - alpha);
        EXPECT_NEAR(out.row_stat.at<float>(0, 0, 0) / tau, 1, 1e-6);
        const std::vector<int64_t> zero = {0};
        const Tensor weights = bound.weights(out, zero, zero);
        const AttentionGradients g = bound.backward(out, up);
        for (int64_t j = 0; j < M; j += 1234) {
          ASSERT_NEAR(weights.at<float>(0, 0, 0, j) * m, 1, 1e-6) << j;
          ASSERT_NEAR(g.dk.at<float>(0, 0, j, 0) * m / (alpha - 1), 1, 1e-6) << j;
        }
      }
    }
  }
}

}  // namespace
}  // namespace foci
