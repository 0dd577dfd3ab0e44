// Both implementations against the oracle: forward, statistics and every gradient, over a random
// sweep of specs, shapes and strides; and the promises that hold bit for bit.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/compare.h"
#include "attention/generate.h"
#include "attention/tolerance.h"
#include "foci/attention/plan.h"
#include "foci/core/rng.h"
#include "foci/core/threads.h"
#include "foci/reference/attention.h"

namespace foci {
namespace {

using testing::attention_case;
using testing::kEverything;
using testing::near;
using testing::same_bits;
using testing::SweepCase;
using testing::SweepLimits;

// Runs once an implementation.
class Implemented : public ::testing::TestWithParam<Implementation> {
 protected:
  Bound bind_it(const AttentionSpec& spec, const AttentionInputs& in,
                SimdTarget target = current_target()) const {
    return Plan::make(spec, shape_of(in), {.implementation = GetParam(), .target = target})
        .bind(in);
  }
};
std::string name_of_case(const ::testing::TestParamInfo<Implementation>& info) {
  return info.param == Implementation::plain ? "Plain" : "Fused";
}
INSTANTIATE_TEST_SUITE_P(, Implemented,
                         ::testing::Values(Implementation::plain, Implementation::fused),
                         name_of_case);

class Sweep : public Implemented {
 protected:
  void sweep(uint64_t first, int cases, DType dtype, const SweepLimits& limits) const;
};
INSTANTIATE_TEST_SUITE_P(, Sweep, ::testing::Values(Implementation::plain, Implementation::fused),
                         name_of_case);

void Sweep::sweep(uint64_t first, int cases, DType dtype, const SweepLimits& limits) const {
  int64_t rows = 0, unfair = 0;
  const std::vector<SimdTarget>& targets = supported_targets();
  for (int n = 0; n < cases && !::testing::Test::HasFailure(); ++n) {
    const SweepCase c = attention_case(first + static_cast<uint64_t>(n), dtype, limits);
    const SimdTarget target = targets[static_cast<size_t>(n) % targets.size()];
    const testing::Comparison result = testing::compare_with_oracle(c, GetParam(), target);
    EXPECT_EQ(result.failures, "") << name_of(target) << " " << c.text;
    rows += result.rows;
    unfair += result.unfair;
  }
  EXPECT_LT(unfair * 10, rows);
}

TEST_P(Sweep, FollowsTheOracleOnSmallShapes) {
  sweep(0, 2000, DType::f32, {});
}

// More queries than a block has rows, more keys than an inner block, heads beyond a vector.
TEST_P(Sweep, FollowsTheOracleAcrossBlocks) {
  sweep(5000, 40, DType::f32,
        {.batch = 1,
         .kv_heads = 1,
         .group = 2,
         .queries = 130,
         .keys = 330,
         .head = 40,
         .value = 20});
}

TEST_P(Sweep, ReadsHalfPrecision) {
  sweep(9000, 150, DType::f16, {});
  sweep(9500, 150, DType::bf16, {});
}

class Threads : public Implemented {
 protected:
  void TearDown() override { set_num_threads(before_); }
  int before_ = num_threads();
};
INSTANTIATE_TEST_SUITE_P(, Threads, ::testing::Values(Implementation::plain, Implementation::fused),
                         name_of_case);

TEST_P(Threads, DoNotChangeBits) {
  const SweepLimits limits{
      .batch = 3, .kv_heads = 2, .group = 2, .queries = 250, .keys = 300, .head = 24, .value = 20};
  for (uint64_t n = 300; n < 312 && !HasFailure(); ++n) {
    const SweepCase c = attention_case(n, DType::f32, limits);
    SCOPED_TRACE(c.text);
    const Bound bound = bind_it(c.spec, c.in);
    set_num_threads(1);
    const AttentionOutputs out = bound.forward();
    const AttentionGradients g = bound.backward(out, c.up, kEverything);
    for (int threads : {2, 3, 5}) {
      set_num_threads(threads);
      EXPECT_EQ(testing::differing_bits(bound.forward(), out), "");
      EXPECT_EQ(testing::differing_bits(bound.backward(out, c.up, kEverything), g), "");
    }
  }
}

Tensor random(const Dims& shape, uint64_t seed) {
  Rng rng(seed);
  return testing::random_normal(rng, shape);
}

// A row's result must not depend on which rows stand around it.
TEST_P(Implemented, EqualQueriesGiveEqualRowsAtEveryPosition) {
  for (const int64_t N : {1, 2, 15, 17, 50, 96, 97, 131, 200}) {
    for (const int64_t M : {1, 37, 255, 256, 300}) {
      SCOPED_TRACE(fmt::format("N {} M {}", N, M));
      AttentionInputs in;
      const Tensor row = random({1, 1, 1, 20}, 1);
      in.q = random({1, 1, N, 20}, 2);
      in.k = random({1, 1, M, 20}, 3);
      in.v = random({1, 1, M, 28}, 4);
      for (int64_t i = 0; i < N; i += 1) in.q.slice(2, i, i + 1).copy_from(row);
      for (const Normalizer& normalizer : {Normalizer(Softmax{}), Normalizer(Sparsemax{}),
                                           Normalizer(Entmax{1.3}), Normalizer(TopK{5})}) {
        const AttentionSpec spec{.normalizer = normalizer, .statistics = Statistics::all()};
        const AttentionOutputs out = bind_it(spec, in).forward();
        AttentionInputs one = in;
        one.q = row;
        const AttentionOutputs expected = bind_it(spec, one).forward();
        for (int64_t i = 0; i < N; ++i) {
          ASSERT_TRUE(same_bits(out.y.slice(2, i, i + 1), expected.y)) << i;
          ASSERT_TRUE(same_bits(out.row_stat.slice(2, i, i + 1), expected.row_stat)) << i;
          ASSERT_TRUE(same_bits(out.entropy.slice(2, i, i + 1), expected.entropy)) << i;
        }
      }
    }
  }
}

// A packed batch gives what its members give one by one, forward and backward.
TEST_P(Implemented, APackedBatchEqualsItsMembers) {
  const std::vector<int64_t> queries = {5, 97, 1, 0, 130}, keys = {300, 20, 1, 7, 131};
  const int64_t H = 4, Hk = 2, D = 20, Dv = 12;
  int64_t N = 0, M = 0;
  for (size_t s = 0; s < keys.size(); ++s) N += queries[s], M += keys[s];
  AttentionInputs in;
  in.q = random({1, H, N, D}, 11);
  in.k = random({1, Hk, M, D}, 12);
  in.v = random({1, Hk, M, Dv}, 13);
  in.q_segments = Tensor::zeros({1, N}, DType::i32);
  in.k_segments = Tensor::zeros({1, M}, DType::i32);
  in.slopes = random({H}, 14);
  in.score_w = random({D}, 18);
  AttentionUpstream up;
  up.dy = random({1, H, N, Dv}, 15);
  up.dentropy = random({1, H, N}, 16);
  up.dcoverage = random({1, H, M}, 17);
  int64_t q = 0, k = 0;
  for (size_t s = 0; s < keys.size(); q += queries[s], k += keys[s], ++s) {
    const auto id = static_cast<double>(s);
    in.q_segments.slice(1, q, q + queries[s]).fill(id);
    in.k_segments.slice(1, k, k + keys[s]).fill(id);
  }
  const std::vector<SimdTarget>& targets = supported_targets();
  size_t turn = 0;
  for (const Score& score : {Score(Dot{}), Score(Cosine{}), Score(L2{0.2}), Score(Additive{})}) {
    for (const Normalizer& normalizer : {Normalizer(Softmax{}), Normalizer(Sparsemax{}),
                                         Normalizer(Entmax{1.3}), Normalizer(TopK{5})}) {
      AttentionSpec spec{.score = score,
                         .normalizer = normalizer,
                         .biases = {Alibi{}},
                         .statistics = Statistics::all()};
      spec.masks = {Window{40, 60, Align::bottom_right}};
      AttentionSpec packed = spec;
      packed.masks.push_back(Segments{});
      const SimdTarget target = targets[turn++ % targets.size()];
      const Bound bound = bind_it(packed, in, target);
      const AttentionOutputs out = bound.forward();
      const AttentionGradients g = bound.backward(out, up);
      q = k = 0;
      for (size_t s = 0; s < keys.size(); q += queries[s], k += keys[s], ++s) {
        const auto row = [&](const Tensor& t) { return t.slice(2, q, q + queries[s]); };
        const auto key = [&](const Tensor& t) { return t.slice(2, k, k + keys[s]); };
        AttentionInputs own;
        own.q = row(in.q), own.k = key(in.k), own.v = key(in.v), own.slopes = in.slopes,
        own.score_w = in.score_w;
        const AttentionUpstream own_up{.dy = row(up.dy),
                                       .dentropy = row(up.dentropy).contiguous(),
                                       .dcoverage = key(up.dcoverage).contiguous()};
        const Bound alone = bind_it(spec, own, target);
        const AttentionOutputs o = alone.forward();
        const AttentionGradients og = alone.backward(o, own_up);
        EXPECT_TRUE(same_bits(row(out.y), o.y)) << s;
        EXPECT_TRUE(same_bits(row(out.row_stat), o.row_stat)) << s;
        EXPECT_TRUE(same_bits(row(out.entropy), o.entropy)) << s;
        EXPECT_TRUE(same_bits(key(out.coverage), o.coverage)) << s;
        EXPECT_TRUE(same_bits(row(g.dq), og.dq)) << s;
        EXPECT_TRUE(same_bits(key(g.dk), og.dk)) << s;
        EXPECT_TRUE(same_bits(key(g.dv), og.dv)) << s;
      }
    }
  }
}

// Near α = 1 most weights are far below what float32 holds, and yet above 0.
TEST_P(Implemented, SupportCountsWeightsThatFloatRoundsToZero) {
  AttentionInputs in{.q = Tensor::zeros({1, 1, 1, 1}),
                     .k = Tensor::zeros({1, 1, 40, 1}),
                     .v = Tensor::zeros({1, 1, 40, 1})};
  in.q.at<float>(0, 0, 0, 0) = 1;
  for (int64_t j = 0; j < 40; ++j) in.k.at<float>(0, 0, j, 0) = -2.0F * static_cast<float>(j);
  const AttentionSpec spec{.normalizer = Entmax{1.01}, .statistics = {Statistic::support}};
  const Tensor support = bind_it(spec, in).forward().support;
  const Tensor want = reference::attention_forward(spec, in).out.support;
  EXPECT_EQ(want.to(DType::f32).item(), 40);
  EXPECT_TRUE(near(support, want, 0));
}

TEST_P(Implemented, ABatchEqualsItsMembers) {
  const SweepLimits limits{
      .batch = 3, .kv_heads = 2, .group = 2, .queries = 120, .keys = 300, .head = 24, .value = 20};
  for (uint64_t n = 40; n < 80 && !HasFailure(); ++n) {
    SweepCase c = attention_case(n, DType::f32, limits);
    if (has_mask<Keep>(c.spec)) continue;  // its broadcast shape does not slice
    if (find_bias<TensorBias>(c.spec)) continue;
    c.spec.dropout.reset();  // counts the batch
    SCOPED_TRACE(c.text);
    const AttentionOutputs out = bind_it(c.spec, c.in).forward();
    for (int64_t b = 0; b < c.in.q.dim(0); ++b) {
      AttentionInputs one = c.in;
      for (Tensor* t : {&one.q, &one.k, &one.v, &one.key_lengths, &one.past_lengths,
                        &one.q_segments, &one.k_segments}) {
        if (t->defined()) *t = t->slice(0, b, b + 1);
      }
      const AttentionOutputs o = bind_it(c.spec, one).forward();
      EXPECT_TRUE(same_bits(out.y.slice(0, b, b + 1), o.y));
      EXPECT_TRUE(same_bits(out.coverage.slice(0, b, b + 1), o.coverage));
    }
  }
}

}  // namespace
}  // namespace foci
