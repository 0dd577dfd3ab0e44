// The list of rows as it is read, the options, and what a report says of its rows.
#include "rows.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "foci/core/error.h"
#include "foci/core/threads.h"

namespace foci::bench {
namespace {

constexpr const char* kList = R"({
  "about": "…",
  "some": [
    {"row": "first", "shape": {"H": 2, "N": 5, "D": 8},
     "targets": {"share": {"at_least": {"avx2": 0.7, "avx512": 0.6}}, "ratio": {"at_most": 2}}},
    {"row": "second", "slow": true, "shape": {"B": 3, "H": 4, "Hk": 2, "N": 1, "M": 7, "D": 8, "Dv": 9},
     "spec": {"normalizer": {"kind": "topk", "k": 3}}, "scores": "trained", "over": "softmax",
     "wanted": ["bias"], "lengths": [1, 2]}
  ]})";

std::vector<Definition> read(const std::string& text, const Options& options = {},
                             SimdTarget target = SimdTarget::avx2) {
  return definitions_of(text, "some", options, target);
}

TEST(BenchRows, EveryKeyIsRead) {
  const auto rows = read(kList);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].shape, (AttentionShape{1, 2, 2, 5, 5, 8, 8}));
  EXPECT_EQ(rows[0].spec, AttentionSpec{});
  EXPECT_EQ(rows[0].scores, "random");
  EXPECT_TRUE(rows[0].targets.at("share").at_least);
  EXPECT_EQ(rows[0].targets.at("share").bound, 0.7);
  EXPECT_FALSE(rows[0].targets.at("ratio").at_least);
  EXPECT_EQ(rows[1].shape, (AttentionShape{3, 4, 2, 1, 7, 8, 9}));
  EXPECT_EQ(std::get<TopK>(rows[1].spec.normalizer).k, 3);
  EXPECT_EQ(rows[1].scores, "trained");
  EXPECT_EQ(rows[1].over, "softmax");
  EXPECT_EQ(rows[1].wanted, std::vector<std::string>{"bias"});
  EXPECT_EQ(rows[1].lengths, (std::vector<int64_t>{1, 2}));
}

TEST(BenchRows, TargetsAreThoseOfTheSimdTarget) {
  EXPECT_EQ(read(kList, {}, SimdTarget::avx512)[0].targets.at("share").bound, 0.6);
  const auto baseline = read(kList, {}, SimdTarget::baseline);
  EXPECT_EQ(baseline[0].targets.count("share"), 0u);
  EXPECT_EQ(baseline[0].targets.at("ratio").bound, 2);
}

TEST(BenchRows, OptionsChoose) {
  ASSERT_EQ(read(kList, {.quick = true}).size(), 1u);
  Options second;
  second.rows = std::regex("^sec");
  ASSERT_EQ(read(kList, second).size(), 1u);
  EXPECT_EQ(read(kList, second)[0].row, "second");
}

TEST(BenchRows, AWrongListIsOneLineThatSaysWhere) {
  const auto says = [](const std::string& row, const std::string& what) {
    try {
      read("{\"some\": [" + row + "]}");
      ADD_FAILURE() << row;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("rows.json, some[0]"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find(what), std::string::npos) << e.what();
    }
  };
  says("{}", "row");
  says(R"({"row": "a", "shape": {"Q": 1}})", "'Q'");
  says(R"({"row": "a", "spec": {"scale": "huge"}})", "scale");
  says(R"({"row": "a", "targets": {"m": {"at_last": 1}}})", "at_least");
  says(R"({"row": "a", "targets": {"m": {"at_least": "much"}}})", "");
  EXPECT_THROW(read("{"), Error);
  EXPECT_THROW(read("{}"), Error);
}

TEST(BenchRows, TheListItselfIsWhole) {
  std::ifstream file(FOCI_BENCH_ROWS);
  const auto list = nlohmann::json::parse(file);
  std::set<std::string> names;
  for (const auto& [section, rows] : list.items()) {
    if (section == "about") continue;
    EXPECT_EQ(definitions(section, {}).size(), rows.size());
    for (const Definition& d : definitions(section, {})) {
      EXPECT_TRUE(names.insert(d.row).second) << d.row << " stands there twice";
    }
  }
  EXPECT_GT(names.size(), 40u);
}

std::optional<int> options(std::vector<std::string> words, Options& o) {
  words.insert(words.begin(), "bench");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  return read_options(static_cast<int>(argv.size()), argv.data(), "bench", o);
}

TEST(BenchOptions, AreRead) {
  const int before = num_threads();
  Options o;
  EXPECT_EQ(options({"--quick", "--rows", "N19.", "--threads", "1", "--json", "x"}, o),
            std::nullopt);
  EXPECT_TRUE(o.quick);
  EXPECT_EQ(o.json, "x");
  EXPECT_TRUE(std::regex_search("N197", *o.rows));
  EXPECT_EQ(num_threads(), 1);
  set_num_threads(before);
}

TEST(BenchOptions, WhatCannotBeIsOneLineAndTwo) {
  for (const std::vector<std::string>& words : {std::vector<std::string>{"--fast"},
                                                {"x"},
                                                {"--rows"},
                                                {"--rows", "("},
                                                {"--threads", "0"},
                                                {"--threads", "2x"},
                                                {"--threads", "99999999999999999999"},
                                                {"--json"}}) {
    Options o;
    testing::internal::CaptureStderr();
    EXPECT_EQ(options(words, o), 2) << words[0];
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  }
  Options o;
  EXPECT_EQ(options({"--help"}, o), 0);
}

TEST(BenchReport, SaysWhatFellShort) {
  Report report("some_bench", {.json = "-"});
  const Definition d = read(kList)[0];
  report.add(d, "share", {0.71, 0.7, 0.72});
  report.add(d, "ratio", {2.1, 2, 2.2}, "a note");
  report.add(d, "other", {1, 1, 1});
  report.fact("peak_gflops", 100);
  const auto json = nlohmann::json::parse(report.json());
  EXPECT_EQ(json["bench"], "some_bench");
  EXPECT_EQ(json["facts"]["peak_gflops"], 100);
  EXPECT_EQ(json["threads"], num_threads());
  ASSERT_EQ(json["rows"].size(), 3u);
  EXPECT_EQ(json["rows"][0]["met"], true);
  EXPECT_EQ(json["rows"][0]["target"], (nlohmann::json{{"at_least", 0.7}}));
  EXPECT_EQ(json["rows"][1]["met"], false);
  EXPECT_EQ(json["rows"][1]["note"], "a note");
  EXPECT_EQ(json["rows"][1]["high"], 2.2);
  EXPECT_TRUE(json["rows"][2]["target"].is_null());
  EXPECT_TRUE(json["rows"][2]["met"].is_null());
}

TEST(BenchReport, AFileThatCannotBeWrittenIsAnError) {
  EXPECT_THROW(Report("b", {.json = "/no/such/folder/x.json"}).finish(), Error);
}

}  // namespace
}  // namespace foci::bench
