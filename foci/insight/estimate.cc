#include "foci/insight/estimate.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "foci/core/error.h"
#include "foci/core/rng.h"

namespace foci::insight {
namespace {

// Keeps bootstrap draws apart from every other use of the same seed.
constexpr uint64_t kBootstrapStream = 0x626F6F74;  // "boot"

double mean_of(std::span<const double> values) {
  double sum = 0;
  for (double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

// The q-quantile of sorted values, linear between neighbours (type 7 of Hyndman and Fan).
double quantile(const std::vector<double>& sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (position - static_cast<double>(below)) * (sorted[above] - sorted[below]);
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
  require(resamples >= 40, "bootstrap_mean: {} resamples; give 40 or more", resamples);
  for (double v : values) require(std::isfinite(v), "bootstrap_mean: a value is {}", v);
  Estimate out;
  if (values.empty()) return out;
  const int64_t n = static_cast<int64_t>(values.size());
  Rng rng(seed, kBootstrapStream);
  std::vector<double> means(static_cast<size_t>(resamples));
  for (double& mean : means) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += values[static_cast<size_t>(rng.below(n))];
    mean = sum / static_cast<double>(n);
  }
  std::sort(means.begin(), means.end());
  out.value = mean_of(values);
  // A skewed sample may leave the mean outside its own percentiles; the interval must hold it.
  out.low = std::min(out.value, quantile(means, 0.025));
  out.high = std::max(out.value, quantile(means, 0.975));
  out.count = n;
  return out;
}

}  // namespace foci::insight
