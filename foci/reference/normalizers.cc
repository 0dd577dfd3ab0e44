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

// entmax, 1 < α ≤ 2: the gap t = (α−1)max − τ between the largest score and τ. For
// z = (α−1)(s − max), Σ [z + t]₊^P with P = 1/(α−1) grows from 0 at t = 0 to ≥ 1 at t = 1;
// bisection until two neighbouring doubles are left.
double entmax_gap(const std::vector<double>& z, double power) {
  double low = 0, high = 1;
  while (true) {
    const double middle = low + (high - low) / 2;
    if (middle <= low || middle >= high) return high;
    double sum = 0;
    for (double x : z) sum += x + middle > 0 ? std::pow(x + middle, power) : 0;
    (sum >= 1 ? high : low) = middle;
  }
}

// entmax, α > 2. τ can lie nearer to a score than doubles lie to each other, and the weight of that
// score still be large: a distance of 1e-60 is a weight of 0.06 at α = 50. So what is looked for is
// the smallest score v that has weight, and that weight w: with c = α−1, τ = c·v − w^c, and
//   p_j = (c·(s_j − v) + w^c)^(1/c).
struct Smallest {
  double score, weight;
};

// Σ over scores ≥ v of the weights that v and w give.
double sum_above(const std::vector<double>& s, double v, double w, double c) {
  const double delta = std::pow(w, c);
  double sum = 0;
  for (double x : s) {
    if (x >= v) sum += x == v ? w : std::pow(c * (x - v) + delta, 1 / c);
  }
  return sum;
}

// v is the lowest score for which those above it leave something, and Σ grows with w.
Smallest entmax_smallest(const std::vector<double>& s, double c) {
  std::vector<double> scores = s;
  std::sort(scores.begin(), scores.end(), std::greater<>());
  scores.erase(std::unique(scores.begin(), scores.end()), scores.end());
  size_t in = 0, out = scores.size();
  while (out - in > 1) {
    const size_t middle = in + (out - in) / 2;
    (sum_above(s, scores[middle], 0, c) < 1 ? in : out) = middle;
  }
  const double v = scores[in];
  double low = 0, high = 1;
  while (true) {
    const double middle = low + (high - low) / 2;
    if (middle <= low || middle >= high) return {v, high};
    (sum_above(s, v, middle, c) >= 1 ? high : low) = middle;
  }
}

// p = [(α−1)s − τ]₊^(1/(α−1)), and ln p^(2−α), from differences of scores.
void sparse_map(const std::vector<double>& s, double alpha, bool sparsemax, RowWeights& row) {
  const double m = largest(s), c = alpha - 1, power = 1 / c;
  row.log_factor.assign(s.size(), 0);
  if (alpha > 2) {
    const auto [v, w] = entmax_smallest(s, c);
    const double delta = std::pow(w, c);
    for (size_t j = 0; j < s.size(); ++j) {
      row.takes_part[j] = s[j] >= v;
      if (s[j] < v) continue;
      const double over = c * (s[j] - v) + delta;
      row.p[j] = s[j] == v ? w : std::pow(over, power);
      row.log_factor[j] = s[j] == v ? (1 - c) * std::log(w) : (power - 1) * std::log(over);
    }
    row.statistic = c * v - delta;
    return;
  }
  std::vector<double> z(s.size());
  for (size_t j = 0; j < s.size(); ++j) z[j] = c * (s[j] - m);
  const double gap = sparsemax ? -sparsemax_threshold(z) : entmax_gap(z, power);
  for (size_t j = 0; j < s.size(); ++j) {
    const double over = std::max(z[j] + gap, 0.0);
    row.p[j] = sparsemax ? over : std::pow(over, power);
    row.takes_part[j] = row.p[j] > 0;
    if (row.takes_part[j] && !sparsemax) row.log_factor[j] = (power - 1) * std::log(over);
  }
  row.statistic = c * m - gap;
}

