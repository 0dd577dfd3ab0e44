// What never changes one bit of a result: the number of threads, what masked keys hold, what other
// rows hold, the batch a row is in, and whether segments come packed or one by one.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/compare.h"
#include "attention/generate.h"
#include "attention/properties/property.h"
#include "attention/tolerance.h"
#include "foci/core/rng.h"
#include "foci/core/threads.h"
#include "foci/reference/attention.h"

namespace foci::testing {
namespace {

TEST(BitProperties, ThreadsChangeNothing) {
  const int before = num_threads();
  const Domain domain{.most_pairs = 400000, .half = true};
  check_property(domain, 60, [&](const Recipe& recipe, SimdTarget target) {
    SweepCase c = make_case(recipe);
    thin_upstream(c, recipe.seed);
    set_num_threads(1);
    const Bound bound = bind_fused(c.spec, c.in, target);
    const AttentionOutputs out = bound.forward();
    const AttentionGradients g = bound.backward(out, c.up, kEverything);
    std::string wrong;
    for (int threads : {2, 3, 5}) {
      set_num_threads(threads);
      const Bound again = bind_fused(c.spec, c.in, target);
      wrong += differing_bits(again.forward(), out);
      wrong += differing_bits(again.backward(out, c.up, kEverything), g);
    }
    return wrong;
  });
  set_num_threads(before);
}

// Other strides are another way to the same numbers.
TEST(BitProperties, StridesChangeNothing) {
  check_property({.half = true}, 80, [&](const Recipe& recipe, SimdTarget target) {
    SweepCase c = make_case(recipe);
    thin_upstream(c, recipe.seed);
    const Bound bound = bind_fused(c.spec, c.in, target);
    const Bound other = bind_fused(c.spec, strided(c.in), target);
    const AttentionOutputs out = bound.forward();
    AttentionUpstream up = c.up;
    up.dy = strided_heads(c.up.dy);
    return differing_bits(other.forward(), out) +
           differing_bits(other.backward(out, up, kEverything),
                          bound.backward(out, c.up, kEverything));
  });
}

// A broadcast that the caller made with strides of 0 is the broadcast that attention makes.
TEST(BitProperties, BroadcastStridesChangeNothing) {
  check_property({}, 80, [&](Recipe recipe, SimdTarget target) {
    if (recipe.keep + recipe.bias == 0) recipe.keep = 1 + static_cast<int64_t>(recipe.seed) % 31;
    SweepCase c = make_case(recipe);
    const AttentionShape s = shape_of(c.in);
    AttentionInputs in = c.in;
    for (Tensor* t : {&in.keep, &in.bias}) {
      if (t->defined()) *t = t->broadcast_to({s.B, s.H, s.N, s.M});
    }
    const AttentionWanted wanted{
        .slopes = true, .tables = true, .score_w = true, .scale = true, .alpha = true};
    const Bound bound = bind_fused(c.spec, c.in, target), other = bind_fused(c.spec, in, target);
    const AttentionOutputs out = bound.forward();
    return differing_bits(other.forward(), out) +
           differing_bits(other.backward(out, c.up, wanted), bound.backward(out, c.up, wanted));
  });
}

// NaN, infinity, or large numbers, in every element of a row.
void spoil(const Tensor& row, Rng& rng) {
  const double values[] = {std::nan(""), std::numeric_limits<double>::infinity(), -3e38, 1e4};
  row.fill(values[rng.below(4)]);
}

TEST(BitProperties, MaskedKeysAndEmptyQueriesChangeNothing) {
  int64_t spoiled = 0;
  const Domain domain{.most_pairs = 10000, .poison = false};
  check_property(domain, 200, [&](const Recipe& recipe, SimdTarget target) {
    SweepCase c = make_case(recipe);
    thin_upstream(c, recipe.seed);
    const reference::Forward f = reference::attention_forward(c.spec, c.in);
    Rng rng(recipe.seed, 80);
    AttentionInputs bad = c.in;
    bad.q = c.in.q.clone(), bad.k = c.in.k.clone(), bad.v = c.in.v.clone();
    AttentionUpstream up = c.up;
    if (up.dy.defined()) up.dy = up.dy.clone();
    const AttentionShape s = shape_of(c.in);
    const auto row = [](const Tensor& t, int64_t b, int64_t h, int64_t i) {
      return t.select(0, b).select(0, h).select(0, i);
    };
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t g = 0; g < s.Hk; ++g) {
        std::vector<bool> seen(s.M);
        for (int64_t h = g * (s.H / s.Hk); h < (g + 1) * (s.H / s.Hk); ++h) {
          for (int64_t i = 0; i < s.N; ++i) {
            bool empty = true;
            for (int64_t j = 0; j < s.M; ++j) {
              if (!f.allowed.at<bool>(b, h, i, j)) continue;
              empty = false;
              seen[j] = true;
            }
            if (!empty) continue;
            ++spoiled;
            spoil(row(bad.q, b, h, i), rng);
            if (up.dy.defined()) spoil(row(up.dy, b, h, i), rng);
          }
        }
        for (int64_t j = 0; j < s.M; ++j) {
          if (seen[j]) continue;
          ++spoiled;
          spoil(row(bad.k, b, g, j), rng);
          spoil(row(bad.v, b, g, j), rng);
        }
      }
    }
    const Bound bound = bind_fused(c.spec, c.in, target), other = bind_fused(c.spec, bad, target);
    const AttentionOutputs out = bound.forward(), same = other.forward();
    return differing_bits(same, out) + differing_bits(other.backward(same, up, kEverything),
                                                      bound.backward(out, c.up, kEverything));
  });
  EXPECT_GT(spoiled, 1000);
}

