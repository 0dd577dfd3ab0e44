// The definition, row by row: see the keys, score them, normalise, drop, sum; and the same
// backwards.
#include "foci/reference/attention.h"

#include <cmath>
#include <limits>

#include "foci/core/rng.h"
#include "foci/reference/masks.h"
#include "foci/reference/normalizers.h"
#include "foci/reference/problem.h"
#include "foci/reference/scores.h"

namespace foci::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// What one query sees.
struct Row {
  std::vector<int64_t> keys;   // ascending
  std::vector<double> scores;  // one a key
  RowWeights weights;          // one a key
};

Row make_row(const Problem& p, const Masks& masks, int64_t b, int64_t h, int64_t i) {
  Row row;
  for (int64_t j = 0; j < p.M; ++j) {
    if (!masks.sees(b, h, i, j)) continue;
    row.keys.push_back(j);
    row.scores.push_back(pair_score(p, masks, b, h, i, j).biased);
  }
  if (!row.keys.empty()) row.weights = normalize(normalizer_of(p.spec.normalizer, h), row.scores);
  return row;
}

// Where in the row the largest weight stands; the lowest key among equals.
size_t largest_weight(const Row& row) {
  size_t best = 0;
  for (size_t t = 1; t < row.keys.size(); ++t) {
    if (row.weights.p[t] > row.weights.p[best]) best = t;
  }
  return best;
}

// What dropout of weights multiplies weight (b,h,i,j) with: 0, or 1/(1−p).
double dropout_factor(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (!p.spec.dropout || p.spec.dropout->place != DropoutPlace::weights) return 1;
  const uint32_t threshold = dropout_threshold(p.spec.dropout->p);
  if (dropout_bits(p.spec.dropout->seed, b, h, i, j) < threshold) return 0;
  return 1 / (1 - threshold / 65536.0);
}

double statistic_of_empty_row(const Normalizer& normalizer) {
  return std::visit(
      overloaded{[](const Softmax&) { return -kInf; }, [](const TopK&) { return -kInf; },
                 [](const Sparsemax&) { return kInf; }, [](const Entmax&) { return kInf; }},
      normalizer);
}

// Calls f(b, h, i) for every query row.
template <class F>
void for_each_row(const Problem& p, F&& f) {
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.H; ++h) {
      for (int64_t i = 0; i < p.N; ++i) f(b, h, i);
    }
  }
}

// Element [b,h,x] of a contiguous tensor [B,H,X]; 0 where the tensor is undefined.
double value_or_zero(const Tensor& t, int64_t b, int64_t h, int64_t x) {
  return t.defined() ? t.data<double>()[(b * t.shape()[1] + h) * t.shape()[2] + x] : 0;
}

Gradients zero_gradients(const Problem& p, const AttentionInputs& in) {
  const auto like = [](const Tensor& t) {
    return t.defined() ? Tensor::zeros(t.shape(), DType::f64) : Tensor();
  };
  Gradients g;
  g.dq = like(p.q), g.dk = like(p.k), g.dv = like(p.v);
  if (p.bias.defined()) {
    g.dbias = like(in.bias);
    g.dbias_view = g.dbias.broadcast_to({p.B, p.H, p.N, p.M});
  }
  g.dslopes = like(p.slopes), g.dtable1d = like(p.table1d), g.dtable2d = like(p.table2d);
  g.dscore_w = like(p.score_w);
  const bool per_head = std::holds_alternative<std::vector<double>>(p.spec.scale);
  g.dscale = Tensor::zeros({per_head ? p.H : 1}, DType::f64);
  if (const auto* e = std::get_if<Entmax>(&p.spec.normalizer)) {
    g.dalpha = Tensor::zeros({e->per_head.empty() ? 1 : p.H}, DType::f64);
  }
  return g;
}

}  // namespace

