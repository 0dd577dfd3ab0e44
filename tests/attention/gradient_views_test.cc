// dQ, dK and dV written into views, as the parts of one tensor that a joint projection waits for:
// the same bits as in tensors of their own, and nothing beside them touched.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "attention/generate.h"
#include "attention/refusal.h"
#include "attention/tolerance.h"
#include "foci/attention/plan.h"

namespace foci {
namespace {

using testing::refusal;
using testing::same_bits;

constexpr double kUntouched = 7.5;  // exact in every dtype

// Channels of q, k and v side by side in the rows of one tensor, `spare` more behind them.
struct Joint {
  Tensor all;  // [B, max(N, M), channels]
  AttentionGradients parts;
};

Joint joint(const AttentionShape& s, int64_t spare) {
  const int64_t rows = std::max(s.N, s.M);
  const int64_t width = s.H * s.D + s.Hk * (s.D + s.Dv) + spare;
  Joint j;
  j.all = Tensor::full({s.B, rows, width}, kUntouched, s.dtype);
  int64_t at = 0;
  const auto part = [&](int64_t heads, int64_t n, int64_t size) {
    const Tensor t =
        Tensor::wrap(j.all.slice(2, at, at + heads * size).raw(), {s.B, heads, n, size},
                     {rows * width, size, width, 1}, s.dtype, std::make_shared<Tensor>(j.all));
    at += heads * size;
    return t;
  };
  j.parts.dq = part(s.H, s.N, s.D);
  j.parts.dk = part(s.Hk, s.M, s.D);
  j.parts.dv = part(s.Hk, s.M, s.Dv);
  return j;
}

int64_t untouched(const Tensor& t) {
  const Tensor wide = t.to(DType::f64).contiguous();
  const auto values = wide.span<double>();
  return std::count(values.begin(), values.end(), kUntouched);
}

AttentionWanted everything() {
  return {.qkv = true,
          .bias = true,
          .slopes = true,
          .tables = true,
          .score_w = true,
          .scale = true,
          .alpha = true};
}

// Backward into tensors of its own and into a joint one.
std::string difference(const Bound& bound, const AttentionShape& shape, const AttentionUpstream& up,
                       int64_t spare) {
  const AttentionOutputs saved = bound.forward();
  const AttentionGradients want = bound.backward(saved, up, everything());
  Joint j = joint(shape, spare);
  bound.backward(saved, up, everything(), j.parts);
  std::string text = testing::differing_bits(j.parts, want);
  const int64_t written = want.dq.numel() + want.dk.numel() + want.dv.numel();
  if (untouched(j.all) < j.all.numel() - written) text += "something beside the parts was written";
  return text;
}

TEST(GradientViews, HoldTheSameBitsForEverySpec) {
  for (const Implementation implementation : {Implementation::fused, Implementation::plain}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const uint64_t cases = dtype == DType::f32 ? 160 : 40;
      for (uint64_t n = 0; n < cases; ++n) {
        const testing::SweepCase c = testing::attention_case(n, dtype);
        const AttentionShape shape = shape_of(c.in);
        const Bound bound =
            Plan::make(c.spec, shape, {.implementation = implementation}).bind(c.in);
        EXPECT_EQ(difference(bound, shape, c.up, static_cast<int64_t>(n % 3)), "")
            << "case " << n << " of " << name_of(dtype);
      }
    }
  }
}

// Shapes for the kernels' own ways with rows: added to in place, partial sums of several chunks,
// rows at a distance that the caches dislike, and parts of a long sparse problem.
TEST(GradientViews, HoldTheSameBitsForEveryCut) {
  struct Cut {
    AttentionShape shape;
    Normalizer normalizer;
    int64_t spare;
  };
  const std::vector<Cut> cuts = {
      {{2, 3, 3, 70, 70, 16, 16}, Softmax{}, 0},     {{2, 3, 3, 70, 70, 16, 16}, Softmax{}, 1},
      {{1, 4, 2, 900, 700, 32, 16}, Softmax{}, 0},   {{1, 4, 2, 900, 700, 32, 16}, Sparsemax{}, 0},
      {{1, 8, 8, 130, 130, 64, 64}, Softmax{}, 0},   {{1, 8, 8, 130, 130, 64, 64}, Entmax{1.5}, 0},
      {{1, 1, 1, 8300, 200, 16, 16}, Sparsemax{}, 0}};
  for (const Cut& cut : cuts) {
    Rng rng(5);
    const AttentionShape& s = cut.shape;
    AttentionSpec spec;
    spec.normalizer = cut.normalizer;
    AttentionInputs in;
    in.q = testing::random_normal(rng, {s.B, s.H, s.N, s.D});
    in.k = testing::random_normal(rng, {s.B, s.Hk, s.M, s.D});
    in.v = testing::random_normal(rng, {s.B, s.Hk, s.M, s.Dv});
    AttentionUpstream up;
    up.dy = testing::random_normal(rng, {s.B, s.H, s.N, s.Dv});
    for (const SimdTarget target : supported_targets()) {
      const Bound bound =
          Plan::make(spec, s, {.implementation = Implementation::fused, .target = target}).bind(in);
      EXPECT_EQ(difference(bound, s, up, cut.spare), "")
          << "N " << s.N << " D " << s.D << " " << testing::text_of(cut.normalizer);
    }
  }
}

TEST(GradientViews, RefuseSharedPlacesAndSparseRows) {
  const AttentionShape s{2, 2, 2, 5, 5, 4, 4};
  AttentionInputs in;
  Rng rng(6);
  in.q = testing::random_normal(rng, {2, 2, 5, 4});
  in.k = testing::random_normal(rng, {2, 2, 5, 4});
  in.v = testing::random_normal(rng, {2, 2, 5, 4});
  const Bound bound = Plan::make({}, s).bind(in);
  const AttentionOutputs saved = bound.forward();
  AttentionUpstream up;
  up.dy = testing::random_normal(rng, {2, 2, 5, 4});
  const auto refused = [&](const AttentionGradients& g) {
    return refusal([&] {
      AttentionGradients given = g;
      bound.backward(saved, up, {}, given);
    });
  };
  const Joint j = joint(s, 0);
  EXPECT_EQ(refused(j.parts), "");
  AttentionGradients g = j.parts;
  g.dk = j.parts.dq;
  EXPECT_EQ(refused(g), "gradients.dk: its memory overlaps that of gradients.dq");
  // One column belongs to both.
  g.dk = Tensor::wrap(j.all.data<float>() + 7, g.dq.shape(), g.dq.strides(), DType::f32);
  EXPECT_EQ(refused(g), "gradients.dk: its memory overlaps that of gradients.dq");
  g.dk = j.parts.dk;
  g.dq = Tensor::zeros({2, 2, 5, 4, 2}).select(-1, 0);
  EXPECT_EQ(
      refused(g),
      "gradients.dq: stride 2 in the last dimension arrived; only the other dimensions may be "
      "strided (call contiguous())");
  g.dq = Tensor::zeros({1, 2, 5, 4}).broadcast_to({2, 2, 5, 4});
  EXPECT_EQ(refused(g),
            "gradients.dq: the view's strides [0, 20, 4, 1] make elements share memory");
}

// Forward says whether backward must look through q, k and v; what it says is not carried over.
TEST(GradientViews, ForwardTellsWhetherItsInputsAreOrdinary) {
  const AttentionShape s{1, 1, 1, 40, 40, 8, 8};
  AttentionInputs in;
  Rng rng(8);
  in.q = testing::random_normal(rng, {1, 1, 40, 8});
  in.k = testing::random_normal(rng, {1, 1, 40, 8});
  in.v = testing::random_normal(rng, {1, 1, 40, 8});
  const Bound bound = Plan::make({}, s, {.implementation = Implementation::fused}).bind(in);
  AttentionOutputs out = bound.forward();
  EXPECT_TRUE(out.ordinary);
  in.v.at<float>(0, 0, 3, 5) = std::numeric_limits<float>::infinity();
  bound.forward(out);
  EXPECT_FALSE(out.ordinary);
}

}  // namespace
}  // namespace foci
