// Work that is left out or put together, against the plain way: one product for the projections of
// query, key and value; the last layer's rows that somebody reads.
#include <gtest/gtest.h>

#include "autograd/gradient_check.h"
#include "foci/nn/encoder.h"
#include "foci/nn/observe.h"
#include "foci/nn/optimiser.h"

namespace foci::nn {
namespace {

using foci::testing::difference;
using foci::testing::random_tensor;

EncoderConfig config_of(bool pre_norm) {
  EncoderConfig c;
  c.attention.channels = 32;
  c.attention.heads = 4;
  c.attention.kv_heads = 2;
  c.layers = 2;
  c.feed_forward = 48;
  c.pre_norm = pre_norm;
  return c;
}

AttentionInputs segments_of(const std::vector<int64_t>& lengths) {
  int64_t total = 0;
  for (int64_t n : lengths) total += n;
  AttentionInputs masks;
  masks.q_segments = Tensor::empty({1, total}, DType::i32);
  int64_t at = 0;
  for (size_t s = 0; s < lengths.size(); ++s) {
    for (int64_t i = 0; i < lengths[s]; ++i) {
      masks.q_segments.at<int32_t>(0, at++) = static_cast<int32_t>(s);
    }
  }
  masks.k_segments = masks.q_segments;
  return masks;
}

struct Result {
  Tensor y, dx;
  std::vector<Tensor> grads;
};

template <class T, class F>
Result run(Encoder<T>& encoder, const Tensor& x, const F& f) {
  for (Parameter<T>* p : encoder.parameters()) {
    if (!p->grad.defined()) p->grad = Tensor::zeros(p->value.shape(), dtype_v<T>);
    p->grad.fill(0);
  }
  Tape<T> tape;
  Context<T> context{.tape = tape, .training = true, .seed = 3};
  const Var<T> in = tape.leaf(x);
  const Var<T> y = f(context, in);
  tape.backward(y, random_tensor(y.shape(), 9).to(dtype_v<T>));
  Result r{y.value().clone(), in.grad().clone(), {}};
  for (Parameter<T>* p : encoder.parameters()) r.grads.push_back(p->grad.clone());
  return r;
}

void expect_equal(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_EQ(a.shape(), b.shape()) << what;
  for (int64_t i = 0; i < a.numel(); ++i) {
    ASSERT_EQ(a.span<float>()[i], b.span<float>()[i]) << what << " " << i;
  }
}

// To rounding, as measured by the largest gradient: those of key biases add up to nothing.
void expect_close(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double top = 0;
  for (const Tensor& t : b) {
    for (float x : t.span<float>()) top = std::max(top, std::abs(double{x}));
  }
  for (size_t i = 0; i < a.size(); ++i) {
    for (int64_t j = 0; j < a[i].numel(); ++j) {
      ASSERT_NEAR(a[i].span<float>()[j], b[i].span<float>()[j], 2e-6 * top) << i << " " << j;
    }
  }
}

// Flat parameters lie side by side, so the projections are one product; those of a fresh model do
// not. Results are sums in the same order, to the bit; dx is one sum instead of three.
TEST(Shortcuts, JointProjectionsGiveTheSameResults) {
  for (const bool pre_norm : {true, false}) {
    for (const bool packed : {true, false}) {
      Encoder<float> apart(config_of(pre_norm)), joint(config_of(pre_norm));
      apart.reset(1);
      joint.reset(1);
      const FlatParameters flat(joint.parameters());
      const Tensor x = random_tensor(packed ? Dims{24, 32} : Dims{2, 12, 32}, 2).to(DType::f32);
      const AttentionInputs masks = packed ? segments_of({9, 15}) : AttentionInputs{};
      const auto forward = [&](Encoder<float>& e) {
        return run(e, x, [&](Context<float>& context, const Var<float>& in) {
          return e.forward(context, in, masks);
        });
      };
      const Result a = forward(apart), b = forward(joint);
      expect_equal(b.y, a.y, "y");
      EXPECT_LT(difference(b.dx, a.dx), 1e-5);
      expect_close(b.grads, a.grads);
    }
  }
}

TEST(Shortcuts, TheLastLayersRowsAreThoseOfTheWholeResult) {
  const std::vector<int64_t> lengths = {5, 1, 20, 8}, rows = {0, 5, 6, 26};
  const AttentionInputs masks = segments_of(lengths);
  for (const bool pre_norm : {true, false}) {
    for (const bool checkpoint : {true, false}) {
      Encoder<float> encoder(config_of(pre_norm));
      encoder.checkpoint = checkpoint;
      encoder.reset(1);
      const Tensor x = random_tensor({34, 32}, 2).to(DType::f32);
      const Result some = run(encoder, x, [&](Context<float>& context, const Var<float>& in) {
        EXPECT_TRUE(encoder.layers.back()->rows_suffice(context));
        return encoder.forward_rows(context, in, masks, rows);
      });
      const Result all = run(encoder, x, [&](Context<float>& context, const Var<float>& in) {
        return ops::gather_rows(context.tape, encoder.forward(context, in, masks), rows);
      });
      expect_equal(some.y, all.y, "y");
      EXPECT_LT(difference(some.dx, all.dx), 1e-5);
      expect_close(some.grads, all.grads);
    }
  }
}

// Where positions count, or somebody watches, all rows are computed.
TEST(Shortcuts, RowsAloneOnlyWhereTheySuffice) {
  const AttentionInputs masks = segments_of({7, 9});
  const std::vector<int64_t> rows = {0, 7};
  EncoderConfig c = config_of(true);
  c.attention.spec.masks = {Causal{}};
  Encoder<float> causal(c), plain(config_of(true));
  causal.reset(1);
  plain.reset(1);
  plain.set_path("");
  const Tensor x = random_tensor({16, 32}, 2).to(DType::f32);
  Tape<float> tape(false);
  Context<float> context{tape};
  EXPECT_FALSE(causal.layers.back()->rows_suffice(context));
  expect_equal(
      causal.forward_rows(context, tape.constant(x), masks, rows).value(),
      ops::gather_rows(tape, causal.forward(context, tape.constant(x), masks), rows).value(),
      "causal");
  Observer observer;
  observer.add({.path = "*attention", .statistics = {Statistic::entropy}});
  context.observer = &observer;
  EXPECT_FALSE(plain.layers.back()->rows_suffice(context));
  plain.forward_rows(context, tape.constant(x), masks, rows);
  ASSERT_EQ(observer.records().size(), 2u);
  EXPECT_EQ(observer.records()[1].entropy.dim(2), 16);
  Context<float> unwatched{tape};
  EXPECT_THROW(plain.forward_rows(unwatched, tape.constant(x), {}, rows), ArgumentError);
}

}  // namespace
}  // namespace foci::nn