Forward attention_forward(const AttentionSpec& spec, const AttentionInputs& in) {
  const Problem p = make_problem(spec, in);
  const Masks masks(p);
  const auto zeros = [](const Dims& shape, DType dtype = DType::f64) {
    return Tensor::zeros(shape, dtype);
  };
  Forward f;
  f.scores = zeros({p.B, p.H, p.N, p.M});
  f.allowed = zeros({p.B, p.H, p.N, p.M}, DType::boolean);
  f.weights = zeros({p.B, p.H, p.N, p.M});
  f.out.y = zeros({p.B, p.H, p.N, p.Dv});
  f.out.row_stat = zeros({p.B, p.H, p.N});
  f.out.entropy = zeros({p.B, p.H, p.N});
  f.out.max_weight = zeros({p.B, p.H, p.N});
  f.out.max_key = zeros({p.B, p.H, p.N}, DType::i64);
  f.out.support = zeros({p.B, p.H, p.N});
  f.out.coverage = zeros({p.B, p.H, p.M});

  for_each_row(p, [&](int64_t b, int64_t h, int64_t i) {
    for (int64_t j = 0; j < p.M; ++j) {
      element<double>(f.scores, b, h, i, j) = pair_score(p, masks, b, h, i, j).biased;
    }
    const Row row = make_row(p, masks, b, h, i);
    const int64_t at = (b * p.H + h) * p.N + i;
    if (row.keys.empty()) {
      f.out.row_stat.data<double>()[at] = statistic_of_empty_row(p.spec.normalizer);
      f.out.max_key.data<int64_t>()[at] = -1;
      return;
    }
    f.out.row_stat.data<double>()[at] = row.weights.statistic;
    const size_t best = largest_weight(row);
    f.out.max_weight.data<double>()[at] = row.weights.p[best];
    f.out.max_key.data<int64_t>()[at] = row.keys[best];
    double* y = f.out.y.data<double>() + at * p.Dv;
    for (size_t t = 0; t < row.keys.size(); ++t) {
      const int64_t j = row.keys[t];
      element<bool>(f.allowed, b, h, i, j) = true;
      if (!row.weights.takes_part[t]) continue;  // weight 0, and its value is not looked at
      const double w = row.weights.p[t];
      element<double>(f.weights, b, h, i, j) = w;
      f.out.coverage.data<double>()[(b * p.H + h) * p.M + j] += w;
      f.out.support.data<double>()[at] += 1;
      if (w != 0) f.out.entropy.data<double>()[at] -= w * std::log(w);
      const double factor = dropout_factor(p, b, h, i, j);
      if (factor == 0) continue;
      const double* v = p.v_row(b, h, j);
      for (int64_t d = 0; d < p.Dv; ++d) y[d] += factor * w * v[d];
    }
  });
  return f;
}

AttentionGradients attention_backward(const AttentionSpec& spec, const AttentionInputs& in,
                                      const AttentionUpstream& up) {
  const Problem p = make_problem(spec, in);
  const Masks masks(p);
  const Tensor dy = upstream(up.dy, "dy", {p.B, p.H, p.N, p.Dv});
  const Tensor drow_stat = upstream(up.drow_stat, "drow_stat", {p.B, p.H, p.N});
  const Tensor dentropy = upstream(up.dentropy, "dentropy", {p.B, p.H, p.N});
  const Tensor dmax_weight = upstream(up.dmax_weight, "dmax_weight", {p.B, p.H, p.N});
  const Tensor dcoverage = upstream(up.dcoverage, "dcoverage", {p.B, p.H, p.M});
  Gradients g = zero_gradients(p, in);

  for_each_row(p, [&](int64_t b, int64_t h, int64_t i) {
    const Row row = make_row(p, masks, b, h, i);
    if (row.keys.empty()) return;
    std::vector<double> dp(row.keys.size(), 0);
    for (size_t t = 0; t < row.keys.size(); ++t) {
      if (!row.weights.takes_part[t]) continue;
      const int64_t j = row.keys[t];
      const double w = row.weights.p[t];
      dp[t] += value_or_zero(dcoverage, b, h, j);
      // −d(p log p)/dp = −log p − 1; the 1 is the same for all keys, and Σdp = 0 removes it.
      if (w != 0) dp[t] -= value_or_zero(dentropy, b, h, i) * std::log(w);
      const double factor = dropout_factor(p, b, h, i, j);
      if (!dy.defined() || factor == 0) continue;
      const double* dy_row = dy.data<double>() + ((b * p.H + h) * p.N + i) * p.Dv;
      const double* v = p.v_row(b, h, j);
      double* dv = g.dv.data<double>() + p.kv_row(b, h, j) * p.Dv;
      for (int64_t d = 0; d < p.Dv; ++d) {
        dp[t] += factor * dy_row[d] * v[d];
        dv[d] += factor * w * dy_row[d];
      }
    }
    dp[largest_weight(row)] += value_or_zero(dmax_weight, b, h, i);
    const double dstat = value_or_zero(drow_stat, b, h, i);
    const Normalizer normalizer = normalizer_of(p.spec.normalizer, h);
    const std::vector<double> ds = normalize_backward(normalizer, row.weights, dp, dstat);
    if (const auto* e = std::get_if<Entmax>(&normalizer)) {
      g.dalpha.data<double>()[g.dalpha.numel() == 1 ? 0 : h] +=
          entmax_alpha_gradient(e->alpha, row.scores, row.weights, dp, dstat);
    }
    for (size_t t = 0; t < row.keys.size(); ++t) {
      if (row.weights.takes_part[t]) pair_score_backward(p, masks, b, h, i, row.keys[t], ds[t], g);
    }
  });

  AttentionGradients out;
  out.dq = g.dq, out.dk = g.dk, out.dv = g.dv;
  out.dbias = g.dbias;
  out.dslopes = g.dslopes;
  out.dtable1d = g.dtable1d;
  out.dtable2d = g.dtable2d;
  out.dscore_w = g.dscore_w;
  out.dscale = g.dscale;
  out.dalpha = g.dalpha;
  return out;
}

}  // namespace foci::reference
