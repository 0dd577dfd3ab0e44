// What the rows of the table are written in.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "foci/core/error.h"
#include "reference/reported_cases.h"

namespace foci::testing {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Row-major float32.
inline Tensor floats(std::initializer_list<float> values, const Dims& shape) {
  return Tensor::from(values, shape);
}
inline Tensor bools(std::initializer_list<bool> values, const Dims& shape) {
  return Tensor::from(values, shape);
}

// Q and K all zero ("zero logits"), so that each row is the plain mean of the V rows it may see.
// v: one number a key; head size 1.
AttentionInputs zero_logits(int64_t queries, std::initializer_list<float> v);

// One query whose scores are exactly these numbers under scale 1; v counts 0, 1, 2 …
AttentionInputs given_scores(std::initializer_list<float> scores);

// "" where every element of `got` is within `tolerance` · max(1, |want|) of the wanted one;
// otherwise what differs, and where. Wanted infinities must be met, NaN never is.
std::string differs(const char* what, const Tensor& got, const std::vector<double>& want,
                    double tolerance = 5e-6);
// The same against a tensor of equal shape.
std::string differs(const char* what, const Tensor& got, const Tensor& want,
                    double tolerance = 5e-6);
// "" where shapes, dtypes and all bytes are equal.
std::string bits_differ(const char* what, const Tensor& a, const Tensor& b);
std::string not_all_zero(const char* what, const Tensor& t);
std::string not_finite(const char* what, const Tensor& t);

// The first complaint.
inline std::string first(std::initializer_list<std::string> complaints) {
  for (const std::string& c : complaints) {
    if (!c.empty()) return c;
  }
  return "";
}

// y alone.
std::string y_differs(const Engine& e, const AttentionSpec& spec, const AttentionInputs& in,
                      const std::vector<double>& want, double tolerance = 5e-6);
std::string weights_differ(const Engine& e, const AttentionSpec& spec, const AttentionInputs& in,
                           const std::vector<double>& want, double tolerance = 5e-6);
// y in every way it can be asked for: bare, with statistics, with the sum of the rows' weights, and
// the gradient of v's sum.
std::string y_differs_on_any_path(const Engine& e, AttentionSpec spec, const AttentionInputs& in,
                                  const std::vector<double>& want);
// Upstream gradients of ones for y.
AttentionUpstream ones_like_y(const AttentionInputs& in);

// The parts of the table.
std::vector<ReportedCase> reported_masks();
std::vector<ReportedCase> reported_positions();
std::vector<ReportedCase> reported_scores();
std::vector<ReportedCase> reported_shapes();
std::vector<ReportedCase> fixed_numbers();

}  // namespace foci::testing
