// Maps with exact zeros in the fused kernels: which keys top-k chooses, and entmax far from the
// usual alphas.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "attention/generate.h"
#include "attention/tolerance.h"
#include "foci/core/simd_target.h"
#include "foci/core/threads.h"
#include "foci/reference/attention.h"

namespace foci {
namespace {

using testing::near;
using testing::random_normal;

Bound bind_fused(const AttentionSpec& spec, const AttentionShape& shape, const AttentionInputs& in,
                 SimdTarget target) {
  return Plan::make(spec, shape, {Implementation::fused, target}).bind(in);
}

// Rows scored whole and rows through a buffer, with ties everywhere and zeros of both signs: the
// lowest keys are chosen among equals.
TEST(SparseMaps, TopKTakesTheLowestKeysAmongEquals) {
  for (const int64_t M : {40, 700, 3000}) {
    for (const int64_t k : {1, 2, 7, 30, 100, 600}) {
      for (const int levels : {1, 2, 5}) {
        Rng rng(M + k);
        AttentionSpec spec;
        spec.normalizer = TopK{k};
        spec.statistics = {Statistic::max_weight, Statistic::support};
        AttentionInputs in;
        in.q = Tensor::full({1, 1, 3, 1}, 1);
        in.k = Tensor::empty({1, 1, M, 1});
        in.v = random_normal(rng, {1, 1, M, 2});
        for (float& x : in.k.span<float>()) {
          const int64_t level = rng.below(levels) - levels / 2;
          x = 0.5f * static_cast<float>(level);
          if (x == 0 && rng.below(2)) x = -0.0f;
        }
        const reference::Forward want = reference::attention_forward(spec, in);
        for (SimdTarget target : supported_targets()) {
          const Bound bound = bind_fused(spec, {1, 1, 1, 3, M, 1, 2}, in, target);
          const AttentionOutputs out = bound.forward();
          const std::string where =
              fmt::format("{} M {} k {} levels {}", name_of(target), M, k, levels);
          EXPECT_TRUE(near(out.support, want.out.support, 0)) << where;
          EXPECT_TRUE(near(out.max_key, want.out.max_key, 0)) << where;
          EXPECT_TRUE(near(out.y, want.out.y)) << where;
          const std::vector<int64_t> rows = {1}, heads = {0};
          const Tensor weights = bound.weights(out, rows, heads);
          for (int64_t j = 0; j < M; ++j) {
            ASSERT_EQ(weights.at<float>(0, 0, 0, j) > 0, want.weights.at<double>(0, 0, 1, j) > 0)
                << where << " key " << j;
          }
        }
      }
    }
  }
}

// Weights add to 1 and follow the order of the scores at any α; near 1 they are softmax's.
TEST(SparseMaps, EntmaxOfExtremeAlphas) {
  constexpr int64_t kM = 300;
  Rng rng(23);
  AttentionInputs in;
  in.q = random_normal(rng, {1, 1, 20, 8});
  in.k = random_normal(rng, {1, 1, kM, 8});
  in.v = random_normal(rng, {1, 1, kM, 8});
  // Two rows of equal scores.
  in.q.slice(2, 0, 2).fill(0);
  std::vector<int64_t> rows(20);
  for (int64_t i = 0; i < 20; ++i) rows[i] = i;
  const std::vector<int64_t> heads = {0};
  for (const double alpha : {1 + 1e-9, 1 + 1e-6, 1.001, 1.999, 2.001, 7.0, 40.0, 1e6}) {
    AttentionSpec spec;
    spec.normalizer = Entmax{alpha};
    spec.statistics = Statistics::all();
    const AttentionSpec soft{.statistics = Statistics::all()};
    const reference::Forward scored = reference::attention_forward(soft, in);
    for (SimdTarget target : supported_targets()) {
      const std::string where = fmt::format("{} alpha {}", name_of(target), alpha);
      const Bound bound = bind_fused(spec, {1, 1, 1, 20, kM, 8, 8}, in, target);
      const AttentionOutputs out = bound.forward();
      const Tensor weights = bound.weights(out, rows, heads);
      for (int64_t i = 0; i < 20; ++i) {
        double sum = 0, largest = 0;
        for (int64_t j = 0; j < kM; ++j) {
          const float w = weights.at<float>(0, 0, i, j);
          ASSERT_GE(w, 0) << where;
          sum += w;
          largest = std::max(largest, double{w});
          if (i < 2) {
            EXPECT_NEAR(w * kM, 1, 1e-6) << where;
          }
          if (alpha <= 1 + 1e-6) {
            EXPECT_NEAR(w, scored.weights.at<double>(0, 0, i, j), 4e-6) << where;
          }
        }
        EXPECT_NEAR(sum, 1, 1e-6) << where;
        EXPECT_FLOAT_EQ(out.max_weight.at<float>(0, 0, i), static_cast<float>(largest)) << where;
        const int64_t key = out.max_key.at<int64_t>(0, 0, i);
        EXPECT_EQ(weights.at<float>(0, 0, i, key), out.max_weight.at<float>(0, 0, i)) << where;
      }
      for (float x : out.row_stat.span<float>()) EXPECT_TRUE(std::isfinite(x)) << where;
    }
  }
}

// Sequences so long that strips leave what they add to dK and dV as parts: the same sums as
// plain's, on any number of threads, with rows of NaN among them and head sizes that fill no
// vector.
TEST(SparseMaps, LongSequencesInParts) {
  constexpr int64_t kN = 8300, kM = 150;
  struct Threads {
    int before = num_threads();
    ~Threads() { set_num_threads(before); }
  } threads;
  for (const Normalizer& normalizer :
       {Normalizer(Sparsemax{}), Normalizer(Entmax{1.5}), Normalizer(TopK{5})}) {
    for (const bool odd : {false, true}) {
      Rng rng(23);
      AttentionSpec spec;
      spec.normalizer = normalizer;
      if (odd) {
        spec.score = Cosine{};
        spec.scale = 4.0;
        spec.masks = {Causal{Align::top_left}};
        spec.dropout = Dropout{0.3, 9};
      } else {
        spec.softcap = 8;
      }
      const int64_t D = odd ? 10 : 32, H = odd ? 2 : 1;
      const AttentionShape shape{1, H, 1, kN, kM, D, D};
      AttentionInputs in;
      in.q = random_normal(rng, {1, H, kN, D});
      in.k = random_normal(rng, {1, 1, kM, D});
      in.v = random_normal(rng, {1, 1, kM, D});
      AttentionUpstream up;
      up.dy = random_normal(rng, {1, H, kN, D});
      up.drow_stat = random_normal(rng, {1, H, kN});
      const auto gradients = [&](Implementation implementation, std::optional<SimdTarget> target) {
        const Bound bound = Plan::make(spec, shape, {implementation, target}).bind(in);
        AttentionWanted wanted;
        wanted.scale = true;
        wanted.alpha = true;
        return bound.backward(bound.forward(), up, wanted);
      };
      const AttentionGradients want = gradients(Implementation::plain, std::nullopt);
      for (SimdTarget target : supported_targets()) {
        set_num_threads(1);
        const AttentionGradients one = gradients(Implementation::fused, target);
        set_num_threads(3);
        const AttentionGradients three = gradients(Implementation::fused, target);
        EXPECT_EQ(testing::differing_bits(one, three), "") << std::string(name_of(target));
        // Thousands of terms a key, of both signs: measured against their number.
        const double tolerance = testing::case_tolerance(spec, in).gradient;
        EXPECT_TRUE(near(one.dq, want.dq, tolerance)) << std::string(name_of(target));
        EXPECT_TRUE(near(one.dk, want.dk, tolerance)) << std::string(name_of(target));
        EXPECT_TRUE(near(one.dv, want.dv, tolerance)) << std::string(name_of(target));
        ASSERT_EQ(one.dalpha.defined(), std::holds_alternative<Entmax>(normalizer));
        if (one.dalpha.defined()) {
          EXPECT_TRUE(near(one.dalpha, want.dalpha, tolerance)) << std::string(name_of(target));
        }
      }
      if (odd) continue;
      // One row of NaN spoils the keys that it sees, all of them; plain agrees on which.
      in.q.at<float>(0, 0, 8200, 3) = std::numeric_limits<float>::quiet_NaN();
      const AttentionGradients spoiled = gradients(Implementation::plain, std::nullopt);
      for (SimdTarget target : supported_targets()) {
        const AttentionGradients got = gradients(Implementation::fused, target);
        EXPECT_TRUE(near(got.dk, spoiled.dk)) << std::string(name_of(target));
        EXPECT_TRUE(near(got.dv, spoiled.dv)) << std::string(name_of(target));
        EXPECT_TRUE(std::isnan(got.dk.at<float>(0, 0, 0, 0)));
      }
    }
  }
}

// A number in one head that is not finite has everything computed with care, and changes no bit of
// another head's gradients, which are of both signs.
TEST(SparseMaps, PartsBesideAHeadOfNaN) {
  const AttentionShape shape{1, 2, 2, 8300, 20, 8, 8};
  for (const Normalizer& normalizer : {Normalizer(Sparsemax{}), Normalizer(TopK{5})}) {
    for (const bool dropout : {false, true}) {
      Rng rng(31);
      AttentionSpec spec;
      spec.normalizer = normalizer;
      if (dropout) spec.dropout = Dropout{0.3, 9};
      AttentionInputs in;
      in.q = random_normal(rng, {1, 2, shape.N, shape.D});
      in.k = random_normal(rng, {1, 2, shape.M, shape.D});
      in.v = random_normal(rng, {1, 2, shape.M, shape.Dv});
      AttentionUpstream up;
      up.dy = random_normal(rng, {1, 2, shape.N, shape.Dv});
      const auto first_head = [&](SimdTarget target) {
        const Bound bound = bind_fused(spec, shape, in, target);
        AttentionGradients g = bound.backward(bound.forward(), up);
        for (Tensor* t : {&g.dq, &g.dk, &g.dv}) *t = t->slice(1, 0, 1);
        return g;
      };
      std::vector<AttentionGradients> want;
      for (SimdTarget target : supported_targets()) want.push_back(first_head(target));
      in.v.at<float>(0, 1, 3, 0) = std::numeric_limits<float>::quiet_NaN();
      for (size_t n = 0; n < want.size(); ++n) {
        const SimdTarget target = supported_targets()[n];
        EXPECT_EQ(testing::differing_bits(first_head(target), want[n]), "") << name_of(target);
      }
    }
  }
}

// Parts that grow under a causal mask until some find no room and are solved again: nothing is
// added twice, neither to dQ, dK and dV nor to a bias of one number a score.
TEST(SparseMaps, PartsWithoutRoom) {
  constexpr int64_t kN = 8300, kM = 600, kD = 16;
  Rng rng(29);
  AttentionSpec spec;
  spec.normalizer = Sparsemax{};
  spec.scale = 1e-5;  // every key has weight, far from the threshold
  spec.masks = {Causal{Align::top_left}};
  spec.biases = {TensorBias{}};
  const AttentionShape shape{1, 1, 1, kN, kM, kD, kD};
  AttentionInputs in;
  in.q = random_normal(rng, {1, 1, kN, kD});
  in.k = random_normal(rng, {1, 1, kM, kD});
  in.v = random_normal(rng, {1, 1, kM, kD});
  in.bias = Tensor::zeros({1, 1, kN, kM});
  AttentionUpstream up;
  up.dy = random_normal(rng, {1, 1, kN, kD});
  const auto gradients = [&](Implementation implementation, bool bias) {
    const Bound bound = Plan::make(spec, shape, {implementation, std::nullopt}).bind(in);
    AttentionWanted wanted;
    wanted.bias = bias;
    return bound.backward(bound.forward(), up, wanted);
  };
  const AttentionGradients want = gradients(Implementation::plain, true);
  for (const bool bias : {false, true}) {
    const AttentionGradients got = gradients(Implementation::fused, bias);
    EXPECT_TRUE(near(got.dq, want.dq));
    EXPECT_TRUE(near(got.dk, want.dk));
    EXPECT_TRUE(near(got.dv, want.dv));
    if (bias) {
      EXPECT_TRUE(near(got.dbias, want.dbias));
    }
  }
}

}  // namespace
}  // namespace foci