// One row of a result that counts queries in dimension 2.
std::string differing_row(const AttentionOutputs& a, int64_t i, const AttentionOutputs& b,
                          int64_t j) {
  std::string wrong;
  const auto check = [&](const char* name, const Tensor& x, const Tensor& y) {
    wrong += failure(name, same_bits(x.select(2, i), y.select(2, j)));
  };
  check("y", a.y, b.y);
  check("row_stat", a.row_stat, b.row_stat);
  check("entropy", a.entropy, b.entropy);
  check("max_weight", a.max_weight, b.max_weight);
  check("max_key", a.max_key, b.max_key);
  check("support", a.support, b.support);
  return wrong;
}

// What the other queries hold, NaN too, changes nothing in a row, nor in its gradient.
TEST(BitProperties, OtherRowsChangeNothing) {
  check_property({}, 150, [&](const Recipe& recipe, SimdTarget target) -> std::string {
    if (recipe.queries == 0) return "";
    SweepCase c = make_case(recipe);
    Rng rng(recipe.seed, 81);
    const int64_t own = rng.below(recipe.queries);
    AttentionInputs in = c.in;
    in.q = random_normal(rng, c.in.q.shape(), 3);
    AttentionUpstream up = c.up;
    up.dy = random_normal(rng, c.up.dy.shape(), 2);
    if (recipe.queries > 1 && rng.below(3) == 0) {
      spoil(in.q.select(2, (own + 1) % recipe.queries), rng);
    }
    in.q.select(2, own).copy_from(c.in.q.select(2, own));
    up.dy.select(2, own).copy_from(c.up.dy.select(2, own));
    const Bound bound = bind_fused(c.spec, c.in, target), other = bind_fused(c.spec, in, target);
    const AttentionOutputs out = bound.forward(), same = other.forward();
    const AttentionGradients g = bound.backward(out, c.up), h = other.backward(same, up);
    return differing_row(same, own, out, own) +
           failure("dq", same_bits(h.dq.select(2, own), g.dq.select(2, own)));
  });
}

