// The benchmarks' inputs are what they claim to be.
#include "inputs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "foci/core/error.h"

namespace foci::bench {
namespace {

struct Scores {
  double deviation, sink;  // of all scores but the first key's; the first key's mean
};

Scores scores(const std::string& kind) {
  Definition d;
  d.scores = kind;
  const AttentionShape s = {1, 2, 1, 256, 256, 64, 64};
  const AttentionInputs in = inputs(d, s);
  double sum = 0, squares = 0, sink = 0, count = 0;
  for (int64_t i = 0; i < s.N; ++i) {
    for (int64_t j = 0; j < s.M; ++j) {
      double score = 0;
      for (int64_t c = 0; c < s.D; ++c) {
        score += double{in.q.at<float>(0, 1, i, c)} * in.k.at<float>(0, 0, j, c) / 8;
      }
      if (j == 0) {
        sink += score / static_cast<double>(s.N);
        continue;
      }
      sum += score;
      squares += score * score;
      ++count;
    }
  }
  return {std::sqrt(squares / count - sum / count * sum / count), sink};
}

TEST(BenchInputs, ScoresSpreadAsTheyShould) {
  EXPECT_NEAR(scores("random").deviation, 1, 0.1);
  const Scores trained = scores("trained");
  EXPECT_GT(trained.deviation, 3);
  EXPECT_LT(trained.deviation, 5);
  EXPECT_GT(trained.sink, 3);
}

TEST(BenchInputs, AClusteredRowSeesItsOwnClusterAlone) {
  Definition d;
  d.scores = "clustered";
  const AttentionShape s = {1, 1, 1, 1, 4096, 64, 64};
  const AttentionInputs in = inputs(d, s);
  std::vector<double> row;
  for (int64_t j = 0; j < s.M; ++j) {
    double score = 0;
    for (int64_t c = 0; c < s.D; ++c) {
      score += double{in.q.at<float>(0, 0, 0, c)} * in.k.at<float>(0, 0, j, c) / 8;
    }
    row.push_back(score);
  }
  std::sort(row.begin(), row.end());
  // 64 runs drawn from 64 centres: nearly all are others, and far below.
  EXPECT_LT(row[row.size() / 2], 12);
  EXPECT_LT(row[row.size() / 2] + 8, std::max(row.back(), 20.0));
}

TEST(BenchInputs, TheSameSeedGivesTheSame) {
  Definition d;
  d.scores = "trained";
  const AttentionShape s = {2, 2, 2, 8, 8, 16, 16};
  const AttentionInputs a = inputs(d, s, 5), b = inputs(d, s, 5), c = inputs(d, s, 6);
  EXPECT_TRUE(std::ranges::equal(a.k.span<float>(), b.k.span<float>()));
  EXPECT_FALSE(std::ranges::equal(a.k.span<float>(), c.k.span<float>()));
}

TEST(BenchInputs, UpstreamsGoWithTheStatistics) {
  AttentionSpec spec;
  const AttentionShape s = {1, 2, 1, 3, 5, 4, 6};
  EXPECT_EQ(upstream(spec, s).dy.shape(), (Dims{1, 2, 3, 6}));
  EXPECT_FALSE(upstream(spec, s).dentropy.defined());
  spec.statistics = {Statistic::entropy, Statistic::coverage};
  EXPECT_EQ(upstream(spec, s).dentropy.shape(), (Dims{1, 2, 3}));
  EXPECT_EQ(upstream(spec, s).dcoverage.shape(), (Dims{1, 2, 5}));
}

TEST(BenchInputs, WrongNamesAreRefused) {
  Definition d;
  d.scores = "made up";
  EXPECT_THROW(inputs(d, {1, 1, 1, 2, 2, 4, 4}), Error);
  EXPECT_TRUE(wanted({"bias"}).bias);
  EXPECT_THROW(wanted({"nothing"}), Error);
}

}  // namespace
}  // namespace foci::bench
