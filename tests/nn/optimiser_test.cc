// AdamW against its formula, groups, clipping, and the learning rate's course.
#include "foci/nn/optimiser.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "autograd/gradient_check.h"

namespace foci::nn {
namespace {

struct Two {
  Parameter<float> w, b;
  Two() {
    w = {"w", foci::testing::random_tensor({3, 7}, 1).to(DType::f32), {}, true};
    b = {"b", foci::testing::random_tensor({5}, 2).to(DType::f32), {}, false};
  }
  std::vector<Parameter<float>*> all() { return {&b, &w}; }
};

TEST(FlatParametersTest, ParametersBecomeViews) {
  Two two;
  const Tensor before = two.w.value.clone();
  FlatParameters flat(two.all());
  EXPECT_TRUE(two.w.value.shares_storage(flat.values()));
  EXPECT_EQ(foci::testing::difference(two.w.value, before), 0);
  EXPECT_EQ(flat.decayed(), 32);  // 21, up to the next cache line
  two.b.grad.fill(2);
  two.w.grad.fill(1);
  EXPECT_DOUBLE_EQ(flat.grad_norm(), std::sqrt(5 * 4.0 + 21));
  flat.zero_grads();
  EXPECT_EQ(flat.grad_norm(), 0);
  EXPECT_EQ(flat.part(flat.values(), 0).shape(), Dims{5});
}

TEST(AdamWTest, FollowsItsFormula) {
  Two two;
  const Tensor w0 = two.w.value.to(DType::f64), b0 = two.b.value.to(DType::f64);
  FlatParameters flat(two.all());
  AdamW optimiser(flat, {.beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1});
  std::vector<double> pw(w0.span<double>().begin(), w0.span<double>().end()), mw(21), vw(21);
  std::vector<double> pb(b0.span<double>().begin(), b0.span<double>().end()), mb(5), vb(5);
  const double lr = 0.01, clip = 1.0;
  for (int t = 1; t <= 3; ++t) {
    const Tensor gw = foci::testing::random_tensor({3, 7}, 10 + t);
    const Tensor gb = foci::testing::random_tensor({5}, 20 + t);
    two.w.grad.copy_from(gw);
    two.b.grad.copy_from(gb);
    double square = 0;
    for (double g : gw.span<double>()) square += g * g;
    for (double g : gb.span<double>()) square += g * g;
    const double norm = std::sqrt(square), shrink = std::min(1.0, clip / norm);
    EXPECT_NEAR(optimiser.step(lr, clip), norm, 1e-6);
    EXPECT_EQ(flat.grad_norm(), 0);
    const auto follow = [&](std::vector<double>& p, std::vector<double>& m, std::vector<double>& v,
                            const Tensor& grad, double decay) {
      for (size_t i = 0; i < p.size(); ++i) {
        const double g = grad.span<double>()[i] * shrink;
        m[i] = 0.8 * m[i] + 0.2 * g;
        v[i] = 0.95 * v[i] + 0.05 * g * g;
        const double mh = m[i] / (1 - std::pow(0.8, t)), vh = v[i] / (1 - std::pow(0.95, t));
        p[i] -= lr * (mh / (std::sqrt(vh) + 1e-6) + decay * p[i]);
      }
    };
    follow(pw, mw, vw, gw, 0.1);
    follow(pb, mb, vb, gb, 0);
    for (int64_t i = 0; i < 21; ++i) EXPECT_NEAR(two.w.value.span<float>()[i], pw[i], 1e-5);
    for (int64_t i = 0; i < 5; ++i) EXPECT_NEAR(two.b.value.span<float>()[i], pb[i], 1e-5);
  }
}

TEST(AdamWTest, ANormThatIsNotFiniteChangesNothing) {
  Two two;
  FlatParameters flat(two.all());
  AdamW optimiser(flat, {});
  const Tensor before = flat.values().clone();
  two.b.grad.at<float>(2) = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(optimiser.step(0.1, 1)));
  EXPECT_EQ(foci::testing::difference(flat.values(), before), 0);
  EXPECT_EQ(optimiser.steps(), 0);
}

TEST(ScheduleTest, WarmsUpAndFallsAsACosine) {
  const Schedule s{.peak = 2, .warm_up = 0.1, .floor = 0.05};
  EXPECT_EQ(s.at(0), 0);
  EXPECT_NEAR(s.at(0.05), 1, 1e-12);
  EXPECT_NEAR(s.at(0.1), 2, 1e-12);
  EXPECT_NEAR(s.at(0.55), 2 * (0.05 + 0.95 * 0.5), 1e-12);
  EXPECT_NEAR(s.at(1), 0.1, 1e-12);
  EXPECT_NEAR(s.at(7), 0.1, 1e-12);
  EXPECT_NEAR((Schedule{.peak = 1, .warm_up = 0}).at(0), 1, 1e-12);
}

}  // namespace
}  // namespace foci::nn
