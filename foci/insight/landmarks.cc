// Landmark hits of one map, and their rates over scenes.
#include "foci/insight/landmarks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "foci/core/error.h"

namespace foci::insight {

double landmark_hit(std::span<const float> map, std::span<const uint8_t> landmark) {
  require(!map.empty() && map.size() == landmark.size(),
          "landmark_hit: a map of {} patches, {} landmark flags", map.size(), landmark.size());
  float largest = -std::numeric_limits<float>::infinity();
  int64_t ties = 0, hits = 0;
  for (size_t i = 0; i < map.size(); ++i) {
    require(std::isfinite(map[i]), "landmark_hit: attention of patch {} is {}", i, map[i]);
    if (map[i] > largest) {
      largest = map[i];
      ties = hits = 0;
    }
    if (map[i] == largest) {
      ++ties;
      hits += landmark[i] != 0 ? 1 : 0;
    }
  }
  return static_cast<double>(hits) / static_cast<double>(ties);
}

LandmarkTally::LandmarkTally(int64_t layers, int64_t heads) : layers_(layers), heads_(heads) {
  require(layers >= 1 && heads >= 1, "LandmarkTally: {} layers, {} heads; give 1 or more", layers,
          heads);
}

void LandmarkTally::add(std::span<const float> attention, std::span<const uint8_t> landmark,
                        int64_t source) {
  const size_t patches = landmark.size();
  const size_t all = static_cast<size_t>(layers_ * heads_);
  require(patches > 0 && attention.size() == all * patches,
          "LandmarkTally: {} attention values for {} layers × {} heads × {} patches",
          attention.size(), layers_, heads_, patches);
  std::vector<double> scene(all);  // kept aside until every head has been read without an error
  std::vector<float> mean(patches, 0.0f), last(patches, 0.0f);
  for (size_t i = 0; i < all; ++i) {
    const std::span<const float> map = attention.subspan(i * patches, patches);
    scene[i] = landmark_hit(map, landmark);
    double sum = 0;
    for (float a : map) sum += a;
    const double factor = sum > 0 ? 1 / sum : 0;
    const bool in_last = i >= all - static_cast<size_t>(heads_);
    for (size_t p = 0; p < patches; ++p) {
      const float scaled = static_cast<float>(map[p] * factor);
      mean[p] += scaled;
      if (in_last) last[p] += scaled;
    }
  }
  all_heads_.push_back(landmark_hit(mean, landmark));
  last_layer_.push_back(landmark_hit(last, landmark));
  sources_.push_back(source);
  hits_.insert(hits_.end(), scene.begin(), scene.end());
  const auto marked = std::count_if(landmark.begin(), landmark.end(), [](uint8_t f) { return f; });
  landmark_share_ += static_cast<double>(marked) / static_cast<double>(patches);
}

double LandmarkTally::chance() const {
  return landmark_share_ / static_cast<double>(scenes());
}

std::vector<double> LandmarkTally::head_rates() const {
  const size_t all = static_cast<size_t>(layers_ * heads_);
  std::vector<double> rates(all, 0.0);
  for (size_t i = 0; i < hits_.size(); ++i) rates[i % all] += hits_[i];
  for (double& r : rates) r /= static_cast<double>(scenes());
  return rates;
}

std::pair<int64_t, int64_t> LandmarkTally::best_head() const {
  require(scenes() > 0, "LandmarkTally::best_head: no scene was added");
  const std::vector<double> rates = head_rates();
  const int64_t best = std::max_element(rates.begin(), rates.end()) - rates.begin();
  return {best / heads_, best % heads_};
}

Estimate LandmarkTally::head(int64_t layer, int64_t head) const {
  require(layer >= 0 && layer < layers_ && head >= 0 && head < heads_,
          "LandmarkTally: layer {} head {} of {} × {}", layer, head, layers_, heads_);
  std::vector<double> values;
  for (int64_t s = 0; s < scenes(); ++s) {
    values.push_back(hits_[static_cast<size_t>((s * layers_ + layer) * heads_ + head)]);
  }
  return share_of(values, sources_);
}

Estimate LandmarkTally::all_heads() const {
  return share_of(all_heads_, sources_);
}

Estimate LandmarkTally::last_layer() const {
  return share_of(last_layer_, sources_);
}

Estimate LandmarkTally::mean_head() const {
  const int64_t all = layers_ * heads_;
  std::vector<double> values;
  for (int64_t s = 0; s < scenes(); ++s) {
    double sum = 0;
    for (int64_t i = 0; i < all; ++i) sum += hits_[static_cast<size_t>(s * all + i)];
    values.push_back(sum / static_cast<double>(all));
  }
  return share_of(values, sources_);
}

}  // namespace foci::insight
