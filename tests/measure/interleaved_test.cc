// Who is called when. How long things take is nobody's promise here.
#include "foci/measure/interleaved.h"

#include <gtest/gtest.h>

#include <string>

#include "foci/measure/fma_peak.h"

namespace foci::measure {
namespace {

TEST(Interleaved, CandidatesTakeTurns) {
  std::string calls;
  int rounds = 0;
  const auto t =
      interleaved({{"a", [&] { calls += 'a'; }}, {"b", [&] { calls += 'b'; }}},
                  {.seconds = 0, .least_rounds = 3, .sample_seconds = 0, .each_round = [&] {
                     calls += '|';
                     ++rounds;
                   }});
  // Two calls to see how long one takes; then each warms up and is measured once.
  EXPECT_EQ(calls, "aa|aabb|aabb|aabb");
  EXPECT_EQ(rounds, 3);
  ASSERT_EQ(t.size(), 2u);
  EXPECT_EQ(t[0].name, "a");
  EXPECT_EQ(t[1].name, "b");
  for (const Timing& one : t) {
    EXPECT_EQ(one.rounds, 3);
    EXPECT_GE(one.seconds, 0);
    EXPECT_LE(one.speedup_low, one.speedup);
    EXPECT_LE(one.speedup, one.speedup_high);
  }
}

TEST(Interleaved, OneRoundIsEnoughWhenTimeIsUp) {
  const auto t = interleaved({{"a", [] {}}}, {.seconds = 100, .most_seconds = 0});
  ASSERT_EQ(t.size(), 1u);
  EXPECT_EQ(t[0].rounds, 1);
}

TEST(Interleaved, EndsWhenTold) {
  int left = 5;
  const InterleavedOptions options{.seconds = 100, .keep_going = [&] { return left-- > 0; }};
  // Two rounds of two candidates, and the third is stopped in its middle.
  const auto t = interleaved({{"a", [] {}}, {"b", [] {}}}, options);
  ASSERT_EQ(t.size(), 2u);
  EXPECT_EQ(t[1].rounds, 2);
  left = 1;
  EXPECT_TRUE(interleaved({{"a", [] {}}, {"b", [] {}}}, options).empty());
  EXPECT_TRUE(interleaved({}).empty());
}

TEST(FmaPeak, IsPositiveOnEveryTarget) {
  for (SimdTarget target : supported_targets()) {
    EXPECT_GT(fma_peak_sample(target, 1), 0) << name_of(target);
  }
  EXPECT_GT(fma_peak_sample(current_target(), 2), 0);
}

}  // namespace
}  // namespace foci::measure
