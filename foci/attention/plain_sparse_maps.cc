// One row of sparsemax or entmax, p = [(α−1)s − τ]₊^(1/(α−1)), from scores to weights and back, in
// double.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "foci/attention/plain.h"

namespace foci::plain {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// [z]₊^power, its derivative's factor left out.
double power_of(double z, double power) {
  if (power == 1) return z;
  if (power == 2) return z * z;
  return std::pow(z, power);
}

// ---- α ≤ 2 --------------------------------------------------------------------------------------

// τ with Σ [z − τ]₊^power = 1, where the largest z is 0. z is emptied of what cannot take part.
double threshold(double power, std::vector<double>& z, std::vector<double>& rest) {
  if (power == 1) {
    // Michelot 1986: project, drop what fell below, again; exact after finitely many steps.
    for (;;) {
      double sum = 0;
      for (double x : z) sum += x;
      const double tau = (sum - 1) / static_cast<double>(z.size());
      rest.clear();
      for (double x : z) {
        if (x > tau) rest.push_back(x);
      }
      if (rest.size() == z.size() || rest.empty()) return tau;
      std::swap(z, rest);
    }
  }
  // Newton's method inside a bracket: the sum is ≥ 1 at −1 and 0 at 0, and falls between.
  double low = -1, high = 0, tau = -1;
  for (int step = 0; step < 200; ++step) {
    double sum = 0, slope = 0;
    for (double x : z) {
      if (x <= tau) continue;
      const double over = x - tau;
      const double p = power_of(over, power);
      sum += p;
      slope += power * p / over;
    }
    (sum >= 1 ? low : high) = tau;
    double next = tau + (sum - 1) / slope;
    if (!(next > low && next < high)) next = low + (high - low) / 2;
    if (next == tau || next <= low || next >= high ||
        std::abs(next - tau) <= 4 * std::numeric_limits<double>::epsilon()) {
      return next;
    }
    tau = next;
  }
  return tau;
}

SparseRow gentle_map(double alpha, const Sight& sight, float max, bool wants_entropy, float* row,
                     uint8_t* part, RowScratch& scratch) {
  const double power = 1 / (alpha - 1);
  std::vector<double>& z = scratch.candidates;
  z.clear();
  // Only z > −1 can have weight, since τ ≥ −1.
  sight.for_each([&](int64_t j) {
    const double x = (alpha - 1) * (double(row[j]) - max);
    if (x > -1) z.push_back(x);
  });
  const double tau = threshold(power, z, scratch.rest);
  SparseRow s{.tau = (alpha - 1) * max + tau, .largest = power_of(-tau, power)};
  sight.for_each([&](int64_t j) {
    const double over = (alpha - 1) * (double(row[j]) - max) - tau;
    const float p = over > 0 ? static_cast<float>(power_of(over, power)) : 0.0f;
    row[j] = p;
    // A weight is above 0 where its score is above τ, also where float32 rounds it to 0 (α near 1).
    if (over > 0) ++s.support;
    if (p == 0) return;
    if (part) part[j] = 1;
    if (wants_entropy) s.entropy -= p * std::log(double(p));
  });
  return s;
}

// ---- α > 2 --------------------------------------------------------------------------------------
//
// τ can lie nearer to a score than numbers lie to each other, and the weight of that score still be
// large: a distance of 1e-60 is a weight of 0.06 at α = 50. So what is looked for is the smallest
// score v that has weight, and that weight w: with c = α−1, τ = c·v − w^c and
//   p_j = (c·(s_j − v) + w^c)^(1/c).

struct Sums {
  double sum, slope;  // Σ over scores ≥ v, and its derivative for w
};
// `scores` descend from the largest; those equal to v = scores[last] have weight w.
Sums sum_to(const std::vector<double>& scores, size_t last, double w, double c) {
  const double v = scores[last], delta = std::pow(w, c), power = 1 / c;
  Sums s{0, 0};
  for (size_t n = 0; n <= last; ++n) {
    if (scores[n] == v) {
      s.sum += w * static_cast<double>(last + 1 - n);
      s.slope += static_cast<double>(last + 1 - n);
      break;
    }
    const double over = c * (scores[n] - v) + delta, p = std::pow(over, power);
    s.sum += p;
    if (delta > 0) s.slope += p / over * (delta / w);
  }
  return s;
}

SparseRow steep_map(double alpha, const Sight& sight, float max, bool wants_entropy, float* row,
                    uint8_t* part, RowScratch& scratch) {
  const double c = alpha - 1, power = 1 / c;
  std::vector<double>& scores = scratch.candidates;
  scores.clear();
  sight.for_each([&](int64_t j) {
    if (c * (double(row[j]) - max) > -1) scores.push_back(row[j]);
  });
  std::sort(scores.begin(), scores.end(), std::greater<>());
  // The lowest score for which those above it leave something; of equals, the last.
  const auto last_equal = [&](size_t n) {
    const auto end = std::upper_bound(scores.begin(), scores.end(), scores[n], std::greater<>());
    return static_cast<size_t>(end - scores.begin()) - 1;
  };
  size_t in = last_equal(0), out = scores.size();
  while (out - in > 1) {
    const size_t middle = in + (out - in) / 2, last = last_equal(middle);
    if (sum_to(scores, last, 0, c).sum < 1) {
      in = last;
    } else {  // equals are out together
      out = middle;
      while (out > 0 && scores[out - 1] == scores[middle]) --out;
    }
  }
  const double v = scores[in];
  // Σ is convex in w: Newton's method falls to the root from above.
  const Sums start = sum_to(scores, in, 0, c);
  double w = (1 - start.sum) / start.slope;
  for (int step = 0; step < 100; ++step) {
    const Sums s = sum_to(scores, in, w, c);
    const double next = w - (s.sum - 1) / s.slope;
    if (!(next < w) || next <= 0) break;
    w = next;
  }
  const double delta = std::pow(w, c);
  const auto weight = [&](double s) { return s == v ? w : std::pow(c * (s - v) + delta, power); };
  SparseRow r{.tau = c * v - delta, .largest = weight(max)};
  sight.for_each([&](int64_t j) {
    const double s = row[j];
    row[j] = s >= v ? static_cast<float>(weight(s)) : 0.0f;
    if (s < v) return;
    ++r.support;
    if (part) part[j] = 1;
    if (wants_entropy) r.entropy -= row[j] * std::log(double(row[j]));
    if (scratch.wants_factors) {
      scratch.log_factors[j] =
          s == v ? (1 - c) * std::log(w) : (power - 1) * std::log(c * (s - v) + delta);
    }
  });
  return r;
}

// Also where p^(2−α) is too large for any number: dp is taken against that of the largest factor,
// whose gradient is what the others leave.
void steep_backward(double c, const Sight& part, float drow_stat, const float* p,
                    const double* log_factors, float* g) {
  const auto log_f = [&](int64_t j) {
    return log_factors ? log_factors[j] : (1 - c) * std::log(double(p[j]));
  };
  double largest = -kInf, most = -kInf, origin = 0;
  part.for_each([&](int64_t j) {
    if (const double x = log_f(j); x > largest) {
      largest = x;
      origin = g[j];
    }
  });
  if (!std::isfinite(origin)) origin = 0;
  double sum = 0, mean = 0;
  part.for_each([&](int64_t j) {
    const double x = log_f(j);
    sum += std::exp(x - largest);
    if (g[j] != origin) most = std::max(most, x);
  });
  part.for_each([&](int64_t j) {
    if (g[j] != origin) mean += std::exp(log_f(j) - most) * (g[j] - origin);
  });
  mean /= sum;
  const double shift = std::exp(most - largest) * mean, stat = drow_stat * c / sum;
  part.for_each([&](int64_t j) {
    const double x = log_f(j);
    double ds = std::exp(x - largest) * stat;
    if (g[j] != origin) {
      const double over = g[j] - origin - shift;
      if (over != 0) ds += std::exp(x) * over;
    } else if (mean != 0) {
      ds -= std::exp(x - largest + most) * mean;
    }
    g[j] = static_cast<float>(ds);
  });
}

}  // namespace

