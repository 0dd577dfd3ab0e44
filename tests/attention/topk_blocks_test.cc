// Top-k that leaves blocks of keys out by bounds: the bits that scoring every key gives, the keys
// that the oracle chooses, and how much is left out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/generate.h"
#include "attention/tolerance.h"
#include "foci/attention/fused.h"
#include "foci/attention/state.h"
#include "foci/core/simd_target.h"
#include "foci/kernels/scratch.h"
#include "foci/reference/attention.h"

namespace foci {
namespace {

using testing::near;
using testing::random_normal;

// `clusters` groups of neighbouring rows around normal centres; queries and keys share them.
struct Clusters {
  int64_t clusters = 64;
  float spread = 0.1f;
  bool scattered = false;  // queries, not keys
};
AttentionInputs clustered(Rng& rng, const AttentionShape& s, const Clusters& c) {
  const Tensor centre = random_normal(rng, {s.B, s.Hk, c.clusters, s.D}, 2);
  const auto fill = [&](int64_t heads, int64_t rows, bool scattered) {
    const Tensor t = random_normal(rng, {s.B, heads, rows, s.D}, c.spread);
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t at = scattered ? rng.below(c.clusters) : i * c.clusters / rows;
          for (int64_t d = 0; d < s.D; ++d) {
            t.at<float>(b, h, i, d) += centre.at<float>(b, h / (heads / s.Hk), at, d);
          }
        }
      }
    }
    return t;
  };
  AttentionInputs in;
  in.q = fill(s.H, s.N, c.scattered);
  in.k = fill(s.Hk, s.M, false);
  in.v = random_normal(rng, {s.B, s.Hk, s.M, s.Dv});
  return in;
}

// Everything that the kernels give for a problem: forward, weights and gradients of each strip.
std::vector<float> results_of(const Problem& p, const fused::Operands& o, int64_t* skipped) {
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(p.target);
  const kernels::RowMap map = fused::row_map_of(p.spec, 0);
  const AttentionShape& s = p.shape;
  const int64_t W = kernels.width;
  const auto round = [&](int64_t n) {
    return (n + kernels.lanes - 1) / kernels.lanes * kernels.lanes;
  };
  Rng rng(17);
  const Tensor dy = random_normal(rng, {W, s.Dv});
  std::vector<float> all;
  const auto scratch = [](size_t bytes) {
    return kernels::Scratch(static_cast<int64_t>(bytes / sizeof(float)));
  };
  for (const fused::Sequence& q : fused::sequences_of(p)) {
    for (int64_t h = 0; h < s.H; ++h) {
      for (int64_t first = 0; first < q.queries; first += W) {
        kernels::Strip strip;
        fused::make_strip(p, o, q, h, first, std::min(W, q.queries - first), strip);
        const int64_t lanes = strip.mask.lanes, keys = q.keys;
        std::vector<float> y(lanes * s.Dv), rows(lanes * 4), weights(lanes * keys);
        std::vector<double> coverage(keys);
        std::vector<int64_t> max_key(lanes);
        int64_t left_out = 0;
        kernels::StripOutputs out{y.data(),
                                  s.Dv,
                                  rows.data(),
                                  rows.data() + lanes,
                                  rows.data() + 2 * lanes,
                                  max_key.data(),
                                  rows.data() + 3 * lanes,
                                  coverage.data(),
                                  &left_out};
        const auto forward = scratch(kernels.forward_scratch(map, keys, s.D, s.Dv, true));
        kernels.forward(map, strip, out, reinterpret_cast<std::byte*>(forward.get()));
        *skipped += left_out;
        const auto space = scratch(kernels.weights_scratch(map, keys, s.D, s.Dv));
        kernels.weights(map, strip, weights.data(), keys,
                        reinterpret_cast<std::byte*>(space.get()));
        std::vector<float> dq(lanes * s.D);
        const int64_t dk_size = keys * round(s.D), dv_size = keys * round(s.Dv);
        const kernels::Scratch dk(dk_size), dv(dv_size);
        std::fill_n(dk.get(), dk_size, 0.0f);
        std::fill_n(dv.get(), dv_size, 0.0f);
        kernels::TileGradients g;
        g.dy = dy.data<float>();
        g.dy_stride = s.Dv;
        g.row_stat = rows.data();
        g.y = y.data();
        g.y_stride = s.Dv;
        g.dq = dq.data();
        g.dq_stride = s.D;
        g.dk = dk.get();
        g.dk_stride = round(s.D);
        g.dv = dv.get();
        g.dv_stride = round(s.Dv);
        const auto backward = scratch(kernels.backward_scratch(map, keys, s.D, s.Dv));
        kernels.backward(map, &strip, 1, g, reinterpret_cast<std::byte*>(backward.get()));
        for (const auto* v : {&y, &rows, &weights, &dq}) {
          all.insert(all.end(), v->begin(), v->end());
        }
        for (const double x : coverage) all.push_back(static_cast<float>(x));
        all.insert(all.end(), dk.get(), dk.get() + dk_size);
        all.insert(all.end(), dv.get(), dv.get() + dv_size);
        for (int64_t key : max_key) all.push_back(static_cast<float>(key));
      }
    }
  }
  return all;
}

