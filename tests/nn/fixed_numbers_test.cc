// Whole encoder layers and a Keras attention layer against fixed numbers of other libraries
// (conformance/fixed_numbers.md), in double and in float.
#include <gtest/gtest.h>

#include <cmath>

#include "foci/nn/encoder.h"

namespace foci::nn {
namespace {

template <class T>
class FixedNumbers : public ::testing::Test {
 protected:
  // Six decimals are given; float32 adds its rounding, grown by the norms.
  static constexpr double kTolerance = std::is_same_v<T, double> ? 1.5e-6 : 2e-5;

  static void cosines(const Tensor& t, int64_t from = 0) {
    for (int64_t i = 0; i < t.numel(); ++i) {
      t.span<T>()[i] = static_cast<T>(std::cos(static_cast<double>(from + i)));
    }
  }

  // d_model 4, 2 heads, feed-forward 16, post-norm; every tensor of n elements is cos(0 … n−1). Of
  // in_proj [12, 4], q, k and v are thirds.
  static EncoderConfig config(int64_t layers, Activation activation, bool final_norm = false) {
    EncoderConfig c;
    c.attention.channels = 4;
    c.attention.heads = 2;
    c.layers = layers;
    c.feed_forward = 16;
    c.activation = activation;
    c.pre_norm = false;
    c.final_norm = final_norm;
    return c;
  }
  static void fill(Encoder<T>& encoder) {
    for (auto& layer : encoder.layers) {
      auto& a = layer->attention;
      int64_t part = 0;
      for (Linear<T>* third : {&a.query, &a.key, &a.value}) {
        cosines(third->weight.value, 16 * part);
        cosines(third->bias.value, 4 * part);
        ++part;
      }
      for (Parameter<T>* p :
           {&a.output->weight, &a.output->bias, &layer->norm1.weight, &layer->norm1.bias,
            &layer->norm2.weight, &layer->norm2.bias, &layer->intermediate.weight,
            &layer->intermediate.bias, &layer->output.weight, &layer->output.bias}) {
        cosines(p->value);
      }
    }
  }
  static Tensor run(const Tensor& x, const AttentionInputs& masks = {}, int64_t layers = 1,
                    Activation activation = Activation::relu, bool final_norm = false) {
    Encoder<T> encoder(config(layers, activation, final_norm));
    fill(encoder);
    Tape<T> tape(false);
    Context<T> context{tape};
    return encoder.forward(context, tape.constant(x.to(dtype_v<T>)), masks).value();
  }
  static void expect_row(const Tensor& y, int64_t b, int64_t i, std::vector<double> want) {
    for (int64_t c = 0; c < 4; ++c) {
      EXPECT_NEAR(y.item({b, i, c}), want[static_cast<size_t>(c)], kTolerance)
          << "sample " << b << " token " << i << " channel " << c;
    }
  }
  static AttentionInputs keep_keys(const std::vector<std::vector<int>>& keys) {
    AttentionInputs in;
    const auto b = static_cast<int64_t>(keys.size()), m = static_cast<int64_t>(keys[0].size());
    in.keep = Tensor::empty({b, 1, 1, m}, DType::boolean);
    for (int64_t x = 0; x < b; ++x) {
      for (int64_t j = 0; j < m; ++j) in.keep.at<bool>(x, 0, 0, j) = keys[x][j] != 0;
    }
    return in;
  }
  static Tensor five_tokens() {  // [2, 5, 4]
    return Tensor::from<double>(
        {.7462, .6653, .5679, .4891, .8335, .2799, .5031, .2947, .6333, .9344,
         .1376, .9938, .9897, .6915, .3154, .1733, .8117, .2366, .4838, .7881,  // sample 0
         .5387, .1655, .3565, .0471, .1402, .0318, .7636, .1346, .8924, .2872,
         .6692, .2944, .8645, .3513, .3064, .0767, .3718, .4945, .9511, .0864},  // sample 1
        {2, 5, 4});
  }
};
using Floats = ::testing::Types<double, float>;
TYPED_TEST_SUITE(FixedNumbers, Floats);

TYPED_TEST(FixedNumbers, OneToken) {
  const Tensor x = Tensor::from<double>({20, 30, 40, 50}, {1, 1, 4});
  this->expect_row(this->run(x), 0, 0, {2.258703, 0.127985, -0.697881, 0.170862});
  this->expect_row(this->run(x, {}, 1, Activation::gelu), 0, 0,
                   {2.249815, 0.131006, -0.702199, 0.177868});
}

TYPED_TEST(FixedNumbers, TheOnlyKeyPadded) {
  const Tensor x = Tensor::from<double>({20, 30, 40, 50}, {1, 1, 4});
  this->expect_row(this->run(x, this->keep_keys({{0}})), 0, 0,
                   {2.212938, 0.134127, -0.721213, 0.192312});
}

TYPED_TEST(FixedNumbers, TwoTokens) {
  const Tensor x = Tensor::from<double>({1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 4});
  const Tensor all = this->run(x), padded = this->run(x, this->keep_keys({{0, 1}}));
  for (int64_t i : {0, 1}) {
    this->expect_row(all, 0, i, {2.272644, 0.119035, -0.691669, 0.153486});
    this->expect_row(padded, 0, i, {2.301516, 0.092249, -0.679101, 0.103088});
  }
}

TYPED_TEST(FixedNumbers, AMaskAsLargeAsTheBatch) {  // [[0,1],[0,0]] is (query, key), not (batch, …)
  Tensor x = Tensor::empty({2, 2, 4}, DType::f64);
  for (int64_t i = 0; i < 16; ++i) x.span<double>()[i] = static_cast<double>(i);
  AttentionInputs masks;
  masks.keep = Tensor::full({2, 2}, 1, DType::boolean);
  masks.keep.template at<bool>(0, 1) = false;
  const Tensor y = this->run(x, masks, 2);
  for (int64_t i : {0, 1}) {
    this->expect_row(y, 0, i, {2.420306, 0.017629, -0.607858, -0.085520});
    this->expect_row(y, 1, i, {2.419836, 0.017549, -0.608188, -0.085348});
  }
}

TYPED_TEST(FixedNumbers, FiveTokens) {
  const Tensor y = this->run(this->five_tokens());
  this->expect_row(y, 0, 0, {2.428589, .020835, -.602055, -.085249});
  this->expect_row(y, 1, 0, {2.427987, .021213, -.602496, -.084103});
  this->expect_row(y, 0, 4, {2.416246, .017512, -.610712, -.082961});
  this->expect_row(y, 1, 4, {2.422901, .024187, -.606178, -.074929});
}

TYPED_TEST(FixedNumbers, FiveTokensPadded) {
  const AttentionInputs masks = this->keep_keys({{1, 0, 1, 1, 1}, {1, 1, 1, 0, 0}});
  const Tensor x = this->five_tokens();
  const Tensor one = this->run(x, masks);
  this->expect_row(one, 0, 0, {2.429026, .020793, -.601741, -.085642});
  this->expect_row(one, 1, 0, {2.428811, .021445, -.601912, -.084252});
  this->expect_row(this->run(x, masks, 2), 0, 0, {2.419051, .017446, -.608738, -.085003});
  this->expect_row(this->run(x, masks, 6), 0, 0, {2.419101, .017453, -.608703, -.085025});
  this->expect_row(this->run(x, masks, 6, Activation::relu, true), 0, 0,
                   {1.695955, -.357639, -.893051, -.445265});
}

TYPED_TEST(FixedNumbers, KerasMultiHeadAttention) {
  // Q = K = I(8), V = arange(64)/100, 8 heads of size 8 that each project by the identity; output
  // channel h sums head h.
  using T = TypeParam;
  MultiHeadAttention<T> attention({.channels = 8, .heads = 8, .head_size = 8});
  attention.output->weight.value.fill(0);
  for (Linear<T>* in : {&attention.query, &attention.key, &attention.value}) {
    in->weight.value.fill(0);
    for (int64_t h = 0; h < 8; ++h) {
      for (int64_t d = 0; d < 8; ++d) in->weight.value.template at<T>(h * 8 + d, d) = 1;
    }
  }
  for (int64_t h = 0; h < 8; ++h) {
    for (int64_t d = 0; d < 8; ++d) attention.output->weight.value.template at<T>(h, h * 8 + d) = 1;
  }
  Tensor eye = Tensor::zeros({1, 8, 8}, dtype_v<T>), v = Tensor::zeros({1, 8, 8}, dtype_v<T>);
  for (int64_t i = 0; i < 8; ++i) eye.at<T>(0, i, i) = 1;
  for (int64_t i = 0; i < 64; ++i) v.span<T>()[i] = static_cast<T>(i / 100.0);
  Tape<T> tape(false);
  Context<T> context{tape};
  const Var<T> q = tape.constant(eye);
  const Tensor y = attention.forward(context, q, q, tape.constant(v)).value();
  const double other = 1 / (7 + std::exp(1 / std::sqrt(8.0)));
  EXPECT_NEAR(other, .11871, 5e-6);
  for (int64_t i = 0; i < 8; ++i) {
    for (int64_t c = 0; c < 8; ++c) {
      // The source lists five decimals of the first row, and the step.
      EXPECT_NEAR(y.item({0, i, c}), 2.40723 + .03222 * static_cast<double>(i), 1e-4);
    }
  }
}

}  // namespace
}  // namespace foci::nn
