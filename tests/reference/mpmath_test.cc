// The oracle against numbers worked out in 50 digits by code that shares nothing with it
// (mpmath_tables.py writes mpmath_table.json): every stage of the scores, every result, every
// gradient.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "foci/reference/attention.h"
#include "foci/reference/masks.h"
#include "foci/reference/problem.h"
#include "foci/reference/rotary.h"
#include "foci/reference/scores.h"
#include "foci/spec/json_value.h"

namespace foci {
namespace {

using Json = nlohmann::json;

const Json& table() {
  static const Json json = [] {
    std::ifstream file(FOCI_SOURCE_DIR "/tests/reference/mpmath_table.json");
    return Json::parse(file);
  }();
  return json;
}

double number(const Json& j) {
  if (!j.is_string()) return j.get<double>();
  const double inf = std::numeric_limits<double>::infinity();
  return j == "inf" ? inf : -inf;
}

std::vector<double> numbers(const Json& list) {
  std::vector<double> values;
  for (const Json& j : list) values.push_back(number(j));
  return values;
}

Tensor tensor(const Json& j, DType dtype = DType::f64) {
  const auto sizes = j.at("shape").get<std::vector<int64_t>>();
  Dims shape;
  for (int64_t n : sizes) shape.push_back(n);
  const Tensor t = Tensor::from(numbers(j.at("data")), shape);
  if (dtype == DType::f64) return t;
  const Tensor made = Tensor::zeros(shape, dtype);
  const auto from = t.span<double>();
  for (size_t n = 0; n < from.size(); ++n) {
    if (dtype == DType::i64) made.data<int64_t>()[n] = std::lround(from[n]);
    if (dtype == DType::i32) made.data<int32_t>()[n] = static_cast<int32_t>(from[n]);
    if (dtype == DType::boolean) made.data<bool>()[n] = from[n] != 0;
  }
  return made;
}

AttentionInputs inputs(const Json& given) {
  AttentionInputs in;
  const auto read = [&](const char* name, Tensor& to, DType dtype = DType::f64) {
    if (given.contains(name)) to = tensor(given.at(name), dtype);
  };
  read("q", in.q), read("k", in.k), read("v", in.v);
  read("key_lengths", in.key_lengths, DType::i64);
  read("past_lengths", in.past_lengths, DType::i64);
  read("q_segments", in.q_segments, DType::i32);
  read("k_segments", in.k_segments, DType::i32);
  read("keep", in.keep, DType::boolean);
  read("bias", in.bias), read("slopes", in.slopes);
  read("table1d", in.table1d), read("table2d", in.table2d), read("score_w", in.score_w);
  return in;
}

// 1e-12 of the number itself, and 1e-14 of the largest beside it, or of `unit`, the size of the
// terms that may cancel: sums of a few terms in double.
void expect_numbers(const std::string& what, const Tensor& got, const Json& list, double unit = 0) {
  ASSERT_TRUE(got.defined()) << what;
  const std::vector<double> want = numbers(list);
  const Tensor dense = got.to(DType::f64).contiguous();
  ASSERT_EQ(dense.numel(), static_cast<int64_t>(want.size())) << what;
  double largest = unit;
  for (double x : want) largest = std::isinf(x) ? largest : std::max(largest, std::abs(x));
  for (size_t n = 0; n < want.size(); ++n) {
    const double x = dense.data<double>()[n];
    if (std::isinf(want[n])) {
      EXPECT_EQ(x, want[n]) << what << "[" << n << "]";
    } else {
      EXPECT_NEAR(x, want[n], 1e-12 * std::abs(want[n]) + 1e-14 * largest)
          << what << "[" << n << "]";
    }
  }
}

class Mpmath : public ::testing::TestWithParam<size_t> {
 protected:
  const Json& given() const { return table().at("attention").at(GetParam()); }
  std::string called(const char* what) const {
    return given().at("name").get<std::string>() + ": " + what;
  }
};

TEST_P(Mpmath, Scores) {
  const Json& want = given().at("out");
  const reference::Problem p =
      reference::make_problem(spec_from_json(given().at("spec")), inputs(given().at("in")));
  const reference::Masks masks(p);
  const Dims shape{p.B, p.H, p.N, p.M};
  const auto stage = [&](double reference::PairScore::*member) {
    const Tensor t = Tensor::zeros(shape, DType::f64);
    double* to = t.data<double>();
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t h = 0; h < p.H; ++h) {
        for (int64_t i = 0; i < p.N; ++i) {
          for (int64_t j = 0; j < p.M; ++j) {
            *to++ = reference::pair_score(p, masks, b, h, i, j).*member;
          }
        }
      }
    }
    return t;
  };
  // A stage that the table leaves out changes nothing.
  const Json* list = &want.at("scores");
  const auto of = [&](const char* name) -> const Json& {
    return *(want.at(name).empty() ? list : (list = &want.at(name)));
  };
  expect_numbers(called("scores"), stage(&reference::PairScore::biased), *list);
  expect_numbers(called("capped"), stage(&reference::PairScore::capped), of("capped"));
  expect_numbers(called("scaled"), stage(&reference::PairScore::scaled), of("scaled"));
  expect_numbers(called("raw"), stage(&reference::PairScore::raw), of("raw"));
}

