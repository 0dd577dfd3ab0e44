// The fused kernels against the oracle, on every SIMD target, and the promises about bits.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/generate.h"
#include "attention/tolerance.h"
#include "foci/core/simd_target.h"
#include "foci/reference/attention.h"

namespace foci {
namespace {

using testing::every_normalizer;
using testing::near;
using testing::random_normal;
using testing::same_bits;
using testing::text_of;

Bound bind_fused(const AttentionSpec& spec, const AttentionShape& shape, const AttentionInputs& in,
                 SimdTarget target) {
  return Plan::make(spec, shape, {Implementation::fused, target}).bind(in);
}

// The gradient of the scale is one number, a difference of large sums: measured against their size.
TEST(Fused, GradientOfTheScale) {
  for (bool cosine : {false, true}) {
    for (const Normalizer& normalizer : every_normalizer()) {
      Rng rng(5);
      AttentionSpec spec;
      if (cosine) spec.score = Cosine{};
      spec.normalizer = normalizer;
      spec.scale = std::vector<double>{0.3, 0.7};
      spec.masks = {Causal{}};
      const AttentionShape shape{2, 2, 2, 50, 60, 16, 8};
      AttentionInputs in;
      in.q = random_normal(rng, {2, 2, 50, 16});
      in.k = random_normal(rng, {2, 2, 60, 16});
      in.v = random_normal(rng, {2, 2, 60, 8});
      AttentionUpstream up;
      up.dy = random_normal(rng, {2, 2, 50, 8});
      const AttentionGradients want = reference::attention_backward(spec, in, up);
      AttentionWanted wanted;
      wanted.scale = true;
      for (SimdTarget target : supported_targets()) {
        const Bound bound = bind_fused(spec, shape, in, target);
        const AttentionGradients got = bound.backward(bound.forward(), up, wanted);
        ASSERT_EQ(got.dscale.shape(), (Dims{2}));
        EXPECT_TRUE(near(got.dscale, want.dscale)) << std::string(name_of(target));
      }
    }
  }
}

// Heads, batch entries and packed segments, computed together and one by one.
TEST(Fused, APackedBatchEqualsItsMembersOneByOne) {
  const std::vector<int64_t> lengths = {37, 1, 64, 16, 530, 5};
  int64_t total = 0;
  for (int64_t n : lengths) total += n;
  constexpr int64_t kH = 2, kHk = 1, kD = 20, kDv = 12;
  for (SimdTarget target : supported_targets()) {
    for (const Normalizer& normalizer : every_normalizer()) {
      for (bool causal : {false, true}) {
        Rng rng(7);
        AttentionSpec spec;
        spec.normalizer = normalizer;
        if (causal) spec.masks.push_back(Causal{});
        spec.statistics = Statistics::all();
        AttentionInputs all;
        all.q = random_normal(rng, {1, kH, total, kD});
        all.k = random_normal(rng, {1, kHk, total, kD});
        all.v = random_normal(rng, {1, kHk, total, kDv});
        AttentionUpstream up;
        up.dy = random_normal(rng, {1, kH, total, kDv});
        up.dcoverage = random_normal(rng, {1, kH, total});
        std::vector<int32_t> ids;
        for (size_t s = 0; s < lengths.size(); ++s) ids.insert(ids.end(), lengths[s], int32_t(s));
        all.q_segments = all.k_segments = Tensor::from(ids, {1, total});
        AttentionSpec packed = spec;
        packed.masks.push_back(Segments{});
        const Bound bound = bind_fused(packed, {1, kH, kHk, total, total, kD, kDv}, all, target);
        const AttentionOutputs out = bound.forward();
        const AttentionGradients grad = bound.backward(out, up);
        int64_t at = 0;
        for (int64_t n : lengths) {
          const auto part = [&](const Tensor& t) { return t.slice(2, at, at + n); };
          AttentionInputs in;
          in.q = part(all.q);
          in.k = part(all.k);
          in.v = part(all.v);
          AttentionUpstream own;
          own.dy = part(up.dy);
          own.dcoverage = part(up.dcoverage).contiguous();
          const Bound alone = bind_fused(spec, {1, kH, kHk, n, n, kD, kDv}, in, target);
          const AttentionOutputs want = alone.forward();
          const AttentionGradients want_grad = alone.backward(want, own);
          const std::string where = fmt::format("{} {} causal {} length {}", name_of(target),
                                                text_of(normalizer), causal, n);
          EXPECT_TRUE(same_bits(part(out.y), want.y)) << where;
          EXPECT_TRUE(same_bits(part(out.row_stat), want.row_stat)) << where;
          EXPECT_TRUE(same_bits(part(out.entropy), want.entropy)) << where;
          EXPECT_TRUE(same_bits(part(out.max_weight), want.max_weight)) << where;
          EXPECT_TRUE(same_bits(part(out.coverage), want.coverage)) << where;
          EXPECT_TRUE(same_bits(part(grad.dq), want_grad.dq)) << where;
          EXPECT_TRUE(same_bits(part(grad.dk), want_grad.dk)) << where;
          EXPECT_TRUE(same_bits(part(grad.dv), want_grad.dv)) << where;
          at += n;
        }
      }
    }
  }
}

// A row's bits depend on its own query and the keys it sees: not on its place, its neighbours, how
// many there are, or what masked keys hold (NaN elsewhere switches to another path: same bits).
TEST(Fused, ARowDependsOnItselfAlone) {
  constexpr int64_t kM = 700, kD = 24, kDv = 17;
  for (SimdTarget target : supported_targets()) {
    for (const Normalizer& normalizer : every_normalizer()) {
      Rng rng(11);
      AttentionSpec spec;
      spec.normalizer = normalizer;
      spec.statistics = {Statistic::entropy, Statistic::max_weight};
      const Tensor k = random_normal(rng, {1, 1, kM, kD}), v = random_normal(rng, {1, 1, kM, kDv});
      const Tensor query = random_normal(rng, {1, 1, 1, kD});
      const Tensor gradient = random_normal(rng, {1, 1, 1, kDv});
      AttentionInputs in{.q = query, .k = k, .v = v};
      AttentionUpstream up;
      up.dy = gradient;
      const Bound alone = bind_fused(spec, {1, 1, 1, 1, kM, kD, kDv}, in, target);
      const AttentionOutputs want = alone.forward();
      const Tensor want_dq = alone.backward(want, up).dq;
      for (int64_t n : {2, 33, 100}) {
        for (int64_t place : {int64_t{0}, n / 2, n - 1}) {
          for (bool poisoned : {false, true}) {
            in.q = random_normal(rng, {1, 1, n, kD}, 3);
            up.dy = random_normal(rng, {1, 1, n, kDv});
            in.q.slice(2, place, place + 1).copy_from(query);
            up.dy.slice(2, place, place + 1).copy_from(gradient);
            if (poisoned) in.q.select(2, place == 0 ? 1 : 0).fill(std::nan(""));
            const Bound bound = bind_fused(spec, {1, 1, 1, n, kM, kD, kDv}, in, target);
            const AttentionOutputs out = bound.forward();
            const std::string where =
                fmt::format("{} {} n {} place {} poisoned {}", name_of(target), text_of(normalizer),
                            n, place, poisoned);
            const auto own = [&](const Tensor& t) { return t.slice(2, place, place + 1); };
            EXPECT_TRUE(same_bits(own(out.y), want.y)) << where;
            EXPECT_TRUE(same_bits(own(out.row_stat), want.row_stat)) << where;
            EXPECT_TRUE(same_bits(own(out.entropy), want.entropy)) << where;
            EXPECT_TRUE(same_bits(own(bound.backward(out, up).dq), want_dq)) << where;
          }
        }
      }
      // More keys, masked, whatever they hold.
      AttentionSpec padded = spec;
      padded.masks = {KeyLengths{}};
      in.q = query;
      up.dy = gradient;
      in.k = random_normal(rng, {1, 1, kM + 40, kD});
      in.v = Tensor::full({1, 1, kM + 40, kDv}, std::nan(""));
      in.k.slice(2, 0, kM).copy_from(k);
      in.v.slice(2, 0, kM).copy_from(v);
      in.key_lengths = Tensor::from<int64_t>({kM}, {1});
      const Bound bound = bind_fused(padded, {1, 1, 1, 1, kM + 40, kD, kDv}, in, target);
      const AttentionOutputs out = bound.forward();
      EXPECT_TRUE(same_bits(out.y, want.y)) << name_of(target);
      EXPECT_TRUE(same_bits(bound.backward(out, up).dq, want_dq)) << name_of(target);
    }
  }
}

// Equal sums of products stay equal under any scale: ties go to the lowest key.
TEST(Fused, TheScaleBreaksNoTies) {
  for (SimdTarget target : supported_targets()) {
    for (const int64_t queries : {1, 20}) {
      AttentionInputs in{.q = Tensor::full({1, 1, queries, 2}, 1),
                         .k = Tensor::from<float>({8, 5, 5, 8, 12, 1, 1, 12}, {1, 1, 4, 2}),
                         .v = Tensor::from<float>({1, 2, 3, 4}, {1, 1, 4, 1})};
      for (const double scale : {0.1, 1 / std::sqrt(2.0), 3.7}) {
        AttentionSpec spec{.scale = scale, .normalizer = TopK{1}};
        spec.statistics = Statistics::all();
        const AttentionShape shape{1, 1, 1, queries, 4, 2, 1};
        const AttentionOutputs best = bind_fused(spec, shape, in, target).forward();
        for (float y : best.y.span<float>()) EXPECT_EQ(y, 1) << scale;
        spec.normalizer = Softmax{};
        const AttentionOutputs all = bind_fused(spec, shape, in, target).forward();
        for (int64_t key : all.max_key.span<int64_t>()) EXPECT_EQ(key, 0) << scale;
      }
    }
  }
}

TEST(Fused, OneKeyIsExact) {
  for (SimdTarget target : supported_targets()) {
    for (const Normalizer& normalizer : every_normalizer()) {
      Rng rng(3);
      AttentionSpec spec;
      spec.normalizer = normalizer;
      spec.statistics = Statistics::all();
      AttentionInputs in;
      in.q = random_normal(rng, {1, 2, 5, 9});
      in.k = random_normal(rng, {1, 1, 1, 9});
      in.v = random_normal(rng, {1, 1, 1, 6});
      AttentionUpstream up;
      up.dy = random_normal(rng, {1, 2, 5, 6});
      up.dentropy = random_normal(rng, {1, 2, 5});
      up.dmax_weight = random_normal(rng, {1, 2, 5});
      up.dcoverage = random_normal(rng, {1, 2, 1});
      const Bound bound = bind_fused(spec, {1, 2, 1, 5, 1, 9, 6}, in, target);
      const AttentionOutputs out = bound.forward();
      EXPECT_TRUE(same_bits(out.y, in.v.broadcast_to({1, 2, 5, 6})));
      const AttentionGradients grad = bound.backward(out, up);
      for (float x : grad.dq.span<float>()) EXPECT_EQ(x, 0);
      for (float x : grad.dk.span<float>()) EXPECT_EQ(x, 0);
    }
  }
}

TEST(Fused, LongRowsInLinearMemory) {
  // 20,000 keys: 40 blocks of the online softmax, a sparse strip of 20,000 rows.
  constexpr int64_t kM = 20000;
  Rng rng(17);
  for (const Normalizer& normalizer : every_normalizer()) {
    AttentionSpec spec;
    spec.normalizer = normalizer;
    spec.statistics = Statistics::all();
    AttentionInputs in;
    in.q = random_normal(rng, {1, 1, 3, 8}, 2);
    in.k = random_normal(rng, {1, 1, kM, 8});
    in.v = random_normal(rng, {1, 1, kM, 4});
    const reference::Forward want = reference::attention_forward(spec, in);
    for (SimdTarget target : supported_targets()) {
      const Plan plan = Plan::make(spec, {1, 1, 1, 3, kM, 8, 4}, {Implementation::fused, target});
      const AttentionOutputs out = plan.bind(in).forward();
      EXPECT_TRUE(near(out.y, want.out.y)) << "y";
      EXPECT_TRUE(near(out.row_stat, want.out.row_stat)) << "row_stat";
      EXPECT_TRUE(near(out.entropy, want.out.entropy)) << "entropy";
      EXPECT_TRUE(near(out.coverage, want.out.coverage)) << "coverage";
    }
    // Ten times the keys need no more than about ten times the workspace.
    const auto bytes = [&](int64_t n, bool backward) {
      return Plan::make(spec, {1, 1, 1, n, n, 64, 64}).workspace_bytes(backward);
    };
    for (bool backward : {false, true})
      EXPECT_LE(bytes(65536, backward), 16 * bytes(4096, backward) + (1 << 20));
  }
}

// Chunks of queries and panels of keys: enough of both that partial sums would otherwise be held
// for all keys at once. Cold, hot (log-sum-exps too coarse to recompute weights from) and masked
// rows, and what arrives for statistics, pass through the constants that panels share.
TEST(Fused, LongKeysComeInPanels) {
  constexpr int64_t kN = 2100, kM = 4800, kD = 64;
  for (bool grouped : {false, true}) {
    Rng rng(11);
    AttentionSpec spec;
    spec.scale = 1.0;
    spec.softcap = grouped ? std::optional<double>(20) : std::nullopt;
    if (grouped) {
      spec.masks = {Causal{}};
    } else {
      spec.masks = {KeyLengths{}};
      spec.dropout = Dropout{0.25, 3};
    }
    spec.statistics = Statistics::all();
    const AttentionShape shape{1, grouped ? 2 : 1, 1, kN, kM, kD, kD};
    AttentionInputs in;
    in.q = random_normal(rng, {1, shape.H, kN, kD}, 0.5);
    in.k = random_normal(rng, {1, 1, kM, kD});
    in.v = random_normal(rng, {1, 1, kM, kD});
    if (!grouped) in.key_lengths = Tensor::from(std::vector<int64_t>{kM - 100}, {1});
    AttentionUpstream up;
    up.dy = random_normal(rng, {1, shape.H, kN, kD});
    up.dentropy = random_normal(rng, {1, shape.H, kN});
    up.dmax_weight = random_normal(rng, {1, shape.H, kN});
    up.dcoverage = random_normal(rng, {1, shape.H, kM});
    const Bound plain = Plan::make(spec, shape, {Implementation::plain, {}}).bind(in);
    const AttentionGradients want = plain.backward(plain.forward(), up);
    const double tolerance = testing::case_tolerance(spec, in).gradient;
    for (SimdTarget target : supported_targets()) {
      if (grouped && target == SimdTarget::baseline) continue;  // one case is slow enough there
      const Bound fused = bind_fused(spec, shape, in, target);
      const AttentionOutputs saved = fused.forward();
      const AttentionGradients got = fused.backward(saved, up);
      EXPECT_TRUE(near(got.dq, want.dq, tolerance)) << std::string(name_of(target));
      EXPECT_TRUE(near(got.dk, want.dk, tolerance)) << std::string(name_of(target));
      EXPECT_TRUE(near(got.dv, want.dv, tolerance)) << std::string(name_of(target));
      if (grouped) continue;
      // Rows of dK and dV that are not aligned to vectors are summed elsewhere, in the same order.
      AttentionGradients given;
      const auto odd_place = [&](const Tensor& t) {
        return Tensor::zeros({t.numel() + 1}).slice(0, 1, t.numel() + 1).reshape(t.shape());
      };
      given.dk = odd_place(in.k);
      given.dv = odd_place(in.v);
      fused.backward(saved, up, {}, given);
      EXPECT_EQ(testing::differing_bits(given, got), "") << std::string(name_of(target));
    }
  }
}

}  // namespace
}  // namespace foci
