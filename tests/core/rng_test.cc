// The generator against Random123, bit for bit, and the laws of what is built on it.
#include "foci/core/rng.h"

#include <Random123/philox.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "foci/core/error.h"

namespace foci {
namespace {

TEST(Philox, EqualsRandom123) {
  r123::Philox4x32 oracle;
  std::array<uint32_t, 4> counter{1, 2, 3, 4};
  uint64_t key = 0x0123456789abcdefu;
  for (int i = 0; i < 2000; ++i) {
    const r123::Philox4x32::ctr_type c = {{counter[0], counter[1], counter[2], counter[3]}};
    const r123::Philox4x32::key_type k = {
        {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)}};
    const auto want = oracle(c, k);
    const auto got = philox(key, counter);
    for (int w = 0; w < 4; ++w) ASSERT_EQ(got[w], want[w]) << "counter " << i << " word " << w;
    counter = got;  // walk through the whole range
    key = key * 6364136223846793005u + 1442695040888963407u;
  }
}

TEST(Philox, KnownAnswerOfThePaper) {
  const auto zero = philox(0, {0, 0, 0, 0});
  EXPECT_EQ(zero, (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
}

TEST(Rng, ResumesFromItsState) {
  Rng a(42, 7);
  for (int i = 0; i < 13; ++i) a.next_u32();
  Rng b(a.state());
  for (int i = 0; i < 50; ++i) ASSERT_EQ(a.next_u32(), b.next_u32());
}

TEST(Rng, StreamsAndSeedsDiffer) {
  EXPECT_NE(Rng(1, 0).next_u64(), Rng(1, 1).next_u64());
  EXPECT_NE(Rng(1, 0).next_u64(), Rng(2, 0).next_u64());
}

TEST(Rng, MomentsOfUniformNormalBelow) {
  Rng rng(5);
  constexpr int kDraws = 100000;
  double mean = 0, normal_mean = 0, normal_square = 0;
  std::array<int, 7> hits{};
  for (int i = 0; i < kDraws; ++i) {
    mean += rng.uniform() / kDraws;
    const double x = rng.normal();
    normal_mean += x / kDraws;
    normal_square += x * x / kDraws;
    ++hits[rng.below(7)];
  }
  EXPECT_NEAR(mean, 0.5, 5 / std::sqrt(12.0 * kDraws));
  EXPECT_NEAR(normal_mean, 0, 5 / std::sqrt(kDraws));
  EXPECT_NEAR(normal_square, 1, 5 * std::sqrt(2.0 / kDraws));
  for (int h : hits) EXPECT_NEAR(h, kDraws / 7.0, 5 * std::sqrt(kDraws / 7.0));
}

TEST(Dropout, BitsMatchTheirRateAndAreKeyedByPosition) {
  const uint32_t threshold = dropout_threshold(0.25);
  EXPECT_EQ(threshold, 16384u);
  int dropped = 0;
  for (int k = 0; k < 40000; ++k) dropped += dropout_bits(9, 1, 2, 3, k) < threshold;
  EXPECT_NEAR(dropped, 10000, 5 * std::sqrt(40000 * 0.25 * 0.75));
  EXPECT_EQ(dropout_bits(9, 1, 2, 3, 11), dropout_bits(9, 1, 2, 3, 11));
  int equal = 0;
  for (int k = 0; k < 1000; ++k)
    equal += dropout_bits(9, 1, 2, 3, k) == dropout_bits(9, 1, 2, 4, k);
  EXPECT_LT(equal, 10);
  EXPECT_THROW(dropout_threshold(1.0), ArgumentError);
  EXPECT_THROW(dropout_threshold(-0.1), ArgumentError);
}

}  // namespace
}  // namespace foci
