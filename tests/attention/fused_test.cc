// The fused kernels against the oracle, on every SIMD target, and the promises about bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/fused_cases.h"
#include "attention/fused_fairness.h"
#include "attention/tolerance.h"
#include "foci/core/simd_target.h"
#include "foci/core/threads.h"
#include "foci/reference/attention.h"

namespace foci {
namespace {

using testing::fused_normalizers;
using testing::FusedCase;
using testing::random_fused_case;
using testing::random_normal;
using testing::same_bits;
using testing::text_of;

Bound bind_fused(const AttentionSpec& spec, const AttentionShape& shape, const AttentionInputs& in,
                 SimdTarget target) {
  return Plan::make(spec, shape, {Implementation::fused, target}).bind(in);
}

// Largest |got − want| over the largest |want| (at least `floor`); infinities and NaN must match in
// place and kind, or the result is infinite. `any_kind`: in place only, since inf − inf and inf +
// inf depend on the order in which a gradient is summed.
double relative_error(const Tensor& got, const Tensor& want, double floor, bool any_kind = false) {
  const Tensor g = got.to(DType::f64).contiguous(), w = want.to(DType::f64).contiguous();
  EXPECT_EQ(g.shape(), w.shape());
  double largest = floor, error = 0;
  for (double x : w.span<double>()) {
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  }
  for (int64_t i = 0; i < g.numel(); ++i) {
    const double a = g.data<double>()[i], b = w.data<double>()[i];
    if (std::isfinite(a) && std::isfinite(b)) {
      error = std::max(error, std::abs(a - b));
    } else if (!(a == b || (std::isnan(a) && std::isnan(b)) ||
                 (any_kind && !std::isfinite(a) && !std::isfinite(b)))) {
      return std::numeric_limits<double>::infinity();
    }
  }
  return error / largest;
}

// float32 scores of magnitude s are known to eps·s·√D and weights follow them: the sweep's scores
// reach about 40, so that weights are known to about 40 · 6e-8 · (a few). Entropy weighs their
// error with ln p; gradients add one difference of such terms, and a gradient of the scale weighs
// them with the scores once more.
constexpr double kForward = 4e-5;
constexpr double kGradient = 1.2e-4;

void expect_close(const char* name, const Tensor& got, const Tensor& want, double tolerance,
                  const std::string& where, bool any_kind = false) {
  if (!got.defined()) return;
  EXPECT_LE(relative_error(got, want, 1e-2, any_kind), tolerance) << name << " " << where;
}

TEST(Fused, EqualsTheOracle) {
  int64_t rows = 0, unfair = 0;
  for (uint64_t index = 0; index < 400 && !HasFailure(); ++index) {
    FusedCase c = random_fused_case(index);
    const reference::Forward want = reference::attention_forward(c.spec, c.in);
    const testing::FusedFairness fair(c.spec, want, kForward / 2, kGradient / 2, c.up);
    rows += static_cast<int64_t>(fair.rows.size());
    unfair += fair.unfair;
    const AttentionGradients want_grad = reference::attention_backward(c.spec, c.in, c.up);
    for (SimdTarget target : supported_targets()) {
      const std::string where = std::string(name_of(target)) + " " + c.name;
      const Bound bound = bind_fused(c.spec, c.shape, c.in, target);
      const AttentionOutputs out = bound.forward();
      AttentionOutputs compared = out;
      for (Tensor* t : {&compared.y, &compared.row_stat, &compared.entropy, &compared.max_weight,
                        &compared.max_key, &compared.support, &compared.coverage}) {
        if (t->defined()) *t = t->clone();
      }
      fair.excuse(want.out, compared);
      expect_close("y", compared.y, want.out.y, kForward, where);
      expect_close("row_stat", compared.row_stat, want.out.row_stat, kForward, where);
      expect_close("entropy", compared.entropy, want.out.entropy, kGradient, where);
      expect_close("max_weight", compared.max_weight, want.out.max_weight, kForward, where);
      const bool softmax = std::holds_alternative<Softmax>(c.spec.normalizer);
      // Softmax gives a NaN row's key as the largest score that is a number.
      if (!(softmax && c.poisoned)) {
        expect_close("max_key", compared.max_key, want.out.max_key, 0, where);
      }
      expect_close("support", compared.support, want.out.support, 0, where);
      expect_close("coverage", compared.coverage, want.out.coverage, kForward, where);
      AttentionWanted wanted;
      wanted.scale = true;
      const AttentionGradients grad = bound.backward(out, c.up, wanted);
      expect_close("dq", grad.dq, want_grad.dq, kGradient, where, c.poisoned);
      expect_close("dk", grad.dk, want_grad.dk, kGradient, where, c.poisoned);
      expect_close("dv", grad.dv, want_grad.dv, kForward, where, c.poisoned);
      if (c.shape.N == 0) continue;
      const std::vector<int64_t> some = {c.shape.N - 1, c.shape.N / 2}, heads = {c.shape.H - 1};
      const Tensor weights = bound.weights(out, some, heads);
      for (int64_t b = 0; b < c.shape.B; ++b) {
        for (int64_t r = 0; r < 2; ++r) {
          if (!fair.rows[(b * c.shape.H + heads[0]) * c.shape.N + some[r]].forward) continue;
          expect_close("weights", weights.select(0, b).select(0, 0).select(0, r),
                       want.weights.select(0, b).select(0, heads[0]).select(0, some[r]), kForward,
                       where);
        }
      }
    }
  }
  EXPECT_LT(unfair * 20, rows) << unfair << " of " << rows << " rows are not compared";
}

// The gradient of the scale is one number, a difference of large sums: measured against their size.
TEST(Fused, GradientOfTheScale) {
  for (bool cosine : {false, true}) {
    for (const Normalizer& normalizer : fused_normalizers()) {
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
        expect_close("dscale", got.dscale, want.dscale, kGradient, std::string(name_of(target)));
      }
    }
  }
}

void expect_same_bits(const AttentionOutputs& a, const AttentionOutputs& b,
                      const std::string& where) {
  EXPECT_TRUE(same_bits(a.y, b.y)) << where;
  EXPECT_TRUE(same_bits(a.row_stat, b.row_stat)) << where;
  EXPECT_TRUE(same_bits(a.entropy, b.entropy)) << where;
  EXPECT_TRUE(same_bits(a.max_weight, b.max_weight)) << where;
  EXPECT_TRUE(same_bits(a.max_key, b.max_key)) << where;
  EXPECT_TRUE(same_bits(a.support, b.support)) << where;
  EXPECT_TRUE(same_bits(a.coverage, b.coverage)) << where;
}

void expect_same_bits(const AttentionGradients& a, const AttentionGradients& b,
                      const std::string& where) {
  EXPECT_TRUE(same_bits(a.dq, b.dq)) << where;
  EXPECT_TRUE(same_bits(a.dk, b.dk)) << where;
  EXPECT_TRUE(same_bits(a.dv, b.dv)) << where;
  EXPECT_TRUE(same_bits(a.dscale, b.dscale)) << where;
}

TEST(Fused, ThreadsDoNotChangeBits) {
  const int before = num_threads();
  for (SimdTarget target : supported_targets()) {
    for (uint64_t index : {3u, 11u, 39u, 55u, 79u}) {
      const FusedCase c = random_fused_case(index);
      set_num_threads(1);
      const Bound bound = bind_fused(c.spec, c.shape, c.in, target);
      AttentionWanted wanted;
      wanted.scale = true;
      const AttentionOutputs out = bound.forward();
      const AttentionGradients grad = bound.backward(out, c.up, wanted);
      for (int threads : {2, 3, 5}) {
        set_num_threads(threads);
        expect_same_bits(bound.forward(), out, c.name);
        expect_same_bits(bound.backward(out, c.up, wanted), grad, c.name);
      }
    }
  }
  set_num_threads(before);
}

// Heads, batch entries and packed segments, computed together and one by one.
TEST(Fused, APackedBatchEqualsItsMembersOneByOne) {
  const std::vector<int64_t> lengths = {37, 1, 64, 16, 530, 5};
  int64_t total = 0;
  for (int64_t n : lengths) total += n;
  constexpr int64_t kH = 2, kHk = 1, kD = 20, kDv = 12;
  for (SimdTarget target : supported_targets()) {
    for (const Normalizer& normalizer : fused_normalizers()) {
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
    for (const Normalizer& normalizer : fused_normalizers()) {
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

TEST(Fused, OneKeyIsExact) {
  for (SimdTarget target : supported_targets()) {
    for (const Normalizer& normalizer : fused_normalizers()) {
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
  for (const Normalizer& normalizer : fused_normalizers()) {
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
      expect_close("y", out.y, want.out.y, kForward, "long");
      expect_close("row_stat", out.row_stat, want.out.row_stat, kForward, "long");
      expect_close("entropy", out.entropy, want.out.entropy, kForward, "long");
      expect_close("coverage", out.coverage, want.out.coverage, kForward, "long");
    }
    // Ten times the keys need no more than about ten times the workspace.
    const auto bytes = [&](int64_t n, bool backward) {
      return Plan::make(spec, {1, 1, 1, n, n, 64, 64}).workspace_bytes(backward);
    };
    for (bool backward : {false, true})
      EXPECT_LE(bytes(65536, backward), 16 * bytes(4096, backward) + (1 << 20));
  }
}

}  // namespace
}  // namespace foci