// Share of the visible pairs that is left out, with the same bits as without boxes.
double share_left_out(const AttentionSpec& spec, const AttentionShape& shape,
                      const AttentionInputs& in, SimdTarget target, const std::string& where) {
  const Problem p = make_problem(spec, shape, target, in);
  fused::Operands o = fused::operands_of(p);
  EXPECT_TRUE(o.boxes.defined()) << where;
  int64_t skipped = 0, none = 0;
  const std::vector<float> with = results_of(p, o, &skipped);
  o.boxes = {};
  const std::vector<float> without = results_of(p, o, &none);
  EXPECT_EQ(none, 0) << where;
  EXPECT_EQ(with.size(), without.size());
  EXPECT_EQ(std::memcmp(with.data(), without.data(), with.size() * sizeof(float)), 0) << where;
  const Bound bound = Plan::make(spec, shape, {Implementation::fused, target}).bind(in);
  EXPECT_EQ(bound.forward().skipped_pairs, skipped) << where;
  const int64_t visible = bound.visible_pairs();
  EXPECT_LE(skipped, visible) << where;
  return visible == 0 ? 0 : static_cast<double>(skipped) / static_cast<double>(visible);
}

AttentionSpec top(int64_t k) {
  AttentionSpec spec;
  spec.normalizer = TopK{k};
  return spec;
}

TEST(TopKBlocks, ClusteredKeysAreMostlyLeftOut) {
  for (SimdTarget target : supported_targets()) {
    // Rows scored whole, and rows through a buffer; heads of whole vectors and not.
    for (const auto& [M, k, D] : {std::tuple{2048, 32, 32}, {2048, 20, 64}, {4096, 8, 19}}) {
      for (const bool scattered : {false, true}) {
        Rng rng(5);
        const AttentionShape s{1, 1, 1, 140, M, D, 8};
        const Clusters clusters{.clusters = M / 64, .scattered = scattered};
        const AttentionInputs in = clustered(rng, s, clusters);
        const std::string where =
            fmt::format("{} M {} scattered {}", name_of(target), M, scattered);
        EXPECT_GT(share_left_out(top(k), s, in, target, where), scattered ? 0.2 : 0.5) << where;
      }
    }
  }
}

TEST(TopKBlocks, RandomKeysGiveTheSame) {
  for (SimdTarget target : supported_targets()) {
    for (const auto& [M, k] : {std::pair{1024, 32}, {5000, 10}}) {
      Rng rng(6);
      const AttentionShape s{1, 2, 1, 70, M, 24, 8};
      const AttentionInputs in = clustered(rng, s, {.clusters = 1, .spread = 1});
      share_left_out(top(k), s, in, target, fmt::format("{} M {}", name_of(target), M));
    }
  }
}

