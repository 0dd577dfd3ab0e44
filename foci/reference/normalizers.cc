// Each normaliser as its definition reads, and its gradient.
#include "foci/reference/normalizers.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace foci::reference {
namespace {

double largest(const std::vector<double>& s) {
  return *std::max_element(s.begin(), s.end());
}

// Softmax over the scores marked in row.takes_part.
void softmax_of_part(const std::vector<double>& s, RowWeights& row) {
  const double m = largest(s);  // always takes part
  double sum = 0;
  for (size_t j = 0; j < s.size(); ++j) {
    if (row.takes_part[j]) sum += row.p[j] = std::exp(s[j] - m);
  }
  for (double& p : row.p) p /= sum;
  row.statistic = m + std::log(sum);
}

// The k largest; among equals (−0 is +0) the lowest index first.
void mark_top_k(const std::vector<double>& s, int64_t k, RowWeights& row) {
  std::vector<size_t> order(s.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return s[x] > s[y]; });
  row.takes_part.assign(s.size(), false);
  for (size_t n = 0; n < order.size() && static_cast<int64_t>(n) < k; ++n) {
    row.takes_part[order[n]] = true;
  }
}

// τ of sparsemax for scores whose largest is 0 (Martins & Astudillo 2016, algorithm 1): the support
// is the longest prefix of the sorted scores whose members exceed the τ they would give.
double sparsemax_threshold(std::vector<double> z) {
  std::sort(z.begin(), z.end(), std::greater<>());
  double sum = 0, tau = -1;
  for (size_t n = 0; n < z.size(); ++n) {
    sum += z[n];
    const double candidate = (sum - 1) / static_cast<double>(n + 1);
    if (z[n] <= candidate) break;
    tau = candidate;
  }
  return tau;
}

// τ of entmax for z = (α−1)s whose largest is 0: Σ [z − τ]₊^power falls from ≥ 1 at −1 to 0 at 0;
// bisection until two neighbouring doubles are left.
double entmax_threshold(const std::vector<double>& z, double power) {
  double low = -1, high = 0;
  while (true) {
    const double middle = low + (high - low) / 2;
    if (middle <= low || middle >= high) return low;
    double sum = 0;
    for (double x : z) sum += x > middle ? std::pow(x - middle, power) : 0;
    (sum >= 1 ? low : high) = middle;
  }
}

// p = [(α−1)s − τ]₊^(1/(α−1)). Everything is shifted so that the largest score is 0.
void sparse_map(const std::vector<double>& s, double alpha, bool sparsemax, RowWeights& row) {
  const double m = largest(s);
  std::vector<double> z(s.size());
  for (size_t j = 0; j < s.size(); ++j) z[j] = (alpha - 1) * (s[j] - m);
  const double power = 1 / (alpha - 1);
  const double tau = sparsemax ? sparsemax_threshold(z) : entmax_threshold(z, power);
  for (size_t j = 0; j < s.size(); ++j) {
    const double over = std::max(z[j] - tau, 0.0);
    row.p[j] = sparsemax ? over : std::pow(over, power);
    row.takes_part[j] = row.p[j] > 0;
  }
  row.statistic = (alpha - 1) * m + tau;
}

}  // namespace

RowWeights normalize(const Normalizer& normalizer, const std::vector<double>& s) {
  RowWeights row;
  row.p.assign(s.size(), 0);
  row.takes_part.assign(s.size(), true);
  const bool has_nan = std::any_of(s.begin(), s.end(), [](double x) { return std::isnan(x); });
  if (has_nan || std::isinf(largest(s))) {
    row.statistic = std::numeric_limits<double>::quiet_NaN();
    row.p.assign(s.size(), row.statistic);
    return row;
  }
  std::visit(overloaded{[&](const Softmax&) { softmax_of_part(s, row); },
                        [&](const Sparsemax&) { sparse_map(s, 2, true, row); },
                        [&](const Entmax& e) { sparse_map(s, e.alpha, false, row); },
                        [&](const TopK& t) {
                          mark_top_k(s, t.k, row);
                          softmax_of_part(s, row);
                        }},
             normalizer);
  return row;
}

