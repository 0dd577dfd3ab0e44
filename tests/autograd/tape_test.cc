// What the tape refuses, and by which words: values that are not there, of other types, of other
// tapes, of passes that are over. And strided views as operands of operators.
#include "foci/autograd/tape.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "autograd/gradient_check.h"
#include "foci/autograd/elementwise.h"
#include "foci/autograd/ops.h"

namespace foci {
namespace {

using testing::random_tensor;

std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const ArgumentError& e) {
    return e.what();
  }
  return "";
}
bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
#define EXPECT_REFUSED(statement, part)                                        \
  do {                                                                         \
    const std::string text = refusal([&] { statement; });                      \
    EXPECT_TRUE(says(text, part)) << #statement << " says \"" << text << "\""; \
  } while (false)

TEST(TapeRefusals, ValuesOfAnotherTape) {
  Tape<float> a, b;
  const Var<float> x = a.leaf(Tensor::full({2}, 3)), y = ops::scale(a, x, 2);
  EXPECT_REFUSED(b.backward(y), "of another tape");
  EXPECT_REFUSED(ops::scale(b, y, 3), "scale: x: a value of another tape");
  EXPECT_REFUSED(ops::add(b, b.leaf(Tensor::full({2}, 1)), y), "add: b: a value of another tape");
  EXPECT_REFUSED(ops::slice(b, y, 0, 0, 1), "slice: x");
  EXPECT_REFUSED(ops::reshape(b, y, {2, 1}), "reshape: x");
  EXPECT_REFUSED(ops::concat(b, std::vector<Var<float>>{y}, 0), "concat: a part");
  EXPECT_REFUSED(b.result(Tensor::full({2}, 3), {&y}), "of another tape");
  EXPECT_REFUSED(b.record({y}, [] {}), "of another tape");
  // One that does not record takes any value, as a constant.
  Tape<float> off(false);
  EXPECT_EQ(ops::scale(off, y, 2).value().item({1}), 12);
  // A tape at the place of an earlier one is another tape.
  std::optional<Tape<float>> one(std::in_place);
  const Var<float> kept = one->leaf(Tensor::full({2}, 1));
  one.emplace();
  EXPECT_REFUSED(ops::scale(*one, kept, 2), "of another tape");
}

TEST(TapeRefusals, APassThatIsOver) {
  Tape<float> tape;
  const Var<float> x = tape.leaf(Tensor::full({1}, 3)), y = ops::scale(tape, x, 2);
  const Var<float> part = ops::reshape(tape, y, {1, 1});
  tape.backward(y);
  EXPECT_EQ(x.grad().item(), 2);
  EXPECT_REFUSED(tape.backward(y), "before backward");
  EXPECT_REFUSED(ops::scale(tape, y, 2), "before backward");
  EXPECT_REFUSED(ops::scale(tape, part, 2), "before backward");
  EXPECT_EQ(x.grad().item(), 2);
  // Leaves serve again, and their gradients add up.
  tape.backward(ops::scale(tape, ops::reshape(tape, x, {1, 1}), 5));
  EXPECT_EQ(x.grad().item(), 7);
  const Var<float> z = ops::scale(tape, x, 2);
  tape.clear();
  EXPECT_REFUSED(tape.backward(z), "clear()");
  // Where a step throws, the rest is gone with it.
  const Var<float> s = ops::scale(tape, x, 1), t = tape.result(Tensor::full({1}, 1), {&s});
  tape.record({t}, [] { throw NumericError("no"); });
  EXPECT_THROW(tape.backward(t), NumericError);
  EXPECT_EQ(tape.steps(), 0u);
  EXPECT_REFUSED(tape.backward(t), "before backward");
}

TEST(TapeRefusals, WhatBackwardIsGiven) {
  Tape<float> tape;
  const Var<float> x = tape.leaf(Tensor::full({2}, 3)), y = ops::scale(tape, x, 2);
  EXPECT_REFUSED(tape.backward(Var<float>()), "no value was given");
  EXPECT_REFUSED(tape.backward(std::vector<std::pair<Var<float>, Tensor>>{}), "no value was given");
  EXPECT_REFUSED(tape.backward(tape.constant(Tensor::full({1}, 1))), "does not depend");
  EXPECT_REFUSED(tape.backward(y), "needs an upstream gradient");
  EXPECT_REFUSED(tape.backward(y, Tensor::full({3}, 1)), "upstream: shape [3]");
  EXPECT_REFUSED(tape.backward(y, Tensor::full({2}, 1, DType::f64)),
                 "upstream: a tensor of float64");
  // Nothing was added, nothing is lost.
  EXPECT_FALSE(x.grad().defined());
  tape.backward(y, Tensor::full({2}, 1));
  EXPECT_EQ(x.grad().item({0}), 2);
}

