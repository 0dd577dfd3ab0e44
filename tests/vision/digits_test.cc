// The built-in digits are the published ones, their split is fixed, and their reader is strict.
#include "foci/vision/digits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>

#include "foci/io/file.h"
#include "io/damage.h"
#include "io/gzip.h"

namespace foci::vision {
namespace {

using foci::testing::gzip;
using foci::testing::message_of;

std::string line(int ink, int label) {
  std::string text;
  for (int i = 0; i < 64; ++i) text += std::to_string(ink) + ",";
  return text + std::to_string(label) + "\n";
}

TEST(Digits, AreThePublishedOnes) {
  ASSERT_EQ(digits().size(), 1797u);
  // Counts of each class, as published with the data.
  std::map<int, int> counts;
  for (const Digit& digit : digits()) ++counts[digit.label];
  const std::map<int, int> want = {{0, 178}, {1, 182}, {2, 177}, {3, 183}, {4, 181},
                                   {5, 182}, {6, 181}, {7, 179}, {8, 174}, {9, 180}};
  EXPECT_EQ(counts, want);
  const std::array<uint8_t, 8> second_row = {0, 0, 13, 15, 10, 15, 5, 0};
  EXPECT_TRUE(std::equal(second_row.begin(), second_row.end(), digits()[0].ink.begin() + 8));
}

TEST(Digits, SplitHoldsEachDigitOnceAndAllClasses) {
  std::vector<int64_t> all = digit_indices(Split::train);
  const std::vector<int64_t>& tests = digit_indices(Split::test);
  EXPECT_TRUE(std::is_sorted(tests.begin(), tests.end()));
  std::map<int, int> per_class;
  for (const int64_t i : tests) ++per_class[digits()[i].label];
  for (int label = 0; label < 10; ++label) EXPECT_NEAR(per_class[label], 36, 2) << label;
  all.insert(all.end(), tests.begin(), tests.end());
  std::sort(all.begin(), all.end());
  std::vector<int64_t> each(1797);
  std::iota(each.begin(), each.end(), 0);
  EXPECT_EQ(all, each);
}

// The split must never move: a model trained yesterday would have seen tomorrow's tests.
TEST(Digits, SplitNeverMoves) {
  int64_t sum = 0, square = 0;
  for (const int64_t i : digit_indices(Split::test)) {
    sum += i;
    square += i * i;
  }
  EXPECT_EQ(digit_indices(Split::test).size(), 355u);
  EXPECT_EQ(sum, 309797);
  EXPECT_EQ(square, 363831611);
}

// Near-copies on both sides would make the test worthless: no two digits are equal.
TEST(Digits, NoTestDigitIsAlsoATrainingDigit) {
  for (const int64_t t : digit_indices(Split::test)) {
    for (const int64_t i : digit_indices(Split::train)) {
      ASSERT_NE(digits()[t].ink, digits()[i].ink) << t << " and " << i;
    }
  }
}

TEST(Digits, ReaderRefusesWithTheLine) {
  EXPECT_EQ(parse_digits(gzip(line(16, 9) + line(0, 0)), "f").size(), 2u);
  const auto expect = [](const std::string& csv, const std::string& text) {
    const std::string message = message_of([&] { parse_digits(gzip(csv), "f"); });
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  expect("", "no digits");
  expect(line(0, 1) + line(17, 1), "line 2: field 1 is 17, not 0 to 16");
  expect(line(0, 10), "line 1: field 65 is 10, not 0 to 9");
  expect(line(-1, 1), "field 1 is -1");
  expect("a", "field 1 is not a number");
  expect("99999999999999", "field 1 is not a number");
  expect("1,2\n", "65 fields");
  expect("0," + line(1, 1), "65 fields");
  std::string unended = line(1, 1);
  unended.pop_back();
  expect(unended, "65 fields");
  EXPECT_NE(message_of([&] { parse_digits("0,1", "f"); }).find("not a gzip"), std::string::npos);
}

TEST(Digits, DamagedFilesNeverHurt) {
  const std::string bytes = read_file(std::string(FOCI_SOURCE_DIR) + "/data/digits.csv.gz");
  const auto read = [](std::string_view b) { parse_digits(b, "f"); };
  EXPECT_EQ(testing::truncate_everywhere(bytes, 997, read).accepted, 0);
  testing::flip_bits(bytes, 4999, read);
  const std::string small = gzip(line(3, 1) + line(7, 2));
  EXPECT_EQ(testing::truncate_everywhere(small, 1, read).accepted, 0);
  testing::flip_bits(small, 1, read);
  testing::scramble(small, 2000, read);
  // Behind the checksum.
  const std::string lines = line(3, 1) + line(16, 2);
  const auto read_lines = [](std::string_view b) { parse_digit_lines(b, "f"); };
  testing::truncate_everywhere(lines, 1, read_lines);
  testing::flip_bits(lines, 1, read_lines);
  testing::scramble(lines, 2000, read_lines);
}

}  // namespace
}  // namespace foci::vision
