// The 1,797 handwritten digits that are built into the library, and which of them are for testing.
// Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
// Repository, 1998, doi 10.24432/C50P49, CC BY 4.0 (see data/README.md).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "foci/core/api.h"
#include "foci/vision/dataset.h"

namespace foci::vision {

struct Digit {
  static constexpr int kSide = 8;
  std::array<uint8_t, kSide * kSide> ink{};  // row by row, 0 (paper) to 16
  int label = 0;                             // 0 to 9
};

// All digits, in the order of collection. Unpacked once, at the first call.
FOCI_API const std::vector<Digit>& digits();

// Indices into digits() of a split, ascending. One fifth of each class is for testing, chosen once
// and for all: no option or seed moves a digit from one side to the other.
FOCI_API const std::vector<int64_t>& digit_indices(Split split);

// Lines of 64 numbers 0–16 and a label 0–9, separated by commas, plain or packed with gzip. Throw
// FormatError naming `name` and the line.
FOCI_API std::vector<Digit> parse_digit_lines(std::string_view csv, const std::string& name);
FOCI_API std::vector<Digit> parse_digits(std::string_view gzipped_csv, const std::string& name);

}  // namespace foci::vision