TEST(TapeRefusals, LeavesAndParameters) {
  Tape<float> tape;
  EXPECT_REFUSED(tape.leaf(Tensor()), "leaf: no tensor");
  EXPECT_REFUSED(tape.leaf(Tensor::full({1}, 1, DType::f64)),
                 "float64 arrived on a tape of float32");
  EXPECT_REFUSED(tape.constant(Tensor::full({1}, 1, DType::i64)), "int64 arrived");
  Parameter<float> p{.name = "w"};
  EXPECT_REFUSED(tape.parameter(p), "parameter w: it has no value");
  p.value = Tensor::full({1}, 1, DType::f64);
  EXPECT_REFUSED(tape.parameter(p), "parameter w: a tensor of float64");
  p.value = Tensor::full({1}, 1).broadcast_to({4});
  EXPECT_REFUSED(tape.parameter(p), "no values of its own");
  p.value = Tensor::full({4}, 1);
  p.grad = Tensor::full({3}, 1);
  EXPECT_REFUSED(tape.parameter(p), "parameter w: a gradient of shape [3]");
  p.grad = Tensor::full({4}, 1, DType::f64);
  EXPECT_REFUSED(tape.parameter(p), "its gradient");
}

TEST(TapeRefusals, OperandsThatAreNotThere) {
  Tape<float> tape;
  const Var<float> none, x = tape.leaf(Tensor::full({2, 3}, 1)),
                         v = tape.leaf(Tensor::full({3}, 1));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_REFUSED(ops::linear(tape, none, x, none), "linear: x: no value");
  EXPECT_REFUSED(ops::linear(tape, x, none, none), "linear: w: no value");
  EXPECT_REFUSED(ops::feed_forward(tape, none, x, none, ops::Activation::relu, x, none),
                 "feed_forward: x");
  EXPECT_REFUSED(ops::feed_forward(tape, x, x, none, ops::Activation::relu, none, none),
                 "feed_forward: w2");
  EXPECT_REFUSED(ops::layer_norm(tape, none, v, v, 1e-5), "layer_norm: x");
  EXPECT_REFUSED(ops::layer_norm(tape, x, none, v, 1e-5), "layer_norm: gamma");
  EXPECT_REFUSED(ops::layer_norm(tape, x, v, none, 1e-5), "layer_norm: beta");
  EXPECT_REFUSED(ops::layer_norm(tape, x, v, v, nan), "layer_norm: eps nan");
  EXPECT_REFUSED(ops::layer_norm(tape, x, v, v, -1), "layer_norm: eps -1");
  EXPECT_REFUSED(ops::add(tape, none, x), "add: a");
  EXPECT_REFUSED(ops::scale(tape, none, 2), "scale: x");
  EXPECT_REFUSED(ops::scale(tape, x, nan), "scale: a factor of nan");
  EXPECT_REFUSED(ops::gather_rows(tape, none, {0}), "gather_rows: table");
  EXPECT_REFUSED(ops::mix_rows(tape, none, {{0}, {}, {}}), "mix_rows: table");
  EXPECT_REFUSED(ops::mix_rows(tape, x, {{0, 1}, {0}, {nan}}), "mix_rows: a weight of nan");
  EXPECT_REFUSED(ops::segment_mean(tape, none, {0}), "segment_mean: x");
  EXPECT_REFUSED(ops::dropout(tape, none, 0.5, 0, 0), "dropout: x");
  EXPECT_REFUSED(ops::dropout(tape, x, nan, 0, 0), "dropout p: nan");
  EXPECT_REFUSED(ops::softmax_cross_entropy(tape, none, {}, 0), "logits: no value");
  EXPECT_REFUSED(ops::softmax_cross_entropy(tape, x, {0, 1}, nan), "label smoothing: nan");
  EXPECT_REFUSED(ops::slice(tape, none, 0, 0, 0), "slice: x");
  EXPECT_REFUSED(ops::reshape(tape, none, {1}), "reshape: x");
  EXPECT_REFUSED(ops::concat(tape, {x, none}, 0), "concat: a part");
  EXPECT_REFUSED(ops::checkpoint<float>(tape, nullptr, {x}), "checkpoint: the block");
  EXPECT_REFUSED(ops::attention(tape, none, none, none, {}), "attention: q: no value");
  EXPECT_REFUSED(tape.record({x}, nullptr), "record: back");
  EXPECT_REFUSED(add_into<float>(Tensor(), Tensor()), "add_into: into is undefined");
}