// Scores that are exact in floats, so that they tie and the oracle's choice is the only right one,
// under every mask.
TEST(TopKBlocks, ChoosesWhatTheOracleChooses) {
  constexpr int64_t kN = 80, kM = 1100, kD = 16;
  struct Case {
    const char* name;
    std::vector<Mask> masks;
    int64_t k = 20;
    double scale = 0.25, softcap = 0;
    float step = 0.125f;  // 0: keys of a cluster are one key
    int64_t clusters = 20;
  };
  const Case cases[] = {
      {"all", {}},
      {"buffer", {}, 3},
      {"most", {}, 400},
      {"negative scale", {}, 20, -0.25},
      {"softcap", {}, 20, 0.25, 8},
      {"repeated keys", {}, 30, 0.25, 0, 0},
      {"one key", {}, 30, 0.25, 0, 0, 1},
      {"causal", {Causal{}}},
      {"causal buffer", {Causal{}}, 2},
      {"top left", {Causal{Align::top_left}}, 5},
      {"window", {Window{400, 30}}},
      {"lengths", {KeyLengths{}}, 10},
      {"segments", {Segments{}}, 10},
      {"keep", {Keep{}}, 10},
      {"keep causal segments", {Keep{}, Causal{}, Segments{}}, 5},
  };
  for (const Case& c : cases) {
    Rng rng(7);
    const AttentionShape s{1, 2, 1, kN, kM, kD, 3};
    AttentionInputs in = clustered(rng, s, {.clusters = c.clusters, .spread = 0});
    for (const Tensor* t : {&in.q, &in.k}) {
      for (float& x : t->span<float>()) {
        x = std::round(4 * x) / 4 + c.step * static_cast<float>(rng.below(3) - 1);
      }
    }
    if (c.scale < 0) {
      for (float& x : in.q.span<float>()) x = -x;
    }
    AttentionSpec spec = top(c.k);
    spec.masks = c.masks;
    spec.scale = c.scale;
    if (c.softcap > 0) spec.softcap = c.softcap;
    spec.statistics = Statistics::all();
    in.key_lengths = Tensor::full({1}, 900, DType::i64);
    in.keep = Tensor::empty({kN, kM}, DType::boolean);
    for (bool& keep : in.keep.span<bool>()) keep = rng.below(5) > 0;
    in.q_segments = Tensor::empty({1, kN}, DType::i32);
    in.k_segments = Tensor::empty({1, kM}, DType::i32);
    for (int64_t i = 0; i < kN; ++i) in.q_segments.at<int32_t>(0, i) = i < 35 ? 1 : 2;
    for (int64_t j = 0; j < kM; ++j) in.k_segments.at<int32_t>(0, j) = j < 390 ? 1 : 2;
    const reference::Forward want = reference::attention_forward(spec, in);
    std::vector<int64_t> rows(kN);
    for (int64_t i = 0; i < kN; ++i) rows[i] = i;
    const std::vector<int64_t> heads = {0, 1};
    for (SimdTarget target : supported_targets()) {
      const std::string where = fmt::format("{} {}", name_of(target), c.name);
      const double share = share_left_out(spec, s, in, target, where);
      if (c.masks.empty() && c.clusters > 1 && c.k < 100) {
        EXPECT_GT(share, 0.1) << where;
      }
      const Bound bound = Plan::make(spec, s, {Implementation::fused, target}).bind(in);
      const AttentionOutputs out = bound.forward();
      EXPECT_TRUE(near(out.y, want.out.y)) << where;
      EXPECT_TRUE(near(out.row_stat, want.out.row_stat)) << where;
      EXPECT_TRUE(near(out.max_key, want.out.max_key, 0)) << where;
      EXPECT_TRUE(near(out.support, want.out.support, 0)) << where;
      // tanh rounds distinct scores to one.
      if (c.softcap > 0) continue;
      const Tensor weights = bound.weights(out, rows, heads);
      int64_t wrong = 0;
      const auto got = weights.span<float>();
      const auto right = want.weights.span<double>();
      for (size_t n = 0; n < got.size(); ++n) wrong += (got[n] > 0) != (right[n] > 0) ? 1 : 0;
      EXPECT_EQ(wrong, 0) << where;
    }
  }
}