SparseRow sparse_map(double alpha, const Sight& sight, float max, bool wants_entropy, float* row,
                     uint8_t* part, RowScratch& scratch) {
  return alpha > 2 ? steep_map(alpha, sight, max, wants_entropy, row, part, scratch)
                   : gentle_map(alpha, sight, max, wants_entropy, row, part, scratch);
}

void sparse_backward(double alpha, const Sight& part, float drow_stat, const float* p,
                     const double* log_factors, float* g) {
  bool undefined = false;
  part.for_each([&](int64_t j) { undefined = undefined || std::isnan(p[j]); });
  if (undefined) {
    part.for_each([&](int64_t j) { g[j] = std::numeric_limits<float>::quiet_NaN(); });
    return;
  }
  if (alpha > 2) return steep_backward(alpha - 1, part, drow_stat, p, log_factors, g);
  const auto factor = [&](float x) {
    if (alpha == 2) return 1.0;
    if (alpha == 1.5) return std::sqrt(double(x));
    return std::pow(double(x), 2 - alpha);
  };
  double sum = 0, mean = 0;
  part.for_each([&](int64_t j) {
    const double f = factor(p[j]);
    sum += f;
    mean += f * g[j];
  });
  const double shift = (double(drow_stat) * (alpha - 1) - mean) / sum;
  part.for_each([&](int64_t j) { g[j] = static_cast<float>(factor(p[j]) * (g[j] + shift)); });
}

