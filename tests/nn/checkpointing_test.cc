// Layers computed again in backward: the same bits, in less memory.
#include <gtest/gtest.h>

#include "autograd/gradient_check.h"
#include "foci/core/memory.h"
#include "foci/nn/encoder.h"
#include "foci/nn/observe.h"

namespace foci::nn {
namespace {

using foci::testing::random_tensor;

EncoderConfig config_of(bool pre_norm, double dropout, int64_t layers = 3) {
  EncoderConfig c;
  c.attention.channels = 16;
  c.attention.heads = 2;
  if (dropout > 0) c.attention.spec.dropout = Dropout{.p = dropout};
  c.layers = layers;
  c.feed_forward = 32;
  c.pre_norm = pre_norm;
  c.dropout = dropout;
  return c;
}

struct Result {
  Tensor y, dx;
  std::vector<Tensor> grads;
  uint64_t streams = 0;
  size_t records = 0;
  int64_t peak = 0;  // bytes of tensors beside those that were there before
};

template <class T>
Result run(Encoder<T>& encoder, const Tensor& x, const AttentionInputs& masks = {},
           bool leaf = true) {
  for (Parameter<T>* p : encoder.parameters())
    p->grad = Tensor::zeros(p->value.shape(), dtype_v<T>);
  const Tensor up = random_tensor(x.shape(), 7).to(dtype_v<T>);
  Result r;
  const int64_t before = tensor_memory().in_use;
  reset_tensor_memory_peak();
  Tape<T> tape;
  Observer observer;
  observer.add({.path = "*attention", .statistics = {Statistic::entropy}});
  Context<T> context{.tape = tape, .training = true, .seed = 5, .observer = &observer};
  const Var<T> in = leaf ? tape.leaf(x) : tape.constant(x);
  const Var<T> y = encoder.forward(context, in, masks);
  tape.backward(y, up);
  r.peak = tensor_memory().most_in_use - before;
  r.y = y.value().clone();
  if (leaf) r.dx = in.grad().clone();
  for (Parameter<T>* p : encoder.parameters()) r.grads.push_back(p->grad.clone());
  r.streams = context.streams;
  r.records = observer.records().size();
  return r;
}

template <class T>
void expect_same_bits(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_EQ(a.shape(), b.shape()) << what;
  for (int64_t i = 0; i < a.numel(); ++i) {
    ASSERT_EQ(a.span<T>()[i], b.span<T>()[i]) << what << " " << i;
  }
}

template <class T>
void check(bool pre_norm, double dropout, bool leaf) {
  Encoder<T> encoder(config_of(pre_norm, dropout));
  encoder.reset(1);
  const Tensor x = random_tensor({1, 40, 16}, 2).to(dtype_v<T>);
  AttentionInputs masks;
  masks.q_segments = Tensor::zeros({1, 40}, DType::i32);
  for (int64_t i = 15; i < 40; ++i) masks.q_segments.at<int32_t>(0, i) = 1;
  masks.k_segments = masks.q_segments;
  const Result kept = run(encoder, x, masks, leaf);
  encoder.checkpoint = true;
  const Result again = run(encoder, x, masks, leaf);
  const std::string text = fmt::format("pre-norm {} dropout {}", pre_norm, dropout);
  expect_same_bits<T>(again.y, kept.y, text + " y");
  if (leaf) expect_same_bits<T>(again.dx, kept.dx, text + " dx");
  const auto parameters = encoder.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    expect_same_bits<T>(again.grads[i], kept.grads[i], text + " " + parameters[i]->name);
  }
  EXPECT_EQ(again.streams, kept.streams);
  EXPECT_EQ(again.records, kept.records);
  EXPECT_EQ(kept.records, 3u);
}

TEST(Checkpointing, GradientsHaveTheSameBits) {
  for (const bool pre_norm : {true, false}) {
    for (const double dropout : {0.0, 0.3}) {
      check<float>(pre_norm, dropout, true);
      check<float>(pre_norm, dropout, false);
      check<double>(pre_norm, dropout, true);
    }
  }
}

TEST(Checkpointing, KeepsOneLayerInsteadOfAll) {
  Encoder<float> encoder(config_of(true, 0, 12));
  encoder.reset(1);
  const Tensor x = random_tensor({2, 128, 16}, 2).to(DType::f32);
  const Result kept = run(encoder, x);
  encoder.checkpoint = true;
  const Result again = run(encoder, x);
  expect_same_bits<float>(again.dx, kept.dx, "dx");
  // A layer keeps some 16 rows of 16 numbers a token, a checkpoint one.
  EXPECT_LT(4 * again.peak, kept.peak) << again.peak << " of " << kept.peak;
  const int64_t inputs = 12 * x.nbytes();
  EXPECT_LT(again.peak, inputs + 2 * kept.peak / 12 + 8 * int64_t(x.nbytes()));
}

TEST(Checkpointing, WithoutATapeItIsTheBlock) {
  Encoder<float> encoder(config_of(true, 0.2));
  encoder.reset(1);
  const Tensor x = random_tensor({1, 5, 16}, 2).to(DType::f32);
  Tape<float> off(false);
  Context<float> context{off};
  const Tensor plain = encoder.forward(context, off.constant(x)).value();
  encoder.checkpoint = true;
  expect_same_bits<float>(encoder.forward(context, off.constant(x)).value(), plain, "y");
}

}  // namespace
}  // namespace foci::nn
