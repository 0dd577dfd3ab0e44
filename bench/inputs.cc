// Inputs of the benchmarks: random, trained-like, clustered.
#include "inputs.h"

#include <cmath>

#include "foci/core/error.h"
#include "foci/core/rng.h"
#include "foci/measure/attention.h"

namespace foci::bench {
namespace {

// `count` directions of norm `norm`.
std::vector<std::vector<float>> directions(Rng& rng, int count, int64_t D, double norm) {
  std::vector<std::vector<float>> list;
  for (int c = 0; c < count; ++c) {
    std::vector<float> v(static_cast<size_t>(D));
    double squares = 0;
    for (float& x : v) {
      x = static_cast<float>(rng.normal());
      squares += double{x} * x;
    }
    for (float& x : v) x = static_cast<float>(x * norm / std::sqrt(squares));
    list.push_back(std::move(v));
  }
  return list;
}

struct Clusters {
  int centres;
  int64_t run;   // neighbours of one centre
  double norm;   // of a centre, as a multiple of √D
  double noise;  // of a component
  double sink;   // of the shared direction, as a multiple of √D; 0 is none
};

// Rewrites q and k, [B,H,N,D] and [B,Hk,M,D].
void cluster(const Clusters& c, const AttentionInputs& in, uint64_t seed) {
  const int64_t D = in.q.dim(3), group = in.q.dim(1) / in.k.dim(1);
  const double root = std::sqrt(static_cast<double>(D));
  Rng rng(seed, 3);
  for (int64_t b = 0; b < in.q.dim(0); ++b) {
    for (int64_t h = 0; h < in.k.dim(1); ++h) {
      const auto centres = directions(rng, c.centres, D, c.norm * root);
      const auto shared = directions(rng, 1, D, c.sink * root)[0];
      const auto fill = [&](const Tensor& t, int64_t head, bool queries) {
        size_t centre = 0;
        for (int64_t i = 0; i < t.dim(2); ++i) {
          if (i % c.run == 0) centre = static_cast<size_t>(rng.below(c.centres));
          for (int64_t d = 0; d < D; ++d) {
            double x = centres[centre][static_cast<size_t>(d)] + c.noise * rng.normal();
            if (queries || i == 0) x += shared[static_cast<size_t>(d)];
            t.at<float>(b, head, i, d) = static_cast<float>(x);
          }
        }
      };
      for (int64_t g = 0; g < group; ++g) fill(in.q, h * group + g, true);
      fill(in.k, h, false);
    }
  }
}

}  // namespace

Tensor normal(const Dims& shape, uint64_t seed) {
  Rng rng(seed, 2);
  Tensor t = Tensor::empty(shape);
  for (float& x : t.span<float>()) x = static_cast<float>(rng.normal());
  return t;
}

AttentionInputs inputs(const Definition& d, const AttentionShape& shape, uint64_t seed) {
  AttentionInputs in = measure::random_inputs(d.spec, shape, seed);
  if (d.scores == "trained") {
    cluster({.centres = 16, .run = 16, .norm = 0.9, .noise = 1.55, .sink = 0.8}, in, seed);
  } else if (d.scores == "clustered") {
    const double root = std::sqrt(static_cast<double>(shape.D));
    cluster({.centres = 64, .run = 64, .norm = 16 / root, .noise = 0.25, .sink = 0}, in, seed);
  } else {
    require<Error>(d.scores == "random", "rows.json, {}: scores '{}'", d.row, d.scores);
  }
  return in;
}

AttentionUpstream upstream(const AttentionSpec& spec, const AttentionShape& s, uint64_t seed) {
  AttentionUpstream up;
  up.dy = normal({s.B, s.H, s.N, s.Dv}, seed);
  const Dims rows = {s.B, s.H, s.N};
  if (spec.statistics.has(Statistic::entropy)) {
    up.dentropy = normal(rows, seed + 1);
    up.drow_stat = normal(rows, seed + 2);
  }
  if (spec.statistics.has(Statistic::max_weight)) up.dmax_weight = normal(rows, seed + 3);
  if (spec.statistics.has(Statistic::coverage)) up.dcoverage = normal({s.B, s.H, s.M}, seed + 4);
  return up;
}

AttentionWanted wanted(const std::vector<std::string>& names) {
  AttentionWanted w;
  for (const std::string& name : names) {
    if (name == "bias") {
      w.bias = true;
    } else if (name == "slopes") {
      w.slopes = true;
    } else if (name == "tables") {
      w.tables = true;
    } else if (name == "score_w") {
      w.score_w = true;
    } else if (name == "scale") {
      w.scale = true;
    } else {
      throw Error(fmt::format("rows.json: no gradient '{}'", name));
    }
  }
  return w;
}

}  // namespace foci::bench
