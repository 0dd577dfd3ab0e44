// Layer norm, activations, cross-entropy, AdamW and vector arithmetic against double.
#include "kernels/dense_testing.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace foci::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct NormResult {
  Floats y, mean, rstd;
};

NormResult norm(SimdTarget target, const Floats& x, int64_t channels, const Floats& gamma,
                const Floats& beta, float eps = 1e-5f) {
  const int64_t rows = static_cast<int64_t>(x.size()) / channels;
  NormResult r{Floats(x.size()), Floats(static_cast<size_t>(rows)),
               Floats(static_cast<size_t>(rows))};
  layer_norm_forward(target, rows, channels, x.data(), gamma.data(), beta.data(), eps, r.y.data(),
                     r.mean.data(), r.rstd.data());
  return r;
}

Floats ones(int64_t n) {
  return Floats(static_cast<size_t>(n), 1.0f);
}
Floats zeros(int64_t n) {
  return Floats(static_cast<size_t>(n), 0.0f);
}

// onnxruntime #21935, #28463; pytorch #51102; mlx #2238: one-pass variances lose these.
TEST(LayerNorm, RowsFarFromZero) {
  on_every_target([](SimdTarget target) {
    const Floats beta = random_floats(256, 1);
    EXPECT_EQ(norm(target, Floats(256, 1234.0f), 256, ones(256), beta).y, beta);
    // A constant whose sum rounds.
    EXPECT_EQ(norm(target, Floats(256, 1234.1f), 256, ones(256), beta).y, beta);
    const NormResult r = norm(target, {40000, 40001, 40002, 40003}, 4, ones(4), zeros(4));
    const float expected[] = {-1.341635f, -0.447212f, 0.447212f, 1.341635f};
    for (int i = 0; i < 4; ++i) EXPECT_NEAR(r.y[i], expected[i], 1e-6f);
    // 1000 channels of two values around 1e5 + 1/3.
    Floats x(1000);
    for (int i = 0; i < 1000; ++i) x[i] = 100000.0f + (i % 2 ? 1.0f : 0.0f);
    const Floats y = norm(target, x, 1000, ones(1000), zeros(1000), 0).y;
    for (int i = 0; i < 1000; ++i) ASSERT_NEAR(y[i], i % 2 ? 1 : -1, 1e-5) << i;
  });
}

TEST(LayerNorm, MatchesDoubleForwardAndBackward) {
  for (const int64_t channels : {1, 2, 3, 7, 13, 17, 31, 33, 64, 65, 100, 300}) {
    const int64_t rows = 37;
    const Floats x = random_floats(rows * channels, 31, 2), dy = random_floats(rows * channels, 32);
    const Floats gamma = random_floats(channels, 33), beta = random_floats(channels, 34);
    const Floats dgamma0 = random_floats(channels, 35), dbeta0 = random_floats(channels, 36);
    on_every_target([&](SimdTarget target) {
      const NormResult got = norm(target, x, channels, gamma, beta);
      Floats dx(x.size()), dgamma = dgamma0, dbeta = dbeta0;
      layer_norm_backward(target, rows, channels, x.data(), gamma.data(), got.mean.data(),
                          got.rstd.data(), dy.data(), nullptr, dx.data(), dgamma.data(),
                          dbeta.data());
      Floats sum = x, unread(x.size());  // x as what has arrived, added to in place
      layer_norm_backward(target, rows, channels, x.data(), gamma.data(), got.mean.data(),
                          got.rstd.data(), dy.data(), sum.data(), sum.data(), unread.data(),
                          unread.data());
      for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(sum[i], x[i] + dx[i]) << i;
      std::vector<double> want_gamma(dgamma0.begin(), dgamma0.end()),
          want_beta(dbeta0.begin(), dbeta0.end());
      for (int64_t r = 0; r < rows; ++r) {
        const float* xr = x.data() + r * channels;
        const float* dr = dy.data() + r * channels;
        const double n = static_cast<double>(channels);
        double mean = 0, variance = 0, g_mean = 0, g_dot = 0;
        for (int64_t c = 0; c < channels; ++c) mean += xr[c] / n;
        for (int64_t c = 0; c < channels; ++c) variance += (xr[c] - mean) * (xr[c] - mean) / n;
        const double rstd = 1 / std::sqrt(variance + 1e-5);
        for (int64_t c = 0; c < channels; ++c) {
          const double xhat = (xr[c] - mean) * rstd, g = double{dr[c]} * gamma[c];
          g_mean += g / n;
          g_dot += g * xhat / n;
          want_gamma[c] += dr[c] * xhat;
          want_beta[c] += dr[c];
        }
        ASSERT_NEAR(got.mean[r], mean, 1e-6);
        ASSERT_NEAR(got.rstd[r], rstd, 2e-6 * rstd);
        for (int64_t c = 0; c < channels; ++c) {
          const double xhat = (xr[c] - mean) * rstd;
          ASSERT_NEAR(got.y[r * channels + c], xhat * gamma[c] + beta[c], 4e-6) << channels;
          ASSERT_NEAR(dx[r * channels + c],
                      rstd * (double{dr[c]} * gamma[c] - g_mean - xhat * g_dot), 4e-6 * (1 + rstd))
              << channels;
        }
      }
      for (int64_t c = 0; c < channels; ++c) {
        ASSERT_NEAR(dgamma[c], want_gamma[c], 3e-5);
        ASSERT_NEAR(dbeta[c], want_beta[c], 1e-5);
      }
    });
  }
}

