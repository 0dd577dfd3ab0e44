// Draws recipes, writes a failing one as a test would, and runs a property over many.
#include "attention/properties/property.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <vector>

#include "attention/generate.h"
#include "attention/tolerance.h"

namespace foci::testing {

// As a test would write it.
std::ostream& operator<<(std::ostream& os, const Recipe& r) {
  const Recipe plain;
  const auto field = [&](const char* name, auto value, auto usual) {
    if (value != usual) os << "." << name << " = " << value << ", ";
  };
#define FOCI_FIELD(name) field(#name, r.name, plain.name)
  os << "{";
  FOCI_FIELD(batch), FOCI_FIELD(kv_heads), FOCI_FIELD(group), FOCI_FIELD(queries), FOCI_FIELD(keys);
  FOCI_FIELD(head), FOCI_FIELD(value);
  if (r.dtype != plain.dtype)
    os << ".dtype = DType::" << (r.dtype == DType::f16 ? "f16, " : "bf16, ");
  FOCI_FIELD(seed), FOCI_FIELD(score), FOCI_FIELD(scale), FOCI_FIELD(softcap);
  FOCI_FIELD(normalizer), FOCI_FIELD(alpha), FOCI_FIELD(k), FOCI_FIELD(causal), FOCI_FIELD(window);
  FOCI_FIELD(left), FOCI_FIELD(right), FOCI_FIELD(lengths), FOCI_FIELD(segments), FOCI_FIELD(keep);
  FOCI_FIELD(bias), FOCI_FIELD(alibi), FOCI_FIELD(relative1d), FOCI_FIELD(relative2d);
  FOCI_FIELD(dropout), FOCI_FIELD(poison), FOCI_FIELD(ties);
#undef FOCI_FIELD
  return os << "}";
}

namespace {

// Strips of 8, 16 and 32 lanes, tiles of three strips, blocks of keys.
constexpr int64_t kEdges[] = {8, 16, 24, 32, 48, 64, 96, 128, 256, 512};

// [low, high], shrinking towards low. RapidCheck's own ranges grow with the case's number, from
// low alone; here the first case may be anything.
int64_t draw(int64_t low, int64_t high) {
  if (low >= high) return low;
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int64_t>(low, high + 1));
}
bool one_in(int64_t n) {
  return draw(0, n - 1) == n - 1;
}
// 0 (the plainest) with half the probability, otherwise 1 … high.
int64_t option(int64_t high) {
  return std::max<int64_t>(0, draw(0, 2 * high) - high);
}

int64_t draw_size(int64_t low, int64_t most) {
  if (draw(0, 1) == 0) return draw(low, std::min<int64_t>(most, 70));
  std::vector<int64_t> near;
  for (int64_t edge : kEdges) {
    for (int64_t n : {edge - 1, edge, edge + 1}) {
      if (n >= low && n <= most) near.push_back(n);
    }
  }
  return near.empty() ? draw(low, most) : near[draw(0, static_cast<int64_t>(near.size()) - 1)];
}

void draw_options(const Domain& domain, Recipe& r) {
  r.score = option(3);
  r.scale = option(3);
  r.softcap = option(1);
  r.normalizer = draw(0, 5);
  r.alpha = draw(0, std::size(kAlphas) - 1);
  const int64_t ks[] = {1, 2, 5, 17, 64, r.keys + 1, int64_t{1} << 62};
  r.k = ks[draw(0, std::size(ks) - 1)];
  r.ties = r.normalizer == 4 ? draw(0, 2) : 0;
  if (domain.positions) {
    r.causal = option(3);
    r.window = option(3);
    r.left = r.window > 0 ? draw(-1, 40) : -1;
    r.right = r.window > 0 ? draw(-1, 40) : -1;
    r.alibi = option(1);
    r.relative1d = one_in(3) ? draw(1, 12) : 0;
    r.relative2d = one_in(4);
  }
  if (domain.segments && one_in(3)) r.segments = draw(1, 4);
  if (domain.tensors) {
    r.lengths = one_in(3);
    if (one_in(3)) r.keep = draw(1, kBroadcastShapes);
    if (one_in(3)) r.bias = draw(1, kBroadcastShapes);
  }
  if (domain.dropout && one_in(3)) r.dropout = draw(1, 2);
  if (domain.poison && one_in(6)) r.poison = draw(1, 2);
  if (domain.half && one_in(4)) {
    r.dtype = draw(0, 1) == 0 ? DType::f16 : DType::bf16;
    if (r.ties == 1) r.ties = 0;
  }
}

Recipe draw_recipe(const Domain& domain) {
  Recipe r;
  const int64_t low = domain.empty ? 0 : 1;
  r.queries = draw_size(low, domain.most_queries);
  r.keys = draw_size(low, domain.most_keys);
  // Not everything large at once: the oracle takes pair by pair.
  const int64_t pairs = std::max<int64_t>(1, r.queries * r.keys);
  if (pairs > domain.most_pairs) r.queries = std::max<int64_t>(1, domain.most_pairs / r.keys);
  int64_t heads = std::max<int64_t>(1, domain.most_pairs / pairs);
  r.batch = draw(1, std::min(domain.batch, heads));
  heads /= r.batch;
  r.kv_heads = draw(1, std::min(domain.kv_heads, heads));
  heads /= r.kv_heads;
  r.group = draw(1, std::min(domain.group, heads));
  const bool large = r.batch * r.kv_heads * r.group * r.queries * r.keys > 10000;
  r.head = draw_size(low, large ? 24 : domain.most_depth);
  r.value = draw_size(low, large ? 24 : domain.most_depth);
  r.seed = static_cast<uint64_t>(draw(0, 1 << 20));
  draw_options(domain, r);
  return r;
}

int64_t number_from(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::strtoll(text, nullptr, 10) : otherwise;
}

}  // namespace

void check_property(const Domain& domain, int cases, const Property& property) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  rc::detail::TestMetadata metadata;
  metadata.id = metadata.description = std::string(test->test_suite_name()) + "." + test->name();
  rc::detail::TestParams params;
  params.seed = static_cast<uint64_t>(number_from("FOCI_PROPERTY_SEED", 20251));
  params.maxSuccess = static_cast<int>(number_from("FOCI_PROPERTY_CASES", cases));
  const std::vector<SimdTarget>& targets = supported_targets();
  const auto result = rc::detail::checkTestable(
      [&] {
        const Recipe recipe = *rc::gen::exec([&] { return draw_recipe(domain); });
        const SimdTarget target = targets[draw(0, static_cast<int64_t>(targets.size()) - 1)];
        const std::string wrong = property(recipe, target);
        if (wrong.empty()) return;
        std::ostringstream text;
        text << wrong << name_of(target) << " " << recipe << "\n" << make_case(recipe).text;
        RC_FAIL(text.str());
      },
      metadata, params);
  if (result.is<rc::detail::SuccessResult>()) return;
  std::ostringstream text;
  rc::detail::printResultMessage(result, text);
  ADD_FAILURE() << text.str();
}

Bound bind_fused(const AttentionSpec& spec, const AttentionInputs& in, SimdTarget target) {
  return Plan::make(spec, shape_of(in), {Implementation::fused, target}).bind(in);
}

}  // namespace foci::testing
