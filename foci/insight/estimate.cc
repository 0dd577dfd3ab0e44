// Intervals: Wilson's, for single answers or groups of them, and the bootstrap.
#include "foci/insight/estimate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "foci/core/error.h"
#include "foci/core/rng.h"

namespace foci::insight {
namespace {

// Keeps bootstrap draws apart from every other use of the same seed.
constexpr uint64_t kBootstrapStream = 0x626F6F74;  // "boot"

// The q-quantile of sorted values, linear between neighbours (type 7 of Hyndman and Fan).
double quantile(const std::vector<double>& sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

// What one group adds to a mean.
struct Group {
  double sum = 0;
  double count = 0;
};

std::vector<Group> grouped(std::span<const double> values, std::span<const int64_t> groups) {
  std::map<int64_t, Group> by_name;
  for (size_t i = 0; i < values.size(); ++i) {
    Group& g = by_name[groups[i]];
    g.sum += values[i];
    g.count += 1;
  }
  std::vector<Group> list;
  list.reserve(by_name.size());
  for (const auto& [name, group] : by_name) list.push_back(group);
  return list;
}

constexpr double kZ = 1.959963984540054;  // 97.5 % quantile of the normal distribution

// That of Student's distribution; the expansion in 1/df is right to 3e-4 from df = 5 on. Source:
// Abramowitz and Stegun, 26.7.5.
double student(double df) {
  constexpr double kFew[] = {12.7062047364, 4.30265272991, 3.18244630528, 2.7764451052};
  if (df < 5) return kFew[static_cast<int>(df) - 1];
  const double z2 = kZ * kZ;
  return kZ * (1 + (z2 + 1) / (4 * df) + ((5 * z2 + 16) * z2 + 3) / (96 * df * df) +
               (((3 * z2 + 19) * z2 + 17) * z2 - 15) / (384 * df * df * df));
}

// Wilson's interval around a share p of n observations, of which there need not be a whole number.
void set_wilson(Estimate& out, double p, double n) {
  const double centre = p + kZ * kZ / (2 * n);
  const double spread = kZ * std::sqrt(p * (1 - p) / n + kZ * kZ / (4 * n * n));
  const double divisor = 1 + kZ * kZ / n;
  out.value = p;
  // At p = 0 and 1 the bounds are exact; rounding must not push them past p.
  out.low = p == 0 ? 0 : std::max(0.0, (centre - spread) / divisor);
  out.high = p == 1 ? 1 : std::min(1.0, (centre + spread) / divisor);
}

Estimate bootstrap(const std::vector<Group>& groups, int64_t count, uint64_t seed, int resamples) {
  require(resamples >= 40, "bootstrap_mean: {} resamples; give 40 or more", resamples);
  Estimate out;
  if (groups.empty()) return out;
  const int64_t n = static_cast<int64_t>(groups.size());
  Group all;
  for (const Group& g : groups) {
    all.sum += g.sum;
    all.count += g.count;
  }
  out.value = all.sum / all.count;
  out.count = count;
  out.independent = n;
  if (n == 1) return out;
  Rng rng(seed, kBootstrapStream);
  std::vector<double> means(static_cast<size_t>(resamples));
  for (double& mean : means) {
    Group drawn;
    for (int64_t i = 0; i < n; ++i) {
      const Group& g = groups[static_cast<size_t>(rng.below(n))];
      drawn.sum += g.sum;
      drawn.count += g.count;
    }
    mean = drawn.sum / drawn.count;
  }
  std::sort(means.begin(), means.end());
  // A skewed sample may leave the mean outside its own percentiles; the interval must hold it.
  out.low = std::min(out.value, quantile(means, 0.025));
  out.high = std::max(out.value, quantile(means, 0.975));
  return out;
}

void check_finite(std::span<const double> values) {
  for (double v : values) require(std::isfinite(v), "bootstrap_mean: a value is {}", v);
}

}  // namespace

Estimate wilson(int64_t successes, int64_t count) {
  require(successes >= 0 && successes <= count, "wilson: {} successes of {}", successes, count);
  Estimate out;
  if (count == 0) return out;
  set_wilson(out, static_cast<double>(successes) / static_cast<double>(count),
             static_cast<double>(count));
  out.count = out.independent = count;
  return out;
}

Estimate share_of(std::span<const double> values, std::span<const int64_t> groups) {
  require(values.size() == groups.size(), "share_of: {} values, {} groups", values.size(),
          groups.size());
  Estimate out;
  if (values.empty()) return out;
  bool answers = true;  // each 0 or 1
  double sum = 0;
  for (double v : values) {
    require(v >= 0 && v <= 1, "share_of: a value is {}; shares lie in [0, 1]", v);
    answers = answers && (v == 0 || v == 1);
    sum += v;
  }
  const std::vector<Group> list = grouped(values, groups);
  const auto n = static_cast<double>(values.size()), g = static_cast<double>(list.size());
  if (answers && list.size() == values.size()) {
    return wilson(std::llround(sum), static_cast<int64_t>(values.size()));
  }
  const double p = std::min(1.0, sum / n);
  double squares = 0;
  for (const Group& group : list) squares += std::pow(group.sum - p * group.count, 2);
  double worth = g;
  // Sums of equal terms may differ by rounding; that is no variance.
  if (list.size() > 1 && p > 0 && p < 1 && squares > 1e-20 * n * n) {
    const double variance = g / (g - 1) * squares / (n * n);
    worth = std::clamp(p * (1 - p) / variance * std::pow(kZ / student(g - 1), 2), 1.0, n);
  }
  set_wilson(out, p, worth);
  out.count = static_cast<int64_t>(values.size());
  out.independent = static_cast<int64_t>(list.size());
  return out;
}

Estimate bootstrap_mean(std::span<const double> values, uint64_t seed, int resamples) {
  check_finite(values);
  std::vector<Group> groups;
  groups.reserve(values.size());
  for (double v : values) groups.push_back({v, 1});
  return bootstrap(groups, static_cast<int64_t>(values.size()), seed, resamples);
}

Estimate bootstrap_mean(std::span<const double> values, std::span<const int64_t> groups,
                        uint64_t seed, int resamples) {
  require(values.size() == groups.size(), "bootstrap_mean: {} values, {} groups", values.size(),
          groups.size());
  check_finite(values);
  return bootstrap(grouped(values, groups), static_cast<int64_t>(values.size()), seed, resamples);
}

}  // namespace foci::insight