TEST(LayerNorm, RowsAreIndependentAndThreadsDoNotMatter) {
  const int64_t rows = 2100, channels = 65;
  const Floats x = random_floats(rows * channels, 41), dy = random_floats(rows * channels, 42);
  const Floats gamma = random_floats(channels, 43), beta = random_floats(channels, 44);
  on_every_target([&](SimdTarget target) {
    const NormResult all = norm(target, x, channels, gamma, beta);
    for (int64_t r = 0; r < rows; r += 53) {
      const Floats row(x.begin() + r * channels, x.begin() + (r + 1) * channels);
      ASSERT_TRUE(same_bits(norm(target, row, channels, gamma, beta).y.data(),
                            all.y.data() + r * channels, channels));
    }
    expect_same_with_any_threads([&] { return norm(target, x, channels, gamma, beta).y; });
    expect_same_with_any_threads([&] {
      Floats out(x.size() + 2 * channels);
      layer_norm_backward(target, rows, channels, x.data(), gamma.data(), all.mean.data(),
                          all.rstd.data(), dy.data(), nullptr, out.data(), out.data() + x.size(),
                          out.data() + x.size() + channels);
      return out;
    });
  });
}

TEST(LayerNorm, NaNStaysInItsRow) {
  on_every_target([](SimdTarget target) {
    Floats x = random_floats(3 * 33, 45);
    x[33 + 32] = kNaN;
    const Floats y = norm(target, x, 33, ones(33), zeros(33)).y;
    for (int i = 0; i < 99; ++i) ASSERT_EQ(std::isnan(y[i]), i / 33 == 1) << i;
  });
}

// The activation of each x, through a linear layer with one input of weight 1; and gelu's slope.
Floats activated(SimdTarget target, Activation activation, const Floats& x,
                 Floats* slope = nullptr) {
  Floats y(x.size());
  if (slope) slope->resize(x.size());
  const float w = 1;
  linear_forward(target, {.rows = static_cast<int64_t>(x.size()),
                          .inputs = 1,
                          .outputs = 1,
                          .x = x.data(),
                          .ldx = 1,
                          .w = &w,
                          .bias = nullptr,
                          .y = y.data(),
                          .ldy = 1,
                          .activation = activation,
                          .slope = slope ? slope->data() : nullptr});
  return y;
}

// From the slope for gelu; for relu x serves as well as its result.
Floats derivative(SimdTarget target, Activation activation, const Floats& x) {
  Floats d = ones(static_cast<int64_t>(x.size())), saved = x;
  if (activation == Activation::gelu) activated(target, activation, x, &saved);
  activation_backward(target, activation, static_cast<int64_t>(x.size()), saved.data(), d.data(),
                      d.data());
  return d;
}

