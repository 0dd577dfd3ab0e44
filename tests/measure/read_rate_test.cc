// The plain read reads everything.
#include "foci/measure/read_rate.h"

#include <gtest/gtest.h>

#include <vector>

namespace foci {
namespace {

TEST(ReadRate, EveryByteOfEveryBlockCounts) {
  // Longer than a piece, misaligned, with quarters that are no whole vectors.
  std::vector<std::byte> a((size_t{1} << 18) + 4 * 1024 + 64), b(4096 + 64);
  const std::span<const std::byte> blocks[] = {std::span(a).subspan(4), std::span(b)};
  for (SimdTarget target : supported_targets()) {
    const uint32_t before = measure::read_all(target, blocks);
    // The last bytes that make no whole vector may be left out.
    const auto counts = [&](std::vector<std::byte>& v, size_t at) {
      v[at] ^= std::byte{1};
      EXPECT_NE(measure::read_all(target, blocks), before) << name_of(target) << ", " << at;
      v[at] ^= std::byte{1};
    };
    for (size_t at = 4; at + 64 <= a.size(); at += 1021) counts(a, at);
    for (size_t at = 0; at + 64 <= b.size(); at += 61) counts(b, at);
  }
}

TEST(ReadRate, NothingIsRead) {
  EXPECT_EQ(measure::read_all(current_target(), {}), 0u);
  const std::span<const std::byte> empty[] = {{}};
  EXPECT_EQ(measure::read_all(current_target(), empty), 0u);
}

}  // namespace
}  // namespace foci
