// Modules as they are made: initial values, names, and what their options may be.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "autograd/gradient_check.h"
#include "foci/core/threads.h"
#include "foci/nn/encoder.h"
#include "foci/nn/optimiser.h"
#include "foci/nn/positions.h"

namespace foci::nn {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const ArgumentError& e) {
    return e.what();
  }
  return "";
}
#define EXPECT_REFUSED(statement, part)                                                       \
  do {                                                                                        \
    const std::string text = refusal([&] { statement; });                                     \
    EXPECT_NE(text.find(part), std::string::npos) << #statement << " says \"" << text << '"'; \
  } while (false)

// Mean and deviation.
std::pair<double, double> moments(const Tensor& t) {
  double sum = 0, squares = 0;
  for (float x : t.span<float>()) {
    sum += static_cast<double>(x);
    squares += static_cast<double>(x) * static_cast<double>(x);
  }
  const auto n = static_cast<double>(t.numel());
  return {sum / n, std::sqrt(squares / n)};
}

TEST(FreshModules, HaveInitialValues) {
  const Linear<float> linear(300, 200), other(300, 200);
  const auto [mean, deviation] = moments(linear.weight.value);
  EXPECT_NEAR(mean, 0, 1e-3);
  EXPECT_NEAR(deviation, std::sqrt(2.0 / 500), 1e-3);
  EXPECT_EQ(foci::testing::difference(linear.bias.value, Tensor::zeros({200})), 0);
  // Each module its own: equal ones could never learn different things.
  EXPECT_GT(foci::testing::difference(linear.weight.value, other.weight.value), 0.5);
  EXPECT_NEAR(moments(Embedding<float>(300, 200).weight.value).second, 0.02, 1e-3);
}

TEST(FreshModules, AreTheSameOnAnyNumberOfThreadsAndFollowReset) {
  const int before = num_threads();
  Tensor first;
  for (int threads : {1, 3}) {
    set_num_threads(threads);
    Linear<float> linear(100, 101);
    linear.reset(7);
    if (!first.defined()) first = linear.weight.value.clone();
    EXPECT_EQ(foci::testing::difference(linear.weight.value, first), 0);
  }
  set_num_threads(before);
}

TEST(FreshModules, LearnWithoutReset) {
  Encoder<float> encoder(
      {.attention = {.channels = 8, .heads = 2}, .layers = 1, .feed_forward = 16});
  Linear<float> head(8, 4);
  std::vector<Parameter<float>*> all = encoder.parameters();
  for (auto* p : head.parameters()) all.push_back(p);
  FlatParameters flat(all);
  AdamW optimiser(flat, {});
  const Tensor x = foci::testing::random_tensor({1, 4, 8}, 3).to(DType::f32);
  double loss = 0;
  for (int i = 0; i < 60; ++i) {
    Tape<float> tape;
    Context<float> context{.tape = tape, .training = true};
    const auto y = head.forward(context, encoder.forward(context, tape.constant(x)));
    const auto l = ops::softmax_cross_entropy(tape, ops::reshape(tape, y, {4, 4}), {0, 1, 2, 3}, 0);
    loss = l.value().item();
    tape.backward(l);
    optimiser.step(1e-2, 1);
  }
  EXPECT_LT(loss, 0.1);
}

TEST(FreshModules, ShapesAloneAreRefusedUntilTheyHaveValues) {
  std::unique_ptr<Linear<float>> linear;
  {
    const ShapesOnly no_memory;
    linear = std::make_unique<Linear<float>>(8, 8);
  }
  Tape<float> tape(false);
  Context<float> context{.tape = tape};
  const auto x = tape.constant(Tensor::full({1, 8}, 1));
  EXPECT_REFUSED(linear->forward(context, x), "no values of its own");
  EXPECT_REFUSED(FlatParameters(linear->parameters()), "no values of its own");
  Linear<float> other(8, 8);
  other.reset(1);
  linear->reset(1);
  EXPECT_EQ(foci::testing::difference(linear->forward(context, x).value(),
                                      other.forward(context, x).value()),
            0);
  {
    const ShapesOnly no_memory;
    linear = std::make_unique<Linear<float>>(8, 8);
  }
  copy_parameters(other, *linear);
  EXPECT_EQ(foci::testing::difference(linear->weight.value, other.weight.value), 0);
}

struct Tree : Module<float> {
  using Module::add_module;
  using Module::add_normal_parameter;
  using Module::add_parameter;
  Parameter<float> p, q;
};

