// Sums over many keys and many queries: their error does not grow with the length. Equal terms are
// the worst case, since all roundings of a plain sum of them go the same way.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/core/rng.h"
#include "foci/core/simd_target.h"

namespace foci {
namespace {

constexpr int64_t kLong = 200001;
// No power of two divides these evenly, so that every addition rounds.
constexpr float kValues[] = {1.1f, 0.7f, 1.3f, 0.9f};

double relative(double got, double want) {
  return std::abs(got / want - 1);
}

// The largest relative error of all elements against one number.
double worst(const Tensor& t, double want) {
  double most = 0;
  const Tensor dense = t.contiguous();
  for (const float x : dense.span<float>()) {
    const double e = relative(x, want);
    if (!(e <= most)) most = e;
  }
  return most;
}

struct Map {
  const char* name;
  Normalizer normalizer;
};
std::vector<Map> maps(int64_t keys) {
  return {{"softmax", Softmax{}},       {"sparsemax", Sparsemax{}},
          {"entmax 1.5", Entmax{1.5}},  {"entmax 1.3", Entmax{1.3}},
          {"top-k of all", TopK{keys}}, {"top-k of most", TopK{keys - 1000}}};
}

// Scores that are all 0, and values of one number: the mean is that number, whatever the map.
TEST(LongRows, EqualKeysGiveTheMean) {
  for (const SimdTarget target : supported_targets()) {
    for (const Map& map : maps(kLong)) {
      for (const int64_t N : {1, 3, 40}) {
        const bool all = map.name != std::string("top-k of most");
        AttentionSpec spec;
        spec.normalizer = map.normalizer;
        spec.statistics = {Statistic::entropy, Statistic::max_weight};
        if (N > 1 && all) spec.statistics = {Statistic::entropy, Statistic::coverage};
        AttentionInputs in;
        in.q = Tensor::zeros({1, 1, N, 1});
        in.k = Tensor::zeros({1, 1, kLong, 1});
        in.v = Tensor::empty({1, 1, kLong, std::size(kValues)});
        for (size_t i = 0; i < std::size(kValues); ++i) {
          in.v.slice(3, i, i + 1).fill(kValues[i]);
        }
        const AttentionShape shape{1, 1, 1, N, kLong, 1, std::size(kValues)};
        const Bound bound = Plan::make(spec, shape, {Implementation::fused, target}).bind(in);
        const AttentionOutputs out = bound.forward();
        const std::string where = fmt::format("{} {} N {}", name_of(target), map.name, N);
        for (size_t i = 0; i < std::size(kValues); ++i) {
          EXPECT_LE(worst(out.y.slice(3, i, i + 1), kValues[i]), 1e-6) << where;
        }
        const double seen = all ? kLong : kLong - 1000;
        EXPECT_LE(worst(out.entropy, std::log(seen)), 1e-6) << where;
        if (out.max_weight.defined()) {
          EXPECT_LE(worst(out.max_weight, 1 / seen), 1e-6) << where;
        }
        if (out.coverage.defined()) {
          EXPECT_LE(worst(out.coverage, static_cast<double>(N) / kLong), 1e-6) << where;
        }
      }
    }
  }
}

// Two kinds of keys, of equal scores: what reaches Q is their covariance.
TEST(LongRows, GradientsOfQueriesOverManyKeys) {
  const float values[] = {0.3f, 2.7f};
  for (const SimdTarget target : supported_targets()) {
    for (const Map& map : maps(kLong)) {
      if (map.name == std::string("top-k of most")) continue;
      for (const int64_t N : {1, 40}) {
        AttentionSpec spec;
        spec.normalizer = map.normalizer;
        spec.scale = 1.0;
        AttentionInputs in;
        in.q = Tensor::zeros({1, 1, N, 1});
        in.k = Tensor::empty({1, 1, kLong, 1});
        in.v = Tensor::empty({1, 1, kLong, 1});
        double mean = 0, square = 0;
        for (int64_t j = 0; j < kLong; ++j) {
          const float x = values[j % 2];
          in.k.at<float>(0, 0, j, 0) = in.v.at<float>(0, 0, j, 0) = x;
          mean += double{x} / kLong;
          square += double{x} * x / kLong;
        }
        const AttentionShape shape{1, 1, 1, N, kLong, 1, 1};
        const Bound bound = Plan::make(spec, shape, {Implementation::fused, target}).bind(in);
        AttentionUpstream up;
        up.dy = Tensor::full({1, 1, N, 1}, 1.1);
        const AttentionGradients g = bound.backward(bound.forward(), up);
        // Under entmax dp/ds is p^(2−α), and p = 1/M.
        double slope = 1;
        if (const auto* e = std::get_if<Entmax>(&map.normalizer)) {
          slope = std::pow(double{kLong}, e->alpha - 1);
        } else if (std::holds_alternative<Sparsemax>(map.normalizer)) {
          slope = kLong;
        }
        const double want = double{1.1f} * slope * (square - mean * mean);
        // δ, one float of the mean's size, is subtracted from every value.
        EXPECT_LE(worst(g.dq, want), 1e-6) << name_of(target) << " " << map.name << " N " << N;
        EXPECT_LE(worst(g.dv, double{1.1f} * N / kLong), 1e-6)
            << name_of(target) << " " << map.name << " N " << N;
      }
    }
  }
}

// Few keys, whose gradients are sums over many queries; with one head, and with four that share K
// and V.
TEST(LongRows, GradientsOfKeysOverManyQueries) {
  constexpr int64_t M = 8;
  for (const SimdTarget target : supported_targets()) {
    for (const Map& map : maps(M)) {
      if (map.name == std::string("top-k of most")) continue;
      for (const int64_t H : {1, 4}) {
        const int64_t N = kLong / H;
        AttentionSpec spec;
        spec.normalizer = map.normalizer;
        spec.scale = 1.0;
        AttentionInputs in;
        in.q = Tensor::full({1, H, N, 1}, 1.3);
        in.k = Tensor::zeros({1, 1, M, 1});
        in.v = Tensor::empty({1, 1, M, 1});
        for (int64_t j = 0; j < M; ++j) in.v.at<float>(0, 0, j, 0) = static_cast<float>(j);
        const AttentionShape shape{1, H, 1, N, M, 1, 1};
        const Bound bound = Plan::make(spec, shape, {Implementation::fused, target}).bind(in);
        AttentionUpstream up;
        up.dy = Tensor::full({1, H, N, 1}, 1.1);
        const AttentionGradients g = bound.backward(bound.forward(), up);
        const double dy = double{1.1f}, q = double{1.3f}, all = static_cast<double>(N * H);
        double slope = 1;
        if (const auto* e = std::get_if<Entmax>(&map.normalizer)) {
          slope = std::pow(double{M}, e->alpha - 1);
        } else if (std::holds_alternative<Sparsemax>(map.normalizer)) {
          slope = M;
        }
        const std::string where = fmt::format("{} {} H {}", name_of(target), map.name, H);
        EXPECT_LE(worst(g.dv, all * dy / M), 1e-6) << where;
        for (int64_t j = 0; j < M; ++j) {
          // Against the largest: δ, which is subtracted from every value, has its digits.
          const double unit = all * slope / M * dy * q,
                       want = unit * (static_cast<double>(j) - 3.5);
          EXPECT_LE(std::abs(g.dk.at<float>(0, 0, j, 0) - want), 1e-6 * unit * 3.5)
              << where << " key " << j;
        }
      }
    }
  }
}

// Thousands of queries and keys at once: panels of keys, groups of chunks and parts of strips.
TEST(LongRows, GradientsWhereBothAreLong) {
  constexpr int64_t N = 9001, M = 10007;
  for (const Map& map : maps(M)) {
    if (map.name == std::string("top-k of most")) continue;
    AttentionSpec spec;
    spec.normalizer = map.normalizer;
    spec.statistics = {Statistic::coverage};
    AttentionInputs in;
    in.q = Tensor::zeros({1, 1, N, 1});
    in.k = Tensor::zeros({1, 1, M, 1});
    in.v = Tensor::full({1, 1, M, 2}, 1);
    const Bound bound = Plan::make(spec, {1, 1, 1, N, M, 1, 2}).bind(in);
    const AttentionOutputs out = bound.forward();
    AttentionUpstream up;
    up.dy = Tensor::full({1, 1, N, 2}, 1.1);
    const AttentionGradients g = bound.backward(out, up);
    EXPECT_LE(worst(out.coverage, double{N} / M), 1e-6) << map.name;
    EXPECT_LE(worst(g.dv, double{1.1f} * N / M), 1e-6) << map.name;
  }
}

// Positive values and any scores, against the formula in double: the bound that docs/attention.md
// states.
TEST(LongRows, TheErrorOfPositiveSumsGrowsWithTheLogarithm) {
  for (const SimdTarget target : supported_targets()) {
    for (const int64_t M : {1, 7, 100, 529, 4096, 65537, 1000000}) {
      for (const double spread : {0.0, 0.01, 1.0, 4.0}) {
        Rng rng(static_cast<uint64_t>(M), static_cast<uint64_t>(100 * spread));
        constexpr int64_t H = 3;
        AttentionSpec spec;
        spec.scale = 1.0;
        spec.statistics = {Statistic::entropy};
        AttentionInputs in;
        in.q = Tensor::full({1, H, 1, 1}, 1);
        in.k = Tensor::empty({1, H, M, 1});
        in.v = Tensor::empty({1, H, M, 1});
        for (float& x : in.k.span<float>()) x = static_cast<float>(spread * rng.normal());
        // Scores that creep upwards move the maximum again and again.
        auto keys = in.k.select(1, 2).span<float>();
        std::sort(keys.begin(), keys.end());
        for (float& x : in.v.span<float>()) x = static_cast<float>(1.1 + 0.1 * rng.uniform());
        const AttentionShape shape{1, H, H, 1, M, 1, 1};
        const Bound bound = Plan::make(spec, shape, {Implementation::fused, target}).bind(in);
        const AttentionOutputs out = bound.forward();
        const double limit = 4e-7 * (1 + std::log2(static_cast<double>(M)));
        for (int64_t h = 0; h < H; ++h) {
          const float* k = in.k.data<float>() + h * M;
          const float* v = in.v.data<float>() + h * M;
          const double m = *std::max_element(k, k + M);
          double sum = 0, mean = 0, moment = 0;
          for (int64_t j = 0; j < M; ++j) {
            const double e = std::exp(k[j] - m);
            sum += e;
            mean += e * v[j];
            moment += e * (k[j] - m);
          }
          const std::string where =
              fmt::format("{} M {} spread {} head {}", name_of(target), M, spread, h);
          EXPECT_LE(relative(out.y.at<float>(0, h, 0, 0), mean / sum), limit) << where;
          const double lse = m + std::log(sum), entropy = std::log(sum) - moment / sum;
          EXPECT_LE(std::abs(out.row_stat.at<float>(0, h, 0) - lse), limit * (1 + std::abs(lse)))
              << where;
          EXPECT_LE(std::abs(out.entropy.at<float>(0, h, 0) - entropy), limit * (1 + entropy))
              << where;
        }
      }
    }
  }
}

}  // namespace
}  // namespace foci
