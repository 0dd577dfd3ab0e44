// HeadMeans: a statistic of attention (entropy, largest weight, …) averaged for each head.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "foci/core/api.h"

namespace foci::insight {

// Running means over rows and scenes for L layers × H heads; memory is L·H numbers.
class FOCI_API HeadMeans {
 public:
  HeadMeans(int64_t layers, int64_t heads);

  // Rows of one head. Infinities and NaN throw ArgumentError: they would hide in a mean.
  void add(int64_t layer, int64_t head, std::span<const float> rows);

  int64_t layers() const { return layers_; }
  int64_t heads() const { return heads_; }
  std::vector<double> means() const;  // [L, H], NaN where no row was added

 private:
  int64_t layers_, heads_;
  std::vector<double> sums_;
  std::vector<int64_t> counts_;
};

// Shannon entropy in nats of weights that need not sum to 1 (they are scaled first); 0 where all
// are 0. Throws ArgumentError where one is negative or not finite.
FOCI_API double entropy_of(std::span<const float> weights);

}  // namespace foci::insight
