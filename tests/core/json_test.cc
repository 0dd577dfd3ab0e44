// JSON from outside: what is right is read, and nothing beyond a limit takes memory or time.
#include "foci/core/json.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <nlohmann/json.hpp>
#include <string>

#include "foci/core/error.h"

namespace foci {
namespace {

std::string refusal(const std::string& text, const JsonLimits& limits = {}) {
  try {
    parse_json(text, "f", limits);
  } catch (const FormatError& e) {
    const std::string message = e.what();
    EXPECT_EQ(message.rfind("f: ", 0), 0u) << message;
    EXPECT_LE(message.size(), 200u);
    for (const char c : message) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << message;
    return message;
  }
  ADD_FAILURE() << "accepted: " << text.substr(0, 60);
  return "";
}

void expect_refused(const std::string& text, const std::string& why,
                    const JsonLimits& limits = {}) {
  const std::string message = refusal(text, limits);
  EXPECT_NE(message.find(why), std::string::npos) << message << "\nwanted: " << why;
}

std::string repeated(const std::string& piece, size_t n) {
  std::string out;
  out.reserve(piece.size() * n);
  for (size_t i = 0; i < n; ++i) out += piece;
  return out;
}

long peak_kilobytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

TEST(Json, ReadsWhatIsRight) {
  const nlohmann::json j =
      parse_json(R"( {"a": [1, -2.5, "ü\n", null, true], "b": {"a": {}}} )", "f");
  EXPECT_EQ(j.dump(), "{\"a\":[1,-2.5,\"ü\\n\",null,true],\"b\":{\"a\":{}}}");
  EXPECT_EQ(parse_json("3", "f"), 3);
}

TEST(Json, SaysWhatIsWrongAndWhere) {
  expect_refused("", "the text is not JSON: it is empty");
  expect_refused(" \n", "it is empty");
  expect_refused("{\"a\": 1,\n \"b\": x}", "line 2, column 7");
  expect_refused("[1] [2]", "line 1, column 5");
  expect_refused("{", "not JSON");
  expect_refused("\xef\xbb\xbf{}", "byte order mark");
  expect_refused(std::string("{}\0{", 4), "zero byte");
  expect_refused("{\"\xff\": 1}", "not JSON");
  expect_refused("[1e999]", "range of doubles");
  expect_refused(R"({"a": {"b": 1, "b": 1}})", "the key b stands twice");
  expect_refused("{\"" + repeated("k", 5000) + "\":1,\"" + repeated("k", 5000) + "\":1}", "kkk...");
}

TEST(Json, LimitsHold) {
  const JsonLimits limits{.bytes = 1000, .depth = 3, .values = 10};
  EXPECT_EQ(parse_json("[[[1]]]", "f", limits).size(), 1u);
  expect_refused("[[[[1]]]]", "more than 3 lists and objects inside one another", limits);
  expect_refused(R"({"a":{"a":{"a":{}}}})", "more than 3", limits);
  EXPECT_EQ(parse_json("[1,2,3,4,5,6,7,8,9]", "f", limits).size(), 9u);
  expect_refused("[1,2,3,4,5,6,7,8,9,10]", "more than 10 values", limits);
  expect_refused(R"({"a":[],"b":[],"c":[],"d":[],"e":[],"f":[],"g":[],"h":[],"i":[],"j":[]})",
                 "more than 10 values", limits);
  EXPECT_EQ(parse_json("\"" + std::string(998, 'x') + "\"", "f", limits).size(), 1u);
  expect_refused("\"" + std::string(999, 'x') + "\"", "1001 bytes of JSON, at most 1000 are read",
                 limits);
}

// Sixty million levels cost what the text costs and no more: they are not even looked at.
TEST(Json, WhatNeverEndsTakesNoMemory) {
  const JsonLimits large{.bytes = 100'000'000, .values = 100'000};
  for (const char* piece : {"[", "{\"a\":", "[[],", "[1,", "{\"a\":[", "1,", "\"", "{"}) {
    const std::string text = repeated(piece, 20'000'000 / std::string(piece).size());
    const long before = peak_kilobytes();
    refusal(text);
    refusal(text, large);
    // A text without an end is the one thing that is copied before it is refused.
    const long copies = piece[0] == '"' ? 4 : 0;
    EXPECT_LE(peak_kilobytes() - before, 40'000 + copies * 20'000) << piece;
  }
}

}  // namespace
}  // namespace foci
