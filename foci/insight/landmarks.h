// Landmark hit rates: does the most-attended patch lie on what is to be recognised?
//
// A *reading* is one map over the patches of a scene: one head's attention, or the mean of several
// heads, each scaled to sum 1 over the patches first so that none outshouts the rest. Its landmark
// hit rate is the share of scenes whose most-attended patch is a landmark. L layers, H heads, P
// patches of a scene (scenes may differ in P).
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "foci/core/api.h"
#include "foci/insight/estimate.h"

namespace foci::insight {

// 1 where the largest value of `map` [P] lies on a landmark, 0 where not. Where several patches
// share the largest value, the share of them that are landmarks, so that a flat map scores what
// chance would. Throws ArgumentError where sizes differ, P is 0 or a value is not finite.
FOCI_API double landmark_hit(std::span<const float> map, std::span<const uint8_t> landmark);

// Collects scenes; memory is L·H + 3 numbers a scene.
class FOCI_API LandmarkTally {
 public:
  LandmarkTally(int64_t layers, int64_t heads);

  // One scene: attention [L, H, P] ≥ 0, landmark [P].
  // Scenes of one `source` show the same thing: they count as one in intervals (share_of).
  void add(std::span<const float> attention, std::span<const uint8_t> landmark, int64_t source);

  int64_t layers() const { return layers_; }
  int64_t heads() const { return heads_; }
  int64_t scenes() const { return static_cast<int64_t>(all_heads_.size()); }

  // What looking anywhere would score: the mean share of landmark patches.
  double chance() const;
  // Plain rates of all heads, [L, H]; NaN before the first scene.
  std::vector<double> head_rates() const;
  // The head with the highest rate, lowest layer and head first among equals: (layer, head).
  // Choose it on other scenes than those it is judged on: the best of many is best by luck too.
  std::pair<int64_t, int64_t> best_head() const;

  // Rates with the intervals of share_of.
  Estimate head(int64_t layer, int64_t head) const;
  Estimate all_heads() const;   // of the mean map over all heads of all layers
  Estimate last_layer() const;  // of the mean map over the last layer's heads
  Estimate mean_head() const;   // the rate of a head drawn at random

 private:
  int64_t layers_, heads_;
  std::vector<double> hits_;                    // [scenes, L, H]
  std::vector<double> all_heads_, last_layer_;  // [scenes]
  std::vector<int64_t> sources_;                // [scenes]
  double landmark_share_ = 0;                   // sum over scenes
};

}  // namespace foci::insight
