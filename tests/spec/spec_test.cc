// validate(): one test a message. Every number a spec may not hold is refused by name.
#include "foci/spec/spec.h"

#include <gtest/gtest.h>

#include <limits>

#include "foci/core/error.h"

namespace foci {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

void expect_refused(const AttentionSpec& spec, const std::string& message) {
  try {
    validate(spec);
    FAIL() << "accepted; expected: " << message;
  } catch (const ArgumentError& e) {
    EXPECT_EQ(e.what(), message);
  }
}

TEST(Validate, AcceptsDefaultsAndEveryOption) {
  EXPECT_NO_THROW(validate({}));
  AttentionSpec all;
  all.score = L2{-0.5};  // negative gammas and scales are legal
  all.scale = std::vector<double>{-1, 0, 2};
  all.softcap = 1e-3;
  all.normalizer = Entmax{1.0001};
  all.masks = {Causal{},     Causal{Align::past}, Window{0, 0, Align::top_left},
               KeyLengths{}, Segments{},          Keep{}};
  all.biases = {TensorBias{}, Alibi{}, Relative1D{0}, Relative2D{1, 1}};
  all.dropout = Dropout{0.0, ~uint64_t{0}, DropoutPlace::keys};
  all.statistics = Statistics::all();
  EXPECT_NO_THROW(validate(all));
}

TEST(Validate, Gamma) {
  expect_refused({.score = L2{kNaN}}, "score.gamma: nan given, a finite number is needed");
}

TEST(Validate, Scale) {
  expect_refused({.scale = kInf}, "scale: inf given, a finite number is needed");
}

TEST(Validate, ScalePerHead) {
  expect_refused({.scale = std::vector<double>{1, kNaN}},
                 "scale[1]: nan given, a finite number is needed");
}

TEST(Validate, Softcap) {
  expect_refused({.softcap = 0.0}, "softcap: 0 given, a finite number > 0 is needed");
  expect_refused({.softcap = -2.0}, "softcap: -2 given, a finite number > 0 is needed");
  expect_refused({.softcap = kNaN}, "softcap: nan given, a finite number > 0 is needed");
  expect_refused({.softcap = kInf}, "softcap: inf given, a finite number > 0 is needed");
}

TEST(Validate, Alpha) {
  for (double alpha : {1.0, 0.5, kNaN, kInf}) {
    expect_refused({.normalizer = Entmax{alpha}},
                   fmt::format("normalizer.alpha: {} given, entmax needs alpha > 1 (softmax is "
                               "the limit at 1)",
                               alpha));
  }
}

TEST(Validate, K) {
  expect_refused({.normalizer = TopK{0}}, "normalizer.k: 0 given, top-k needs k >= 1");
}

TEST(Validate, WindowSides) {
  expect_refused({.masks = {Window{-1, 2}}},
                 "masks[0].left: -1 given, a window side is >= 0 or unbounded");
  expect_refused({.masks = {Keep{}, Window{std::nullopt, -3}}},
                 "masks[1].right: -3 given, a window side is >= 0 or unbounded");
}

TEST(Validate, MaxDistance) {
  expect_refused({.biases = {Relative1D{-1}}},
                 "biases[0].max_distance: -1 given, it must lie in [0, 2^40)");
  expect_refused({.biases = {Relative1D{int64_t{1} << 40}}},
                 "biases[0].max_distance: 1099511627776 given, it must lie in [0, 2^40)");
}

TEST(Validate, Grid) {
  expect_refused({.biases = {Alibi{}, Relative2D{0, 3}}},
                 "biases[1].grid: [0, 3] given, both sides must be >= 1");
}

TEST(Validate, TheSameKindTwice) {
  expect_refused({.masks = {Keep{}, Causal{}, Keep{}}},
                 "masks[2]: the same kind stands at masks[0] already");
  expect_refused({.biases = {Alibi{}, Alibi{}}},
                 "biases[1]: the same kind stands at biases[0] already");
}

TEST(Validate, DropoutP) {
  for (double p : {1.0, -0.1, kNaN}) {
    expect_refused({.dropout = Dropout{p}},
                   fmt::format("dropout.p: {} given, it must lie in [0, 1)", p));
  }
}

TEST(BiasAlign, IsPastWhereAnyMaskIs) {
  EXPECT_EQ(bias_align({}), Align::bottom_right);
  EXPECT_EQ(bias_align({.masks = {Causal{Align::top_left}}}), Align::bottom_right);
  EXPECT_EQ(bias_align({.masks = {Causal{Align::past}}}), Align::past);
  EXPECT_EQ(bias_align({.masks = {Keep{}, Window{1, 1, Align::past}}}), Align::past);
  EXPECT_EQ(bias_align({.masks = {Keep{}, KeyLengths{}, Segments{}}}), Align::bottom_right);
}

}  // namespace
}  // namespace foci
