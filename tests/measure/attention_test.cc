// What `foci bench attention` measures: inputs for every spec, pairs that count, rows of the
// report.
#include "foci/measure/attention.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "reference/sweep.h"

namespace foci::measure {
namespace {

using testing::sweep_case;

TEST(MeasureAttention, DrawsInputsForEverySpec) {
  for (uint64_t n = 0; n < 300; ++n) {
    const testing::SweepCase c = sweep_case(n, DType::f32);
    AttentionShape shape = shape_of(c.in);
    if (n % 3 == 0) shape.dtype = DType::f16;
    SCOPED_TRACE(c.text);
    EXPECT_NO_THROW(Plan::make(c.spec, shape).bind(random_inputs(c.spec, shape, n)).forward());
    EXPECT_GT(bytes_needed({.spec = c.spec, .shape = shape}), 0);
  }
  EXPECT_GT(bytes_available(), 1e6);
}

TEST(MeasureAttention, TheSeedDecidesTheInputs) {
  const AttentionShape shape{.H = 2, .Hk = 2, .N = 3, .M = 4, .D = 2, .Dv = 2};
  const auto first = [&](uint64_t seed) {
    return random_inputs({}, shape, seed).q.at<float>(0, 0, 0, 0);
  };
  EXPECT_EQ(first(1), first(1));
  EXPECT_NE(first(1), first(2));
}

TEST(MeasureAttention, ClustersSpareTopKItsScores) {
  AttentionJob job{.shape = {.B = 2, .H = 2, .Hk = 1, .N = 130, .M = 1024, .D = 16, .Dv = 4},
                   .clusters = 16,
                   .seconds = 1e-3};
  EXPECT_EQ(measure_attention(job).skipped_pairs, 0);
  job.spec.normalizer = TopK{8};
  const AttentionReport r = measure_attention(job);
  EXPECT_GT(r.skipped_pairs, r.visible_pairs / 4);
  EXPECT_LT(r.skipped_pairs, r.visible_pairs);
  // Rows of one cluster are near each other, in every batch entry and head.
  AttentionInputs in = random_inputs(job.spec, job.shape, 1);
  cluster_rows(in, 16, 1);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 2; ++h) {
      EXPECT_NEAR(in.q.at<float>(b, h, 129, 3), in.k.at<float>(b, 0, 1023, 3), 1);
    }
  }
}

// Their centres are counted, and none is drawn that has no rows.
TEST(MeasureAttention, NoMoreClustersThanRows) {
  AttentionJob job{.shape = {.B = 1, .H = 2, .Hk = 2, .N = 3, .M = 5, .D = 4, .Dv = 4}};
  const double without = bytes_needed(job);
  job.clusters = 5;
  EXPECT_EQ(bytes_needed(job), without + 4 * 2 * 5 * 4);
  AttentionInputs five = random_inputs(job.spec, job.shape, 1), many = five;
  cluster_rows(five, 5, 1);
  job.clusters = int64_t{1} << 40;
  EXPECT_EQ(bytes_needed(job), without + 4 * 2 * 5 * 4);
  cluster_rows(many, job.clusters, 1);
  EXPECT_TRUE(std::ranges::equal(many.q.span<float>(), five.q.span<float>()));
  EXPECT_TRUE(std::ranges::equal(many.k.span<float>(), five.k.span<float>()));
}

AttentionJob small(const AttentionSpec& spec) {
  return {.spec = spec,
          .shape = {.B = 2, .H = 2, .Hk = 1, .N = 6, .M = 8, .D = 4, .Dv = 3},
          .seconds = 1e-3};
}

TEST(MeasureAttention, ReportsBothDirections) {
  AttentionJob job = small({.masks = {Causal{}}});
  job.seconds = 0.5;
  const AttentionReport r = measure_attention(job);
  EXPECT_EQ(r.pairs, 2 * 2 * 6 * 8);
  EXPECT_EQ(r.visible_pairs, 2 * 2 * (3 + 4 + 5 + 6 + 7 + 8));
  EXPECT_NE(r.explanation.find("fused"), std::string::npos);
  EXPECT_GT(r.peak_gflops, 0);
  EXPECT_FALSE(r.stopped);
  EXPECT_TRUE(r.left_out.empty());
  ASSERT_EQ(r.rows.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const AttentionRow& row = r.rows[i];
    EXPECT_EQ(row.backward, i >= 2);
    EXPECT_EQ(row.implementation, i % 2 ? Implementation::plain : Implementation::fused);
    EXPECT_GE(row.rounds, 1);
    EXPECT_GT(row.workspace_bytes, 0u);
    const double flops = 2e-9 * double(r.visible_pairs) * (i >= 2 ? 3 * 4 + 2 * 3 : 4 + 3);
    EXPECT_NEAR(row.gflops * row.seconds, flops, 1e-6 * flops);
    EXPECT_NEAR(row.share * r.peak_gflops, row.gflops, 1e-6 * row.gflops);
    EXPECT_EQ(row.speedup > 0, i % 2 == 0);
  }
}

TEST(MeasureAttention, EverySpecCanBeMeasured) {
  for (uint64_t n = 0; n < 6; ++n) {
    AttentionJob job = small(sweep_case(n, DType::f32).spec);
    // Of the case's own number of heads.
    if (std::holds_alternative<std::vector<double>>(job.spec.scale)) job.spec.scale = AutoScale{};
    job.spec.normalizer = normalizer_of(job.spec.normalizer, 0);
    std::erase_if(job.spec.biases,
                  [](const Bias& b) { return std::holds_alternative<Relative2D>(b); });
    job.all_gradients = true;
    const AttentionReport r = measure_attention(job);
    EXPECT_GE(r.rows.size(), 2u);
    EXPECT_LE(r.visible_pairs, r.pairs);
  }
}

TEST(MeasureAttention, EmptyShapesAndStops) {
  AttentionJob job = small({});
  job.shape.N = 0;
  EXPECT_EQ(measure_attention(job).visible_pairs, 0);
  job = small({});
  job.keep_going = [] { return false; };
  const AttentionReport r = measure_attention(job);
  EXPECT_TRUE(r.stopped);
  EXPECT_TRUE(r.rows.empty());
  job.shape.H = 3, job.shape.Hk = 2;
  EXPECT_THROW(measure_attention(job), ArgumentError);
  EXPECT_THROW((void)bytes_needed(job), ArgumentError);
}

}  // namespace
}  // namespace foci::measure