// ds of a sparse map: ds_j = f_j (dp_j − Σ f dp/Σf) with f = p^(2−α) on the support. For large α
// the f of the smallest weight outgrows all others, and what the others leave of its gradient is
// the difference of numbers almost equal; so dp is taken against that key's, and f as exponents.
std::vector<double> sparse_backward(const RowWeights& row, double per_statistic,
                                    const std::vector<double>& dp, double dstatistic) {
  const std::vector<double>& log_f = row.log_factor;
  std::vector<double> ds(row.p.size(), 0);
  size_t first = ds.size();  // of the largest f
  for (size_t j = 0; j < ds.size(); ++j) {
    if (row.takes_part[j] && (first == ds.size() || log_f[j] > log_f[first])) first = j;
  }
  if (first == ds.size()) return ds;
  const double origin = std::isfinite(dp[first]) ? dp[first] : 0;
  double most = -std::numeric_limits<double>::infinity();  // of log_f where dp is not the origin
  double sum = 0;                                          // Σf in units of the largest
  for (size_t j = 0; j < ds.size(); ++j) {
    if (!row.takes_part[j]) continue;
    if (dp[j] != origin) most = std::max(most, log_f[j]);
    sum += std::exp(log_f[j] - log_f[first]);
  }
  double mean = 0;  // in units of e^(most − log_f[first])
  for (size_t j = 0; j < ds.size(); ++j) {
    if (row.takes_part[j] && dp[j] != origin) {
      mean += std::exp(log_f[j] - most) * (dp[j] - origin) / sum;
    }
  }
  for (size_t j = 0; j < ds.size(); ++j) {
    if (!row.takes_part[j]) continue;
    const double below = log_f[j] - log_f[first];
    if (dp[j] != origin) {
      const double x = dp[j] - origin - std::exp(most - log_f[first]) * mean;
      ds[j] = x == 0 ? 0 : std::exp(log_f[j]) * x;
    } else if (mean != 0) {
      ds[j] = -std::exp(below + most) * mean;
    }
    ds[j] += dstatistic * per_statistic * std::exp(below) / sum;
  }
  return ds;
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
  std::vector<double> ds(row.p.size(), 0);
  if (std::any_of(row.p.begin(), row.p.end(), [](double p) { return std::isnan(p); })) {
    ds.assign(ds.size(), std::numeric_limits<double>::quiet_NaN());
    return ds;
  }
  if (alpha > 1) {
    if (row.log_factor.size() == row.p.size()) {
      return sparse_backward(row, alpha - 1, dp, dstatistic);
    }
    RowWeights whole = row;  // weights that somebody else made
    for (double p : row.p) whole.log_factor.push_back((2 - alpha) * std::log(p));
    return sparse_backward(whole, alpha - 1, dp, dstatistic);
  }
  double sum = 0, mean = 0;
  for (size_t j = 0; j < ds.size(); ++j) {
    if (!row.takes_part[j]) continue;
    sum += row.p[j];
    mean += row.p[j] * dp[j];
  }
  mean /= sum;
  for (size_t j = 0; j < ds.size(); ++j) {
    if (row.takes_part[j]) ds[j] = row.p[j] * (dp[j] - mean) + dstatistic * row.p[j] / sum;
  }
  return ds;
}

double entmax_alpha_gradient(double alpha, const std::vector<double>& s, const RowWeights& row,
                             const std::vector<double>& dp, double dstatistic) {
  // With β = α − 1, f = p^(2−α), F = Σf and H the entropy, differentiating β ln p_j = ln(β s_j − τ)
  // by α, under Σ∂p = 0, gives (Correia, Niculae & Martins 2019)
  //   β ∂p_j = p_j/β − p_j ln p_j − (1/β + H) f_j/F and ∂τ = τ/β + (1/β + H)/F.
  // Near α = 1 the 1/β² in it cancel: with u = p^β and a = (1 − u + u ln u)/β², whose mean ā is
  // weighted with f, ∂p_j = f_j (ā − a_j), and ∂τ = m + (1 − u_m)(1/β + H)/F − β ā u_m of the
  // largest score m.
  const double beta = alpha - 1, top = largest(s);
  const bool steep = alpha >= 2;
  const auto log_f = [&](size_t j) {
    return row.log_factor.empty() ? (2 - alpha) * std::log(row.p[j]) : row.log_factor[j];
  };
  const auto a = [&](size_t j) {
    const double log_u = beta * std::log(row.p[j]);
    return (log_u * std::exp(log_u) - std::expm1(log_u)) / (beta * beta);
  };
  double most = steep ? -std::numeric_limits<double>::infinity() : 0;  // f is counted in e^most
  for (size_t j = 0; j < s.size() && steep; ++j) {
    if (row.takes_part[j]) most = std::max(most, log_f(j));
  }
  std::vector<double> f(s.size(), 0);
  double sum = 0, entropy = 0, mean = 0;
  for (size_t j = 0; j < s.size(); ++j) {
    if (!row.takes_part[j]) continue;
    sum += f[j] = std::exp(log_f(j) - most);
    entropy -= row.p[j] * std::log(row.p[j]);
    mean += f[j] * a(j);
  }
  mean /= sum;
  const double share = (1 / beta + entropy) / sum;
  const double log_u = beta * std::log(*std::max_element(row.p.begin(), row.p.end()));
  double gradient =
      dstatistic * (steep ? row.statistic / beta + share * std::exp(-most)
                          : top - std::expm1(log_u) * share - beta * mean * std::exp(log_u));
  for (size_t j = 0; j < s.size(); ++j) {
    if (!row.takes_part[j]) continue;
    const double own = row.p[j] * (1 / beta - std::log(row.p[j]));
    gradient += dp[j] * (steep ? (own - share * f[j]) / beta : f[j] * (mean - a(j)));
  }
  return gradient;
}

}  // namespace foci::reference
