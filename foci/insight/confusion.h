// ConfusionMatrix: which class was taken for which.
#pragma once

#include <cstdint>
#include <vector>

#include "foci/core/api.h"
#include "foci/insight/estimate.h"

namespace foci::insight {

class FOCI_API ConfusionMatrix {
 public:
  // Throws ArgumentError unless 1 ≤ classes ≤ 10,000 (the matrix is classes²).
  explicit ConfusionMatrix(int64_t classes);

  // Counts one answer; throws ArgumentError for a class out of range.
  void add(int64_t truth, int64_t predicted);

  int64_t classes() const { return classes_; }
  const std::vector<int64_t>& counts() const { return counts_; }  // [C, C], row = true class
  int64_t total() const { return total_; }
  int64_t correct() const { return correct_; }
  Estimate accuracy() const { return wilson(correct_, total_); }

 private:
  int64_t classes_;
  int64_t total_ = 0, correct_ = 0;
  std::vector<int64_t> counts_;
};

}  // namespace foci::insight
