// Plan: what it refuses and in which words, what it picks, what it says about it.
#include "foci/attention/plan.h"

#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "attention/refusal.h"
#include "foci/core/error.h"

namespace foci {
namespace {

using testing::refusal;

AttentionShape shape() {
  return {.B = 2, .H = 4, .Hk = 2, .N = 6, .M = 8, .D = 16, .Dv = 12};
}

std::string make_refusal(const AttentionSpec& spec, const AttentionShape& s) {
  return refusal([&] { Plan::make(spec, s); });
}

TEST(Plan, StaysUsableWhenHandedOn) {
  Plan first = Plan::make({}, shape());
  const Plan second = std::move(first);
  EXPECT_EQ(first.explain(), second.explain());  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(first.shape(), shape());
}

TEST(Plan, RefusesImpossibleShapes) {
  const auto with = [](auto change) {
    AttentionShape s = shape();
    change(s);
    return make_refusal({}, s);
  };
  EXPECT_EQ(with([](AttentionShape&) {}), "");
  EXPECT_EQ(with([](AttentionShape& s) { s.N = -1; }), "shape.N: -1 arrived, a size is >= 0");
  EXPECT_EQ(with([](AttentionShape& s) { s.Dv = -3; }), "shape.Dv: -3 arrived, a size is >= 0");
  EXPECT_EQ(with([](AttentionShape& s) { s.H = 0; }),
            "shape.H: no query heads arrived for 2 key/value heads; as few, or at least 1, are "
            "right");
  EXPECT_EQ(with([](AttentionShape& s) { s.Hk = 0; }),
            "shape.Hk: no key/value heads arrived for 4 query heads, at least 1 is right");
  EXPECT_EQ(with([](AttentionShape& s) { s.H = s.Hk = 0; }), "");
  EXPECT_EQ(with([](AttentionShape& s) { s.H = 3; }),
            "shape.Hk: 2 key/value heads do not divide 3 query heads; H must be a multiple of Hk");
  EXPECT_EQ(with([](AttentionShape& s) { s.dtype = DType::f64; }),
            "shape.dtype: float64 arrived, attention computes in float32, float16 or bfloat16");
  EXPECT_EQ(with([](AttentionShape& s) { s.N = int64_t{1} << 60; }),
            "shape: q [B, H, N, D] of sizes [2, 4, 1152921504606846976, 16] has more elements than "
            "memory can be addressed");
  EXPECT_EQ(with([](AttentionShape& s) {
              s.N = int64_t{1} << 40;
              s.M = int64_t{1} << 40;
            }),
            "shape: scores [N, M] of sizes [1099511627776, 1099511627776] has more elements than "
            "memory can be addressed");
  EXPECT_EQ(with([](AttentionShape& s) {
              s.B = 0;
              s.M = int64_t{1} << 50;
              s.N = 0;
            }),
            "shape: 0 queries and 1125899906842624 keys arrived, each must be below 2^30");
}

TEST(Plan, ServesEmptySizes) {
  for (int64_t AttentionShape::*size : {&AttentionShape::B, &AttentionShape::N, &AttentionShape::M,
                                        &AttentionShape::D, &AttentionShape::Dv}) {
    AttentionShape s = shape();
    s.*size = 0;
    EXPECT_EQ(make_refusal({}, s), "");
  }
}

TEST(Plan, RefusesNumbersThatDoNotFit) {
  AttentionSpec spec;
  spec.scale = std::vector<double>{1, 2};
  EXPECT_EQ(make_refusal(spec, shape()),
            "scale: 2 numbers arrived for 4 query heads; give one number, or one per query head");
  spec.scale = 1e300;
  EXPECT_EQ(make_refusal(spec, shape()), "scale: 1e+300 arrived, which float32 cannot hold");
  spec.scale = std::vector<double>{1, 2, -1e39, 4};
  EXPECT_EQ(make_refusal(spec, shape()), "scale[2]: -1e+39 arrived, which float32 cannot hold");
  spec.scale = AutoScale{};
  spec.score = L2{1e40};
  EXPECT_EQ(make_refusal(spec, shape()), "score.gamma: 1e+40 arrived, which float32 cannot hold");
  spec.score = Dot{};
  spec.softcap = 1e-42;
  EXPECT_EQ(make_refusal(spec, shape()), "softcap: 1e-42 arrived, which float32 cannot hold");
  spec.softcap = -1;
  EXPECT_EQ(make_refusal(spec, shape()), "softcap: -1 given, a finite number > 0 is needed");
  spec.softcap.reset();
  spec.normalizer = Entmax{1e39};
  EXPECT_EQ(make_refusal(spec, shape()),
            "normalizer.alpha: 1e+39 arrived, attention in float32 takes up to 1e6");
  spec.normalizer = Entmax{.per_head = {2, 1.5, 1e39, 4}};
  EXPECT_EQ(make_refusal(spec, shape()),
            "normalizer.alpha[2]: 1e+39 arrived, attention in float32 takes up to 1e6");
  spec.normalizer = Entmax{.per_head = {2, 1.5}};
  EXPECT_EQ(make_refusal(spec, shape()),
            "normalizer.alpha: 2 numbers arrived for 4 query heads; give one number, or one per "
            "query head");
}

TEST(Plan, RefusesGridsOfAnotherSize) {
  AttentionSpec spec;
  spec.biases = {Relative2D{3, 3}};
  EXPECT_EQ(make_refusal(spec, shape()),
            "relative2d.grid: [3, 3] holds 9 positions, but there are M = 8 keys");
  spec.biases = {Relative2D{2, 4}};
  EXPECT_EQ(make_refusal(spec, shape()), "");
  AttentionShape s = shape();
  s.N = 9;
  EXPECT_EQ(make_refusal(spec, s),
            "relative2d.grid: N = 9 queries do not fit the grid's 8 positions");
  spec.biases = {Relative1D{int64_t{1} << 30}};
  EXPECT_EQ(make_refusal(spec, shape()),
            "relative1d.max_distance: 1073741824 arrived, it must be below 2^30");
  s = shape();
  s.H = s.Hk = int64_t{1} << 24;
  s.N = s.M = 0;
  EXPECT_EQ(make_refusal({}, s),
            "shape.H: 16777216 query heads arrived, there may be fewer than 2^24");
  s = shape();
  s.B = int64_t{1} << 32;
  s.N = s.M = 0;
  EXPECT_EQ(make_refusal({}, s),
            "shape.B: 4294967296 batch entries arrived, there may be fewer than 2^32");
}

TEST(Plan, PicksWhatIsAskedFor) {
  const Plan plan = Plan::make(
      {}, shape(), {.implementation = Implementation::plain, .target = SimdTarget::baseline});
  EXPECT_EQ(plan.implementation(), Implementation::plain);
  EXPECT_EQ(plan.target(), SimdTarget::baseline);
  EXPECT_EQ(plan.explain(), "plain (asked for) on SIMD target baseline");
  EXPECT_EQ(plan.shape(), shape());
  EXPECT_EQ(plan.spec(), AttentionSpec{});
  EXPECT_GT(plan.workspace_bytes(true), plan.workspace_bytes(false));
}

TEST(Plan, PicksFusedForEverySpec) {
  for (const Score& score : {Score(Dot{}), Score(Cosine{}), Score(L2{}), Score(Additive{})}) {
    for (const Normalizer& normalizer :
         {Normalizer(Softmax{}), Normalizer(Sparsemax{}), Normalizer(Entmax{1.5}),
          Normalizer(Entmax{1.3}), Normalizer(Entmax{4}), Normalizer(TopK{3})}) {
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        for (const DropoutPlace place : {DropoutPlace::weights, DropoutPlace::keys}) {
          AttentionSpec spec;
          spec.score = score;
          spec.normalizer = normalizer;
          spec.softcap = 20;
          spec.masks = {Causal{}, Window{3, 4, Align::past}, KeyLengths{}, Segments{}, Keep{}};
          spec.biases = {TensorBias{}, Alibi{}, Relative1D{4}, Relative2D{2, 4}};
          spec.dropout = Dropout{.place = place};
          spec.statistics = Statistics::all();
          AttentionShape s = shape();
          s.dtype = dtype;
          const Plan plan = Plan::make(spec, s);
          EXPECT_EQ(plan.implementation(), Implementation::fused) << plan.explain();
          std::string told = fmt::format("fused on SIMD target {}", name_of(current_target()));
          if (std::holds_alternative<TopK>(normalizer)) told += "; top-k scores every key: ";
          EXPECT_EQ(plan.explain().substr(0, told.size()), told);
          EXPECT_EQ(plan.explain().size() > told.size(), std::holds_alternative<TopK>(normalizer));
        }
      }
    }
  }
}

}  // namespace
}  // namespace foci
