// Rotary positions against numbers computed by hand (reported cases 32 and 49).
#include "foci/reference/rotary.h"

#include <gtest/gtest.h>

#include <cmath>

namespace foci {
namespace {

using reference::RotaryPairs;

// x at one position, all channels turning, base 10000.
std::vector<double> turned(const std::vector<double>& x, double position, RotaryPairs pairs) {
  const auto d = static_cast<int64_t>(x.size());
  std::vector<double> c, s;
  for (int64_t r = 0; r < d / 2; ++r) {
    const double angle = position * std::pow(10000, -2.0 * double(r) / double(d));
    c.push_back(std::cos(angle));
    s.push_back(std::sin(angle));
  }
  const Tensor y = reference::rotary(Tensor::from(x, {1, 1, 1, d}), Tensor::from(c, {1, 1, d / 2}),
                                     Tensor::from(s, {1, 1, d / 2}), pairs);
  const auto values = y.span<double>();
  return {values.begin(), values.end()};
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want, double by) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], by) << i;
}

TEST(Reported, Row49_RotaryPairings) {
  const std::vector<double> x = {1, 2, 3, 4};
  expect_near(turned(x, 1, RotaryPairs::half_split), {-1.984111, 1.959901, 2.462378, 4.019800},
              1e-6);
  expect_near(turned(x, 1, RotaryPairs::interleaved), {-1.142640, 1.922076, 2.959851, 4.029800},
              1e-6);
  // Channels 0,1,2,3 interleaved are channels 0,2,1,3 half-split: the same scores.
  const auto permuted = [](const std::vector<double>& a) {
    return std::vector<double>{a[0], a[2], a[1], a[3]};
  };
  const std::vector<double> y = {0.5, -1, 2, 0.25};
  EXPECT_NEAR(dot(turned(x, 3, RotaryPairs::interleaved), turned(y, 8, RotaryPairs::interleaved)),
              dot(turned(permuted(x), 3, RotaryPairs::half_split),
                  turned(permuted(y), 8, RotaryPairs::half_split)),
              1e-12);
}

TEST(Reported, Row32_RotaryShifts) {
  const std::vector<double> x = {1, 2, 3, 4}, y = {0.5, -1, 2, 0.25};
  for (RotaryPairs pairs : {RotaryPairs::half_split, RotaryPairs::interleaved}) {
    expect_near(turned(turned(x, 9, pairs), -4, pairs), turned(x, 5, pairs), 1e-12);
    EXPECT_NEAR(dot(turned(x, 12, pairs), turned(y, 9, pairs)),
                dot(turned(x, 3, pairs), turned(y, 0, pairs)), 1e-12);
  }
}

TEST(Rotary, LeavesChannelsBeyondR) {
  const Tensor x = Tensor::from<float>({1, 2, 3, 4, 5}, {1, 1, 1, 5});
  const Tensor zero = Tensor::from<float>({0}, {1, 1, 1}),
               one = Tensor::from<float>({1}, {1, 1, 1});
  const Tensor y = reference::rotary(x, zero, one, RotaryPairs::half_split);
  const auto values = y.span<double>();
  expect_near({values.begin(), values.end()}, {-2, 1, 3, 4, 5}, 0);
}

TEST(Rotary, RefusesShapesThatDoNotFit) {
  const Tensor x = Tensor::zeros({1, 1, 2, 4});
  const auto at = [](const Dims& shape) { return Tensor::zeros(shape); };
  EXPECT_THROW(reference::rotary(at({2, 4}), at({1, 2, 2}), at({1, 2, 2}), {}), ArgumentError);
  EXPECT_THROW(reference::rotary(x, at({1, 2, 3}), at({1, 2, 3}), {}), ArgumentError);
  EXPECT_THROW(reference::rotary(x, at({1, 1, 2}), at({1, 1, 2}), {}), ArgumentError);
  EXPECT_THROW(reference::rotary(x, at({1, 2, 2}), at({1, 2, 1}), {}), ArgumentError);
}

}  // namespace
}  // namespace foci
