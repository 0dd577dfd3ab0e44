// How far a tensor is from the expected one.
#pragma once

#include <optional>
#include <string>

#include "foci/core/tensor.h"

namespace foci::verify {

struct Difference {
  Dims index;  // of the worst element
  double got = 0, want = 0;
  double error = 0, allowed = 0;
  int64_t wrong = 0, elements = 0;
  std::string message;  // "[0, 2] is 1.5, expected 1 (error 0.5, allowed 2e-05; 3 of 8 differ)"
};

// nullopt where equal shapes hold numbers that differ by at most `tolerance` times the largest
// finite |want|. Infinities and NaN must match in place and kind; where all of `want` is zero, so
// must all of `got` be. Any dtypes.
std::optional<Difference> difference(const Tensor& got, const Tensor& want, double tolerance);

}  // namespace foci::verify
