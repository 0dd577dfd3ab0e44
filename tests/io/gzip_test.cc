// gzip: members follow one another, limits hold, and damage is refused.
#include "foci/io/gzip.h"

#include <gtest/gtest.h>

#include "io/damage.h"
#include "io/gzip.h"

namespace foci {
namespace {

using testing::gzip;
using testing::message_of;

TEST(Gzip, MembersFollowOneAnother) {
  for (const size_t n : {0, 1, 65535, 65536, 65537, 300'000}) {
    const std::string text(n, 'x');
    EXPECT_EQ(gunzip(gzip(text), "f"), text);
    EXPECT_EQ(gunzip(gzip(text) + gzip("") + gzip("end"), "f"), text + "end");
  }
}

TEST(Gzip, LimitsHold) {
  const std::string bomb = gzip(std::string(50'000'000, '\0'));
  EXPECT_LT(bomb.size(), 100'000u);
  EXPECT_NE(message_of([&] { gunzip(bomb, "f", 1000); }).find("more than 1000 bytes"),
            std::string::npos);
  EXPECT_EQ(gunzip(gzip("12345"), "f", 5), "12345");
  message_of([&] { gunzip(gzip("123456"), "f", 5); });
  message_of([&] { gunzip(gzip("123") + gzip("456"), "f", 5); });
}

TEST(Gzip, DamageIsRefused) {
  const std::string bytes = gzip("some text, some more text, and the same text again");
  const auto read = [](std::string_view b) { gunzip(b, "f"); };
  EXPECT_EQ(testing::truncate_everywhere(bytes, 1, read).accepted, 0);
  testing::flip_bits(bytes, 1, read);
  testing::scramble(bytes, 1000, read);
  EXPECT_NE(message_of([&] { gunzip(bytes + "x", "f"); }).find("1 bytes behind its end"),
            std::string::npos);
  EXPECT_NE(message_of([&] { gunzip("", "f"); }).find("not a gzip"), std::string::npos);
}

}  // namespace
}  // namespace foci
