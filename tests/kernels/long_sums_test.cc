// Sums over many terms: their error must not grow with the number of terms. Terms are positive, and
// equal ones the worst case: rounding then always goes the same way.
#include <algorithm>

#include "foci/kernels/rows.h"
#include "kernels/dense_testing.h"

namespace foci::kernels {
namespace {

constexpr float kValues[] = {1.1f, 0.7f, 1.3f, 0.0f};  // 0: mixed ones
constexpr int64_t kLengths[] = {1000, 200001, 1000000};

double bound(int64_t terms) {
  return 4e-7 * (1 + std::log2(static_cast<double>(terms)));
}

Floats terms(int64_t n, float value) {
  Floats x(static_cast<size_t>(n), value);
  if (value != 0) return x;
  Rng rng(17);
  for (float& one : x) one = static_cast<float>(0.5 + rng.uniform());
  return x;
}

// Calls f(target, M, x) for every length and kind of values.
template <class F>
void on_long_sums(const F& f) {
  on_every_target([&](SimdTarget target) {
    for (const int64_t M : kLengths) {
      for (const float value : kValues) {
        SCOPED_TRACE(::testing::Message() << M << " of " << value);
        f(target, M, terms(M, value));
      }
    }
  });
}

#define EXPECT_CLOSE(got, wanted, M) \
  EXPECT_LE(std::abs(static_cast<double>(got) / (wanted)-1), bound(M)) << (got) << " " << (wanted)

TEST(LongSums, LayerNormOverALongRow) {
  on_long_sums([](SimdTarget target, int64_t M, const Floats& x) {
    double sum = 0, squares = 0;
    for (float v : x) sum += v;
    const double mean = sum / static_cast<double>(M);
    Floats wide = x;  // of a spread that does not vanish
    for (int64_t i = 0; i < M; i += 2) wide[i] = -wide[i];
    double wide_sum = 0;
    for (float v : wide) wide_sum += v;
    const double wide_mean = wide_sum / static_cast<double>(M);
    for (float v : wide) squares += (v - wide_mean) * (v - wide_mean);
    const Floats one(static_cast<size_t>(M), 1.0f), zero(static_cast<size_t>(M), 0.0f);
    Floats y(x.size());
    float got_mean = 0, got_rstd = 0;
    layer_norm_forward(target, 1, M, x.data(), one.data(), zero.data(), 1e-5f, y.data(), &got_mean,
                       &got_rstd);
    EXPECT_CLOSE(got_mean, mean, M);
    layer_norm_forward(target, 1, M, wide.data(), one.data(), zero.data(), 1e-5f, y.data(),
                       &got_mean, &got_rstd);
    EXPECT_CLOSE(got_rstd, 1 / std::sqrt(squares / static_cast<double>(M) + 1e-5), M);
    // dx = rstd·(g − mean(g) − x̂·mean(g∘x̂)) of g = x: the mean of g is taken out.
    Floats dx(x.size()), dgamma(x.size()), dbeta(x.size());
    const float half = 0.5f, zero_mean = 0;
    layer_norm_backward(target, 1, M, zero.data(), one.data(), &zero_mean, &half, x.data(), nullptr,
                        dx.data(), dgamma.data(), dbeta.data());
    EXPECT_NEAR(dx[0], 0.5 * (x[0] - mean), 0.5 * mean * bound(M));
  });
}

TEST(LongSums, LayerNormsParametersOverManyRows) {
  on_long_sums([](SimdTarget target, int64_t M, const Floats& dy) {
    const float gamma = 1;
    // One channel at a distance of 1 from its "mean": x̂ = 1.
    const Floats x(static_cast<size_t>(M), 1.0f), mean(static_cast<size_t>(M), 0.0f),
        rstd(static_cast<size_t>(M), 1.0f);
    double sum = 0;
    for (float v : dy) sum += v;
    Floats dx(x.size());
    float dgamma = 0, dbeta = 0;
    layer_norm_backward(target, M, 1, x.data(), &gamma, mean.data(), rstd.data(), dy.data(),
                        nullptr, dx.data(), &dgamma, &dbeta);
    EXPECT_CLOSE(dbeta, sum, M);
  });
}

TEST(LongSums, LayerNormsGammaOverManyRows) {
  on_every_target([](SimdTarget target) {
    for (const int64_t M : {int64_t{200001}, int64_t{500000}}) {
      // Rows (−1, 1) with dy = (−v, v): each adds v to both channels' gamma.
      const float v = 1.1f;
      Floats x, dy;
      for (int64_t r = 0; r < M; ++r) {
        x.insert(x.end(), {-1, 1});
        dy.insert(dy.end(), {-v, v});
      }
      const Floats mean(static_cast<size_t>(M), 0.0f), rstd(static_cast<size_t>(M), 1.0f);
      const Floats gamma = {1, 1};
      Floats dx(x.size()), dgamma = {0, 0}, dbeta = {0, 0};
      layer_norm_backward(target, M, 2, x.data(), gamma.data(), mean.data(), rstd.data(), dy.data(),
                          nullptr, dx.data(), dgamma.data(), dbeta.data());
      for (float g : dgamma) EXPECT_CLOSE(g, static_cast<double>(v) * static_cast<double>(M), M);
    }
  });
}

TEST(LongSums, CrossEntropyOverManyClasses) {
  on_every_target([](SimdTarget target) {
    for (const int64_t M : kLengths) {
      Floats logits(static_cast<size_t>(M), 1.1f), dlogits(logits.size());
      logits[static_cast<size_t>(M) / 2] = 1.2f;  // so that terms are exp(−0.1), not 1
      const int64_t label = 3;
      float loss = 0;
      softmax_cross_entropy(target, 1, M, logits.data(), &label, 0, &loss, dlogits.data());
      const double gap = static_cast<double>(1.1f) - static_cast<double>(1.2f);
      const double sum = 1 + static_cast<double>(M - 1) * std::exp(gap);
      EXPECT_NEAR(loss, std::log(sum) - gap, bound(M) + 4e-7 * std::log(sum));
      EXPECT_CLOSE(dlogits[0], std::exp(gap) / sum, M);
      // Smoothing takes the sum of all distances to the largest.
      softmax_cross_entropy(target, 1, M, logits.data(), &label, 1, &loss, dlogits.data());
      const double mean = gap * static_cast<double>(M - 1) / static_cast<double>(M);
      EXPECT_NEAR(loss, std::log(sum) - mean, bound(M) + 4e-7 * std::log(sum));
    }
  });
}

TEST(LongSums, ProductsOverALongDepth) {
  on_long_sums([](SimdTarget target, int64_t M, const Floats& x) {
    if (M < 200000) return;
    const float w = 1.1f;
    double sum = 0;
    for (float v : x) sum += static_cast<double>(v) * static_cast<double>(w);
    // Rows: one, two (which are not packed), and many.
    const int64_t n = 3;
    for (const int64_t m : {1, 2, 18}) {
      if (m > 2 && M > 200001) continue;
      Floats a;
      for (int64_t i = 0; i < m; ++i) a.insert(a.end(), x.begin(), x.end());
      const Floats b(static_cast<size_t>(n * M), w);
      Floats c(static_cast<size_t>(m * n), 5.0f);
      gemm(target, {GemmLayout::nt, m, n, M, a.data(), M, b.data(), M, c.data(), n});
      for (float v : c) ASSERT_LE(std::abs(v / sum - 1), bound(M)) << m;
      gemm(target, {GemmLayout::nn, m, n, M, a.data(), M, b.data(), n, c.data(), n, true});
      for (float v : c) ASSERT_LE(std::abs(v / (2 * sum) - 1), bound(M)) << m;
    }
  });
}

// Full panels of few rows are read without packing; bits must be those of many rows.
TEST(LongSums, EqualRowsHaveEqualBitsOverALongDepth) {
  on_every_target([](SimdTarget target) {
    const int64_t M = 20011, n = 70, many = 40;
    const Floats row = random_floats(M, 1), w = random_floats(n * M, 2), bias = random_floats(n, 3);
    const Floats residual_row = random_floats(n, 4);
    Floats x, residual;
    for (int64_t i = 0; i < many; ++i) {
      x.insert(x.end(), row.begin(), row.end());
      residual.insert(residual.end(), residual_row.begin(), residual_row.end());
    }
    const auto forward = [&](int64_t rows, Floats* slope) {
      Floats y(static_cast<size_t>(rows * n));
      slope->resize(y.size());
      linear_forward(target, {.rows = rows,
                              .inputs = M,
                              .outputs = n,
                              .x = x.data(),
                              .ldx = M,
                              .w = w.data(),
                              .bias = bias.data(),
                              .y = y.data(),
                              .ldy = n,
                              .activation = Activation::gelu,
                              .slope = slope->data(),
                              .residual = residual.data()});
      return y;
    };
    Floats slopes, slope;
    const Floats all = forward(many, &slopes);
    for (const int64_t rows : {1, 2, 3, 16, 17}) {
      const Floats y = forward(rows, &slope);
      for (int64_t r = 0; r < many; ++r) {
        ASSERT_TRUE(same_bits(all.data() + r * n, y.data() + r % rows * n, n)) << rows << " " << r;
        ASSERT_TRUE(same_bits(slopes.data() + r * n, slope.data() + r % rows * n, n));
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      double s = bias[j];
      for (int64_t k = 0; k < M; ++k) s += static_cast<double>(row[k]) * w[j * M + k];
      const double y = s * 0.5 * std::erfc(-s / std::sqrt(2.0)) + residual_row[j];
      ASSERT_NEAR(all[j], y, 1e-4 * (1 + std::abs(y))) << j;
    }
    expect_same_with_any_threads([&] { return forward(many, &slope); });
  });
}

TEST(LongSums, GradientsOfLinearOverManyRows) {
  on_long_sums([](SimdTarget target, int64_t M, const Floats& dy) {
    const int64_t outputs = 1;
    double sum = 0;
    for (float v : dy) sum += v;
    for (const int64_t inputs : {1, 6}) {
      const Floats x(static_cast<size_t>(M * inputs), 1.3f);
      Floats dw(static_cast<size_t>(outputs * inputs), 1.0f), db = {1.0f};
      linear_backward_weight(target, M, inputs, outputs, dy.data(), outputs, x.data(), inputs,
                             dw.data(), db.data(), true);
      EXPECT_CLOSE(db[0], sum + 1, M);
      for (float v : dw) EXPECT_CLOSE(v, sum * static_cast<double>(1.3f) + 1, M);
    }
  });
}

// With many columns there are blocks enough, so that rows are not cut among tasks.
TEST(LongSums, GradientsOfAWideLinear) {
  on_every_target([](SimdTarget target) {
    const int64_t M = 14000, inputs = 520, outputs = 410;
    const Floats x(static_cast<size_t>(inputs * M), 1.1f),
        dy(static_cast<size_t>(outputs * M), 0.7f);
    Floats dw(static_cast<size_t>(outputs * inputs)), db(static_cast<size_t>(outputs));
    linear_backward_weight(target, M, inputs, outputs, dy.data(), outputs, x.data(), inputs,
                           dw.data(), db.data(), false);
    const double each = static_cast<double>(1.1f) * static_cast<double>(0.7f);
    for (const size_t at : {size_t{0}, dw.size() / 2, dw.size() - 1}) {
      EXPECT_CLOSE(dw[at], each * static_cast<double>(M), M);
    }
    EXPECT_CLOSE(db[0], static_cast<double>(0.7f) * static_cast<double>(M), M);
  });
}

TEST(LongSums, NormOfGradients) {
  on_long_sums([](SimdTarget target, int64_t M, const Floats& x) {
    double sum = 0;
    for (float v : x) sum += static_cast<double>(v) * static_cast<double>(v);
    EXPECT_NEAR(sum_of_squares(target, M, x.data()) / sum, 1, 1e-10);
  });
}

TEST(LongSums, RowsOfWeights) {
  on_long_sums([](SimdTarget target, int64_t M, const Floats& given) {
    const RowKernels& k = row_kernels(target);
    const int64_t width = (M + kRowLanes - 1) / kRowLanes * kRowLanes;
    Floats x(static_cast<size_t>(width), -std::numeric_limits<float>::infinity()),
        y(x.size(), 0.0f);
    std::copy(given.begin(), given.end(), x.begin());
    const float top = *std::max_element(given.begin(), given.end());
    double sum = 0, squares = 0;
    for (float v : given) {
      sum += std::exp(static_cast<double>(v) - static_cast<double>(top) - 0.1);
      squares += static_cast<double>(v) * static_cast<double>(v);
    }
    Floats e = x;
    EXPECT_CLOSE(k.exponentials(width, top + 0.1f, e.data()), sum, M);
    e = x;
    float products = 0;
    EXPECT_CLOSE(k.exponentials_and_products(width, top + 0.1f, e.data(), &products), sum, M);
    std::copy(given.begin(), given.end(), y.begin());
    EXPECT_CLOSE(k.dot(width, y.data(), y.data()), squares, M);
  });
}

TEST(LongSums, WhatIsNotFiniteStays) {
  on_every_target([](SimdTarget target) {
    const int64_t M = 20011;
    const float inf = std::numeric_limits<float>::infinity();
    for (const float bad : {inf, -inf, kNaN}) {
      Floats x(static_cast<size_t>(M), 1.0f);
      x[9000] = bad;
      const Floats one(static_cast<size_t>(M), 1.0f);
      float c = 0, db = 0;
      gemm(target, {GemmLayout::nt, 1, 1, M, x.data(), M, one.data(), M, &c, 1});
      EXPECT_EQ(std::isnan(c), std::isnan(bad));
      if (!std::isnan(bad)) EXPECT_EQ(c, bad);
      linear_backward_weight(target, M, 1, 1, x.data(), 1, one.data(), 1, &c, &db, false);
      EXPECT_EQ(std::isnan(db), std::isnan(bad));
      if (!std::isnan(bad)) EXPECT_EQ(db, bad);
      if (!std::isnan(bad)) EXPECT_EQ(c, bad);
    }
  });
}

}  // namespace
}  // namespace foci::kernels
