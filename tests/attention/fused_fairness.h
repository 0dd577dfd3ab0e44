// Which rows of a fused case float32 can decide: the oracle's choices are taken in double, and
// where they hang on less than the rounding of a float32 score, no float32 result can be held to
// them.
//
// With x = (α−1)s − τ a sparse map's weight is p = x^P, P = 1/(α−1), and its gradient is a sum of
// f·(…) with f = p^(2−α) = x^((2−α)P); the entropy's gradient is a sum of f·ln p. If scores are off
// by ε, then x is off by δ = 2(α−1)ε (τ moves too), and with K = x^((2−α)P − 1), least x taken,
//   weights by       P·x·K·δ        bounded for α ≤ 2
//   gradients by     |2−α|·P·K·δ    bounded for α ≤ 1.5
//   entropy's by     P·K·(1 + |(2−α) ln p|)·δ
// Where one of these exceeds what the tolerance leaves, the row is left out of that comparison.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/reference/attention.h"

namespace foci::testing {

struct RowFairness {
  bool forward = true;  // y, weights, support and all statistics
  bool gradient = true;
  bool entropy_gradient = true;
  bool largest = true;  // which key has the largest weight
};

// Scores that are equal in double are taken to be equal in float32: the cases make them so.
inline RowFairness row_fairness(const AttentionSpec& spec, const reference::Forward& f, int64_t b,
                                int64_t h, int64_t i, double tolerance, double gradient_tolerance) {
  RowFairness fair;
  std::vector<double> seen;
  double size = 0.1;
  for (int64_t j = 0; j < f.scores.dim(3); ++j) {
    if (!f.allowed.at<bool>(b, h, i, j)) continue;
    const double s = f.scores.at<double>(b, h, i, j);
    if (!std::isfinite(s)) return fair;  // NaN everywhere
    seen.push_back(s);
    size = std::max(size, std::abs(s));
  }
  if (seen.size() < 2) return fair;
  std::sort(seen.begin(), seen.end(), std::greater<>());
  const double error = 0x1p-21 * size;
  const auto decided = [&](double gap) { return gap == 0 || gap > 2 * error; };
  fair.largest = decided(seen[0] - seen[1]);
  if (const auto* t = std::get_if<TopK>(&spec.normalizer)) {
    const auto k = static_cast<uint64_t>(t->k);
    if (k < seen.size()) fair.forward = decided(seen[k - 1] - seen[k]);
  }
  const double alpha = std::holds_alternative<Sparsemax>(spec.normalizer)
                           ? 2
                           : (std::holds_alternative<Entmax>(spec.normalizer)
                                  ? std::get<Entmax>(spec.normalizer).alpha
                                  : 0);
  if (alpha > 0) {
    const double tau = f.out.row_stat.at<double>(b, h, i);
    const double power = 1 / (alpha - 1);
    const double delta = 2 * (alpha - 1) * error;
    for (double s : seen) {
      const double x = (alpha - 1) * s - tau;
      if (std::abs(x) <= delta) fair.forward = false;
      if (x <= 0) break;
      const double k = std::pow(x, (2 - alpha) * power - 1) * delta;
      const double log_p = power * std::log(x);
      if (alpha > 2 && power * x * k > tolerance) fair.forward = false;
      if (std::abs(2 - alpha) * power * k > gradient_tolerance) fair.gradient = false;
      if (power * k * (1 + std::abs((2 - alpha) * log_p)) > gradient_tolerance) {
        fair.entropy_gradient = false;
      }
    }
  }
  fair.gradient = fair.gradient && fair.forward;
  fair.entropy_gradient = fair.entropy_gradient && fair.gradient;
  return fair;
}

// The rows of a case; upstream gradients that cannot be compared are taken away, and so is
// dcoverage where a whole row's gradient cannot be.
struct FusedFairness {
  std::vector<RowFairness> rows;  // [B·H·N]
  int64_t unfair = 0;             // rows whose forward or gradient is left out

  FusedFairness(const AttentionSpec& spec, const reference::Forward& f, double tolerance,
           double gradient_tolerance, AttentionUpstream& up) {
    const int64_t B = f.out.y.dim(0), H = f.out.y.dim(1), N = f.out.y.dim(2);
    for (Tensor* t : {&up.dy, &up.drow_stat, &up.dentropy, &up.dmax_weight}) {
      if (t->defined()) *t = t->clone();
    }
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t i = 0; i < N; ++i) {
          const RowFairness fair = row_fairness(spec, f, b, h, i, tolerance, gradient_tolerance);
          rows.push_back(fair);
          const auto clear = [&](const Tensor& t) {
            if (t.defined()) t.select(0, b).select(0, h).select(0, i).fill(0);
          };
          if (!fair.entropy_gradient) clear(up.dentropy);
          if (!fair.largest) clear(up.dmax_weight);
          if (fair.gradient) continue;
          ++unfair;
          clear(up.dy);
          clear(up.drow_stat);
          clear(up.dmax_weight);
        }
      }
    }
    if (unfair > 0) up.dcoverage = Tensor();
  }

  // Copies the expected values of rows that are not compared over the actual ones.
  void excuse(const AttentionOutputs& expected, AttentionOutputs& actual) const {
    const int64_t H = expected.y.dim(1), N = expected.y.dim(2);
    bool all = true;
    for (size_t n = 0; n < rows.size(); ++n) {
      const auto row = static_cast<int64_t>(n);
      const auto copy = [&](const Tensor& from, const Tensor& to) {
        if (!to.defined()) return;
        to.select(0, row / (H * N))
            .select(0, row / N % H)
            .select(0, row % N)
            .copy_from(from.select(0, row / (H * N)).select(0, row / N % H).select(0, row % N));
      };
      if (!rows[n].largest) copy(expected.max_key, actual.max_key);
      if (rows[n].forward) continue;
      all = false;
      copy(expected.y, actual.y);
      copy(expected.row_stat, actual.row_stat);
      copy(expected.entropy, actual.entropy);
      copy(expected.max_weight, actual.max_weight);
      copy(expected.max_key, actual.max_key);
      copy(expected.support, actual.support);
    }
    if (!all && actual.coverage.defined()) actual.coverage.copy_from(expected.coverage);
  }
};

}  // namespace foci::testing