// A key in the corner of its box scores what the bound of its block is, but for rounding; another
// block promises more and its keys score a hair less. Bounds that did not allow for rounding would
// leave the best key out.
TEST(TopKBlocks, BoundsAllowForRounding) {
  constexpr int64_t kN = 128, kM = 512, kD = 64;
  const AttentionShape s{1, 1, 1, kN, kM, kD, 1};
  AttentionSpec spec = top(1);
  spec.scale = 1.0;
  spec.statistics = {Statistic::max_weight};
  const auto product = [](const float* a, const float* b) {
    float sum = 0;
    for (int64_t d = 0; d < kD; ++d) sum = std::fma(a[d], b[d], sum);
    return sum;
  };
  int tight = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(seed);
    AttentionInputs in;
    in.q = Tensor::empty({1, 1, kN, kD});
    in.k = Tensor::zeros({1, 1, kM, kD});
    in.v = random_normal(rng, {1, 1, kM, 1});
    float *q = in.q.data<float>(), *k = in.k.data<float>();
    for (int64_t d = 0; d < kD; ++d) q[d] = static_cast<float>(0.5 + rng.uniform());
    for (int64_t i = 1; i < kN; ++i) std::copy_n(q, kD, q + i * kD);
    // Keys 64 … 127 are all alike; key 200 is the corner, key 201 spans the box.
    float *corner = k + 200 * kD, *opposite = k + 201 * kD, middle[kD], half[kD];
    for (int64_t d = 0; d < kD; ++d) {
      corner[d] = static_cast<float>(1 + rng.uniform());
      opposite[d] = static_cast<float>(-rng.uniform());
      middle[d] = 0.5f * corner[d] + 0.5f * opposite[d];
      half[d] = std::max(corner[d] - middle[d], middle[d] - opposite[d]);
      for (int64_t j = 64; j < 128; ++j) k[j * kD + d] = corner[d] * (1 - 0x1p-23f);
    }
    const float best = product(q, corner), other = product(q, k + 64 * kD);
    if (!(best > other)) continue;
    tight += product(q, middle) + product(q, half) < other ? 1 : 0;
    for (SimdTarget target : supported_targets()) {
      const AttentionOutputs out =
          Plan::make(spec, s, {Implementation::fused, target}).bind(in).forward();
      // The baseline may have no fused multiply-add: best and other may round to one there.
      const int64_t key = out.max_key.at<int64_t>(0, 0, 0);
      EXPECT_TRUE(key == 200 || (target == SimdTarget::baseline && key == 64)) << key;
      EXPECT_GT(out.skipped_pairs, 0);
    }
  }
  EXPECT_GT(tight, 10);
}

TEST(TopKBlocks, PlansSayWhetherKeysAreLeftOut) {
  const AttentionShape s{1, 1, 1, 256, 1024, 16, 16};
  const auto text = [&](const AttentionSpec& spec, const AttentionShape& shape) {
    return Plan::make(spec, shape, {Implementation::fused}).explain();
  };
  const auto says = [](const std::string& said, const char* part) {
    return said.find(part) != std::string::npos;
  };
  EXPECT_TRUE(says(text(top(32), s), "top-k leaves blocks of 64 keys out"));
  AttentionSpec biased = top(32);
  biased.biases = {Alibi{}};
  EXPECT_TRUE(says(text(biased, s), "top-k scores every key: bounds do not know of biases"));
  AttentionSpec l2 = top(32);
  l2.score = L2{1};
  EXPECT_TRUE(says(text(l2, s), "bounds are for dot and cosine scores"));
  EXPECT_TRUE(says(text(top(512), s), "k is half the keys or more"));
  EXPECT_TRUE(says(text(top(32), {1, 1, 1, 256, 255, 16, 16}), "fewer than 256 keys"));
  EXPECT_TRUE(says(text(top(32), {1, 1, 1, 16, 1024, 16, 16}), "fewer than 128 queries"));
  EXPECT_FALSE(says(text({}, s), "top-k"));
}

}  // namespace
}  // namespace foci
