// Estimates, confusion, landmark hit rates and head means against answers known by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "foci/core/error.h"
#include "foci/core/rng.h"
#include "foci/insight/confusion.h"
#include "foci/insight/estimate.h"
#include "foci/insight/heads.h"
#include "foci/insight/landmarks.h"

namespace foci::insight {
namespace {

TEST(Wilson, KnownIntervals) {
  // Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
  const Estimate a = wilson(81, 263);
  EXPECT_NEAR(a.low, 0.2553, 5e-5);
  EXPECT_NEAR(a.high, 0.3662, 5e-5);
  const Estimate b = wilson(15, 148);
  EXPECT_NEAR(b.low, 0.0624, 5e-5);
  EXPECT_NEAR(b.high, 0.1605, 5e-5);
  const Estimate none = wilson(0, 20);
  EXPECT_EQ(none.low, 0);
  EXPECT_NEAR(none.high, 0.1611, 5e-5);
  EXPECT_EQ(wilson(29, 29).high, 1);
  EXPECT_NEAR(wilson(29, 29).low, 0.8830, 5e-5);
  EXPECT_TRUE(std::isnan(wilson(0, 0).value));
  EXPECT_THROW(wilson(3, 2), ArgumentError);
  EXPECT_THROW(wilson(-1, 2), ArgumentError);
}

TEST(Share, OfSingleAnswersIsWilsons) {
  std::vector<double> values(263, 0.0);
  std::vector<int64_t> alone;
  for (int i = 0; i < 263; ++i) alone.push_back(i);
  for (int i = 0; i < 81; ++i) values[static_cast<size_t>(3 * i)] = 1;
  const Estimate e = share_of(values, alone);
  EXPECT_NEAR(e.low, 0.2553, 5e-5);  // as above
  EXPECT_NEAR(e.high, 0.3662, 5e-5);
  EXPECT_EQ(e.count, 263);
  EXPECT_EQ(e.independent, 263);
}

TEST(Share, OfOneThingIsNeverCertain) {
  // 1 of 1: [1 / (1 + z²), 1]; the same where the one thing was looked at often.
  const double z2 = 1.959963984540054 * 1.959963984540054;
  const std::vector<double> ones(7, 1.0), zeros(7, 0.0);
  for (size_t n : {size_t{1}, size_t{7}}) {
    const std::vector<int64_t> same(n, 5);
    const Estimate all = share_of(std::span(ones).first(n), same);
    EXPECT_EQ(all.value, 1);
    EXPECT_EQ(all.high, 1);
    EXPECT_NEAR(all.low, 1 / (1 + z2), 1e-12);
    EXPECT_EQ(all.independent, 1);
    EXPECT_EQ(all.count, static_cast<int64_t>(n));
    const Estimate none = share_of(std::span(zeros).first(n), same);
    EXPECT_EQ(none.low, 0);
    EXPECT_NEAR(none.high, z2 / (1 + z2), 1e-12);
  }
  EXPECT_TRUE(std::isnan(share_of({}, {}).value));
}

TEST(Share, LooksAtOneThingAreOneFact) {
  // Fifty things, each seen eight times with the same outcome: the interval of fifty answers, but
  // for Student's t of 49 degrees of freedom (2.00958) and the 50/49 of their variance.
  std::vector<double> values;
  std::vector<int64_t> groups;
  for (int thing = 0; thing < 50; ++thing) {
    for (int look = 0; look < 8; ++look) {
      values.push_back(thing % 5 == 0 ? 0 : 1);
      groups.push_back(1000 - thing);
    }
  }
  const Estimate e = share_of(values, groups);
  EXPECT_NEAR(e.value, 0.8, 1e-12);
  EXPECT_EQ(e.count, 400);
  EXPECT_EQ(e.independent, 50);
  const double z = 1.959963984540054, n = 49 * std::pow(z / 2.00957524, 2);
  const double centre = (0.8 + z * z / (2 * n)) / (1 + z * z / n);
  const double spread = z * std::sqrt(0.16 / n + z * z / (4 * n * n)) / (1 + z * z / n);
  EXPECT_NEAR(e.low, centre - spread, 1e-5);
  EXPECT_NEAR(e.high, centre + spread, 1e-5);
}

TEST(Share, CoversTheTruthAboutNineteenTimesInTwenty) {
  // Things differ in how hard they are; each is looked at one to six times.
  Rng rng(4);
  for (const double truth : {0.5, 0.9, 0.97}) {
    int covered = 0;
    constexpr int kTrials = 400;
    for (int t = 0; t < kTrials; ++t) {
      std::vector<double> values;
      std::vector<int64_t> groups;
      for (int64_t thing = 0; thing < 60; ++thing) {
        const double spread = std::min(truth, 1 - truth) * 0.9;
        const double p = truth + (rng.below(2) == 0 ? spread : -spread);
        for (int64_t look = rng.below(6); look >= 0; --look) {
          values.push_back(rng.uniform() < p ? 1 : 0);
          groups.push_back(thing);
        }
      }
      const Estimate e = share_of(values, groups);
      covered += e.low <= truth && truth <= e.high ? 1 : 0;
    }
    EXPECT_GE(covered, 0.92 * kTrials) << truth;
  }
}

TEST(Share, TiesLeaveFractionsAndWrongValuesAreRefused) {
  const Estimate e =
      share_of(std::vector<double>{0.5, 0.25, 1, 0}, std::vector<int64_t>{1, 2, 3, 4});
  EXPECT_EQ(e.value, 0.4375);
  EXPECT_LT(e.low, 0.3);
  EXPECT_GT(e.high, 0.6);
  EXPECT_THROW(share_of(std::vector<double>{1.5}, std::vector<int64_t>{1}), ArgumentError);
  EXPECT_THROW(share_of(std::vector<double>{NAN}, std::vector<int64_t>{1}), ArgumentError);
  EXPECT_THROW(share_of(std::vector<double>{1}, std::vector<int64_t>{}), ArgumentError);
}

TEST(Bootstrap, AgreesWithTheNormalApproximation) {
  std::vector<double> values(400, 0.0);
  for (int i = 0; i < 300; ++i) values[i] = 1;
  const Estimate e = bootstrap_mean(values, 7);
  EXPECT_EQ(e.value, 0.75);
  EXPECT_EQ(e.count, 400);
  const double spread = 1.96 * std::sqrt(0.75 * 0.25 / 400);
  EXPECT_NEAR(e.low, 0.75 - spread, 0.15 * spread);
  EXPECT_NEAR(e.high, 0.75 + spread, 0.15 * spread);
}

TEST(Bootstrap, CoversTheTruthAboutNineteenTimesInTwenty) {
  Rng rng(3);
  int covered = 0;
  constexpr int kTrials = 200;
  for (int t = 0; t < kTrials; ++t) {
    std::vector<double> values(80);
    for (double& v : values) v = rng.uniform() < 0.6 ? 1 : 0;
    const Estimate e = bootstrap_mean(values, static_cast<uint64_t>(t), 400);
    covered += e.low <= 0.6 && 0.6 <= e.high ? 1 : 0;
  }
  EXPECT_GE(covered, 0.88 * kTrials);
  EXPECT_LE(covered, 0.99 * kTrials);
}

TEST(Bootstrap, SameSeedSameInterval) {
  const std::vector<double> values{0, 1, 1, 0, 1, 0.5, 0.25, 1};
  const Estimate a = bootstrap_mean(values, 11), b = bootstrap_mean(values, 11);
  EXPECT_EQ(a.low, b.low);
  EXPECT_EQ(a.high, b.high);
  const Estimate constant = bootstrap_mean(std::vector<double>(5, 0.5), 1);
  EXPECT_EQ(constant.low, 0.5);
  EXPECT_EQ(constant.high, 0.5);
  EXPECT_TRUE(std::isnan(bootstrap_mean({}, 1).value));
  const Estimate one = bootstrap_mean(std::vector<double>{0.5}, 1);  // no spread to be seen
  EXPECT_EQ(one.value, 0.5);
  EXPECT_TRUE(std::isnan(one.low) && std::isnan(one.high));
  EXPECT_THROW(bootstrap_mean(values, 1, 10), ArgumentError);
  EXPECT_THROW(bootstrap_mean(std::vector<double>{NAN}, 1), ArgumentError);
}

TEST(Bootstrap, GroupsWidenTheIntervalByTheirSize) {
  // Fifty things, each seen eight times with the same outcome: eight times the looks, no more
  // facts.
  std::vector<double> values, once;
  std::vector<int64_t> groups;
  for (int thing = 0; thing < 50; ++thing) {
    once.push_back(thing % 5 == 0 ? 0 : 1);
    for (int look = 0; look < 8; ++look) {
      values.push_back(once.back());
      groups.push_back(1000 - thing);
    }
  }
  const Estimate grouped = bootstrap_mean(values, groups, 3);
  const Estimate plain = bootstrap_mean(once, 3);
  EXPECT_EQ(grouped.value, 0.8);
  EXPECT_EQ(grouped.count, 400);
  EXPECT_NEAR(grouped.high - grouped.low, plain.high - plain.low, 0.03);
  const Estimate naive = bootstrap_mean(values, 3);
  EXPECT_GT(grouped.high - grouped.low, 2 * (naive.high - naive.low));
  EXPECT_THROW(bootstrap_mean(values, std::vector<int64_t>{1}, 3), ArgumentError);
}

TEST(Confusion, CountsAndAccuracy) {
  ConfusionMatrix m(3);
  m.add(0, 0);
  m.add(0, 1);
  m.add(2, 2);
  m.add(2, 2);
  EXPECT_EQ(m.counts(), (std::vector<int64_t>{1, 1, 0, 0, 0, 0, 0, 0, 2}));
  EXPECT_EQ(m.accuracy().value, 0.75);
  EXPECT_EQ(m.total(), 4);
  EXPECT_THROW(m.add(3, 0), ArgumentError);
  EXPECT_THROW(m.add(0, -1), ArgumentError);
  EXPECT_EQ(m.total(), 4);
  EXPECT_THROW(ConfusionMatrix(0), ArgumentError);
}

TEST(LandmarkHit, LargestPatchDecidesAndTiesShare) {
  const std::vector<uint8_t> landmark{0, 1, 1, 0};
  EXPECT_EQ(landmark_hit(std::vector<float>{.1f, .2f, .5f, .2f}, landmark), 1);
  EXPECT_EQ(landmark_hit(std::vector<float>{.6f, .2f, .1f, .1f}, landmark), 0);
  EXPECT_EQ(landmark_hit(std::vector<float>{.25f, .25f, .25f, .25f}, landmark), 0.5);
  EXPECT_EQ(landmark_hit(std::vector<float>{.4f, .4f, .1f, .1f}, landmark), 0.5);
  EXPECT_THROW(landmark_hit(std::vector<float>{1}, landmark), ArgumentError);
  EXPECT_THROW(landmark_hit({}, {}), ArgumentError);
  EXPECT_THROW(landmark_hit(std::vector<float>{NAN, 0, 0, 0}, landmark), ArgumentError);
}

TEST(LandmarkTally, RatesOfHeadsAndOfTheirMean) {
  LandmarkTally tally(1, 2);
  // Head 0 finds the landmark in the first scene only, head 1 in both; scenes differ in size.
  tally.add(std::vector<float>{.7f, .3f, /**/ .9f, .1f}, std::vector<uint8_t>{1, 0}, 0);
  tally.add(std::vector<float>{.1f, .1f, .1f, .7f, /**/ 20, 0, 0, 0},
            std::vector<uint8_t>{1, 0, 0, 0}, 1);
  EXPECT_EQ(tally.scenes(), 2);
  EXPECT_EQ(tally.chance(), (0.5 + 0.25) / 2);
  EXPECT_EQ(tally.head_rates(), (std::vector<double>{0.5, 1}));
  EXPECT_EQ(tally.best_head(), (std::pair<int64_t, int64_t>{0, 1}));
  EXPECT_EQ(tally.head(0, 0).value, 0.5);
  EXPECT_NEAR(tally.head(0, 1).low, wilson(2, 2).low, 1e-12);
  EXPECT_EQ(tally.mean_head().value, 0.75);
  // Second scene: scaled to sum 1, head 1 puts 1.0 and head 0 puts 0.1 on the landmark.
  EXPECT_EQ(tally.all_heads().value, 1);
  EXPECT_THROW(tally.add(std::vector<float>{1, 2, 3}, std::vector<uint8_t>{1, 0}, 2),
               ArgumentError);
  EXPECT_THROW(tally.add(std::vector<float>{1, 2, 3, NAN}, std::vector<uint8_t>{1, 0}, 2),
               ArgumentError);
  EXPECT_EQ(tally.scenes(), 2);
}

TEST(LandmarkTally, TheLastLayerIsReadByItself) {
  LandmarkTally tally(2, 1);
  tally.add(std::vector<float>{9, 1, /**/ 4, 6}, std::vector<uint8_t>{0, 1}, 0);
  EXPECT_EQ(tally.all_heads().value, 0);
  EXPECT_EQ(tally.last_layer().value, 1);
}

TEST(LandmarkTally, LookingAnywhereScoresChance) {
  Rng rng(5);
  LandmarkTally tally(2, 2);
  constexpr int kScenes = 600, kPatches = 20;
  for (int s = 0; s < kScenes; ++s) {
    std::vector<float> maps(4 * kPatches);
    for (float& x : maps) x = static_cast<float>(rng.uniform());
    std::vector<uint8_t> landmark(kPatches, 0);
    for (int k = 0; k < 4; ++k) landmark[rng.below(kPatches)] = 1;
    tally.add(maps, landmark, s);
  }
  for (double rate : tally.head_rates()) {
    EXPECT_NEAR(rate, tally.chance(), 5 * std::sqrt(0.19 * 0.81 / kScenes));
  }
  const Estimate e = tally.all_heads();
  EXPECT_NEAR(e.value, tally.chance(), 5 * std::sqrt(0.19 * 0.81 / kScenes));
  EXPECT_LT(e.low, e.value);
  EXPECT_GT(e.high, e.value);
}

TEST(HeadMeans, AverageRowsOfEachHead) {
  HeadMeans means(1, 2);
  means.add(0, 0, std::vector<float>{1, 2, 3});
  means.add(0, 0, std::vector<float>{6});
  EXPECT_EQ(means.means()[0], 3);
  EXPECT_TRUE(std::isnan(means.means()[1]));
  EXPECT_THROW(means.add(0, 2, {}), ArgumentError);
  EXPECT_THROW(means.add(0, 1, std::vector<float>{INFINITY}), ArgumentError);
}

TEST(Entropy, OfKnownDistributions) {
  EXPECT_NEAR(entropy_of(std::vector<float>{1, 1, 1, 1}), std::log(4.0), 1e-12);
  EXPECT_EQ(entropy_of(std::vector<float>{0, 5, 0}), 0);
  EXPECT_NEAR(entropy_of(std::vector<float>{3, 1}),
              -(0.75 * std::log(0.75) + 0.25 * std::log(0.25)), 1e-12);
  EXPECT_EQ(entropy_of(std::vector<float>{0, 0}), 0);
  EXPECT_THROW(entropy_of(std::vector<float>{-1, 2}), ArgumentError);
}

}  // namespace
}  // namespace foci::insight
