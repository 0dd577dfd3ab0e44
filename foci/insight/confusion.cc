// Counting of answers.
#include "foci/insight/confusion.h"

#include "foci/core/error.h"

namespace foci::insight {

ConfusionMatrix::ConfusionMatrix(int64_t classes) : classes_(classes) {
  require(classes >= 1 && classes <= 10000, "ConfusionMatrix: {} classes; give 1 to 10000",
          classes);
  counts_.assign(static_cast<size_t>(classes * classes), 0);
}

void ConfusionMatrix::add(int64_t truth, int64_t predicted) {
  require(truth >= 0 && truth < classes_, "ConfusionMatrix: true class {} of {}", truth, classes_);
  require(predicted >= 0 && predicted < classes_, "ConfusionMatrix: predicted class {} of {}",
          predicted, classes_);
  ++counts_[static_cast<size_t>(truth * classes_ + predicted)];
  ++total_;
  correct_ += truth == predicted ? 1 : 0;
}

}  // namespace foci::insight
