// Modules: names, whole-layer gradients, masks and packing, dropout, observers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "autograd/gradient_check.h"
#include "foci/nn/encoder.h"
#include "foci/nn/observe.h"

namespace foci::nn {
namespace {

using foci::testing::random_tensor;

EncoderConfig small(bool pre_norm) {
  EncoderConfig c;
  c.attention.channels = 6;
  c.attention.heads = 2;
  c.layers = 2;
  c.feed_forward = 10;
  c.pre_norm = pre_norm;
  return c;
}

TEST(Modules, ParametersAreNamedByPath) {
  EncoderConfig c = small(true);
  c.layers = 1;
  Encoder<float> encoder(c);
  std::vector<std::string> names;
  for (const auto* p : encoder.parameters()) names.push_back(p->name);
  EXPECT_EQ(names,
            (std::vector<std::string>{
                "layer.0.layernorm_before.weight", "layer.0.layernorm_before.bias",
                "layer.0.attention.query.weight", "layer.0.attention.query.bias",
                "layer.0.attention.key.weight", "layer.0.attention.key.bias",
                "layer.0.attention.value.weight", "layer.0.attention.value.bias",
                "layer.0.attention.output.weight", "layer.0.attention.output.bias",
                "layer.0.layernorm_after.weight", "layer.0.layernorm_after.bias",
                "layer.0.intermediate.weight", "layer.0.intermediate.bias", "layer.0.output.weight",
                "layer.0.output.bias", "layernorm.weight", "layernorm.bias"}));
  EXPECT_EQ(encoder.parameter_count(), 12 + 4 * 42 + 12 + 70 + 66 + 12);
  for (const auto* p : encoder.parameters()) {
    EXPECT_EQ(p->decay, p->value.rank() == 2) << p->name;  // no decay for biases and norms
  }
}

TEST(Modules, ResetIsAFunctionOfTheSeed) {
  Encoder<float> a(small(true)), b(small(true));
  a.reset(5);
  b.reset(5);
  const auto pa = a.parameters(), pb = b.parameters();
  for (size_t i = 0; i < pa.size(); ++i) {
    EXPECT_EQ(foci::testing::difference(pa[i]->value, pb[i]->value), 0) << pa[i]->name;
  }
  b.reset(6);
  EXPECT_GT(foci::testing::difference(pa[2]->value, pb[2]->value), 0);
}

// The gradient of every parameter and of the input of a whole encoder, by finite differences along
// one random direction each.
TEST(Modules, EncoderGradients) {
  for (bool pre_norm : {true, false}) {
    Encoder<double> encoder(small(pre_norm));
    encoder.reset(3);
    Rng rng(4);
    for (Parameter<double>* p : encoder.parameters()) {  // biases away from 0, so that they matter
      for (double& x : p->value.span<double>()) x += 0.1 * rng.normal();
    }
    AttentionInputs masks;
    masks.key_lengths = Tensor::from<int64_t>({4, 2}, {2});
    const Tensor x = random_tensor({2, 4, 6}, 1), up = random_tensor({2, 4, 6}, 2);
    const auto value = [&] {
      Tape<double> tape(false);
      Context<double> context{tape};
      const Tensor y = encoder.forward(context, tape.constant(x), masks).value();
      double sum = 0;
      for (int64_t i = 0; i < y.numel(); ++i) sum += y.span<double>()[i] * up.span<double>()[i];
      return sum;
    };
    Tape<double> tape;
    Context<double> context{tape};
    const Var<double> in = tape.leaf(x);
    tape.backward(encoder.forward(context, in, masks), up);
    const auto check = [&](const std::string& name, const Tensor& values, const Tensor& grad) {
      const Tensor direction = random_tensor(values.shape(), 9), kept = values.clone();
      double slope = 0, sides[2];
      for (int64_t i = 0; i < values.numel(); ++i) {
        slope += grad.span<double>()[i] * direction.span<double>()[i];
      }
      const double h = 1e-5;
      for (int s : {0, 1}) {
        for (int64_t i = 0; i < values.numel(); ++i) {
          values.span<double>()[i] =
              kept.span<double>()[i] + (s ? -h : h) * direction.span<double>()[i];
        }
        sides[s] = value();
      }
      values.copy_from(kept);
      EXPECT_NEAR(slope, (sides[0] - sides[1]) / (2 * h), 1e-6) << name;
    };
    check("input", x, in.grad());
    for (Parameter<double>* p : encoder.parameters()) check(p->name, p->value, p->grad);
  }
}

TEST(Modules, AttentionProjections) {
  // Cross-attention with other widths, grouped heads, values of their own size, shared or not.
  for (bool shared : {false, true}) {
    MultiHeadAttention<double> attention({.channels = 6,
                                          .kv_channels = 5,
                                          .heads = 4,
                                          .kv_heads = 2,
                                          .head_size = 3,
                                          .value_size = 2,
                                          .shared_values = shared});
    attention.reset(1);
    EXPECT_EQ(attention.query.weight.value.shape(), (Dims{12, 6}));
    EXPECT_EQ(attention.key.weight.value.shape(), (Dims{6, 5}));
    EXPECT_EQ(attention.value.weight.value.shape(), (Dims{shared ? 2 : 4, 5}));
    EXPECT_EQ(attention.output->weight.value.shape(), (Dims{6, 8}));
    foci::testing::check_finite_differences(
        {random_tensor({2, 3, 6}, 1), random_tensor({2, 4, 5}, 2)},
        [&](Tape<double>& tape, const std::vector<Var<double>>& v) {
          Context<double> context{tape};
          return std::vector<Var<double>>{attention.forward(context, v[0], v[1])};
        });
  }
}

TEST(Modules, AttentionConfigErrors) {
  EXPECT_THROW(resolved({.channels = 6, .heads = 4}), ArgumentError);
  EXPECT_THROW(resolved({.channels = 6, .heads = 3, .kv_heads = 2}), ArgumentError);
  EXPECT_THROW(resolved({.channels = 6, .heads = 0}), ArgumentError);
}

// reported_cases.md row 58: the last key is padded in every sample, the output keeps its shape, and
// training (without dropout) and inference agree.
TEST(ReportedCases, PaddedEncoderKeepsItsLength) {
  Encoder<float> encoder(small(true));
  encoder.reset(1);
  AttentionInputs masks;
  masks.key_lengths = Tensor::from<int64_t>({3, 2}, {2});
  const Tensor x = random_tensor({2, 4, 6}, 1).to(DType::f32);
  std::vector<Tensor> y;
  for (bool training : {true, false}) {
    Tape<float> tape(training);
    Context<float> context{tape, training};
    y.push_back(encoder.forward(context, tape.leaf(x), masks).value());
    EXPECT_EQ(y.back().shape(), (Dims{2, 4, 6}));
  }
  EXPECT_EQ(foci::testing::difference(y[0], y[1]), 0);
}

// reported_cases.md row 61: dropout is off in inference.
TEST(ReportedCases, DropoutIsOffInInference) {
  EncoderConfig with = small(true);
  with.dropout = 0.5;
  with.attention.spec.dropout = Dropout{0.5};
  Encoder<float> dropping(with), plain(small(true));
  plain.reset(1);
  copy_parameters(plain, dropping);
  const Tensor x = random_tensor({2, 4, 6}, 1).to(DType::f32);
  const auto run = [&](Encoder<float>& encoder, bool training, uint64_t seed) {
    Tape<float> tape(false);
    Context<float> context{tape, training, seed};
    return encoder.forward(context, tape.constant(x)).value();
  };
  const Tensor first = run(dropping, false, 1), second = run(dropping, false, 2);
  EXPECT_EQ(foci::testing::difference(first, second), 0);
  EXPECT_EQ(foci::testing::difference(first, run(plain, false, 3)), 0);
  const Tensor trained = run(dropping, true, 1);
  EXPECT_GT(foci::testing::difference(trained, first), 0.01);
  EXPECT_EQ(foci::testing::difference(trained, run(dropping, true, 1)), 0);
  EXPECT_GT(foci::testing::difference(trained, run(dropping, true, 2)), 0.01);
}

// reported_cases.md row 52: layer norm of constant and of large-mean vectors, in float32.
TEST(ReportedCases, LayerNormOfConstantAndLargeMeanRows) {
  LayerNorm<float> wide(256), narrow(4);
  Tape<float> tape(false);
  Context<float> context{tape};
  const Tensor flat = wide.forward(context, tape.constant(Tensor::full({1, 256}, 1234))).value();
  for (float y : flat.span<float>()) EXPECT_EQ(y, 0);
  const Tensor y =
      narrow.forward(context, tape.constant(Tensor::from<float>({40000, 40001, 40002, 40003}, {4})))
          .value();
  const double want[] = {-1.341635, -0.447212, 0.447212, 1.341635};
  for (int64_t i = 0; i < 4; ++i) EXPECT_NEAR(y.at<float>(i), want[i], 2e-6);
}

TEST(Packing, EqualsItsMembersOneByOneBitForBit) {
  EncoderConfig config = small(true);
  config.attention.channels = 24;
  config.feed_forward = 40;
  Encoder<float> encoder(config);
  encoder.reset(2);
  const std::vector<int64_t> sizes = {5, 1, 19, 8, 40};
  int64_t total = 0;
  for (int64_t n : sizes) total += n;
  const Tensor x = random_tensor({total, 24}, 1).to(DType::f32);
  AttentionInputs masks;
  masks.q_segments = Tensor::empty({1, total}, DType::i32);
  for (int64_t s = 0, at = 0; s < static_cast<int64_t>(sizes.size()); ++s) {
    for (int64_t i = 0; i < sizes[s]; ++i) {
      masks.q_segments.at<int32_t>(0, at++) = static_cast<int32_t>(s);
    }
  }
  masks.k_segments = masks.q_segments;
  Tape<float> tape(false);
  Context<float> context{tape};
  const Tensor packed = encoder.forward(context, tape.constant(x), masks).value();
  for (int64_t s = 0, at = 0; s < static_cast<int64_t>(sizes.size()); at += sizes[s], ++s) {
    const Tensor alone =
        encoder.forward(context, tape.constant(x.slice(0, at, at + sizes[s]).unsqueeze(0))).value();
    for (int64_t i = 0; i < sizes[s]; ++i) {
      for (int64_t c = 0; c < 24; ++c) {
        ASSERT_EQ(packed.at<float>(at + i, c), alone.at<float>(0, i, c))
            << "member " << s << " token " << i << " channel " << c;
      }
    }
  }
}

TEST(Observers, SeeStatisticsAndRows) {
  Encoder<double> encoder(small(true));
  encoder.reset(1);
  encoder.set_path("encoder");
  Observer observer;
  observer.add({.path = "encoder.layer.*.attention",
                .statistics = {Statistic::entropy, Statistic::max_weight, Statistic::coverage}});
  observer.add({.path = "encoder.layer.1.*", .rows = {2, 0}, .heads = {1}});
  Tape<double> tape(false);
  Context<double> context{.tape = tape, .observer = &observer};
  encoder.forward(context, tape.constant(random_tensor({2, 4, 6}, 1)));
  ASSERT_EQ(observer.records().size(), 2u);
  const AttentionRecord& first = observer.records()[0];
  const AttentionRecord& second = observer.records()[1];
  EXPECT_EQ(first.path, "encoder.layer.0.attention");
  EXPECT_FALSE(first.weights.defined());
  EXPECT_FALSE(first.support.defined());
  EXPECT_EQ(first.entropy.shape(), (Dims{2, 2, 4}));
  ASSERT_EQ(second.weights.shape(), (Dims{2, 1, 2, 4}));
  const std::vector<int64_t> rows = {2, 0};
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t r = 0; r < 2; ++r) {
      double sum = 0, entropy = 0, top = 0;
      for (int64_t j = 0; j < 4; ++j) {
        const double p = second.weights.at<double>(b, 0, r, j);
        sum += p;
        entropy -= p * std::log(p);
        top = std::max(top, p);
      }
      EXPECT_NEAR(sum, 1, 1e-12);
      EXPECT_NEAR(second.entropy.at<double>(b, 1, rows[r]), entropy, 1e-12);
      EXPECT_NEAR(second.max_weight.at<double>(b, 1, rows[r]), top, 1e-12);
    }
  }
}

TEST(Observers, Patterns) {
  EXPECT_TRUE(matches("*", ""));
  EXPECT_TRUE(matches("a.*.c", "a.b.b.c"));
  EXPECT_TRUE(matches("a*", "a"));
  EXPECT_FALSE(matches("a.*.c", "a.b.d"));
  EXPECT_FALSE(matches("", "a"));
  EXPECT_TRUE(matches("**a", "ba"));
}

}  // namespace
}  // namespace foci::nn