// Every query computed alone gives what it gives among the others.
TEST(BitProperties, ARowAloneIsTheRowAmongOthers) {
  const Domain domain{.positions = false, .segments = false, .dropout = false};
  check_property(domain, 150, [&](const Recipe& recipe, SimdTarget target) -> std::string {
    if (recipe.queries == 0) return "";
    SweepCase c = make_case(recipe);
    Rng rng(recipe.seed, 82);
    const int64_t own = rng.below(recipe.queries);
    const auto row = [&](const Tensor& t, int dim) { return t.slice(dim, own, own + 1); };
    AttentionInputs in = c.in;
    in.q = row(c.in.q, 2);
    for (Tensor* t : {&in.keep, &in.bias}) {
      if (t->defined() && t->rank() > 1 && t->dim(-2) != 1) *t = row(*t, t->rank() - 2);
    }
    AttentionUpstream up;
    up.dy = row(c.up.dy, 2);
    up.drow_stat = row(c.up.drow_stat, 2).contiguous();
    up.dentropy = row(c.up.dentropy, 2).contiguous();
    up.dmax_weight = row(c.up.dmax_weight, 2).contiguous();
    up.dcoverage = c.up.dcoverage;
    const Bound bound = bind_fused(c.spec, c.in, target), alone = bind_fused(c.spec, in, target);
    const AttentionOutputs out = bound.forward(), one = alone.forward();
    const AttentionGradients g = bound.backward(out, c.up), h = alone.backward(one, up);
    return differing_row(one, 0, out, own) +
           failure("dq", same_bits(h.dq.select(2, 0), g.dq.select(2, own)));
  });
}

// Equal queries that see the same keys give equal rows, wherever they stand.
TEST(BitProperties, EqualRowsGiveEqualBits) {
  const Domain domain{.positions = false, .segments = false, .tensors = false, .dropout = false};
  check_property(domain, 150, [&](const Recipe& recipe, SimdTarget target) -> std::string {
    if (recipe.queries < 2) return "";
    SweepCase c = make_case(recipe);
    Rng rng(recipe.seed, 83);
    const int64_t i = rng.below(recipe.queries), j = rng.below(recipe.queries);
    c.in.q.select(2, j).copy_from(c.in.q.select(2, i));
    c.up.dy.select(2, j).copy_from(c.up.dy.select(2, i));
    c.up = {.dy = c.up.dy, .dcoverage = c.up.dcoverage};
    const Bound bound = bind_fused(c.spec, c.in, target);
    const AttentionOutputs out = bound.forward();
    const AttentionGradients g = bound.backward(out, c.up);
    return differing_row(out, i, out, j) +
           failure("dq", same_bits(g.dq.select(2, i), g.dq.select(2, j)));
  });
}

// Entry b of a batch alone. Dropout counts the batch, so it is left out.
TEST(BitProperties, AnEntryAloneIsTheEntryInItsBatch) {
  const Domain domain{.batch = 4, .dropout = false, .half = true};
  check_property(domain, 120, [&](const Recipe& recipe, SimdTarget target) {
    SweepCase c = make_case(recipe);
    thin_upstream(c, recipe.seed);
    const Bound bound = bind_fused(c.spec, c.in, target);
    const AttentionOutputs out = bound.forward();
    const AttentionGradients g = bound.backward(out, c.up);
    std::string wrong;
    for (int64_t b = 0; b < recipe.batch; ++b) {
      const auto own = [&](const Tensor& t) { return t.defined() ? t.slice(0, b, b + 1) : t; };
      AttentionInputs in = c.in;
      for (Tensor* t : {&in.q, &in.k, &in.v, &in.key_lengths, &in.past_lengths, &in.q_segments,
                        &in.k_segments}) {
        *t = own(*t);
      }
      for (Tensor* t : {&in.keep, &in.bias}) {
        if (t->defined() && t->rank() == 4 && t->dim(0) != 1) *t = own(*t);
      }
      const AttentionUpstream up{own(c.up.dy), own(c.up.drow_stat), own(c.up.dentropy),
                                 own(c.up.dmax_weight), own(c.up.dcoverage)};
      const Bound alone = bind_fused(c.spec, in, target);
      const AttentionOutputs one = alone.forward();
      const AttentionGradients h = alone.backward(one, up);
      const AttentionOutputs part{own(out.y),          own(out.row_stat), own(out.entropy),
                                  own(out.max_weight), own(out.max_key),  own(out.support),
                                  own(out.coverage)};
      wrong += differing_bits(one, part) + failure("dq", same_bits(h.dq, own(g.dq))) +
               failure("dk", same_bits(h.dk, own(g.dk))) +
               failure("dv", same_bits(h.dv, own(g.dv)));
    }
    return wrong;
  });
}