TEST(TapeRefusals, MasksOfAttentionInDouble) {
  Tape<double> tape;
  const auto x = tape.leaf(Tensor::full({1, 3, 2}, 1, DType::f64));
  EXPECT_REFUSED(ops::attention(tape, x, x, x, {.spec = {.masks = {Segments{}}}}),
                 "q_segments: nothing");
  EXPECT_REFUSED(ops::attention(tape, x, x, x, {.spec = {.masks = {Keep{}}}}), "keep: ");
  AttentionInputs masks;
  masks.key_lengths = Tensor::full({1}, 3, DType::i32);
  EXPECT_REFUSED(ops::attention(tape, x, x, x, {.spec = {.masks = {KeyLengths{}}}, .masks = masks}),
                 "key_lengths: int32");
}

// Weights, biases and attention's operands may be any views: parts of larger values, or turned.
template <class F>
void expect_like_dense(const F& op, const Tensor& turned) {
  Tape<float> a, b;
  const Var<float> x = a.leaf(turned), y = b.leaf(turned.clone());
  const Var<float> from_view = op(a, x), from_copy = op(b, y);
  EXPECT_EQ(testing::difference(from_view.value(), from_copy.value()), 0);
  const Tensor up = Tensor::full(from_view.shape(), 0.5);
  a.backward(from_view, up);
  b.backward(from_copy, up);
  EXPECT_EQ(testing::difference(x.grad(), y.grad()), 0);
}

TEST(TapeViews, TurnedOperandsAreReadAsTheyAre) {
  const Tensor w = random_tensor({5, 4}, 1).to(DType::f32).transpose(0, 1);
  const Tensor in = random_tensor({3, 5}, 2).to(DType::f32);
  expect_like_dense(
      [&](Tape<float>& t, const Var<float>& x) {
        return ops::linear(t, t.constant(in), x, Var<float>());
      },
      w);
  expect_like_dense(
      [&](Tape<float>& t, const Var<float>& x) {
        const Var<float> second = t.constant(random_tensor({2, 4}, 3).to(DType::f32));
        return ops::feed_forward(t, t.constant(in), x, Var<float>(), ops::Activation::gelu, second,
                                 Var<float>());
      },
      w);
  const Tensor column = random_tensor({5, 3}, 4).to(DType::f32).select(1, 1);
  expect_like_dense(
      [&](Tape<float>& t, const Var<float>& x) {
        return ops::layer_norm(t, t.constant(in), x, x, 1e-5);
      },
      column);
  const Tensor tokens = random_tensor({1, 4, 6}, 5).to(DType::f32).transpose(1, 2);
  expect_like_dense(
      [&](Tape<float>& t, const Var<float>& x) {
        return ops::attention(t, x, x, x, {.heads = 2, .kv_heads = 2}).y;
      },
      tokens);
}

TEST(TapeViews, GradientsReachPartsOfAValue) {
  const Tensor all = random_tensor({4, 9}, 1).to(DType::f32);
  const Tensor in = random_tensor({3, 5}, 2).to(DType::f32),
               up = random_tensor({3, 4}, 3).to(DType::f32);
  Tape<float> a, b;
  const Var<float> whole = a.leaf(all), part = b.leaf(all.slice(1, 2, 7).clone());
  a.backward(ops::linear(a, a.constant(in), ops::slice(a, whole, 1, 2, 7), Var<float>()), up);
  b.backward(ops::linear(b, b.constant(in), part, Var<float>()), up);
  EXPECT_EQ(testing::difference(whole.grad().slice(1, 2, 7), part.grad()), 0);
  EXPECT_EQ(testing::difference(whole.grad().slice(1, 7, 9), Tensor::zeros({4, 2})), 0);
}

}  // namespace
}  // namespace foci
