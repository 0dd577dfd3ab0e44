// The gradient of entmax's α: both implementations on every SIMD target against the oracle, whose
// own stands in mpmath's table; rows where it is known; bits.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/generate.h"
#include "attention/tolerance.h"
#include "foci/attention/normalize.h"
#include "foci/attention/plan.h"
#include "foci/core/rng.h"
#include "foci/core/threads.h"
#include "foci/reference/attention.h"

namespace foci {
namespace {

using testing::near;
using testing::random_normal;
using testing::same_bits;

constexpr AttentionWanted kAlone{.qkv = false, .alpha = true};

struct Case {
  AttentionInputs in;
  AttentionUpstream up;
};

Case make_case(const Dims& q, int64_t kv_heads, int64_t keys, bool statistics) {
  Rng rng(31, static_cast<uint64_t>(keys));
  const int64_t B = q[0], H = q[1], N = q[2], D = q[3];
  Case c;
  c.in = {.q = random_normal(rng, q),
          .k = random_normal(rng, {B, kv_heads, keys, D}),
          .v = random_normal(rng, {B, kv_heads, keys, D})};
  c.up.dy = random_normal(rng, q);
  if (!statistics) return c;
  c.up.drow_stat = random_normal(rng, {B, H, N});
  c.up.dentropy = random_normal(rng, {B, H, N});
  c.up.dmax_weight = random_normal(rng, {B, H, N});
  c.up.dcoverage = random_normal(rng, {B, H, keys});
  return c;
}

// Calls f(bound, name, options) for both implementations, the fused one on every target.
template <class F>
void on_everything(const AttentionSpec& spec, const AttentionInputs& in, F&& f) {
  const auto run = [&](const PlanOptions& options, const std::string& name) {
    f(Plan::make(spec, shape_of(in), options).bind(in), name, options);
  };
  run({.implementation = Implementation::plain}, "plain");
  for (SimdTarget target : supported_targets()) {
    run({Implementation::fused, target}, std::string(name_of(target)));
  }
}

TEST(AlphaGradient, EqualsTheOracle) {
  for (const bool statistics : {false, true}) {
    for (const int64_t keys : {1, 2, 9, 70, 600}) {
      const Case c = make_case({2, 4, 37, 8}, 2, keys, statistics);
      for (const double alpha :
           {1 + 1e-7, 1.001, 1.05, 1.25, 1.5, 1.75, 1.999, 2.0, 2.001, 2.5, 8.0, 32.0}) {
        AttentionSpec spec{.normalizer = Entmax{alpha}};
        if (statistics) spec.statistics = Statistics::all();
        const Tensor want = reference::attention_backward(spec, c.in, c.up).dalpha;
        on_everything(
            spec, c.in, [&](const Bound& bound, const std::string& name, const PlanOptions&) {
              const AttentionGradients got = bound.backward(bound.forward(), c.up, kAlone);
              EXPECT_FALSE(got.dq.defined());
              ASSERT_TRUE(got.dalpha.defined());
              ASSERT_EQ(got.dalpha.shape(), Dims{1});
              // A sum over rows of both signs, whose terms weigh ln² p.
              const double terms = std::sqrt(2.0 * 4 * 37) * (1 + std::log(1.0 * keys));
              EXPECT_TRUE(near(got.dalpha, want, testing::kTolerance, terms))
                  << name << " alpha " << alpha << " keys " << keys << " statistics " << statistics;
            });
      }
    }
  }
}

TEST(AlphaGradient, OfEachHead) {
  const Case c = make_case({2, 4, 21, 8}, 2, 40, true);
  const std::vector<double> alphas = {1.25, 2, 1.5, 1.0625};
  const AttentionSpec spec{.normalizer = Entmax{.per_head = alphas},
                           .statistics = Statistics::all()};
  const AttentionGradients want = reference::attention_backward(spec, c.in, c.up);
  const reference::Forward forward = reference::attention_forward(spec, c.in);
  ASSERT_EQ(want.dalpha.shape(), Dims{4});
  on_everything(spec, c.in,
                [&](const Bound& bound, const std::string& name, const PlanOptions& options) {
                  const AttentionOutputs out = bound.forward();
                  EXPECT_TRUE(near(out.y, forward.out.y)) << name;
                  const AttentionGradients got = bound.backward(out, c.up, {.alpha = true});
                  EXPECT_TRUE(near(got.dq, want.dq)) << name;
                  EXPECT_TRUE(near(got.dk, want.dk)) << name;
                  EXPECT_TRUE(near(got.dalpha, want.dalpha)) << name;
                  // A head gives the bits that it gives where its α is that of all.
                  for (int64_t h = 0; h < 4; ++h) {
                    AttentionSpec one = spec;
                    one.normalizer = Entmax{alphas[static_cast<size_t>(h)]};
                    const Bound alone = Plan::make(one, shape_of(c.in), options).bind(c.in);
                    EXPECT_TRUE(same_bits(alone.forward().y.select(1, h).contiguous(),
                                          out.y.select(1, h).contiguous()))
                        << name << " head " << h;
                  }
                });
}

// One key, equal keys: no α moves a weight. No key: none. NaN: NaN.
TEST(AlphaGradient, IsZeroWhereNoWeightCanMove) {
  for (const double alpha : {1.0001, 1.5, 2.0, 3.0, 64.0}) {
    const AttentionSpec spec{.normalizer = Entmax{alpha}, .masks = {KeyLengths{}}};
    Case c = make_case({3, 1, 5, 4}, 1, 8, false);
    c.in.key_lengths = Tensor::from<int64_t>({1, 0, 8}, {3});
    c.in.k.select(0, 2).fill(0.5);
    on_everything(spec, c.in, [&](const Bound& bound, const std::string& name, const PlanOptions&) {
      const float got = bound.backward(bound.forward(), c.up, kAlone).dalpha.at<float>(0);
      EXPECT_NEAR(got, 0, 2e-5) << name << " alpha " << alpha;
    });
    c.in.q.at<float>(0, 0, 3, 1) = std::numeric_limits<float>::quiet_NaN();
    on_everything(spec, c.in, [&](const Bound& bound, const std::string& name, const PlanOptions&) {
      const float got = bound.backward(bound.forward(), c.up, kAlone).dalpha.at<float>(0);
      EXPECT_TRUE(std::isnan(got)) << name << " alpha " << alpha;
    });
  }
}

TEST(AlphaGradient, IsWantedOfEntmaxAlone) {
  const Case c = make_case({1, 2, 9, 4}, 1, 12, false);
  for (const Normalizer& n :
       {Normalizer(Softmax{}), Normalizer(Sparsemax{}), Normalizer(TopK{3})}) {
    on_everything({.normalizer = n}, c.in,
                  [&](const Bound& bound, const std::string& name, const PlanOptions&) {
                    EXPECT_FALSE(bound.backward(bound.forward(), c.up, kAlone).dalpha.defined())
                        << name;
                  });
  }
}

TEST(AlphaGradient, HoldsItsBitsOnAnyNumberOfThreads) {
  const Case c = make_case({2, 4, 700, 8}, 2, 90, true);
  const AttentionSpec spec{.normalizer = Entmax{1.5}, .statistics = Statistics::all()};
  const int before = num_threads();
  for (SimdTarget target : supported_targets()) {
    const Bound bound =
        Plan::make(spec, shape_of(c.in), {Implementation::fused, target}).bind(c.in);
    const auto gradient = [&](int threads) {
      set_num_threads(threads);
      return bound.backward(bound.forward(), c.up, {.alpha = true}).dalpha;
    };
    EXPECT_TRUE(same_bits(gradient(1), gradient(3))) << name_of(target);
  }
  set_num_threads(before);
}

TEST(AlphaGradient, OfRowsAlone) {
  Rng rng(5);
  const Tensor scores = random_normal(rng, {40, 17}), up = random_normal(rng, {40, 17});
  for (const double alpha : {1.05, 1.5, 2.0, 2.5}) {
    const Entmax entmax{alpha};
    double dalpha = 0;
    const Tensor weights = normalize(entmax, scores);
    const Tensor g = normalize_backward(entmax, weights, up, {}, &dalpha);
    EXPECT_TRUE(same_bits(g, normalize_backward(entmax, weights, up)));
    // The same rows as attention of one channel: q = 1, k = the scores, v = the upstream gradients.
    double want = 0;
    for (int64_t r = 0; r < 40; ++r) {
      const AttentionInputs in{.q = Tensor::full({1, 1, 1, 1}, 1),
                               .k = scores.select(0, r).contiguous().reshape({1, 1, 17, 1}),
                               .v = up.select(0, r).contiguous().reshape({1, 1, 17, 1})};
      want += reference::attention_backward({.scale = 1.0, .normalizer = entmax}, in,
                                            {.dy = Tensor::full({1, 1, 1, 1}, 1)})
                  .dalpha.at<double>(0);
    }
    EXPECT_NEAR(dalpha, want, 2e-5 * (1 + std::abs(want))) << alpha;
  }
  double dalpha = 0;
  EXPECT_THROW(normalize_backward(Softmax{}, scores, up, {}, &dalpha), ArgumentError);
  EXPECT_THROW(normalize(Entmax{.per_head = {1.5, 2}}, scores), ArgumentError);
}

}  // namespace
}  // namespace foci
