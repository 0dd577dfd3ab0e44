// The row maps on their own, against the oracle's rows in double and finite differences.
#include "foci/attention/normalize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "attention/refusal.h"
#include "attention/tolerance.h"
#include "foci/attention/plan.h"
#include "foci/core/rng.h"
#include "foci/core/simd_target.h"
#include "foci/core/threads.h"
#include "foci/reference/normalizers.h"

namespace foci {
namespace {

using testing::near;
using testing::refusal;
using testing::same_bits;
using testing::storage_tolerance;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr DType kDtypes[] = {DType::f32, DType::f16, DType::bf16};

const std::vector<Normalizer>& normalizers() {
  static const std::vector<Normalizer> all = {Softmax{},   Sparsemax{},  Entmax{1.5}, Entmax{1.25},
                                              Entmax{2.5}, Entmax{1.05}, TopK{1},     TopK{5}};
  return all;
}

std::string text(const Normalizer& n) {
  return std::visit(overloaded{[](const Softmax&) { return std::string("softmax"); },
                               [](const Sparsemax&) { return std::string("sparsemax"); },
                               [](const Entmax& e) { return fmt::format("entmax {}", e.alpha); },
                               [](const TopK& t) { return fmt::format("top-{}", t.k); }},
                    n);
}

enum class Scores : uint8_t { plain, masked, ties };

Tensor numbers(const Dims& shape, uint64_t seed, Scores kind = Scores::plain) {
  Tensor t = Tensor::empty(shape);
  Rng rng(seed);
  for (float& x : t.span<float>()) {
    x = static_cast<float>(2 * rng.normal());
    if (kind == Scores::ties) x = std::round(x);
    if (kind == Scores::masked && rng.uniform() < 0.3) x = -kInf;
  }
  return t;
}

double largest(const Tensor& t) {
  double most = 0;
  const Tensor wide = t.to(DType::f32);
  for (float x : wide.span<float>()) most = std::max(most, std::abs(double(x)));
  return most;
}

// Both directions by the oracle, which knows no −inf: such keys are not there. The backward starts
// from `weights`, which the engine gave.
struct Expected {
  Tensor weights, dscores;
};
Expected expected(const Normalizer& n, const Tensor& scores, const Tensor& weights,
                  const Tensor& dweights) {
  const int64_t columns = scores.dim(-1);
  const Tensor s = scores.to(DType::f64).contiguous(), g = dweights.to(DType::f64).contiguous(),
               p = weights.to(DType::f64).contiguous();
  Expected e{Tensor::zeros(scores.shape(), DType::f64), Tensor::zeros(scores.shape(), DType::f64)};
  for (int64_t at = 0; at < s.numel(); at += columns) {
    std::vector<int64_t> there;
    std::vector<double> row, dp;
    reference::RowWeights given;
    for (int64_t j = at; j < at + columns; ++j) {
      if (s.data<double>()[j] == -kInf) continue;
      there.push_back(j);
      row.push_back(s.data<double>()[j]);
      dp.push_back(g.data<double>()[j]);
      given.p.push_back(p.data<double>()[j]);
      given.takes_part.push_back(given.p.back() > 0);
    }
    if (row.empty()) continue;
    const reference::RowWeights w = reference::normalize(n, row);
    const std::vector<double> ds = reference::normalize_backward(n, given, dp, 0);
    for (size_t i = 0; i < there.size(); ++i) {
      e.weights.data<double>()[there[i]] = w.p[i];
      e.dscores.data<double>()[there[i]] = ds[i];
    }
  }
  return e;
}

class AllTargets : public ::testing::TestWithParam<SimdTarget> {
 protected:
  void SetUp() override { set_target(GetParam()); }
  void TearDown() override { set_target(before_); }
  const SimdTarget before_ = current_target();
};
using Normalize = AllTargets;
std::string target_name(const ::testing::TestParamInfo<SimdTarget>& info) {
  return std::string(name_of(info.param));
}
INSTANTIATE_TEST_SUITE_P(Targets, Normalize, ::testing::ValuesIn(supported_targets()), target_name);

TEST_P(Normalize, AgreesWithTheOracle) {
  uint64_t seed = 0;
  for (const Normalizer& n : normalizers()) {
    for (const DType dtype : kDtypes) {
      for (const int64_t columns : {1, 2, 3, 7, 15, 16, 17, 33, 100, 257}) {
        for (const Scores kind : {Scores::plain, Scores::masked, Scores::ties}) {
          const Dims shape{3, 2, columns};
          SCOPED_TRACE(fmt::format("{}, {}, {} columns, scores {}", text(n), name_of(dtype),
                                   columns, static_cast<int>(kind)));
          const Tensor scores = numbers(shape, ++seed, kind).to(dtype);
          const Tensor dweights = numbers(shape, ++seed).to(dtype);
          const Tensor weights = normalize(n, scores);
          const Tensor dscores = normalize_backward(n, weights, dweights);
          const Expected e = expected(n, scores, weights, dweights);
          const double storage = storage_tolerance(dtype);
          ASSERT_EQ(weights.dtype(), dtype);
          ASSERT_EQ(dscores.dtype(), dtype);
          ASSERT_TRUE(near(weights, e.weights, testing::kTolerance + storage));
          // Weights that were rounded do not add up to 1, and by as much p·g does not cancel.
          const double floor = dtype == DType::f32 ? 1e-2 : largest(dweights);
          ASSERT_TRUE(near(dscores, e.dscores, testing::kTolerance + storage, floor));
        }
      }
    }
  }
}

TEST_P(Normalize, GradientsAreThoseOfFiniteDifferences) {
  constexpr int64_t kColumns = 9;
  constexpr float kStep = 1e-2f;
  uint64_t seed = 100;
  for (const Normalizer& n : normalizers()) {
    SCOPED_TRACE(text(n));
    const Tensor scores = numbers({4, kColumns}, ++seed), dweights = numbers({4, kColumns}, ++seed);
    const Tensor weights = normalize(n, scores);
    const Tensor dscores = normalize_backward(n, weights, dweights);
    int checked = 0;
    for (int64_t r = 0; r < 4; ++r) {
      for (int64_t j = 0; j < kColumns; ++j) {
        double loss[2] = {0, 0};
        bool same_support = true;
        for (const int side : {0, 1}) {
          const Tensor moved = scores.clone();
          moved.at<float>(r, j) += side == 1 ? kStep : -kStep;
          const Tensor w = normalize(n, moved);
          for (int64_t c = 0; c < kColumns; ++c) {
            loss[side] += double(w.at<float>(r, c)) * dweights.at<float>(r, c);
            same_support &= (w.at<float>(r, c) > 0) == (weights.at<float>(r, c) > 0);
          }
        }
        if (!same_support) continue;  // the map has a corner there
        ++checked;
        EXPECT_NEAR((loss[1] - loss[0]) / (2 * kStep), dscores.at<float>(r, j), 4e-3)
            << r << ", " << j;
      }
    }
    EXPECT_GE(checked, 18);
  }
}

TEST_P(Normalize, BitsDependOnTheRowAlone) {
  const int before = num_threads();
  const Tensor rows = numbers({600, 77}, 7, Scores::masked), upstream = numbers({600, 77}, 8);
  for (const Normalizer& n : normalizers()) {
    SCOPED_TRACE(text(n));
    set_num_threads(1);
    const Tensor w = normalize(n, rows), g = normalize_backward(n, w, upstream);
    set_num_threads(3);
    const Tensor w3 = normalize(n, rows), g3 = normalize_backward(n, w, upstream);
    EXPECT_TRUE(same_bits(w, w3));
    EXPECT_TRUE(same_bits(g, g3));
    for (const int64_t r : {0, 1, 300, 599}) {
      const Tensor one = normalize(n, rows.select(0, r));
      EXPECT_TRUE(same_bits(one, w.select(0, r)));
      EXPECT_TRUE(same_bits(normalize_backward(n, one, upstream.select(0, r)), g.select(0, r)));
    }
  }
  set_num_threads(before);
}

TEST_P(Normalize, ViewsAreReadAsTheyLie) {
  for (const DType dtype : kDtypes) {
    const Tensor base = numbers({5, 9, 4, 3}, 11).to(dtype),
                 up = numbers({5, 9, 4, 3}, 12).to(dtype);
    const auto view = [](const Tensor& t) { return t.transpose(1, 3).slice(0, 1, 4); };
    for (const Normalizer& n : normalizers()) {
      const Tensor w = normalize(n, view(base));
      EXPECT_TRUE(same_bits(w, normalize(n, view(base).contiguous())));
      const Tensor dense = normalize_backward(n, w, view(up).contiguous());
      EXPECT_TRUE(same_bits(dense, normalize_backward(n, w, view(up))));
      // Stride 0 in the last dimension and in the first.
      const Tensor narrow = base.slice(3, 0, 1).broadcast_to({5, 9, 4, 6});
      EXPECT_TRUE(same_bits(normalize(n, narrow), normalize(n, narrow.contiguous())));
      const Tensor repeated = base.slice(0, 0, 1).broadcast_to({2, 9, 4, 3});
      EXPECT_TRUE(same_bits(normalize(n, repeated), normalize(n, repeated.contiguous())));
    }
  }
}

TEST_P(Normalize, NonFiniteScores) {
  const Tensor scores = Tensor::from<float>(
      {-kInf, -kInf, -kInf, kNan, 1, -kInf, kInf, 2, -kInf, 0, -kInf, 1}, {4, 3});
  const Tensor dweights = Tensor::full({4, 3}, 1);
  for (const Normalizer& n : normalizers()) {
    SCOPED_TRACE(text(n));
    const Tensor w = normalize(n, scores), g = normalize_backward(n, w, dweights);
    for (int64_t j = 0; j < 3; ++j) {
      EXPECT_EQ(w.at<float>(0, j), 0);
      EXPECT_EQ(g.at<float>(0, j), 0);
    }
    for (const int64_t r : {1, 2}) {
      for (const int64_t j : {0, 1}) {
        EXPECT_TRUE(std::isnan(w.at<float>(r, j)));
        EXPECT_TRUE(std::isnan(g.at<float>(r, j)));
      }
      EXPECT_EQ(w.at<float>(r, 2), 0);
      EXPECT_EQ(g.at<float>(r, 2), 0);
    }
    EXPECT_EQ(w.at<float>(3, 1), 0);
    EXPECT_NEAR(w.at<float>(3, 0) + w.at<float>(3, 2), 1, 1e-6);
  }
}

TEST_P(Normalize, TopKChoosesTheLowestOfEqualColumns) {
  const Tensor w = normalize(TopK{2}, Tensor::from<float>({-1, 0, -0.0f, 0, -kInf}, {5}));
  for (int64_t j = 0; j < 5; ++j) EXPECT_EQ(w.at<float>(j), j == 1 || j == 2 ? 0.5f : 0.0f) << j;
  // More are asked for than there are.
  const Tensor all = normalize(TopK{9}, Tensor::from<float>({3, -kInf, 3}, {3}));
  EXPECT_EQ(all.at<float>(0), 0.5f);
  EXPECT_EQ(all.at<float>(1), 0);
}

TEST_P(Normalize, AWeightOfZeroHasNoGradient) {
  const Tensor scores = Tensor::from<float>({0, -200, 0.5, -500}, {4});
  const Tensor dweights = Tensor::from<float>({1, kNan, 2, kInf}, {4});
  for (const Normalizer& n :
       {Normalizer(Softmax{}), Normalizer(TopK{3}), Normalizer(Entmax{1.5})}) {
    const Tensor w = normalize(n, scores), g = normalize_backward(n, w, dweights);
    EXPECT_EQ(g.at<float>(1), 0);
    EXPECT_EQ(g.at<float>(3), 0);
    EXPECT_NEAR(g.at<float>(0) + g.at<float>(2), 0, 1e-6);
    EXPECT_LT(g.at<float>(0), -0.1);
  }
}

TEST_P(Normalize, NoRowsAndNoColumns) {
  for (const Dims& shape : {Dims{0}, Dims{3, 0}, Dims{0, 5}, Dims{2, 0, 4}}) {
    for (const Normalizer& n : normalizers()) {
      const Tensor none = Tensor::empty(shape);
      EXPECT_EQ(normalize(n, none).shape(), shape);
      EXPECT_EQ(normalize_backward(n, none, none).shape(), shape);
    }
  }
  for (const Normalizer& n : normalizers()) {
    EXPECT_EQ(normalize(n, Tensor::from<float>({-3}, {1})).at<float>(0), 1);
  }
}

TEST(NormalizeRefusals, NameTheArgument) {
  const Tensor rows = Tensor::zeros({2, 3});
  const Tensor ints = Tensor::zeros({2, 3}, DType::i64),
               doubles = Tensor::zeros({2, 3}, DType::f64);
  const Tensor number = Tensor::zeros({});
  EXPECT_EQ(refusal([&] { normalize(Softmax{}, number); }),
            "scores: shape [] given, at least one dimension [..., M] is needed");
  EXPECT_EQ(refusal([&] { normalize(Softmax{}, Tensor()); }),
            "scores: nothing given, a tensor [..., M] is needed");
  EXPECT_EQ(refusal([&] { normalize(Softmax{}, ints); }),
            "scores: int64 given, float32, float16 or bfloat16 is needed");
  EXPECT_EQ(refusal([&] { normalize(Softmax{}, doubles); }),
            "scores: float64 given, float32, float16 or bfloat16 is needed");
  EXPECT_NE(refusal([&] { normalize(Entmax{1}, rows); }).find("normalizer.alpha: 1 given"),
            std::string::npos);
  EXPECT_NE(refusal([&] { normalize_backward(TopK{0}, rows, rows); }).find("normalizer.k: 0 given"),
            std::string::npos);
  EXPECT_EQ(refusal([&] { normalize_backward(Softmax{}, ints, rows); }),
            "weights: int64 given, float32, float16 or bfloat16 is needed");
  EXPECT_EQ(refusal([&] {
              normalize_backward(Softmax{}, rows, Tensor::zeros({3, 2}));
            }),
            "dweights: shape [3, 2] given, [2, 3] as of weights is right");
  EXPECT_EQ(refusal([&] { normalize_backward(Softmax{}, rows, rows.to(DType::bf16)); }),
            "dweights: bfloat16 given, float32 as of weights is right");
}

TEST(Normalize, LongRowsKeepTheirPrecision) {
  for (const int64_t M : {int64_t{200001}, int64_t{1000000}}) {
    // One score above the others, so that they count exp(−0.1) each.
    Tensor scores = Tensor::full({1, M}, 1.1);
    scores.at<float>(0, 5) = 1.2f;
    const double gap = std::exp(static_cast<double>(1.1f) - static_cast<double>(1.2f));
    const double sum = 1 + static_cast<double>(M - 1) * gap;
    const Tensor p = normalize(Softmax{}, scores);
    EXPECT_NEAR(p.item({0, 0}) / (gap / sum), 1, 1e-6);
    EXPECT_NEAR(p.item({0, 5}) * sum, 1, 1e-6);
  }
}

TEST(Plain, LongRowsOfValuesKeepTheirPrecision) {
  for (const double value : {1.1, 0.7, 1.3}) {
    const int64_t M = 200001;
    const Tensor k = Tensor::zeros({1, 1, M, 4}), v = Tensor::full({1, 1, M, 4}, value);
    const Plan plan = Plan::make({}, {.N = 1, .M = M, .D = 4, .Dv = 4},
                                 {.implementation = Implementation::plain});
    const Tensor y = plan.bind({.q = Tensor::zeros({1, 1, 1, 4}), .k = k, .v = v}).forward().y;
    EXPECT_NEAR(y.item({0, 0, 0, 0}) / static_cast<double>(static_cast<float>(value)), 1, 5e-6);
  }
}

}  // namespace
}  // namespace foci