// Segments of random lengths, some without queries or without keys. Dropout counts keys in the
// batch entry, and lengths hide the entry's end, so both are left out.
TEST(BitProperties, PackedSegmentsAreTheSegmentsOneByOne) {
  const Domain domain{.batch = 1,
                      .segments = false,
                      .tensors = false,
                      .dropout = false,
                      .half = true,
                      .empty = false};
  check_property(domain, 120, [&](Recipe recipe, SimdTarget target) -> std::string {
    recipe.relative2d = recipe.poison = 0;  // a grid has a size of its own
    for (int64_t* align : {&recipe.causal, &recipe.window}) {
      if (*align == 3) *align = 1;  // cached keys come before the whole entry
    }
    recipe.segments = 2;
    SweepCase c = make_case(recipe);
    thin_upstream(c, recipe.seed);
    Rng rng(recipe.seed, 84);
    struct Part {
      int64_t q, q_end, k, k_end;
    };
    std::vector<Part> parts;
    for (int64_t q = 0, k = 0; q < recipe.queries || k < recipe.keys;) {
      const auto take = [&](int64_t at, int64_t all) {
        if (rng.below(8) == 0) return at;
        return std::min(all, at + 1 + rng.below(rng.below(3) == 0 ? 300 : 20));
      };
      parts.push_back({q, take(q, recipe.queries), k, take(k, recipe.keys)});
      q = parts.back().q_end, k = parts.back().k_end;
    }
    c.in.q_segments = Tensor::zeros({1, recipe.queries}, DType::i32);
    c.in.k_segments = Tensor::zeros({1, recipe.keys}, DType::i32);
    for (size_t s = 0; s < parts.size(); ++s) {
      c.in.q_segments.slice(1, parts[s].q, parts[s].q_end).fill(static_cast<double>(s));
      c.in.k_segments.slice(1, parts[s].k, parts[s].k_end).fill(static_cast<double>(s));
    }
    const Bound bound = bind_fused(c.spec, c.in, target);
    const AttentionOutputs out = bound.forward();
    const AttentionGradients g = bound.backward(out, c.up);
    AttentionSpec spec = c.spec;
    std::erase_if(spec.masks, [](const Mask& m) { return std::holds_alternative<Segments>(m); });
    std::string wrong;
    for (const Part& p : parts) {
      const auto row = [&](const Tensor& t) {
        return t.defined() ? t.slice(2, p.q, p.q_end).contiguous() : t;
      };
      const auto key = [&](const Tensor& t) {
        return t.defined() ? t.slice(2, p.k, p.k_end).contiguous() : t;
      };
      AttentionInputs in = c.in;
      in.q_segments = in.k_segments = Tensor();
      in.q = row(c.in.q), in.k = key(c.in.k), in.v = key(c.in.v);
      const AttentionUpstream up{row(c.up.dy), row(c.up.drow_stat), row(c.up.dentropy),
                                 row(c.up.dmax_weight), key(c.up.dcoverage)};
      const Bound alone = bind_fused(spec, in, target);
      const AttentionOutputs one = alone.forward();
      const AttentionGradients h = alone.backward(one, up);
      AttentionOutputs part{row(out.y),          row(out.row_stat), row(out.entropy),
                            row(out.max_weight), row(out.max_key),  row(out.support),
                            key(out.coverage)};
      part.max_key = part.max_key.clone();
      for (int64_t& j : part.max_key.span<int64_t>()) j = j < 0 ? j : j - p.k;
      wrong += differing_bits(one, part) + failure("dq", same_bits(h.dq, row(g.dq))) +
               failure("dk", same_bits(h.dk, key(g.dk))) +
               failure("dv", same_bits(h.dv, key(g.dv)));
      if (!wrong.empty())
        return fmt::format("queries {}:{}, keys {}:{}: ", p.q, p.q_end, p.k, p.k_end) + wrong;
    }
    return wrong;
  });
}

}  // namespace
}  // namespace foci::testing
