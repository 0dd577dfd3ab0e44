// Unpacks the embedded digits and splits them by class.
#include "foci/vision/digits.h"

#include <algorithm>
#include <charconv>

#include "foci/core/rng.h"
#include "foci/io/gzip.h"

namespace foci::vision {

extern const unsigned char kDigitsFile[];  // written by embed.cmake
extern const std::size_t kDigitsFile_size;

namespace {

constexpr int kClasses = 10;
constexpr int kFullInk = 16;
constexpr uint64_t kSplitSeed = 0x666f6369;  // any fixed number: it decides which digits are tests

struct SplitIndices {
  std::vector<int64_t> train, test;
};

SplitIndices split_digits() {
  SplitIndices split;
  for (int label = 0; label < kClasses; ++label) {
    std::vector<int64_t> members;
    for (size_t i = 0; i < digits().size(); ++i) {
      if (digits()[i].label == label) members.push_back(static_cast<int64_t>(i));
    }
    Rng rng(kSplitSeed, static_cast<uint64_t>(label));
    for (size_t i = members.size(); i > 1; --i) {
      std::swap(members[i - 1], members[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
    }
    const auto tests = members.begin() + static_cast<int64_t>(members.size() / 5);
    split.test.insert(split.test.end(), members.begin(), tests);
    split.train.insert(split.train.end(), tests, members.end());
  }
  std::sort(split.train.begin(), split.train.end());
  std::sort(split.test.begin(), split.test.end());
  return split;
}

}  // namespace

std::vector<Digit> parse_digits(std::string_view gzipped_csv, const std::string& name) {
  return parse_digit_lines(gunzip(gzipped_csv, name, uint64_t{16} << 20), name);
}

std::vector<Digit> parse_digit_lines(std::string_view csv, const std::string& name) {
  std::vector<Digit> all;
  const char* at = csv.data();
  const char* const end = at + csv.size();
  constexpr int kNumbers = Digit::kSide * Digit::kSide + 1;
  while (at < end) {
    Digit digit;
    const size_t line = all.size() + 1;
    for (int i = 0; i < kNumbers; ++i) {
      const bool is_label = i + 1 == kNumbers;
      int value = -1;
      const auto [stop, error] = std::from_chars(at, end, value);
      require<FormatError>(error == std::errc(), "{}: line {}: field {} is not a number", name,
                           line, i + 1);
      const int most = is_label ? kClasses - 1 : kFullInk;
      require<FormatError>(value >= 0 && value <= most, "{}: line {}: field {} is {}, not 0 to {}",
                           name, line, i + 1, value, most);
      const char separator = is_label ? '\n' : ',';
      require<FormatError>(stop != end && *stop == separator, "{}: line {}: {} fields are needed",
                           name, line, kNumbers);
      at = stop + 1;
      if (is_label) {
        digit.label = value;
      } else {
        digit.ink[static_cast<size_t>(i)] = static_cast<uint8_t>(value);
      }
    }
    all.push_back(digit);
  }
  require<FormatError>(!all.empty(), "{}: no digits in it", name);
  return all;
}

const std::vector<Digit>& digits() {
  static const std::vector<Digit> all = parse_digits(
      {reinterpret_cast<const char*>(kDigitsFile), kDigitsFile_size}, "the built-in digits");
  return all;
}

const std::vector<int64_t>& digit_indices(Split split) {
  static const SplitIndices indices = split_digits();
  return split == Split::train ? indices.train : indices.test;
}

}  // namespace foci::vision