TEST(Activations, GeluAndItsDerivative) {
  Floats x = {0.0f, -0.0f, 1e-30f, -100.0f, 100.0f, 5.4f, -5.4f, 1e30f};
  for (float v = -15; v < 15; v += 0.00371f) x.push_back(v);
  on_every_target([&](SimdTarget target) {
    const Floats y = activated(target, Activation::gelu, x);
    const Floats d = derivative(target, Activation::gelu, x);
    for (size_t i = 0; i < x.size(); ++i) {
      const double v = x[i], phi = 0.5 * std::erfc(-v * std::sqrt(0.5));
      ASSERT_NEAR(y[i], v * phi, 2.5e-7 * std::abs(v)) << v;
      const double density = std::exp(-0.5 * v * v) * 0.3989422804014327;
      ASSERT_NEAR(d[i], phi + v * density, 4e-7) << v;
    }
    EXPECT_EQ(y[3], 0.0f);
    EXPECT_EQ(y[4], 100.0f);
  });
}

TEST(Activations, ReluAndNaN) {
  const Floats x = {-1, -0.0f, 0, 2, kNaN, kInf, -kInf};
  on_every_target([&](SimdTarget target) {
    const Floats y = activated(target, Activation::relu, x);
    const Floats d = derivative(target, Activation::relu, x);
    const float want_y[] = {0, 0, 0, 2, kNaN, kInf, 0}, want_d[] = {0, 0, 0, 1, 1, 1, 0};
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::isnan(want_y[i])) {
        EXPECT_TRUE(std::isnan(y[i]));
      } else {
        EXPECT_EQ(y[i], want_y[i]);
      }
      EXPECT_EQ(d[i], want_d[i]) << x[i];
    }
    EXPECT_TRUE(std::isnan(activated(target, Activation::gelu, {kNaN})[0]));
    EXPECT_TRUE(std::isnan(derivative(target, Activation::gelu, {kNaN})[0]));
    // A NaN gradient arrives where the unit is on, also behind a plain copy.
    Floats up = {kNaN, kNaN};
    const Floats pre = {1, -1};
    activation_backward(target, Activation::relu, 2, pre.data(), up.data(), up.data());
    EXPECT_TRUE(std::isnan(up[0]));
    EXPECT_EQ(up[1], 0.0f);
  });
}

TEST(Activations, PositionDoesNotChangeBits) {
  on_every_target([](SimdTarget target) {
    for (const Activation activation : {Activation::relu, Activation::gelu}) {
      const Floats d = derivative(target, activation, Floats(101, -0.731f));
      for (const float v : d) ASSERT_EQ(v, d[0]);
    }
  });
}

TEST(CrossEntropy, MatchesDouble) {
  for (const int64_t classes : {1, 2, 3, 10, 17, 33, 1000}) {
    for (const float smoothing : {0.0f, 0.1f}) {
      const int64_t rows = 43;
      const Floats z = random_floats(rows * classes, 51, 8);
      std::vector<int64_t> labels(static_cast<size_t>(rows));
      Rng rng(52);
      for (int64_t& l : labels) l = rng.below(classes);
      on_every_target([&](SimdTarget target) {
        Floats loss(labels.size()), grad(z.size());
        softmax_cross_entropy(target, rows, classes, z.data(), labels.data(), smoothing,
                              loss.data(), grad.data());
        for (int64_t r = 0; r < rows; ++r) {
          const float* zr = z.data() + r * classes;
          double sum = 0;
          for (int64_t c = 0; c < classes; ++c) sum += std::exp(double{zr[c]});
          const double lse = std::log(sum);
          double want = 0;
          for (int64_t c = 0; c < classes; ++c) {
            const double q =
                smoothing / static_cast<double>(classes) + (c == labels[r] ? 1.0 - smoothing : 0.0);
            if (q > 0) want += q * (lse - zr[c]);
            ASSERT_NEAR(grad[r * classes + c], (std::exp(zr[c] - lse) - q) / rows, 5e-7 / rows);
          }
          // The sum's rounding, in one lane at worst, and that of the logits' magnitude.
          ASSERT_NEAR(loss[r], want, product_tolerance(classes, 1) + 2 * kEps * want) << classes;
        }
      });
    }
  }
}

