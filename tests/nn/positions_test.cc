// Position tables: odd widths, interpolation, and the identity at the native grid.
#include "foci/nn/positions.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/gradient_check.h"

namespace foci::nn {
namespace {

// reported_cases.md row 50
TEST(ReportedCases, SinusoidalTablesOfOddAndTinyWidth) {
  const Tensor three = sinusoidal_table(2, 3), two = sinusoidal_table(2, 2);
  const double want[] = {0.841471, 0.540302, 0.002154};
  for (int64_t c = 0; c < 3; ++c) EXPECT_NEAR(three.at<float>(1, c), want[c], 1e-6);
  for (int64_t c = 0; c < 2; ++c) EXPECT_NEAR(two.at<float>(1, c), want[c], 1e-6);
  EXPECT_EQ(three.at<float>(0, 0), 0);
  EXPECT_EQ(three.at<float>(0, 1), 1);
  EXPECT_EQ(sinusoidal_table(4, 1).shape(), (Dims{4, 1}));
  EXPECT_EQ(sinusoidal_table(0, 5).numel(), 0);
}

TEST(Positions, SinusoidalGridTellsRowAndColumn) {
  const Tensor grid = sinusoidal_grid(2, 3, 7);
  const Tensor row = sinusoidal_table(2, 4), col = sinusoidal_table(3, 3);
  for (int64_t y = 0; y < 2; ++y) {
    for (int64_t x = 0; x < 3; ++x) {
      for (int64_t c = 0; c < 7; ++c) {
        EXPECT_EQ(grid.at<float>(y * 3 + x, c),
                  c < 4 ? row.at<float>(y, c) : col.at<float>(x, c - 4));
      }
    }
  }
}

TEST(Positions, TheNativeGridIsTheTableItself) {
  GridPositions<float> positions(3, 5, 4);
  positions.reset(1);
  Tape<float> tape(false);
  Context<float> context{tape};
  const Tensor y = positions.forward(context, {{3, 5}, {3, 5}}).value();
  ASSERT_EQ(y.shape(), (Dims{30, 4}));
  for (int64_t i = 0; i < 30; ++i) {
    for (int64_t c = 0; c < 4; ++c) {
      EXPECT_EQ(y.at<float>(i, c), positions.table.weight.value.at<float>(i % 15, c));
    }
  }
}

TEST(Positions, OtherGridsAreInterpolatedByTheirCentres) {
  // A table of 1 × 4 cells with values 0 10 20 30, read by 2 cells (centres 0.5 and 2.5) and by 8.
  GridPositions<double> positions(1, 4, 1);
  for (int64_t i = 0; i < 4; ++i) positions.table.weight.value.at<double>(i, 0) = 10.0 * i;
  Tape<double> tape(false);
  Context<double> context{tape};
  const Tensor half = positions.forward(context, {{1, 2}}).value();
  EXPECT_NEAR(half.at<double>(0, 0), 5, 1e-12);
  EXPECT_NEAR(half.at<double>(1, 0), 25, 1e-12);
  const Tensor fine = positions.forward(context, {{1, 8}}).value();
  const double want[] = {0, 2.5, 7.5, 12.5, 17.5, 22.5, 27.5, 30};
  for (int64_t i = 0; i < 8; ++i) EXPECT_NEAR(fine.at<double>(i, 0), want[i], 1e-12);
  // Growing downwards repeats the only row.
  const Tensor tall = positions.forward(context, {{3, 4}}).value();
  for (int64_t i = 0; i < 12; ++i) EXPECT_EQ(tall.at<double>(i, 0), 10.0 * (i % 4));
}

TEST(Positions, GridGradientsReachTheTable) {
  GridPositions<double> positions(2, 3, 2);
  foci::testing::check_finite_differences(
      {foci::testing::random_tensor({6, 2}, 1)},
      [&](Tape<double>& tape, const std::vector<Var<double>>& v) {
        ops::RowMix mix;
        append_grid_mix(3, 4, 2, 3, mix);
        append_grid_mix(1, 1, 2, 3, mix);
        return std::vector<Var<double>>{ops::mix_rows(tape, v[0], mix)};
      });
}

}  // namespace
}  // namespace foci::nn
