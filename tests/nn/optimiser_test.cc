// AdamW against its formula, groups, clipping, and the learning rate's course.
#include "foci/nn/optimiser.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

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

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(FlatParametersTest, RefusesWhatIsNoParameter) {
  EXPECT_REFUSED(FlatParameters({nullptr}), "parameters[0]: null given");
  Parameter<float> p;
  EXPECT_REFUSED(FlatParameters({&p}), "parameters[0]: it has no value");
  p.name = "w";
  p.value = Tensor::full({2}, 1, DType::f64);
  EXPECT_REFUSED(FlatParameters({&p}), "parameter w: a value of float64");
  p.value = Tensor::full({1}, 1).broadcast_to({3});
  EXPECT_REFUSED(FlatParameters({&p}), "no values of its own");
  p.value = Tensor::full({2}, 1);
  p.grad = Tensor::full({3}, 1);
  EXPECT_REFUSED(FlatParameters({&p}), "a gradient of float32 and shape [3]");
  const Tensor all = Tensor::full({4}, 1);
  Parameter<float> a{"a", all.slice(0, 0, 3), {}}, b{"b", all.slice(0, 2, 4), {}};
  EXPECT_REFUSED(FlatParameters({&a, &b}), "parameter b: its value shares a part");
  Two two;
  FlatParameters flat(two.all());
  EXPECT_REFUSED(flat.part(flat.values(), 2), "parameter 2 of 2");
  EXPECT_REFUSED(flat.part(Tensor(), 0), "shape none");
}

TEST(FlatParametersTest, ATensorHasOnePlaceHoweverOftenItIsListed) {
  Two two;
  const Tensor w = two.w.value.clone();
  Parameter<float> tied{"tied", two.w.value, Tensor::full({3, 7}, 2), true};
  two.w.grad = Tensor::full({3, 7}, 1);
  FlatParameters flat({&two.w, &two.b, &two.w, &tied});
  EXPECT_EQ(flat.parameters(), (std::vector<Parameter<float>*>{&two.w, &two.b, &tied}));
  EXPECT_EQ(flat.values().numel(), 32 + 16);
  EXPECT_EQ(tied.value.raw(), two.w.value.raw());
  EXPECT_EQ(tied.grad.raw(), two.w.grad.raw());
  EXPECT_EQ(foci::testing::difference(tied.value, w), 0);
  EXPECT_EQ(two.w.grad.item({2, 6}), 3);  // what had collected in each, together
  AdamW optimiser(flat, {.weight_decay = 0});
  optimiser.step(0.5, 0);
  EXPECT_NEAR(tied.value.item({0, 0}), w.item({0, 0}) - 0.5, 1e-5);
}

TEST(AdamWTest, RefusesNumbersThatAreNone) {
  Two two;
  FlatParameters flat(two.all());
  AdamW optimiser(flat, {});
  const Tensor before = flat.values().clone();
  flat.grads().fill(1);
  for (double x : {kNan, kInfinity, -1e-3, 1e300}) {
    EXPECT_REFUSED(optimiser.step(x, 1), "learning_rate: ");
    EXPECT_REFUSED(optimiser.step(1e-3, x), "max_norm: ");
    EXPECT_REFUSED(AdamW(flat, {.eps = x}), "eps: ");
    EXPECT_REFUSED(AdamW(flat, {.weight_decay = x}), "weight_decay: ");
    EXPECT_REFUSED(AdamW(flat, {.beta1 = x}), "beta1: ");
    EXPECT_REFUSED(AdamW(flat, {.beta2 = x}), "beta2: ");
  }
  EXPECT_REFUSED(AdamW(flat, {.eps = 0}), "eps: ");
  EXPECT_REFUSED(AdamW(flat, {.eps = 1e-60}), "eps: ");
  EXPECT_REFUSED(optimiser.restore_steps(-1), "steps: -1");
  EXPECT_EQ(foci::testing::difference(flat.values(), before), 0);
  EXPECT_EQ(optimiser.steps(), 0);
  EXPECT_EQ(flat.grads().item({0}), 1);
}

TEST(AdamWTest, RefusesParametersThatWentElsewhere) {
  Two two;
  FlatParameters flat(two.all());
  AdamW optimiser(flat, {});
  two.w.grad = two.w.grad.clone();
  EXPECT_REFUSED(optimiser.step(1e-3, 1), "parameter w: it was given another gradient");
  FlatParameters other(two.all());
  EXPECT_REFUSED(optimiser.step(1e-3, 1), "parameter b: it was given another value");
}

TEST(ScheduleTest, RefusesNumbersThatAreNone) {
  for (double x : {kNan, kInfinity, -0.5}) {
    EXPECT_REFUSED(Schedule{.peak = x}.at(0.5), "peak: ");
    EXPECT_REFUSED(Schedule{.warm_up = x}.at(0.5), "warm_up: ");
    EXPECT_REFUSED(Schedule{.floor = x}.at(0.5), "floor: ");
  }
  EXPECT_REFUSED(Schedule{.warm_up = 1.5}.at(0.5), "warm_up: ");
  EXPECT_REFUSED(Schedule{.floor = 1.5}.at(0.5), "floor: ");
  EXPECT_REFUSED(Schedule{}.at(kNan), "progress: nan");
  EXPECT_EQ(Schedule{}.at(-1), Schedule{}.at(0));
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