TEST_P(Mpmath, Results) {
  const Json& want = given().at("out");
  const reference::Forward f =
      reference::attention_forward(spec_from_json(given().at("spec")), inputs(given().at("in")));
  expect_numbers(called("scores"), f.scores, want.at("scores"));
  expect_numbers(called("weights"), f.weights, want.at("weights"));
  expect_numbers(called("y"), f.out.y, want.at("y"));
  expect_numbers(called("row_stat"), f.out.row_stat, want.at("row_stat"));
  expect_numbers(called("entropy"), f.out.entropy, want.at("entropy"), 1);
  expect_numbers(called("max_weight"), f.out.max_weight, want.at("max_weight"));
  expect_numbers(called("max_key"), f.out.max_key, want.at("max_key"));
  expect_numbers(called("support"), f.out.support, want.at("support"));
  expect_numbers(called("coverage"), f.out.coverage, want.at("coverage"));
}

TEST_P(Mpmath, Gradients) {
  if (!given().contains("grad")) return;  // ties and zero vectors, where there is no derivative
  const Json& want = given().at("grad");
  const Json& up = given().at("up");
  const AttentionGradients g =
      reference::attention_backward(spec_from_json(given().at("spec")), inputs(given().at("in")),
                                    {.dy = tensor(up.at("dy")),
                                     .drow_stat = tensor(up.at("drow_stat")),
                                     .dentropy = tensor(up.at("dentropy")),
                                     .dmax_weight = tensor(up.at("dmax_weight")),
                                     .dcoverage = tensor(up.at("dcoverage"))});
  const std::pair<const char*, const Tensor*> results[] = {{"dq", &g.dq},
                                                           {"dk", &g.dk},
                                                           {"dv", &g.dv},
                                                           {"dbias", &g.dbias},
                                                           {"dslopes", &g.dslopes},
                                                           {"dtable1d", &g.dtable1d},
                                                           {"dtable2d", &g.dtable2d},
                                                           {"dscore_w", &g.dscore_w},
                                                           {"dscale", &g.dscale},
                                                           {"dalpha", &g.dalpha}};
  size_t compared = 0;
  for (const auto& [name, t] : results) {
    EXPECT_EQ(t->defined(), want.contains(name)) << called(name);
    if (!want.contains(name)) continue;
    expect_numbers(called(name), *t, want.at(name));
    ++compared;
  }
  EXPECT_EQ(compared, want.size());
}

INSTANTIATE_TEST_SUITE_P(Table, Mpmath,
                         ::testing::Range(size_t{0}, table().at("attention").size()));

TEST(MpmathRotary, TurnsAsComplexNumbers) {
  for (const Json& c : table().at("rotary")) {
    const std::string pairs = c.at("pairs");
    expect_numbers(pairs,
                   reference::rotary(tensor(c.at("x")), tensor(c.at("cos")), tensor(c.at("sin")),
                                     pairs == "interleaved" ? reference::RotaryPairs::interleaved
                                                            : reference::RotaryPairs::half_split),
                   c.at("y"));
  }
}

}  // namespace
}  // namespace foci
