// Intervals: Wilson's, and the bootstrap over single values or over groups.
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
  out.value = all.sum / all.count;
  // A skewed sample may leave the mean outside its own percentiles; the interval must hold it.
  out.low = std::min(out.value, quantile(means, 0.025));
  out.high = std::max(out.value, quantile(means, 0.975));
  out.count = count;
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
  constexpr double kZ = 1.959963984540054;  // 97.5 % quantile of the normal distribution
  const double n = static_cast<double>(count), p = static_cast<double>(successes) / n;
  const double centre = p + kZ * kZ / (2 * n);
  const double spread = kZ * std::sqrt(p * (1 - p) / n + kZ * kZ / (4 * n * n));
  const double divisor = 1 + kZ * kZ / n;
  out.value = p;
  // At p = 0 and 1 the bounds are exact; rounding must not push them past p.
  out.low = successes == 0 ? 0 : std::max(0.0, (centre - spread) / divisor);
  out.high = successes == count ? 1 : std::min(1.0, (centre + spread) / divisor);
  out.count = count;
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
  std::map<int64_t, Group> by_name;
  for (size_t i = 0; i < values.size(); ++i) {
    Group& g = by_name[groups[i]];
    g.sum += values[i];
    g.count += 1;
  }
  std::vector<Group> list;
  list.reserve(by_name.size());
  for (const auto& [name, group] : by_name) list.push_back(group);
  return bootstrap(list, static_cast<int64_t>(values.size()), seed, resamples);
}

}  // namespace foci::insight