TEST(ModuleTrees, NamesDifferAndNothingHoldsItself) {
  Tree tree, child;
  tree.add_parameter("p", tree.p, {2}, true, 3);
  EXPECT_EQ(tree.p.value.item({1}), 3);
  EXPECT_REFUSED(tree.add_parameter("p", tree.q, {2}, true),
                 "p: a parameter or module of this name");
  EXPECT_REFUSED(tree.add_parameter("q", tree.p, {2}, true),
                 "q is the parameter that was declared as p");
  EXPECT_REFUSED(tree.add_parameter("", tree.q, {2}, true), "empty");
  EXPECT_REFUSED(tree.add_parameter(nullptr, tree.q, {2}, true), "null");
  EXPECT_REFUSED(tree.add_parameter("q", tree.q, {2}, true, kNan), "q starts as nan");
  EXPECT_REFUSED(tree.add_normal_parameter("q", tree.q, {2}, true, -1), "q of deviation -1");
  tree.add_module("child", child);
  EXPECT_REFUSED(tree.add_module("tree", tree), "tree is this module");
  EXPECT_REFUSED(child.add_module("tree", tree), "tree is this module");
  // Reached in two ways, listed once.
  child.add_parameter("q", child.q, {5}, true);
  tree.add_module("again", child);
  EXPECT_EQ(tree.parameters().size(), 2u);
  EXPECT_EQ(tree.parameter_count(), 7);
}

TEST(ModuleOptions, AreRefusedByName) {
  const EncoderConfig good{
      .attention = {.channels = 8, .heads = 2}, .layers = 1, .feed_forward = 8};
  const auto with = [&](auto change) {
    EncoderConfig c = good;
    change(c);
    return refusal([&] { Encoder<float>{c}; });
  };
  EXPECT_EQ(with([](EncoderConfig&) {}), "");
  EXPECT_NE(with([](EncoderConfig& c) { c.dropout = kNan; }).find("dropout"), std::string::npos);
  EXPECT_NE(with([](EncoderConfig& c) { c.dropout = 1; }).find("dropout"), std::string::npos);
  EXPECT_NE(with([](EncoderConfig& c) { c.eps = kNan; }).find("eps"), std::string::npos);
  EXPECT_NE(with([](EncoderConfig& c) { c.eps = -1; }).find("eps"), std::string::npos);
  EXPECT_NE(with([](EncoderConfig& c) { c.layers = -1; }).find("layers"), std::string::npos);
  EXPECT_NE(with([](EncoderConfig& c) { c.feed_forward = 0; }).find("feed_forward"),
            std::string::npos);
  EXPECT_NE(with([](EncoderConfig& c) { c.attention.channels = 0; }).find("channels"),
            std::string::npos);
  EXPECT_NE(with([](EncoderConfig& c) { c.attention.kv_channels = 3; }).find("kv_channels"),
            std::string::npos);
  constexpr int64_t kHuge = int64_t{1} << 40;
  EXPECT_REFUSED(resolved({.heads = kHuge, .head_size = kHuge}), "too many elements");
  EXPECT_REFUSED(LayerNorm<float>(4, kNan), "eps nan");
  EXPECT_REFUSED(Linear<float>(kHuge, kHuge), "too many elements");
  EXPECT_REFUSED(GridPositions<float>(kHuge, kHuge, 4), "too many elements");
  EXPECT_REFUSED(sinusoidal_grid(kHuge, kHuge, 4), "too many elements");
  EXPECT_REFUSED(sinusoidal_table(4, 4, kNan), "base nan");
  EXPECT_REFUSED(sinusoidal_table(4, 4, std::numeric_limits<double>::infinity()), "base inf");
  Tape<float> tape;
  Context<float> context{.tape = tape};
  EXPECT_REFUSED(dropout(context, tape.constant(Tensor::full({1}, 1)), kNan), "dropout p: nan");
  Embedding<float> table(3, 2);
  EXPECT_REFUSED(table.forward(context, {0, 3}), "ids[1]: 3 given");
  MultiHeadAttention<float> attention({.channels = 8, .heads = 2});
  EXPECT_REFUSED(attention.forward(context, Var<float>()), "attention: queries: no value");
  EXPECT_REFUSED(attention.forward(context, tape.constant(Tensor::full({1, 2, 6}, 1))),
                 "queries of shape [1, 2, 6], 8 channels");
  Encoder<float> encoder(good);
  AttentionInputs masks;
  masks.q_segments = masks.k_segments = Tensor::full({1, 3}, 0, DType::i32);
  const auto x = tape.constant(Tensor::full({3, 8}, 1));
  EXPECT_REFUSED(encoder.forward_rows(context, x, masks, {3}), "encoder rows: 3 given");
  EXPECT_REFUSED(encoder.forward_rows(context, x, masks, {-1}), "encoder rows: -1 given");
  masks.q_segments = Tensor::full({1, 3}, 0, DType::i64);
  EXPECT_REFUSED(encoder.forward_rows(context, x, masks, {0}), "q_segments of int64");
}

}  // namespace
}  // namespace foci::nn
