// Bad specs and shapes, as Plan::make and bind refuse them whatever implementation would be picked:
// one test a message. bind_test.cc and plan_test.cc have the rest of each one's checks.
#include <gtest/gtest.h>

#include <limits>

#include "attention/refusal.h"
#include "foci/attention/plan.h"

namespace foci {
namespace {

using testing::refusal;

constexpr AttentionShape kShape{.B = 2, .H = 4, .Hk = 2, .N = 3, .M = 5, .D = 4, .Dv = 6};

AttentionInputs inputs() {
  return {.q = Tensor::zeros({2, 4, 3, 4}),
          .k = Tensor::zeros({2, 2, 5, 4}),
          .v = Tensor::zeros({2, 2, 5, 6})};
}

std::string at_make(const AttentionSpec& spec, const AttentionShape& shape = kShape) {
  return refusal([&] { Plan::make(spec, shape); });
}

std::string at_bind(const AttentionSpec& spec, const AttentionInputs& in) {
  return refusal([&] { Plan::make(spec, kShape).bind(in); });
}

// With one input changed.
std::string at_bind(const AttentionSpec& spec, Tensor AttentionInputs::*member, const Tensor& t) {
  AttentionInputs in = inputs();
  in.*member = t;
  return at_bind(spec, in);
}

TEST(AttentionRefuses, NothingIsWrong) {
  EXPECT_EQ(at_bind({}, inputs()), "");
}

TEST(AttentionRefuses, RankOfQ) {
  EXPECT_EQ(at_bind({}, &AttentionInputs::q, Tensor::zeros({4, 3, 4})),
            "q: shape [4, 3, 4] arrived, [2, 4, 3, 4] (B, H, N, D) is right");
}
TEST(AttentionRefuses, RankOfK) {
  EXPECT_EQ(at_bind({}, &AttentionInputs::k, Tensor::zeros({1, 2, 2, 5, 4})),
            "k: shape [1, 2, 2, 5, 4] arrived, [2, 2, 5, 4] (B, Hk, M, D) is right");
}
TEST(AttentionRefuses, RankOfV) {
  EXPECT_EQ(at_bind({}, &AttentionInputs::v, Tensor::zeros({2, 60})),
            "v: shape [2, 60] arrived, [2, 2, 5, 6] (B, Hk, M, Dv) is right");
}
TEST(AttentionRefuses, HeadsThatDoNotDivide) {
  AttentionShape shape = kShape;
  shape.Hk = 3;
  EXPECT_EQ(at_make({}, shape),
            "shape.Hk: 3 key/value heads do not divide 4 query heads; H must be a multiple of Hk");
}
TEST(AttentionRefuses, MoreKeyHeadsThanQueryHeads) {
  AttentionShape shape = kShape;
  shape.Hk = 8;
  EXPECT_EQ(at_make({}, shape),
            "shape.Hk: 8 key/value heads do not divide 4 query heads; H must be a multiple of Hk");
}
TEST(AttentionRefuses, AnotherDOfK) {
  EXPECT_EQ(at_bind({}, &AttentionInputs::k, Tensor::zeros({2, 2, 5, 3})),
            "k: shape [2, 2, 5, 3] arrived, [2, 2, 5, 4] (B, Hk, M, D) is right");
}
TEST(AttentionRefuses, AnotherMOfV) {
  EXPECT_EQ(at_bind({}, &AttentionInputs::v, Tensor::zeros({2, 2, 4, 6})),
            "v: shape [2, 2, 4, 6] arrived, [2, 2, 5, 6] (B, Hk, M, Dv) is right");
}
TEST(AttentionRefuses, AlphaOfOne) {
  EXPECT_EQ(at_make({.normalizer = Entmax{1}}),
            "normalizer.alpha: 1 given, entmax needs alpha > 1 (softmax is the limit at 1)");
}
TEST(AttentionRefuses, KOfZero) {
  EXPECT_EQ(at_make({.normalizer = TopK{0}}), "normalizer.k: 0 given, top-k needs k >= 1");
}
TEST(AttentionRefuses, SoftcapOfZero) {
  EXPECT_EQ(at_make({.softcap = 0.0}), "softcap: 0 given, a finite number > 0 is needed");
}
TEST(AttentionRefuses, NegativeWindow) {
  EXPECT_EQ(at_make({.masks = {Window{-1, 2}}}),
            "masks[0].left: -1 given, a window side is >= 0 or unbounded");
  EXPECT_EQ(at_make({.masks = {Window{1, -2}}}),
            "masks[0].right: -2 given, a window side is >= 0 or unbounded");
}
TEST(AttentionRefuses, KeyLengthsBeyondM) {
  EXPECT_EQ(at_bind({.masks = {KeyLengths{}}}, &AttentionInputs::key_lengths,
                    Tensor::from<int64_t>({5, 6}, {2})),
            "key_lengths[1]: 6 arrived, it must lie in [0, M = 5]");
}
TEST(AttentionRefuses, NegativeKeyLengths) {
  EXPECT_EQ(at_bind({.masks = {KeyLengths{}}}, &AttentionInputs::key_lengths,
                    Tensor::from<int64_t>({-1, 5}, {2})),
            "key_lengths[0]: -1 arrived, it must lie in [0, M = 5]");
}
TEST(AttentionRefuses, KeepThatIsNotBoolean) {
  EXPECT_EQ(at_bind({.masks = {Keep{}}}, &AttentionInputs::keep, Tensor::zeros({3, 5})),
            "keep: float32 arrived, bool is right (true attends)");
}
TEST(AttentionRefuses, KeepThatDoesNotBroadcast) {
  EXPECT_EQ(
      at_bind({.masks = {Keep{}}}, &AttentionInputs::keep, Tensor::zeros({5, 3}, DType::boolean)),
      "keep: shape [5, 3] arrived, it must broadcast right-aligned to [2, 4, 3, 5] "
      "(B, H, N, M)");
}
TEST(AttentionRefuses, BiasThatDoesNotBroadcast) {
  EXPECT_EQ(at_bind({.biases = {TensorBias{}}}, &AttentionInputs::bias, Tensor::zeros({2, 3, 5})),
            "bias: shape [2, 3, 5] arrived, it must broadcast right-aligned to [2, 4, 3, 5] "
            "(B, H, N, M)");
}
TEST(AttentionRefuses, ScaleOfAnotherLength) {
  EXPECT_EQ(at_make({.scale = std::vector<double>{1, 2}}),
            "scale: 2 numbers arrived for 4 query heads; give one number, or one per query head");
}
TEST(AttentionRefuses, DropoutOfOne) {
  EXPECT_EQ(at_make({.dropout = Dropout{.p = 1}}), "dropout.p: 1 given, it must lie in [0, 1)");
}
TEST(AttentionRefuses, NegativeDropout) {
  EXPECT_EQ(at_make({.dropout = Dropout{.p = -0.5}}),
            "dropout.p: -0.5 given, it must lie in [0, 1)");
}
TEST(AttentionRefuses, SizesWhoseProductOverflows) {
  AttentionShape shape = kShape;
  shape.M = int64_t{1} << 60;
  EXPECT_EQ(at_make({}, shape),
            "shape: k [B, Hk, M, D] of sizes [2, 2, 1152921504606846976, 4] has more elements than "
            "memory can be addressed");
}

// An output anywhere on an input's memory.
TEST(AttentionRefuses, OverlapWithEachInput) {
  AttentionSpec spec;
  spec.masks = {Keep{}};
  spec.biases = {TensorBias{}};
  for (const char* name : {"q", "k", "v", "keep", "bias"}) {
    AttentionInputs in = inputs();
    in.keep = Tensor::full({3, 5}, 1, DType::boolean);
    in.bias = Tensor::zeros({4, 3, 5});
    AttentionOutputs out;
    out.y = Tensor::zeros({2, 4, 3, 6});
    const auto on_y = [&](const Dims& shape, DType dtype) {
      // The last bytes of y, whatever their type.
      auto* end = static_cast<std::byte*>(out.y.raw()) + out.y.nbytes();
      const size_t bytes = static_cast<size_t>(shape.product()) * size_of(dtype);
      const Tensor view = Tensor::wrap(end - bytes, shape, contiguous_strides(shape), dtype);
      if (dtype == DType::boolean) view.fill(1);
      return view;
    };
    const std::string which = name;
    if (which == "q") in.q = on_y({2, 4, 3, 4}, DType::f32);
    if (which == "k") in.k = on_y({2, 2, 5, 4}, DType::f32);
    if (which == "v") in.v = on_y({2, 2, 5, 6}, DType::f32);
    if (which == "keep") in.keep = on_y({3, 5}, DType::boolean);
    if (which == "bias") in.bias = on_y({4, 3, 5}, DType::f32);
    EXPECT_EQ(refusal([&] { Plan::make(spec, kShape).bind(in).forward(out); }),
              "outputs.y: its memory overlaps that of the input " + which);
  }
}

TEST(RefusedShapes, TensorsThatAreNotThere) {
  AttentionInputs in;
  EXPECT_EQ(refusal([&] { shape_of(in); }), "q: no tensor was given");
  in.q = Tensor::zeros({2, 3});
  EXPECT_EQ(refusal([&] { shape_of(in); }), "q: shape [2, 3] arrived, [B, H, N, D] is right");
  in.q = Tensor::zeros({1, 2, 3, 4});
  EXPECT_EQ(refusal([&] { shape_of(in); }), "k: no tensor was given");
}

}  // namespace
}  // namespace foci
