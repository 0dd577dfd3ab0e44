// The causal language model: packed against one by one, causality, gradients, what it refuses.
#include "foci/models/lm/lm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "autograd/gradient_check.h"
#include "foci/autograd/profile.h"
#include "foci/nn/optimiser.h"

namespace foci {
namespace {

using testing::expect_slope;

LmConfig small(bool tied) {
  return {.vocabulary = 11,
          .max_length = 9,
          .width = 12,
          .layers = 2,
          .heads = 3,
          .feed_forward = 20,
          .tied = tied};
}

const std::vector<int64_t> kIds = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 10, 7, 0};
const std::vector<int64_t> kLengths = {4, 1, 7, 3};

template <class T>
Tensor logits_of(Lm<T>& model, const std::vector<int64_t>& ids,
                 const std::vector<int64_t>& lengths) {
  Tape<T> tape(false);
  nn::Context<T> context{tape};
  return model.forward(context, ids, lengths).value();
}

TEST(LmTest, PackedEqualsOneByOneBitForBit) {
  for (bool tied : {true, false}) {
    Lm<float> model(small(tied));
    model.reset(3);
    const Tensor packed = logits_of(model, kIds, kLengths);
    ASSERT_EQ(packed.shape(), (Dims{15, 11}));
    int64_t at = 0;
    for (const int64_t n : kLengths) {
      const Tensor alone = logits_of(model, {kIds.begin() + at, kIds.begin() + at + n}, {n});
      for (int64_t i = 0; i < n * 11; ++i) {
        EXPECT_EQ(alone.span<float>()[i], packed.span<float>()[at * 11 + i]);
      }
      at += n;
    }
    // Texts of one length take another path: no segments.
    const Tensor even = logits_of(model, kIds, {5, 5, 5});
    const Tensor second = logits_of(model, {kIds.begin() + 5, kIds.begin() + 10}, {5});
    for (int64_t i = 0; i < 55; ++i) {
      EXPECT_EQ(even.span<float>()[55 + i], second.span<float>()[i]);
    }
  }
}

TEST(LmTest, SeesNoLaterToken) {
  Lm<float> model(small(true));
  model.reset(3);
  const Tensor before = logits_of(model, kIds, {6, 9});
  std::vector<int64_t> changed = kIds;
  changed[10] = 0;
  const Tensor after = logits_of(model, changed, {6, 9});
  for (int64_t r = 0; r < 15; ++r) {
    bool same = true;
    for (int64_t c = 0; c < 11; ++c) same &= before.at<float>(r, c) == after.at<float>(r, c);
    EXPECT_EQ(same, r < 10) << r;
  }
}

TEST(LmTest, FloatFollowsDouble) {
  for (bool tied : {true, false}) {
    Lm<double> exact(small(tied));
    exact.reset(3);
    Lm<float> single(small(tied));
    nn::copy_parameters(exact, single);
    EXPECT_LT(
        testing::difference(logits_of(single, kIds, kLengths), logits_of(exact, kIds, kLengths)),
        2e-5);
  }
}

// Texts of mixed lengths cost what they cost one by one, forward and backward: nothing is padded.
// The packed gradient is the sum of theirs.
TEST(LmTest, PackedTrainingWastesNothing) {
  Lm<float> model(small(true));
  model.reset(3);
  const auto parameters = model.parameters();
  const auto flops_of = [&](const std::vector<int64_t>& ids, const std::vector<int64_t>& lengths,
                            double weight) {
    Profile profile;
    const Profiling on(profile);
    Tape<float> tape;
    nn::Context<float> context{tape};
    const Var<float> loss =
        ops::softmax_cross_entropy(tape, model.forward(context, ids, lengths), ids, 0.1);
    tape.backward(loss, Tensor::full({1}, weight));
    double flops = 0;
    for (const Profile::Row& row : profile.rows()) flops += row.flops;
    return flops;
  };
  const double packed = flops_of(kIds, kLengths, 1);
  std::vector<Tensor> together;
  for (Parameter<float>* p : parameters) {
    together.push_back(p->grad.clone());
    p->grad.fill(0);
  }
  double alone = 0;
  int64_t at = 0;
  for (const int64_t n : kLengths) {
    alone += flops_of({kIds.begin() + at, kIds.begin() + at + n}, {n}, static_cast<double>(n) / 15);
    at += n;
  }
  EXPECT_EQ(packed, alone);
  double top = 0;
  for (const Tensor& t : together) {
    for (float x : t.span<float>()) top = std::max(top, std::abs(double{x}));
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (int64_t j = 0; j < together[i].numel(); ++j) {
      ASSERT_NEAR(together[i].span<float>()[j], parameters[i]->grad.span<float>()[j], 2e-6 * top)
          << parameters[i]->name;
    }
  }
}

// Along one random direction through all parameters at once; the tied table is used twice.
TEST(LmTest, GradientsByFiniteDifferences) {
  for (bool tied : {true, false}) {
    Lm<double> model(small(tied));
    model.reset(3);
    const auto loss_of = [&](Tape<double>& tape) {
      nn::Context<double> context{tape};
      return ops::softmax_cross_entropy(tape, model.forward(context, kIds, kLengths), kIds, 0.1);
    };
    Tape<double> tape;
    tape.backward(loss_of(tape));
    ASSERT_NO_FATAL_FAILURE(
        expect_slope(model.parameters(), loss_of, 0.1, std::string(tied ? "tied" : "own head")));
  }
}

TEST(LmTest, RefusesWhatMakesNoSense) {
  Lm<float> model(small(true));
  model.reset(1);
  EXPECT_THROW(logits_of(model, {1, 2}, {3}), ArgumentError);
  EXPECT_THROW(logits_of(model, {1, 11}, {2}), ArgumentError);
  EXPECT_THROW(logits_of(model, std::vector<int64_t>(10, 1), {10}), ArgumentError);
  EXPECT_THROW(logits_of(model, {}, {}), ArgumentError);
  LmConfig bad = small(true);
  bad.heads = 5;
  EXPECT_THROW(Lm<float>{bad}, ArgumentError);
}

TEST(LmTest, RefusesByName) {
  const LmConfig good{
      .vocabulary = 4, .max_length = 8, .width = 16, .layers = 1, .heads = 2, .feed_forward = 16};
  const auto refusal = [](const auto& f) -> std::string {
    try {
      f();
    } catch (const ArgumentError& e) {
      return e.what();
    }
    return "";
  };
  LmConfig c = good;
  c.vocabulary = 0;
  EXPECT_EQ(refusal([&] { Lm<float>{c}; }), "lm vocabulary: 0 given, at least 1 is needed");
  c = good;
  c.eps = INFINITY;
  EXPECT_NE(refusal([&] { Lm<float>{c}; }).find("lm eps"), std::string::npos);
  Lm<float> model(good);
  Tape<float> tape(false);
  nn::Context<float> context{.tape = tape};
  EXPECT_EQ(refusal([&] {
              model.forward(context, {0, 4}, {2});
            }),
            "lm: ids[1] is 4, the vocabulary is [0, 4)");
}

TEST(LmTest, LearnsWithoutReset) {
  Lm<float> model(
      {.vocabulary = 4, .max_length = 8, .width = 16, .layers = 1, .heads = 2, .feed_forward = 16});
  nn::FlatParameters parameters(model.parameters());
  nn::AdamW optimiser(parameters, {});
  double loss = 0;
  for (int i = 0; i < 60; ++i) {
    Tape<float> tape;
    nn::Context<float> context{.tape = tape, .training = true};
    const auto l = ops::softmax_cross_entropy(
        tape, model.forward(context, {0, 1, 2, 3, 0, 1, 2}, {7}), {1, 2, 3, 0, 1, 2, 3}, 0);
    loss = l.value().item();
    tape.backward(l);
    optimiser.step(1e-2, 1);
  }
  EXPECT_LT(loss, 0.5);
}

}  // namespace
}  // namespace foci
