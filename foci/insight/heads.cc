// Means of a statistic for each head, and entropy of weights.
#include "foci/insight/heads.h"

#include <cmath>
#include <limits>

#include "foci/core/error.h"

namespace foci::insight {

HeadMeans::HeadMeans(int64_t layers, int64_t heads) : layers_(layers), heads_(heads) {
  require(layers >= 1 && heads >= 1, "HeadMeans: {} layers, {} heads; give 1 or more", layers,
          heads);
  sums_.assign(static_cast<size_t>(layers * heads), 0.0);
  counts_.assign(sums_.size(), 0);
}

void HeadMeans::add(int64_t layer, int64_t head, std::span<const float> rows) {
  require(layer >= 0 && layer < layers_ && head >= 0 && head < heads_,
          "HeadMeans: layer {} head {} of {} × {}", layer, head, layers_, heads_);
  double sum = 0;
  for (float x : rows) {
    require(std::isfinite(x), "HeadMeans: layer {} head {} holds {}", layer, head, x);
    sum += x;
  }
  const size_t i = static_cast<size_t>(layer * heads_ + head);
  sums_[i] += sum;
  counts_[i] += static_cast<int64_t>(rows.size());
}

std::vector<double> HeadMeans::means() const {
  std::vector<double> out(sums_.size(), std::numeric_limits<double>::quiet_NaN());
  for (size_t i = 0; i < out.size(); ++i) {
    if (counts_[i] > 0) out[i] = sums_[i] / static_cast<double>(counts_[i]);
  }
  return out;
}

double entropy_of(std::span<const float> weights) {
  double total = 0;
  for (float w : weights) {
    require(std::isfinite(w) && w >= 0, "entropy_of: a weight is {}; weights are finite and ≥ 0",
            w);
    total += w;
  }
  if (total == 0) return 0;
  double entropy = 0;
  for (float w : weights) {
    const double p = w / total;
    if (p > 0) entropy -= p * std::log(p);
  }
  return entropy;
}

}  // namespace foci::insight