std::vector<double> normalize_backward(const Normalizer& normalizer, const RowWeights& row,
                                       const std::vector<double>& dp, double dstatistic) {
  // Every map here has ∂p_j/∂s_k = g_j (δ_jk − g_k / Σg): for softmax g = p, since Σp = 1; for
  // p = [(α−1)s − τ]₊^(1/(α−1)) differentiating gives dp_j = p_j^(2−α) (ds_j − dτ/(α−1)), so
  // g = p^(2−α) on the support, and Σdp = 0 gives ∂τ/∂s_k = (α−1) g_k / Σg. The log-sum-exp has
  // ∂/∂s_k = p_k = g_k / Σg.
  const double alpha = std::visit(
      overloaded{[](const Softmax&) { return 1.0; }, [](const Sparsemax&) { return 2.0; },
                 [](const Entmax& e) { return e.alpha; }, [](const TopK&) { return 1.0; }},
      normalizer);
  const double per_statistic = alpha == 1 ? 1 : alpha - 1;
  std::vector<double> g(row.p.size(), 0);
  double sum = 0, mean = 0;
  for (size_t j = 0; j < g.size(); ++j) {
    if (!row.takes_part[j]) continue;
    g[j] = alpha == 1 ? row.p[j] : std::pow(row.p[j], 2 - alpha);
    sum += g[j];
    mean += g[j] * dp[j];
  }
  mean /= sum;
  std::vector<double> ds(g.size(), 0);
  for (size_t j = 0; j < g.size(); ++j) {
    if (row.takes_part[j]) ds[j] = g[j] * (dp[j] - mean) + dstatistic * per_statistic * g[j] / sum;
  }
  return ds;
}

double entmax_alpha_gradient(double alpha, const std::vector<double>& s, const RowWeights& row,
                             const std::vector<double>& dp, double dstatistic) {
  // With β = α − 1 and β ln p_j = ln(β s_j − τ), differentiating by α gives
  //   β ∂p_j = f_j (s_j − τ') − p_j ln p_j,  f = p^(2−α),
  // and Σ∂p = 0 makes τ' = (Σ f_j s_j + H) / Σf, H the entropy (Correia, Niculae & Martins 2019).
  // Where f grows without bound as p falls to 0, β s_j = p_j^β + τ takes it out:
  //   β ∂p_j = p_j/β − p_j ln p_j − (1/β + H) f_j/Σf and τ' = τ/β + (1/β + H)/Σf.
  const double beta = alpha - 1, top = largest(s);
  const bool steep = alpha >= 2;
  double least = 1, entropy = 0;
  for (size_t j = 0; j < s.size(); ++j) {
    if (!row.takes_part[j]) continue;
    least = std::min(least, row.p[j]);
    entropy -= row.p[j] * std::log(row.p[j]);
  }
  const double unit = steep ? least : 1;  // f is counted in units of unit^(2−α)
  std::vector<double> f(s.size(), 0);
  double sum = 0, moment = 0;
  for (size_t j = 0; j < s.size(); ++j) {
    if (!row.takes_part[j]) continue;
    sum += f[j] = std::pow(row.p[j] / unit, 2 - alpha);
    moment += f[j] * (s[j] - top);
  }
  const double slope = steep ? (row.statistic - beta * top) / beta +
                                   (1 / beta + entropy) / sum * std::pow(unit, alpha - 2)
                             : (moment + entropy) / sum;  // τ' of scores whose largest is 0
  double gradient = dstatistic * (top + slope);
  for (size_t j = 0; j < s.size(); ++j) {
    if (!row.takes_part[j]) continue;
    const double own = row.p[j] * std::log(row.p[j]);
    const double moved =
        steep ? row.p[j] / beta - (1 / beta + entropy) * f[j] / sum : f[j] * (s[j] - top - slope);
    gradient += dp[j] * (moved - own) / beta;
  }
  return gradient;
}

}  // namespace foci::reference
