// Raw scores at every stage against the oracle, over all scores, biases and masks.
#include "foci/attention/raw_scores.h"

#include <gtest/gtest.h>

#include <limits>

#include "attention/fairness.h"
#include "attention/generate.h"
#include "attention/refusal.h"
#include "attention/tolerance.h"
#include "foci/core/threads.h"

namespace foci {
namespace {

using testing::attention_case;
using testing::near;
using testing::same_bits;
using testing::SweepCase;
using testing::SweepLimits;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr ScoreStage kStages[] = {ScoreStage::scaled, ScoreStage::capped, ScoreStage::masked,
                                  ScoreStage::weights};

// What each stage is, by the oracle's scores of a spec that ends there.
Tensor expected(const SweepCase& c, ScoreStage stage) {
  AttentionSpec spec = c.spec;
  if (stage == ScoreStage::scaled || stage == ScoreStage::capped) {
    spec.masks.clear();
    spec.biases.clear();
    spec.dropout.reset();
    if (stage == ScoreStage::scaled) spec.softcap.reset();
    return reference::attention_forward(spec, c.in).scores;
  }
  const reference::Forward f = reference::attention_forward(spec, c.in);
  if (stage == ScoreStage::weights) return f.weights;
  Tensor scores = f.scores.clone();
  const auto allowed = f.allowed.span<bool>();
  for (size_t e = 0; e < allowed.size(); ++e) {
    if (!allowed[e]) scores.data<double>()[e] = -kInf;
  }
  return scores;
}

Bound bind(const SweepCase& c, const AttentionInputs& in, SimdTarget target) {
  return Plan::make(c.spec, shape_of(c.in), {.target = target}).bind(in);
}

void sweep(uint64_t first, int cases, DType dtype, const SweepLimits& limits) {
  const std::vector<SimdTarget>& targets = supported_targets();
  for (int n = 0; n < cases && !::testing::Test::HasFailure(); ++n) {
    SweepCase c = attention_case(first + static_cast<uint64_t>(n), dtype, limits);
    SCOPED_TRACE(c.text);
    // Whether a key is chosen may hang on less than float32's rounding.
    const bool fair = testing::make_fair(c, reference::attention_forward(c.spec, c.in)).count == 0;
    const Bound bound =
        bind(c, testing::strided(c.in), targets[static_cast<size_t>(n) % targets.size()]);
    for (ScoreStage stage : kStages) {
      if (stage == ScoreStage::weights && !fair) continue;
      const Tensor got = raw_scores(bound, stage);
      EXPECT_EQ(got.dtype(), DType::f32);
      EXPECT_TRUE(near(got, expected(c, stage))) << "stage " << static_cast<int>(stage);
    }
  }
}

TEST(RawScores, FollowTheOracle) {
  sweep(20000, 800, DType::f32, {});
}

TEST(RawScores, FollowTheOracleAcrossBlocks) {
  sweep(25000, 20, DType::f32,
        {.batch = 1, .kv_heads = 1, .group = 2, .queries = 130, .keys = 330, .head = 40});
}

TEST(RawScores, ReadHalfPrecision) {
  sweep(28000, 60, DType::f16, {});
  sweep(28500, 60, DType::bf16, {});
}

TEST(RawScores, DoNotDependOnThreads) {
  const SweepLimits limits{.batch = 2, .kv_heads = 2, .group = 2, .queries = 200, .keys = 300};
  const int before = num_threads();
  for (uint64_t n = 29000; n < 29004; ++n) {
    const SweepCase c = attention_case(n, DType::f32, limits);
    const Bound bound = bind(c, c.in, current_target());
    for (ScoreStage stage : kStages) {
      set_num_threads(1);
      const Tensor one = raw_scores(bound, stage);
      set_num_threads(3);
      EXPECT_TRUE(same_bits(raw_scores(bound, stage), one)) << c.text;
    }
  }
  set_num_threads(before);
}

// A NaN that a mask hides shows where masks do not count yet, and nowhere else.
TEST(RawScores, HiddenKeysAreNotRead) {
  AttentionInputs in{.q = Tensor::full({1, 1, 2, 3}, 1),
                     .k = Tensor::full({1, 1, 2, 3}, 1),
                     .v = Tensor::full({1, 1, 2, 3}, 1)};
  in.k.slice(2, 1, 2).fill(std::numeric_limits<double>::quiet_NaN());
  in.key_lengths = Tensor::from<int64_t>({1}, {1});
  const AttentionSpec spec{.scale = 1.0, .masks = {KeyLengths{}}};
  const Bound bound = Plan::make(spec, shape_of(in)).bind(in);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto rows = [](double a, double b) {
    return Tensor::from<double>({a, b, a, b}, {1, 1, 2, 2});
  };
  EXPECT_TRUE(near(raw_scores(bound, ScoreStage::scaled), rows(3, nan), 0));
  EXPECT_TRUE(near(raw_scores(bound, ScoreStage::capped), rows(3, nan), 0));
  EXPECT_TRUE(near(raw_scores(bound, ScoreStage::masked), rows(3, -kInf), 0));
  EXPECT_TRUE(near(raw_scores(bound, ScoreStage::weights), rows(1, 0), 0));
}

// Of the same tensors: how many pairs a benchmark may count.
TEST(VisiblePairs, AreThoseTheOracleAllows) {
  for (uint64_t n = 30000; n < 30400; ++n) {
    SweepCase c = attention_case(n);
    c.spec.dropout.reset();
    const auto allowed = reference::attention_forward(c.spec, c.in).allowed;
    int64_t count = 0;
    for (bool a : allowed.span<bool>()) count += a;
    EXPECT_EQ(bind(c, testing::strided(c.in), current_target()).visible_pairs(), count) << c.text;
  }
}

TEST(RawScores, EmptySizes) {
  for (const auto& [N, M] : {std::pair{0, 3}, {3, 0}, {0, 0}}) {
    const AttentionInputs in{.q = Tensor::zeros({1, 2, N, 4}),
                             .k = Tensor::zeros({1, 2, M, 4}),
                             .v = Tensor::zeros({1, 2, M, 4})};
    const Bound bound = Plan::make({}, shape_of(in)).bind(in);
    for (ScoreStage stage : kStages) {
      EXPECT_EQ(raw_scores(bound, stage).shape(), Dims({1, 2, N, M}));
    }
  }
}

// Rows and keys may be few enough where their product over all heads is not.
TEST(RawScores, RefuseMoreThanCanBeAddressed) {
  const int64_t n = int64_t{1} << 20;
  const AttentionInputs in{.q = Tensor::zeros({1, n, n, 0}),
                           .k = Tensor::zeros({1, 1, n, 0}),
                           .v = Tensor::zeros({1, 1, n, 0})};
  const Bound bound = Plan::make({}, shape_of(in)).bind(in);
  EXPECT_EQ(testing::refusal([&] { raw_scores(bound, ScoreStage::scaled); }),
            "shape: scores [B, H, N, M] of sizes [1, 1048576, 1048576, 1048576] has more elements "
            "than memory can be addressed");
}

}  // namespace
}  // namespace foci
