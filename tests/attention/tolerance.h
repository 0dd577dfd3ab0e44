// How close a float32 result must come to the oracle in double: every tolerance stands here.
//
// Errors are measured against a tensor's largest element (plus a floor, where a sum's terms cancel:
// then their size counts). eps = 2^-24.
//
// A sum of n products of unit size carries about √n·eps of rounding and passes through exp, a
// division and a second sum: 16·eps is typical, kTolerance = 340·eps the promise (`foci verify`'s
// default). That supposes scores of a few units. A score q·k is known to eps·‖q‖‖k‖·scale, and a
// weight's relative error is the score's absolute one: `score_error` gives it, and adds to the
// tolerance where scores are large. naive_test.cc shows that the plain float32 formula errs half as
// much or more.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "foci/attention/plan.h"
#include "foci/core/tensor.h"

namespace foci::testing {

constexpr double kTolerance = 2e-5;
constexpr double kEps = 0x1p-24;

// Results stored as float16 or bfloat16 round once more: 2^-11 and 2^-8 of each element.
inline double storage_tolerance(DType dtype) {
  return dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : 0;
}

// The error of a float32 score of this case: eps times the largest product of norms.
double score_error(const AttentionSpec& spec, const AttentionInputs& in);

struct CaseTolerance {
  double value;     // y, weights, statistics: a weight moves by its score's error and its sum's
  double gradient;  // these take a difference of such values, times scores once more
};
inline CaseTolerance case_tolerance(const AttentionSpec& spec, const AttentionInputs& in) {
  const double error = score_error(spec, in);
  return {kTolerance + 2 * error, kTolerance + 8 * error};
}

// Where infinity and NaN may stand for each other: inf − inf and inf + inf depend on the order in
// which a gradient is summed.
enum class NonFinite : uint8_t { same_kind, same_place };

struct Closeness {
  double error = 0;  // largest |actual − expected| beyond storage; infinite where kinds differ
  double scale = 0;  // largest expected absolute value, plus the floor
  int64_t at = -1;   // the element with that error
  double relative() const { return error == 0 ? 0 : error / scale; }
};
// Both may be of any floating or integer dtype; shapes must be equal.
Closeness closeness(const Tensor& actual, const Tensor& expected, double floor = 0,
                    NonFinite kinds = NonFinite::same_kind);

// The error is within tolerance · scale.
::testing::AssertionResult near(const Tensor& actual, const Tensor& expected,
                                double tolerance = kTolerance, double floor = 0,
                                NonFinite kinds = NonFinite::same_kind);

// Bit for bit, NaN included.
::testing::AssertionResult same_bits(const Tensor& a, const Tensor& b);

// The message of an AssertionResult that fails, with a name before it; empty where it holds.
std::string failure(const std::string& name, const ::testing::AssertionResult& result);

// Everything in which the bits of two results differ.
std::string differing_bits(const AttentionOutputs& a, const AttentionOutputs& b);
std::string differing_bits(const AttentionGradients& a, const AttentionGradients& b);

}  // namespace foci::testing
