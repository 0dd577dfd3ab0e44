// Entmax and its gradient in float32 against numbers of mpmath: unfused, fused on every SIMD
// target, and the row map alone, over α from 1.01 to 1e6.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "foci/attention/normalize.h"
#include "foci/attention/plan.h"
#include "foci/core/simd_target.h"
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

}  // namespace
}  // namespace foci
