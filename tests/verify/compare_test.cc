// When two tensors are the same, and which element is named where they are not.
#include "foci/verify/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace foci::verify {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Tensor floats(std::initializer_list<float> values) {
  return Tensor::from(values, {static_cast<int64_t>(values.size())});
}

TEST(Difference, IsRelativeToTheLargestElement) {
  EXPECT_FALSE(difference(floats({100, 0.0009f}), floats({100, 0}), 1e-5));
  const auto d = difference(floats({100.5f, 0.0011f, 3}), floats({100, 0, 3}), 1e-5);
  ASSERT_TRUE(d);
  EXPECT_EQ(d->index, Dims({0}));
  EXPECT_EQ(d->got, 100.5);
  EXPECT_EQ(d->want, 100);
  EXPECT_EQ(d->wrong, 2);
  EXPECT_EQ(d->elements, 3);
  EXPECT_EQ(d->message,
            "[0] is 100.5, expected 100 (error 0.5, allowed 0.001; 2 of 3 elements differ)");
}

TEST(Difference, WantsExactZerosWhereAllAreZero) {
  EXPECT_FALSE(difference(floats({0, -0.0f}), floats({0, 0}), 1));
  EXPECT_TRUE(difference(floats({0, 1e-30f}), floats({0, 0}), 1));
}

TEST(Difference, MatchesInfinitiesAndNanInPlaceAndKind) {
  EXPECT_FALSE(difference(floats({kInf, -kInf, kNaN, 1}), floats({kInf, -kInf, kNaN, 1}), 0));
  for (const Tensor& got : {floats({-kInf, 1}), floats({kNaN, 1}), floats({1e30f, 1})}) {
    const auto d = difference(got, floats({kInf, 1}), 1);
    ASSERT_TRUE(d);
    EXPECT_TRUE(std::isinf(d->error));
    EXPECT_EQ(d->wrong, 1);
  }
  EXPECT_TRUE(difference(floats({1, kNaN}), floats({1, 2}), 1));
  EXPECT_TRUE(difference(floats({1, 2}), floats({1, kNaN}), 1));
  // Infinities do not widen what is allowed for the rest.
  EXPECT_TRUE(difference(floats({kInf, 1.5f}), floats({kInf, 1}), 0.1));
}

TEST(Difference, IndexesEveryDimensionAndTakesAnyDtype) {
  Tensor want = Tensor::zeros({2, 3, 4}, DType::f64);
  want.fill(1);
  Tensor got = want.to(DType::f16);
  got.slice(0, 1, 2).slice(1, 2, 3).slice(2, 3, 4).fill(2);
  const auto d = difference(got, want, 1e-3);
  ASSERT_TRUE(d);
  EXPECT_EQ(d->index, Dims({1, 2, 3}));
}

TEST(Difference, SeesShapes) {
  EXPECT_TRUE(difference(floats({1}), Tensor::full({1, 1}, 1), 1));
  EXPECT_TRUE(difference(Tensor(), floats({1}), 1));
  EXPECT_FALSE(difference(Tensor::zeros({0, 3}), Tensor::zeros({0, 3}), 0));
  EXPECT_EQ(difference(floats({1}), floats({1, 2}), 1)->message, "has shape [1], expected [2]");
}

}  // namespace
}  // namespace foci::verify
