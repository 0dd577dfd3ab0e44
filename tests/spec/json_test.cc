// Specs as JSON: every option survives the round trip, and every refusal names its path.
#include "foci/spec/json_value.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "foci/core/error.h"

namespace foci {
namespace {

void expect_round_trip(const AttentionSpec& spec) {
  EXPECT_EQ(spec_from_json(spec_to_json(spec)), spec) << spec_to_json_text(spec);
  EXPECT_EQ(spec_from_json_text(spec_to_json_text(spec)), spec) << spec_to_json_text(spec);
}

void expect_refused(const std::string& text, const std::string& message) {
  try {
    spec_from_json_text(text);
    FAIL() << text << " was accepted; expected: " << message;
  } catch (const ArgumentError& e) {
    EXPECT_EQ(e.what(), message) << text;
  }
}

TEST(SpecJson, EmptyObjectIsTheDefault) {
  EXPECT_EQ(spec_from_json_text("{}"), AttentionSpec{});
}

TEST(SpecJson, RoundTripOfEveryOption) {
  expect_round_trip({});
  for (const Score& score : {Score(Dot{}), Score(Cosine{}), Score(L2{0.1}), Score(Additive{})}) {
    expect_round_trip({.score = score});
  }
  for (const Scale& scale :
       {Scale(AutoScale{}), Scale(-0.125), Scale(3.0), Scale(std::vector<double>{1, -2, 1.0 / 3}),
        Scale(std::vector<double>{})}) {
    expect_round_trip({.scale = scale});
  }
  expect_round_trip({.softcap = 30.0});
  for (const Normalizer& n :
       {Normalizer(Softmax{}), Normalizer(Sparsemax{}), Normalizer(Entmax{1.25}),
        Normalizer(Entmax{.per_head = {1.25, 3}}), Normalizer(TopK{int64_t{1} << 62})}) {
    expect_round_trip({.normalizer = n});
  }
  for (Align align : {Align::bottom_right, Align::top_left, Align::past}) {
    expect_round_trip({.masks = {Causal{align}}});
    expect_round_trip({.masks = {Window{128, 0, align}}});
  }
  expect_round_trip({.masks = {Window{}}});
  expect_round_trip({.masks = {Window{3, std::nullopt}}});
  expect_round_trip({.masks = {Window{std::nullopt, 3}}});
  expect_round_trip({.masks = {KeyLengths{}, Segments{}, Keep{}}});
  expect_round_trip({.biases = {TensorBias{}, Alibi{}, Relative1D{7}, Relative2D{3, 5}}});
  expect_round_trip({.dropout = Dropout{0.1, ~uint64_t{0}, DropoutPlace::weights}});
  expect_round_trip({.dropout = Dropout{0, 7, DropoutPlace::keys}});
  expect_round_trip({.statistics = {Statistic::entropy}});
  expect_round_trip({.statistics = Statistics::all()});
}

// The very words of the schema, so that the round trip cannot hide two equal mistakes.
TEST(SpecJson, ReadsTheSchema) {
  const AttentionSpec spec = spec_from_json_text(R"({
    "score": {"kind":"l2","gamma":0.5}, "scale": [1, 0.5], "softcap": 30,
    "normalizer": {"kind":"entmax","alpha":1.5},
    "masks": [{"kind":"causal","align":"past"}, {"kind":"causal"},
              {"kind":"window","left":128,"right":null,"align":"top-left"},
              {"kind":"key_lengths"}, {"kind":"keep"}, {"kind":"segments"}],
    "biases": [{"kind":"tensor"}, {"kind":"alibi"}, {"kind":"relative1d","max_distance":16},
               {"kind":"relative2d","grid":[3,4]}],
    "dropout": {"p":0.1,"seed":42,"place":"keys"}, "statistics": ["coverage"]})");
  const AttentionSpec want{
      .score = L2{0.5},
      .scale = std::vector<double>{1, 0.5},
      .softcap = 30,
      .normalizer = Entmax{1.5},
      .masks = {Causal{Align::past}, Causal{Align::bottom_right},
                Window{128, std::nullopt, Align::top_left}, KeyLengths{}, Keep{}, Segments{}},
      .biases = {TensorBias{}, Alibi{}, Relative1D{16}, Relative2D{3, 4}},
      .dropout = Dropout{0.1, 42, DropoutPlace::keys},
      .statistics = {Statistic::coverage}};
  EXPECT_EQ(spec, want);
  EXPECT_EQ(spec_from_json_text(R"({"scale":"auto","softcap":null,"dropout":null,"masks":[]})"),
            AttentionSpec{});
}

TEST(SpecJson, WritesTheSchema) {
  EXPECT_EQ(spec_to_json({.normalizer = TopK{8}, .masks = {Window{2, std::nullopt}}}),
            nlohmann::json::parse(R"({
              "score":{"kind":"dot"}, "scale":"auto", "softcap":null,
              "normalizer":{"kind":"topk","k":8},
              "masks":[{"kind":"window","left":2,"right":null,"align":"bottom-right"}],
              "biases":[], "dropout":null})"));
  EXPECT_THROW(spec_to_json({.softcap = -1.0}), ArgumentError);
}

TEST(SpecJsonRefuses, TextThatIsNoJson) {
  for (const char* text : {"", "{", "{} x", "{\"scale\":NaN}", "\xff", "{\"a\":\"\xc3\"}"}) {
    try {
      spec_from_json_text(text);
      ADD_FAILURE() << text << " was accepted";
    } catch (const ArgumentError& e) {
      EXPECT_EQ(std::string(e.what()).rfind("spec: the text is not JSON: ", 0), 0u) << e.what();
    }
  }
}

TEST(SpecJsonRefuses, TextsBeyondAllMeasure) {
  for (const char* piece : {"[", "{\"a\":", "[1,", "{\"scale\":[1,"}) {
    std::string text;
    for (int i = 0; i < 200'000; ++i) text += piece;
    for (size_t n : {text.size(), size_t{500'000}}) {
      try {
        spec_from_json_text(text.substr(0, n));
        ADD_FAILURE() << piece << " was accepted";
      } catch (const ArgumentError& e) {
        EXPECT_EQ(std::string(e.what()).rfind("spec: ", 0), 0u) << e.what();
        EXPECT_LE(std::string(e.what()).size(), 200u);
      }
    }
  }
}

TEST(SpecJsonRefuses, WhatIsNoObject) {
  expect_refused("[]", "spec: an array given, an object is needed");
  expect_refused("null", "spec: null given, an object is needed");
  expect_refused(R"({"score":"dot"})", "score: \"dot\" given, an object is needed");
  expect_refused(R"({"masks":[null]})", "masks[0]: null given, an object is needed");
}

TEST(SpecJsonRefuses, UnknownKeys) {
  expect_refused(R"({"normaliser":{}})",
                 "normaliser: unknown key, the keys here are score, scale, softcap, normalizer, "
                 "masks, biases, dropout, statistics");
  expect_refused(R"({"score":{"kind":"dot","gamma":1}})",
                 "score.gamma: unknown key, the keys here are kind");
  expect_refused(R"({"masks":[{"kind":"keep"},{"kind":"window","width":3}]})",
                 "masks[1].width: unknown key, the keys here are kind, left, right, align");
  expect_refused(R"({"dropout":{"rate":0.5}})",
                 "dropout.rate: unknown key, the keys here are p, seed, place");
  expect_refused("{\"a\\nb\":1}",
                 "a\\nb: unknown key, the keys here are score, scale, softcap, normalizer, masks, "
                 "biases, dropout, statistics");
}

TEST(SpecJsonRefuses, KeysThatStandTwice) {
  expect_refused(R"({"scale":1,"scale":2})", "spec: the key scale stands twice in one object");
  expect_refused(R"({"masks":[{"kind":"keep","kind":"keep"}]})",
                 "spec: the key kind stands twice in one object");
}

TEST(SpecJsonRefuses, UnknownKinds) {
  expect_refused(R"({"score":{"kind":"dots"}})",
                 "score.kind: \"dots\" given, one of dot, cosine, l2, additive is needed");
  expect_refused(R"({"normalizer":{"kind":3}})",
                 "normalizer.kind: 3 given, one of softmax, sparsemax, entmax, topk is needed");
  expect_refused(
      R"({"masks":[{"kind":"padding"}]})",
      "masks[0].kind: \"padding\" given, one of causal, window, key_lengths, segments, keep is "
      "needed");
  expect_refused(
      R"({"biases":[{"kind":[]}]})",
      "biases[0].kind: an array given, one of tensor, alibi, relative1d, relative2d is needed");
  expect_refused(R"({"masks":[{"kind":"causal","align":"bottom_right"}]})",
                 "masks[0].align: \"bottom_right\" given, one of bottom-right, top-left, past is "
                 "needed");
  expect_refused(R"({"dropout":{"p":0,"place":"values"}})",
                 "dropout.place: \"values\" given, one of weights, keys is needed");
  expect_refused(R"({"statistics":["entropy","mean"]})",
                 "statistics[1]: \"mean\" given, one of entropy, max_weight, support, coverage is "
                 "needed");
}

TEST(SpecJsonRefuses, MissingValues) {
  expect_refused(R"({"score":{}})", "score.kind: missing");
  expect_refused(R"({"score":{"kind":"l2"}})", "score.gamma: missing");
  expect_refused(R"({"normalizer":{"kind":"entmax"}})", "normalizer.alpha: missing");
  expect_refused(R"({"normalizer":{"kind":"topk"}})", "normalizer.k: missing");
  expect_refused(R"({"biases":[{"kind":"relative1d"}]})", "biases[0].max_distance: missing");
  expect_refused(R"({"biases":[{"kind":"relative2d"}]})", "biases[0].grid: missing");
  expect_refused(R"({"dropout":{}})", "dropout.p: missing");
}

TEST(SpecJsonRefuses, WrongTypes) {
  expect_refused(R"({"score":{"kind":"l2","gamma":"1"}})",
                 "score.gamma: \"1\" given, a number is needed");
  expect_refused(R"({"scale":"none"})",
                 "scale: \"none\" given, \"auto\", a number or an array of numbers is needed");
  expect_refused(R"({"scale":null})",
                 "scale: null given, \"auto\", a number or an array of numbers is needed");
  expect_refused(R"({"scale":[1,"2"]})", "scale[1]: \"2\" given, a number is needed");
  expect_refused(R"({"softcap":true})", "softcap: true given, a number or null is needed");
  expect_refused(R"({"normalizer":{"kind":"topk","k":8.0}})",
                 "normalizer.k: 8.0 given, an integer is needed");
  expect_refused(R"({"normalizer":{"kind":"topk","k":18446744073709551615}})",
                 "normalizer.k: 18446744073709551615 given, an integer below 2^63 is needed");
  expect_refused(R"({"masks":{}})", "masks: an object given, an array is needed");
  expect_refused(R"({"masks":[{"kind":"window","left":"all"}]})",
                 "masks[0].left: \"all\" given, an integer or null is needed");
  expect_refused(R"({"biases":3})", "biases: 3 given, an array is needed");
  expect_refused(R"({"biases":[{"kind":"relative2d","grid":[3]}]})",
                 "biases[0].grid: an array given, [height, width] is needed");
  expect_refused(R"({"biases":[{"kind":"relative2d","grid":[3,null]}]})",
                 "biases[0].grid[1]: null given, an integer is needed");
  expect_refused(R"({"dropout":{"p":0.1,"seed":-1}})",
                 "dropout.seed: -1 given, an integer in [0, 2^64) is needed");
  expect_refused(R"({"dropout":{"p":0.1,"seed":1.5}})",
                 "dropout.seed: 1.5 given, an integer in [0, 2^64) is needed");
  expect_refused(R"({"statistics":"entropy"})",
                 "statistics: \"entropy\" given, an array is needed");
}

TEST(SpecJsonRefuses, NumbersThatASpecMayNotHold) {
  expect_refused(R"({"normalizer":{"kind":"entmax","alpha":[]}})",
                 "normalizer.alpha: an array given, a number or an array of numbers is needed");
  expect_refused(R"({"normalizer":{"kind":"entmax","alpha":[1.5,"2"]}})",
                 "normalizer.alpha[1]: \"2\" given, a number is needed");
  expect_refused(
      R"({"normalizer":{"kind":"entmax","alpha":[1.5,0.5]}})",
      "normalizer.alpha[1]: 0.5 given, entmax needs alpha > 1 (softmax is the limit at 1)");
  expect_refused(R"({"normalizer":{"kind":"entmax","alpha":1}})",
                 "normalizer.alpha: 1 given, entmax needs alpha > 1 (softmax is the limit at 1)");
  expect_refused(R"({"masks":[{"kind":"keep"},{"kind":"window","left":-1}]})",
                 "masks[1].left: -1 given, a window side is >= 0 or unbounded");
}

TEST(SpecJsonRefuses, LongValuesAreShownShort) {
  try {
    spec_from_json_text("{\"scale\":\"" + std::string(100000, 'x') + "\"}");
    FAIL();
  } catch (const ArgumentError& e) {
    EXPECT_LT(std::string(e.what()).size(), 200u);
  }
}

}  // namespace
}  // namespace foci
