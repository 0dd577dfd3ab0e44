// Fused against the oracle, over recipes of everything: forward, statistics, every gradient and
// exact weights, on every target.
#include <gtest/gtest.h>

#include <algorithm>

#include "attention/compare.h"
#include "attention/fairness.h"
#include "attention/generate.h"
#include "attention/properties/property.h"
#include "attention/tolerance.h"
#include "foci/core/rng.h"
#include "foci/reference/attention.h"

namespace foci::testing {
namespace {

struct Tally {
  int64_t rows = 0, unfair = 0;
};

std::string follows_the_oracle(const Recipe& recipe, SimdTarget target, Tally& tally) {
  SweepCase c = make_case(recipe);
  thin_upstream(c, recipe.seed);
  const Comparison result = compare_with_oracle(c, Implementation::fused, target);
  tally.rows += result.rows;
  tally.unfair += result.unfair;
  return result.failures;
}

TEST(OracleProperties, FusedFollowsIt) {
  Tally tally;
  check_property({.half = true}, 400, [&](const Recipe& recipe, SimdTarget target) {
    return follows_the_oracle(recipe, target, tally);
  });
  EXPECT_LT(tally.unfair * 10, tally.rows);
}

TEST(OracleProperties, FusedFollowsItOnSmallShapes) {
  Tally tally;
  const Domain domain{.most_keys = 9, .most_queries = 9, .most_depth = 9, .half = true};
  check_property(domain, 1500, [&](const Recipe& recipe, SimdTarget target) {
    return follows_the_oracle(recipe, target, tally);
  });
  EXPECT_LT(tally.unfair * 10, tally.rows);
}

// Key new[j] of a tensor whose dimension `dim` counts keys; itself where that dimension is
// broadcast.
Tensor permuted(const Tensor& t, int dim, const std::vector<int64_t>& order) {
  if (!t.defined() || t.rank() < -dim) return t;
  if (t.dim(dim) != static_cast<int64_t>(order.size())) return t;
  const Tensor p = Tensor::empty(t.shape(), t.dtype());
  for (size_t j = 0; j < order.size(); ++j) {
    p.select(dim < 0 ? t.rank() + dim : dim, static_cast<int64_t>(j))
        .copy_from(t.select(dim < 0 ? t.rank() + dim : dim, order[j]));
  }
  return p;
}

// Without positions, keys in another order give the same rows, and coverage, dK and dV in that
// order. Both are within a tolerance of the oracle.
TEST(OracleProperties, KeysInAnotherOrderGiveTheSameRows) {
  const Domain domain{.positions = false, .dropout = false, .poison = false};
  check_property(domain, 200, [&](Recipe recipe, SimdTarget target) -> std::string {
    // No two scores are equal, since of equal ones the first in order counts.
    recipe.lengths = recipe.ties = recipe.softcap = 0;
    recipe.head = std::max<int64_t>(recipe.head, 2);
    if (recipe.scale == 2) recipe.scale = 1;
    recipe.segments = recipe.segments > 0 ? 4 : 0;
    SweepCase c = make_case(recipe);
    const reference::Forward expected = reference::attention_forward(c.spec, c.in);
    const Fairness fairness = make_fair(c, expected);
    Rng rng(recipe.seed, 79);
    std::vector<int64_t> order(recipe.keys);
    for (int64_t j = 0; j < recipe.keys; ++j) order[j] = j;
    for (int64_t j = recipe.keys - 1; j > 0; --j) std::swap(order[j], order[rng.below(j + 1)]);
    AttentionInputs in = c.in;
    in.k = permuted(c.in.k, 2, order);
    in.v = permuted(c.in.v, 2, order);
    in.k_segments = permuted(c.in.k_segments, 1, order);
    in.keep = permuted(c.in.keep, -1, order);
    in.bias = permuted(c.in.bias, -1, order);
    AttentionUpstream up = c.up;
    up.dcoverage = permuted(c.up.dcoverage, 2, order);

    const Bound bound = bind_fused(c.spec, c.in, target), other = bind_fused(c.spec, in, target);
    const AttentionOutputs out = bound.forward(), moved = other.forward();
    const AttentionGradients g = bound.backward(out, c.up, kEverything);
    const AttentionGradients m = other.backward(moved, up, kEverything);
    // max_key of the moved case, in the first one's numbers.
    AttentionOutputs a = out, b = moved;
    b.max_key = moved.max_key.clone();
    for (int64_t& key : b.max_key.span<int64_t>()) key = key < 0 ? key : order[key];
    a.coverage = permuted(out.coverage, 2, order);
    const CaseTolerance tolerance = case_tolerance(c.spec, c.in);
    const double value = 2 * tolerance.value, gradient = 2 * tolerance.gradient;
    std::string wrong;
    // A row that float32 cannot decide may be decided either way.
    AttentionOutputs same = expected.out;
    same.coverage = permuted(expected.out.coverage, 2, order);
    for (AttentionOutputs* o : {&a, &b}) {
      for (Tensor* t : {&o->y, &o->row_stat, &o->entropy, &o->max_weight, &o->max_key, &o->support,
                        &o->coverage}) {
        *t = t->clone();
      }
      excuse(fairness, same, *o);
    }
    wrong += failure("y", near(b.y, a.y, value));
    wrong += failure("row_stat", near(b.row_stat, a.row_stat, value, 0.1));
    wrong += failure("entropy", near(b.entropy, a.entropy, value, 0.1));
    wrong += failure("max_weight", near(b.max_weight, a.max_weight, value));
    wrong += failure("max_key", near(b.max_key, a.max_key, 0));
    wrong += failure("support", near(b.support, a.support, 0));
    wrong += failure("coverage", near(b.coverage, a.coverage, value));
    wrong += failure("dq", near(m.dq, g.dq, gradient, 0.01));
    wrong += failure("dk", near(m.dk, permuted(g.dk, 2, order), gradient, 0.01));
    wrong += failure("dv", near(m.dv, permuted(g.dv, 2, order), gradient, 0.01));
    if (g.dbias.defined()) {
      const double sum = 0.5 * std::sqrt(static_cast<double>(expected.out.row_stat.numel()));
      wrong += failure("dbias", near(m.dbias, permuted(g.dbias, -1, order), gradient, sum));
    }
    return wrong;
  });
}

}  // namespace
}  // namespace foci::testing
