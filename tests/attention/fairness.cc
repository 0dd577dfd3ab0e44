// Finds the rows that hang on a rounding, and takes them out of the comparison.
#include "attention/fairness.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace foci::testing {
namespace {

// Scores that are equal in double are taken to be equal in float32: the cases make them so.
RowFairness row_fairness(const AttentionSpec& spec, const reference::Forward& f, int64_t b,
                         int64_t h, int64_t i, const CaseTolerance& tolerance) {
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
  const double error = 8 * kEps * size;
  // Whether every other score is clearly above or below this one, or equal to it. (Two that a
  // softcap makes equal in double may have a third so near that all are equal in float32.)
  const auto decided = [&](double score) {
    return std::none_of(seen.begin(), seen.end(), [&](double s) {
      return s != score && std::abs(s - score) <= 2 * error;
    });
  };
  fair.largest = decided(seen[0]);
  if (const auto* t = std::get_if<TopK>(&spec.normalizer)) {
    const auto k = static_cast<uint64_t>(t->k);
    if (k < seen.size()) fair.forward = decided(seen[k - 1]) && decided(seen[k]);
  }
  double alpha = 0;
  if (std::holds_alternative<Sparsemax>(spec.normalizer)) alpha = 2;
  const Normalizer normalizer = normalizer_of(spec.normalizer, h);
  if (const auto* e = std::get_if<Entmax>(&normalizer)) alpha = e->alpha;
  if (alpha > 0) {
    const double tau = f.out.row_stat.at<double>(b, h, i);
    const double power = 1 / (alpha - 1);
    const double delta = 2 * (alpha - 1) * error;
    double entropy_error = 0;
    for (double s : seen) {
      const double x = (alpha - 1) * s - tau;
      if (std::abs(x) <= delta) fair.forward = false;
      if (x <= 0) break;
      const double k = std::pow(x, (2 - alpha) * power - 1) * delta;
      const double log_p = power * std::log(x);
      if (alpha > 2 && power * x * k > tolerance.value / 2) fair.forward = false;
      if (std::abs(2 - alpha) * power * k > tolerance.gradient / 2) fair.gradient = false;
      if (power * k * (1 + std::abs((2 - alpha) * log_p)) > tolerance.gradient / 2) {
        fair.entropy_gradient = false;
      }
      entropy_error += power * x * k * std::abs(log_p);
    }
    fair.entropy = entropy_error <= 16 * tolerance.value;
  }
  fair.gradient = fair.gradient && fair.forward;
  fair.entropy_gradient = fair.entropy_gradient && fair.gradient;
  return fair;
}

// Row n of a [B, H, N, …] tensor.
Tensor row_of(const Tensor& t, int64_t n) {
  const int64_t H = t.dim(1), N = t.dim(2);
  return t.select(0, n / (H * N)).select(0, n / N % H).select(0, n % N);
}

}  // namespace

Fairness make_fair(SweepCase& c, const reference::Forward& f) {
  const CaseTolerance tolerance = case_tolerance(c.spec, c.in);
  const int64_t H = f.out.y.dim(1), N = f.out.y.dim(2);
  AttentionUpstream& up = c.up;
  for (Tensor* t : {&up.dy, &up.drow_stat, &up.dentropy, &up.dmax_weight}) {
    if (t->defined()) *t = t->clone();
  }
  Fairness fairness;
  for (int64_t n = 0; n < f.out.row_stat.numel(); ++n) {
    const RowFairness fair = row_fairness(c.spec, f, n / (H * N), n / N % H, n % N, tolerance);
    fairness.rows.push_back(fair);
    const auto clear = [&](const Tensor& t) {
      if (t.defined()) row_of(t, n).fill(0);
    };
    if (!fair.entropy_gradient) clear(up.dentropy);
    if (!fair.largest) clear(up.dmax_weight);
    if (fair.gradient) continue;
    ++fairness.count;
    clear(up.dy);
    clear(up.drow_stat);
    clear(up.dmax_weight);
  }
  if (fairness.count > 0) up.dcoverage = Tensor();
  return fairness;
}

void excuse(const Fairness& fairness, const AttentionOutputs& expected, AttentionOutputs& actual) {
  bool all = true;
  for (size_t n = 0; n < fairness.rows.size(); ++n) {
    const auto row = static_cast<int64_t>(n);
    const auto copy = [&](const Tensor& from, const Tensor& to) {
      if (to.defined()) row_of(to, row).copy_from(row_of(from, row));
    };
    if (!fairness.rows[n].largest) copy(expected.max_key, actual.max_key);
    if (!fairness.rows[n].entropy) copy(expected.entropy, actual.entropy);
    if (fairness.rows[n].forward) continue;
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

}  // namespace foci::testing
