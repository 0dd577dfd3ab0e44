// What options mean, by numbers computed by hand; what is refused.
#include "foci/reference/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "foci/core/rng.h"
#include "reference/reported_parts.h"

namespace foci {
namespace {

using reference::attention_backward;
using reference::attention_forward;
using testing::differs;
using testing::floats;
using testing::given_scores;
using testing::kNaN;
using testing::zero_logits;

std::vector<double> softmax(std::vector<double> s) {
  double sum = 0;
  for (double& x : s) sum += x = std::exp(x);
  for (double& x : s) x /= sum;
  return s;
}

Tensor row_weights(const AttentionSpec& spec, const AttentionInputs& in, int64_t i, int64_t h = 0) {
  return attention_forward(spec, in).weights.select(0, 0).select(0, h).select(0, i);
}

void expect_row(const AttentionSpec& spec, const AttentionInputs& in, int64_t i,
                const std::vector<double>& scores) {
  EXPECT_EQ(differs("weights", row_weights(spec, in, i), softmax(scores), 1e-12), "");
}

TEST(Meaning, ScaleIsAutoOneOrPerHead) {
  AttentionInputs in{.q = floats({1, 1, 1, 1}, {1, 1, 1, 4}),
                     .k = Tensor::full({1, 1, 2, 4}, 1),
                     .v = Tensor::zeros({1, 1, 2, 1})};
  in.k.slice(2, 1, 2).fill(0.5);  // dot products 4 and 2
  expect_row({}, in, 0, {2, 1});
  expect_row({.scale = 3.0}, in, 0, {12, 6});
  expect_row({.score = L2{0.5}}, in, 0, {0, -0.5});
  in.q = Tensor::full({1, 2, 1, 4}, 1);
  const AttentionSpec spec{.scale = std::vector<double>{1, -1}};
  EXPECT_EQ(differs("head 0", row_weights(spec, in, 0, 0), softmax({4, 2}), 1e-12), "");
  EXPECT_EQ(differs("head 1", row_weights(spec, in, 0, 1), softmax({-4, -2}), 1e-12), "");
}

TEST(Meaning, AdditiveScore) {
  AttentionInputs in{.q = floats({1, -1}, {1, 1, 1, 2}),
                     .k = floats({0, 2, 1, 1}, {1, 1, 2, 2}),
                     .v = Tensor::zeros({1, 1, 2, 1}),
                     .score_w = floats({2, 3}, {2})};
  expect_row({.score = Additive{}}, in, 0,
             {2 * std::tanh(1) + 3 * std::tanh(1), 2 * std::tanh(2) + 3 * std::tanh(0)});
}

TEST(Meaning, AlibiCountsFromThePosition) {
  AttentionInputs in = zero_logits(2, {0, 0, 0});
  in.slopes = floats({0.5}, {1});
  const AttentionSpec spec{.biases = {Alibi{}}};
  expect_row(spec, in, 0, {-0.5, 0, -0.5});  // bottom-right: query 0 stands at key 1
  expect_row(spec, in, 1, {-1, -0.5, 0});
  in.past_lengths = Tensor::from<int64_t>({2}, {1});
  expect_row({.masks = {Window{{}, {}, Align::past}}, .biases = {Alibi{}}}, in, 0, {-1, -0.5, 0});
}

TEST(Meaning, Relative1DClipsKeyMinusQuery) {
  AttentionInputs in = zero_logits(4, {0, 0, 0, 0});
  in.table1d = floats({0.1f, 0.2f, 0.4f}, {1, 3});
  const double a = 0.1f, b = 0.2f, c = 0.4f;
  expect_row({.biases = {Relative1D{1}}}, in, 2, {a, a, b, c});
}

TEST(Meaning, Relative2DWalksTheGrid) {
  // Grid of 2 rows and 3 columns; the table holds 10·(row of the table) + column.
  AttentionInputs in = zero_logits(6, {0, 0, 0, 0, 0, 0});
  in.table2d = Tensor::zeros({1, 3, 5});
  for (int64_t y = 0; y < 3; ++y) {
    for (int64_t x = 0; x < 5; ++x) in.table2d.at<float>(0, y, x) = float(10 * y + x) / 8;
  }
  // Query 4 stands at row 1, column 1; key 0 is one row up and one column left.
  const AttentionSpec spec{.biases = {Relative2D{2, 3}}};
  expect_row(spec, in, 4, {1 / 8., 2 / 8., 3 / 8., 11 / 8., 12 / 8., 13 / 8.});
  in.q = in.q.slice(2, 0, 1);  // one query: it stands at the last key
  expect_row(spec, in, 0, {0, 1 / 8., 2 / 8., 10 / 8., 11 / 8., 12 / 8.});
}

TEST(Meaning, SegmentsNeedNotLieTogether) {
  AttentionInputs in = zero_logits(3, {0, 0, 0, 0, 0});
  in.q_segments = Tensor::from<int32_t>({1, 2, 1}, {1, 3});
  in.k_segments = Tensor::from<int32_t>({1, 2, 1, 2, 1}, {1, 5});
  // Segment 1 has keys 0, 2, 4 and queries 0, 2: bottom-right they stand at its keys 1 and 2.
  const AttentionSpec spec{.masks = {Segments{}, Causal{}}};
  EXPECT_EQ(differs("0", row_weights(spec, in, 0), {0.5, 0, 0.5, 0, 0}), "");
  EXPECT_EQ(differs("1", row_weights(spec, in, 1), {0, 0.5, 0, 0.5, 0}), "");
  EXPECT_EQ(differs("2", row_weights(spec, in, 2), {1 / 3., 0, 1 / 3., 0, 1 / 3.}), "");
}

TEST(Meaning, KeyLengthsMoveNoDiagonal) {
  AttentionInputs in = zero_logits(4, {0, 0, 0, 0});
  in.key_lengths = Tensor::from<int64_t>({2}, {1});
  const AttentionSpec spec{.masks = {Causal{}, KeyLengths{}}};
  EXPECT_EQ(differs("0", row_weights(spec, in, 0), {1, 0, 0, 0}), "");
  EXPECT_EQ(differs("3", row_weights(spec, in, 3), {0.5, 0.5, 0, 0}), "");
}

TEST(Meaning, WindowSidesMayBeHuge) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const AttentionSpec spec{.masks = {Window{kMost, kMost}}};
  EXPECT_EQ(differs("0", row_weights(spec, zero_logits(2, {0, 0}), 0), {0.5, 0.5}), "");
}

TEST(Meaning, DropoutFollowsItsBits) {
  const AttentionInputs in = zero_logits(1, {1, 1, 1, 1, 1, 1, 1, 1});
  const double p = dropout_threshold(0.4) / 65536.0;
  double kept = 0;
  for (int64_t j = 0; j < 8; ++j) kept += dropout_bits(3, 0, 0, 0, j) >= dropout_threshold(0.4);
  ASSERT_GT(kept, 0);
  ASSERT_LT(kept, 8);
  reference::Forward f = attention_forward({.dropout = Dropout{0.4, 3}}, in);
  EXPECT_NEAR(f.out.y.item(), kept / 8 / (1 - p), 1e-12);
  EXPECT_NEAR(f.out.entropy.item(), std::log(8), 1e-12);  // before dropout
  f = attention_forward({.dropout = Dropout{0.4, 3, DropoutPlace::keys}}, in);
  EXPECT_NEAR(f.out.y.item(), 1, 1e-12);
  EXPECT_EQ(f.out.support.item(), kept);
}

TEST(Meaning, AVisibleNanReachesTheOutput) {
  AttentionInputs in = given_scores({1, kNaN, 2});
  for (const Normalizer& n : {Normalizer(Softmax{}), Normalizer(Sparsemax{}), Normalizer(Entmax{}),
                              Normalizer(TopK{1})}) {
    const reference::Forward f = attention_forward({.scale = 1.0, .normalizer = n}, in);
    EXPECT_TRUE(std::isnan(f.out.y.item()));
  }
}

TEST(Meaning, AZeroWeightOfASparseMapHidesItsValue) {
  AttentionInputs in = given_scores({5, 1, 5});
  in.v = floats({1, kNaN, 3}, {1, 1, 3, 1});
  // Both weights are 1/2 and y is 2, so ds = g (v − 2) with g = p^(2−α), or p for top-k.
  const std::pair<Normalizer, double> cases[] = {
      {Sparsemax{}, 1}, {Entmax{1.5}, std::sqrt(0.5)}, {TopK{2}, 0.5}};
  for (const auto& [n, g] : cases) {
    const AttentionSpec spec{.scale = 1.0, .normalizer = n};
    EXPECT_NEAR(attention_forward(spec, in).out.y.item(), 2, 1e-12);
    const AttentionGradients got = attention_backward(spec, in, testing::ones_like_y(in));
    EXPECT_EQ(differs("dk", got.dk, {-g, 0, g}), "");
    EXPECT_EQ(differs("dv", got.dv, {0.5, 0, 0.5}), "");
  }
  EXPECT_TRUE(std::isnan(attention_forward({.scale = 1.0}, in).out.y.item()));
}

TEST(Meaning, SparseMapsHoldForHugeScores) {
  const AttentionInputs in = given_scores({1e6f, 1e6f - 0.5f, 1e6f - 8});
  const reference::Forward f = attention_forward({.scale = 1.0, .normalizer = Sparsemax{}}, in);
  EXPECT_EQ(differs("weights", f.weights, {0.75, 0.25, 0}, 1e-9), "");
  EXPECT_NEAR(f.out.row_stat.item(), 1e6 - 0.75, 1e-9);
}

TEST(Meaning, EntmaxOfTwoIsSparsemax) {
  Rng rng(4);
  for (int n = 0; n < 50; ++n) {
    std::vector<float> scores;
    for (int j = 0; j < 9; ++j) scores.push_back(static_cast<float>(rng.normal()));
    AttentionInputs in = given_scores({0, 0, 0, 0, 0, 0, 0, 0, 0});
    in.k = Tensor::from(scores, {1, 1, 9, 1});
    const reference::Forward a = attention_forward({.scale = 1.0, .normalizer = Sparsemax{}}, in);
    const reference::Forward b = attention_forward({.scale = 1.0, .normalizer = Entmax{2}}, in);
    EXPECT_EQ(differs("weights", a.weights, b.weights, 1e-12), "");
    EXPECT_EQ(differs("tau", a.out.row_stat, b.out.row_stat, 1e-12), "");
  }
}

// ---- refusals -------------------------------------------------------------------------------

AttentionInputs good() {
  return {.q = Tensor::zeros({2, 4, 3, 5}),
          .k = Tensor::zeros({2, 2, 6, 5}),
          .v = Tensor::zeros({2, 2, 6, 7})};
}

void expect_refused(const AttentionSpec& spec, const AttentionInputs& in,
                    const std::string& message) {
  try {
    attention_forward(spec, in);
    FAIL() << "accepted; expected: " << message;
  } catch (const ArgumentError& e) {
    EXPECT_EQ(e.what(), message);
  }
}

TEST(Refuses, Operands) {
  AttentionInputs in = good();
  in.k = Tensor();
  expect_refused({}, in, "k: not given, but the spec reads it");
  in = good();
  in.q = in.q.to(DType::i32);
  expect_refused({}, in, "q: int32 given, a floating type is needed");
  in = good();
  in.q = Tensor::zeros({4, 3, 5});
  expect_refused({}, in, "q: shape [4, 3, 5] given, [B, H, N, D] is needed");
  in = good();
  in.q = Tensor::zeros({2, 3, 3, 5});
  expect_refused({}, in, "k: 2 key/value heads do not divide 3 query heads");
  in = good();
  in.k = Tensor::zeros({2, 2, 6, 4});
  expect_refused({}, in, "k: shape [2, 2, 6, 4] given, [2, 2, 6, 5] is needed to fit q");
  in = good();
  in.v = Tensor::zeros({2, 2, 5, 7});
  expect_refused({}, in, "v: shape [2, 2, 5, 7] given, [2, 2, 6, 7] is needed to fit k");
}

TEST(Refuses, WhatTheSpecReads) {
  AttentionInputs in = good();
  expect_refused({.scale = std::vector<double>{1, 2}}, in,
                 "scale: 2 numbers given for 4 query heads");
  in.score_w = Tensor::zeros({4});
  expect_refused({.score = Additive{}}, in, "score_w: shape [4] given, [5] is needed");
  in.key_lengths = Tensor::from<int64_t>({3, 7}, {2});
  expect_refused({.masks = {KeyLengths{}}}, in, "key_lengths[1]: 7 given, it must lie in [0, 6]");
  in.past_lengths = Tensor::from<int64_t>({-1, 0}, {2});
  expect_refused({.masks = {Causal{Align::past}}}, in,
                 "past_lengths[0]: -1 given, it must lie in [0, 281474976710656]");
  in.keep = Tensor::zeros({3, 5}, DType::boolean);
  expect_refused({.masks = {Keep{}}}, in,
                 "keep: shape [3, 5] given, one that broadcasts right-aligned to [2, 4, 3, 6] is "
                 "needed");
  in.keep = Tensor::zeros({3, 6});
  expect_refused({.masks = {Keep{}}}, in, "keep: float32 given, bool is needed");
  in.q_segments = Tensor::zeros({2, 3}, DType::i64);
  expect_refused({.masks = {Segments{}}}, in, "q_segments: int64 given, int32 is needed");
  in.slopes = Tensor::zeros({2});
  expect_refused({.biases = {Alibi{}}}, in, "slopes: shape [2] given, [4] is needed");
  in.table2d = Tensor::zeros({4, 3, 5});
  expect_refused({.biases = {Relative2D{2, 4}}}, in,
                 "table2d: shape [4, 3, 5] given, [4, 3, 7] is needed");
  in.table2d = Tensor::zeros({4, 3, 3});
  expect_refused({.biases = {Relative2D{2, 2}}}, in,
                 "relative2d.grid: [2, 2] given, it must hold M = 6 keys");
}

TEST(Refuses, UpstreamShapes) {
  EXPECT_THROW(attention_backward({}, good(), {.dy = Tensor::zeros({2, 4, 3, 5})}), ArgumentError);
  EXPECT_THROW(attention_backward({}, good(), {.dcoverage = Tensor::zeros({2, 4, 3})}),
               ArgumentError);
}

}  // namespace
}  // namespace foci