double alpha_gradient(double alpha, const Sight& part, float max, float drow_stat, float dentropy,
                      const float* p, const double* log_factors, const float* g) {
  // With β = α − 1, u = p^β, f = p^(2−α) = p/u, F = Σf and H the entropy, differentiating
  // β ln p_j = ln(β s_j − τ) gives
  //   ∂p_j/∂α = (p_j (1/β − ln p_j) − (1/β + H) f_j/F)/β.
  // Near α = 1 the 1/β² in it cancel: it is f_j (ā − a_j), a = (1 − u(1 − ln u))/β², whose mean ā
  // is weighted with f. u_m being that of the largest score m,
  //   ∂τ/∂α = m + (1 − u_m)(1/β + H)/F − β ā u_m.
  if (part.count == 0) return 0;
  const double beta = alpha - 1;
  const bool steep = alpha >= 2;
  const auto a_of = [&](double log_p) {
    const double z = -beta * log_p;
    if (std::abs(z) > 0.1) return (1 - std::exp(-z) * (1 + z)) / (beta * beta);
    double term = 1, series = 0;  // Σ (−z)^k (k + 1)/(k + 2)!
    for (int k = 0; k < 10; ++k) {
      series += term * (k + 1);
      term *= -z / (k + 3);
    }
    return log_p * log_p * series / 2;
  };
  const auto log_factor = [&](int64_t j) {
    return log_factors ? log_factors[j] : (2 - alpha) * std::log(double(p[j]));
  };
  double most = -std::numeric_limits<double>::infinity();  // Σf is counted in units of the largest
  part.for_each([&](int64_t j) { most = std::max(most, log_factor(j)); });
  double sum = 0, entropy = 0, mean = 0, largest = 0;
  part.for_each([&](int64_t j) {
    const double log_p = std::log(double(p[j])), f = std::exp(log_factor(j) - most);
    sum += f;
    entropy -= p[j] * log_p;
    largest = p[j] > largest ? p[j] : largest;
    if (!steep) mean += f * a_of(log_p);
  });
  mean /= sum;
  const double shift = (1 / beta + entropy) / sum;  // times e^most: that of F
  double gradient = 0;
  part.for_each([&](int64_t j) {
    const double log_p = std::log(double(p[j])), f = std::exp(log_factor(j) - most);
    const double moved = steep ? (p[j] * (1 / beta - log_p) - shift * f) / beta
                               : f * std::exp(most) * (mean - a_of(log_p));
    gradient += moved * (g[j] - dentropy * log_p);
  });
  if (drow_stat != 0) {
    const double log_u = beta * std::log(largest), own = shift * std::exp(-most);
    const double moved = steep ? own - std::exp(log_u) / beta
                               : -std::expm1(log_u) * own - beta * mean * std::exp(log_u);
    gradient += drow_stat * (double(max) + moved);
  }
  return gradient;
}

}  // namespace foci::plain
