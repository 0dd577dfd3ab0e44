// The additive score takes tanh(q+k) from exponentials of q and of k, and tanh itself where an
// entry is too large for that: pair by pair, so that neither a row's neighbours nor its keys' show.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/tolerance.h"
#include "foci/attention/plan.h"
#include "foci/core/rng.h"
#include "foci/core/simd_target.h"
#include "foci/kernels/attention.h"
#include "foci/reference/attention.h"

namespace foci {
namespace {

using testing::near;
using testing::same_bits;

Tensor random(Rng& rng, const Dims& shape, double scale = 1) {
  Tensor t = Tensor::empty(shape);
  for (float& x : t.span<float>()) x = static_cast<float>(rng.normal() * scale);
  return t;
}

// Every third row is far beyond the limit, in entries of both signs.
void widen_rows(const Tensor& t, Rng& rng) {
  for (int64_t h = 0; h < t.dim(1); ++h) {
    for (int64_t i = 0; i < t.dim(2); i += 3) {
      const Tensor row = t.select(0, 0).select(0, h).select(0, i);
      for (int64_t d = 0; d < row.numel(); ++d) {
        row.data<float>()[d] = static_cast<float>(rng.normal() * (d % 4 == 0 ? 60 : 1));
      }
    }
  }
}

Bound bind(const AttentionSpec& spec, const AttentionInputs& in, SimdTarget target) {
  const AttentionShape shape{1,           in.q.dim(1), in.k.dim(1), in.q.dim(2),
                             in.k.dim(2), in.q.dim(3), in.v.dim(3)};
  return Plan::make(spec, shape, {Implementation::fused, target}).bind(in);
}

TEST(Additive, LargeEntriesTakeTanhItself) {
  constexpr int64_t kN = 40, kM = 70, kD = 12;
  for (const Normalizer& normalizer : {Normalizer(Softmax{}), Normalizer(Sparsemax{})}) {
    for (const bool wide_queries : {false, true}) {
      for (const bool wide_keys : {false, true}) {
        Rng rng(wide_queries + 2 * wide_keys);
        AttentionSpec spec{.score = Additive{}, .normalizer = normalizer};
        AttentionInputs in{.q = random(rng, {1, 2, kN, kD}),
                           .k = random(rng, {1, 1, kM, kD}),
                           .v = random(rng, {1, 1, kM, 8}),
                           .score_w = random(rng, {kD}, 0.5)};
        if (wide_queries) widen_rows(in.q, rng);
        if (wide_keys) widen_rows(in.k, rng);
        const AttentionUpstream up{.dy = random(rng, {1, 2, kN, 8})};
        AttentionUpstream up64;
        up64.dy = up.dy.to(DType::f64);
        const reference::Forward want = reference::attention_forward(spec, in);
        const AttentionGradients want_g = reference::attention_backward(spec, in, up64);
        for (SimdTarget target : supported_targets()) {
          SCOPED_TRACE(
              fmt::format("{} wide queries {} keys {}", name_of(target), wide_queries, wide_keys));
          const Bound bound = bind(spec, in, target);
          const AttentionOutputs out = bound.forward();
          EXPECT_TRUE(near(out.y, want.out.y));
          EXPECT_TRUE(near(out.row_stat, want.out.row_stat));
          const AttentionGradients g = bound.backward(out, up, {.score_w = true});
          EXPECT_TRUE(near(g.dq, want_g.dq));
          EXPECT_TRUE(near(g.dk, want_g.dk));
          EXPECT_TRUE(near(g.dv, want_g.dv));
          EXPECT_TRUE(near(g.dscore_w, want_g.dscore_w));
        }
      }
    }
  }
}

// Where q and k are small tanh is about q + k, which 1 − 2/(1 + e^(2(q+k))) has few digits of.
TEST(Additive, SmallEntriesKeepTheirDigits) {
  constexpr int64_t kN = 20, kM = 30, kD = 6;
  for (const double size : {1e-5, 1e-3, 0.1}) {
    Rng rng(21);
    AttentionSpec spec{.score = Additive{}};
    AttentionInputs in{.q = random(rng, {1, 1, kN, kD}, size),
                       .k = random(rng, {1, 1, kM, kD}, size),
                       .v = random(rng, {1, 1, kM, 5}),
                       .score_w = random(rng, {kD}, 1 / size)};
    const Tensor want = reference::attention_forward(spec, in).out.y;
    for (SimdTarget target : supported_targets()) {
      EXPECT_TRUE(near(bind(spec, in, target).forward().y, want)) << name_of(target) << size;
    }
  }
}

TEST(Additive, WideNeighboursChangeNoBit) {
  constexpr int64_t kN = 33, kM = 50, kD = 10;
  Rng rng(9);
  AttentionSpec spec{.score = Additive{}, .masks = {KeyLengths{}}};
  AttentionInputs in{.q = random(rng, {1, 1, kN, kD}),
                     .k = random(rng, {1, 1, kM, kD}),
                     .v = random(rng, {1, 1, kM, 4}),
                     .key_lengths = Tensor::from<int64_t>({kM - 5}, {1}),
                     .score_w = random(rng, {kD})};
  AttentionInputs wide = in;
  wide.q = in.q.clone();
  wide.k = in.k.clone();
  wide.q.select(2, 4).fill(100);            // another row
  wide.k.slice(2, kM - 5, kM).fill(-1000);  // keys that nobody sees
  const AttentionUpstream up{.dy = random(rng, {1, 1, kN, 4})};
  for (SimdTarget target : supported_targets()) {
    const Bound a = bind(spec, in, target), b = bind(spec, wide, target);
    const AttentionOutputs x = a.forward(), y = b.forward();
    const Tensor dx = a.backward(x, up).dq, dy = b.backward(y, up).dq;
    for (int64_t i = 0; i < kN; ++i) {
      if (i == 4) continue;
      EXPECT_TRUE(same_bits(x.y.select(2, i), y.y.select(2, i))) << i;
      EXPECT_TRUE(same_bits(dx.select(2, i), dy.select(2, i))) << i;
    }
  }
}

TEST(Additive, ExponentialsRoundOnce) {
  std::vector<float> x, got(4001);
  for (int i = -2000; i <= 2000; ++i) x.push_back(static_cast<float>(i) * 0.0105f);
  for (SimdTarget target : supported_targets()) {
    const kernels::AttentionKernels& kernels = kernels::attention_kernels(target);
    EXPECT_EQ(kernels.exponentials(x.data(), 4001, got.data()), kernels::RowSize::usual);
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      worst = std::max(worst, std::abs(got[i] / std::exp(2 * double{x[i]}) - 1));
    }
    EXPECT_LT(worst, 0x1p-23) << name_of(target);
    for (float beyond : {21.5f, -30.0f, INFINITY, NAN}) {
      float to = 0;
      EXPECT_EQ(kernels.exponentials(&beyond, 1, &to), kernels::RowSize::wide);
      EXPECT_TRUE(std::isfinite(to));
    }
  }
}

}  // namespace
}  // namespace foci