TEST(CrossEntropy, LargeLogitsMaskedClassesAndNaN) {
  on_every_target([](SimdTarget target) {
    const Floats z = {1e4f, 0, -kInf, 5, 5, -kInf, 1, kNaN, 2};
    const std::vector<int64_t> labels = {0, 1, 0};
    Floats loss(3), grad(9);
    softmax_cross_entropy(target, 3, 3, z.data(), labels.data(), 0, loss.data(), grad.data());
    EXPECT_EQ(loss[0], 0.0f);
    EXPECT_NEAR(loss[1], std::log(2.0), 1e-6);
    EXPECT_TRUE(std::isnan(loss[2]));
    for (int i = 0; i < 3; ++i) EXPECT_EQ(grad[i], 0.0f);
    EXPECT_NEAR(grad[3], 0.5 / 3, 1e-7);
    EXPECT_NEAR(grad[4], -0.5 / 3, 1e-7);
    EXPECT_EQ(grad[5], 0.0f);
    for (int i = 6; i < 9; ++i) EXPECT_TRUE(std::isnan(grad[i]));
  });
}

TEST(Arithmetic, MatchesAtEveryLength) {
  for (const int64_t n : {0, 1, 2, 3, 5, 7, 13, 17, 31, 33, 63, 65, 100, 40000}) {
    const Floats a = random_floats(n, 61), b = random_floats(n, 62);
    on_every_target([&](SimdTarget target) {
      Floats y(a.size()), z = b, s = a;
      add(target, n, a.data(), b.data(), y.data());
      axpy(target, n, 0.3f, a.data(), z.data());
      scale(target, n, -1.7f, s.data());
      double squares = 0;
      for (size_t i = 0; i < a.size(); ++i) {
        ASSERT_EQ(y[i], a[i] + b[i]);
        ASSERT_NEAR(z[i], b[i] + double{0.3f} * a[i], 2 * kEps);
        ASSERT_EQ(s[i], a[i] * -1.7f);
        squares += double{a[i]} * a[i];
      }
      EXPECT_NEAR(sum_of_squares(target, n, a.data()), squares, 1e-13 * squares);
      expect_same_with_any_threads([&] {
        const double sum = sum_of_squares(target, n, a.data());
        Floats bits(2);
        std::memcpy(bits.data(), &sum, sizeof sum);
        return bits;
      });
    });
  }
}

TEST(AdamW, ThreeStepsMatchDouble) {
  const int64_t n = 20001;
  const Floats p0 = random_floats(n, 71);
  on_every_target([&](SimdTarget target) {
    std::vector<double> p(p0.begin(), p0.end()), m(p.size()), v(p.size());
    Floats pf = p0, mf(p0.size()), vf(p0.size());
    for (int t = 1; t <= 3; ++t) {
      const Floats grad = random_floats(n, 71 + t, 0.1);
      Floats gf = grad;
      const AdamW a{.learning_rate = 1e-2f,
                    .beta1 = 0.9f,
                    .beta2 = 0.999f,
                    .eps = 1e-8f,
                    .weight_decay = 0.1f,
                    .correction1 = static_cast<float>(1 - std::pow(0.9, t)),
                    .correction2 = static_cast<float>(1 - std::pow(0.999, t)),
                    .grad_scale = 0.5f};
      adamw_step(target, n, a, gf.data(), pf.data(), mf.data(), vf.data());
      EXPECT_EQ(gf, Floats(gf.size()));
      for (size_t i = 0; i < p.size(); ++i) {
        const double g = 0.5 * grad[i];
        m[i] = 0.9 * m[i] + 0.1 * g;
        v[i] = 0.999 * v[i] + 0.001 * g * g;
        const double step =
            m[i] / (1 - std::pow(0.9, t)) / (std::sqrt(v[i] / (1 - std::pow(0.999, t))) + 1e-8);
        p[i] -= 1e-2 * (step + 0.1 * p[i]);
        ASSERT_NEAR(pf[i], p[i], 2e-6) << t << " " << i;
      }
    }
  });
}

}  // namespace
}  // namespace foci::kernels
