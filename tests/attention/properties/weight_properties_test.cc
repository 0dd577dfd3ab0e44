// What holds between weights, outputs and statistics of one call, and what dropout promises.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/generate.h"
#include "attention/properties/property.h"
#include "attention/tolerance.h"
#include "foci/core/rng.h"
#include "foci/reference/attention.h"

namespace foci::testing {
namespace {

Tensor all_weights(const Bound& bound, const AttentionOutputs& out) {
  std::vector<int64_t> rows(out.y.dim(2)), heads(out.y.dim(1));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
  for (size_t h = 0; h < heads.size(); ++h) heads[h] = static_cast<int64_t>(h);
  return bound.weights(out, rows, heads);
}

// What dropout of weights multiplies a weight with.
double dropout_factor(const AttentionSpec& spec, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (!spec.dropout || spec.dropout->place != DropoutPlace::weights) return 1;
  const uint32_t threshold = dropout_threshold(spec.dropout->p);
  return dropout_bits(spec.dropout->seed, b, h, i, j) < threshold ? 0
                                                                  : 1 / (1 - threshold / 65536.0);
}

template <class F>
void for_each_row(const AttentionShape& s, F&& f) {
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t h = 0; h < s.H; ++h) {
      for (int64_t i = 0; i < s.N; ++i) f(b, h, i);
    }
  }
}

// The sum of a row's weights is 1, or 0 where no key may be seen. Each weight has a relative error
// of a few eps and of the row's statistic (of size r, rounded: r·eps); the sum it was divided by
// was taken in partial sums of at most M/4 terms.
TEST(WeightProperties, SumToOneOrZero) {
  check_property({.poison = false}, 150, [&](const Recipe& recipe, SimdTarget target) {
    const SweepCase c = make_case(recipe);
    const AttentionShape s = shape_of(c.in);
    const Bound bound = bind_fused(c.spec, c.in, target);
    const AttentionOutputs out = bound.forward();
    const Tensor w = all_weights(bound, out);
    std::string wrong;
    for_each_row(s, [&](int64_t b, int64_t h, int64_t i) {
      double sum = 0;
      for (int64_t j = 0; j < s.M; ++j) {
        const float x = w.at<float>(b, h, i, j);
        sum += x;
        if (!(x >= 0)) wrong += fmt::format("weight {} at {} {} {} {}\n", x, b, h, i, j);
      }
      const double statistic = out.row_stat.at<float>(b, h, i);
      if (std::isinf(statistic)) {
        if (sum != 0) wrong += fmt::format("sum {} of an empty row {} {} {}\n", sum, b, h, i);
        return;
      }
      const double bound_of_sum = kEps * (16 + 0.25 * double(s.M) + 2 * std::abs(statistic));
      if (std::abs(sum - 1) > bound_of_sum) {
        wrong +=
            fmt::format("sum 1 + {} of row {} {} {}, bound {}\n", sum - 1, b, h, i, bound_of_sum);
      }
    });
    return wrong;
  });
}

// Y, entropy, largest weight, support and coverage are those of the weights that `weights` gives.
TEST(WeightProperties, GiveOutputsAndStatistics) {
  check_property({.poison = false}, 200, [&](const Recipe& recipe, SimdTarget target) {
    const SweepCase c = make_case(recipe);
    const AttentionShape s = shape_of(c.in);
    const Bound bound = bind_fused(c.spec, c.in, target);
    const AttentionOutputs out = bound.forward();
    const Tensor w = all_weights(bound, out);
    const auto zeros = [](const Dims& shape) { return Tensor::zeros(shape, DType::f64); };
    const Tensor y = zeros({s.B, s.H, s.N, s.Dv}), entropy = zeros({s.B, s.H, s.N});
    const Tensor max_weight = zeros({s.B, s.H, s.N}), coverage = zeros({s.B, s.H, s.M});
    const CaseTolerance tolerance = case_tolerance(c.spec, c.in);
    const bool sparsemax = std::holds_alternative<Sparsemax>(c.spec.normalizer);
    std::string wrong;
    for_each_row(s, [&](int64_t b, int64_t h, int64_t i) {
      int64_t count = 0;
      for (int64_t j = 0; j < s.M; ++j) {
        const double p = w.at<float>(b, h, i, j);
        count += p > 0;
        coverage.at<double>(b, h, j) += p;
        if (p > 0) entropy.at<double>(b, h, i) -= p * std::log(p);
        double& most = max_weight.at<double>(b, h, i);
        most = std::max(most, p);
        const double factor = p * dropout_factor(c.spec, b, h, i, j);
        for (int64_t d = 0; d < s.Dv; ++d) {
          y.at<double>(b, h, i, d) += factor * c.in.v.at<float>(b, h / (s.H / s.Hk), j, d);
        }
      }
      const int64_t key = out.max_key.at<int64_t>(b, h, i);
      const double most = max_weight.at<double>(b, h, i);
      if ((key < 0) != std::isinf(out.row_stat.at<float>(b, h, i)) ||
          (key >= 0 && w.at<float>(b, h, i, key) < most - tolerance.value)) {
        wrong += fmt::format("max_key {} of row {} {} {}\n", key, b, h, i);
      }
      // Weights that float rounds to 0 still take part.
      const auto support = static_cast<int64_t>(out.support.at<float>(b, h, i));
      if (sparsemax ? count != support : count > support) {
        wrong += fmt::format("support {} of row {} {} {}, {} weights\n", support, b, h, i, count);
      }
    });
    return wrong + failure("y", near(out.y, y, tolerance.value)) +
           failure("entropy", near(out.entropy, entropy, tolerance.value, 0.1)) +
           failure("max_weight", near(out.max_weight, max_weight, tolerance.value)) +
           failure("coverage", near(out.coverage, coverage, tolerance.value));
  });
}

// The dropped weights (keys) are those that dropout_bits says, entry for entry. With V = 1, Y holds
// the weights after dropout.
TEST(DropoutProperties, DropsWhatTheBitsSay) {
  const Domain domain{.most_pairs = 15000, .poison = false};
  check_property(domain, 100, [&](Recipe recipe, SimdTarget target) -> std::string {
    recipe.normalizer = 0;
    if (recipe.dropout == 0) recipe.dropout = 1 + static_cast<int64_t>(recipe.seed % 2);
    // No weight may round to 0.
    if (recipe.scale == 3) recipe.scale = 0;
    recipe.alibi = 0;
    SweepCase c = make_case(recipe);
    const AttentionShape s = shape_of(c.in);
    c.in.v = Tensor::zeros({s.B, s.Hk, s.M, s.M});
    for (int64_t j = 0; j < s.M; ++j) c.in.v.select(2, j).select(2, j).fill(1);
    const bool of_keys = c.spec.dropout->place == DropoutPlace::keys;
    AttentionSpec without = c.spec;
    without.dropout.reset();
    const Tensor allowed = reference::attention_forward(without, c.in).allowed;
    const Bound bound = bind_fused(c.spec, c.in, target);
    const AttentionOutputs out = bound.forward();
    const Tensor w = all_weights(bound, out);
    const uint32_t threshold = dropout_threshold(c.spec.dropout->p);
    std::string wrong;
    for_each_row(s, [&](int64_t b, int64_t h, int64_t i) {
      for (int64_t j = 0; j < s.M; ++j) {
        const bool seen = allowed.at<bool>(b, h, i, j);
        const bool kept = dropout_bits(c.spec.dropout->seed, b, h, i, j) >= threshold;
        // Weights are given before dropout of weights.
        const bool has_weight = w.at<float>(b, h, i, j) > 0;
        const bool arrives = out.y.at<float>(b, h, i, j) > 0;
        if (has_weight != (seen && (kept || !of_keys)) || arrives != (seen && kept)) {
          wrong += fmt::format("query {} {} {} key {}: seen {}, kept {}, weight {}, output {}\n", b,
                               h, i, j, seen, kept, has_weight, arrives);
        }
      }
    });
    return wrong;
  });
}

// A weight w survives with probability 1 − p and is then w/(1 − p), so the mean over n seeds of
// Σ w·v has the undropped value as its expectation and variance Σ (w·v)²·p/((1 − p)·n). Six
// standard deviations: fewer than one comparison in 10⁸ would miss that by chance.
TEST(DropoutProperties, TheMeanOverSeedsIsTheUndroppedOutput) {
  constexpr int kSeeds = 200;
  const Domain domain{.most_keys = 70,
                      .most_queries = 20,
                      .most_depth = 8,
                      .most_pairs = 700,
                      .poison = false,
                      .empty = false};
  check_property(domain, 25, [&](Recipe recipe, SimdTarget target) {
    recipe.dropout = 1;
    SweepCase c = make_case(recipe);
    const AttentionShape s = shape_of(c.in);
    AttentionSpec without = c.spec;
    without.dropout.reset();
    const Bound bound = bind_fused(without, c.in, target);
    const AttentionOutputs out = bound.forward();
    const Tensor w = all_weights(bound, out);
    const Tensor sum = Tensor::zeros(out.y.shape(), DType::f64);
    for (int n = 0; n < kSeeds; ++n) {
      c.spec.dropout->seed = recipe.seed * 1000 + static_cast<uint64_t>(n);
      const Tensor y = bind_fused(c.spec, c.in, target).forward().y;
      for (int64_t e = 0; e < y.numel(); ++e) sum.data<double>()[e] += y.data<float>()[e];
    }
    const double p = dropout_threshold(c.spec.dropout->p) / 65536.0;
    std::string wrong;
    for_each_row(s, [&](int64_t b, int64_t h, int64_t i) {
      for (int64_t d = 0; d < s.Dv; ++d) {
        double squares = 0;
        for (int64_t j = 0; j < s.M; ++j) {
          const double term =
              double{w.at<float>(b, h, i, j)} * c.in.v.at<float>(b, h / (s.H / s.Hk), j, d);
          squares += term * term;
        }
        const double deviation = std::sqrt(squares * p / (1 - p) / kSeeds);
        const double off = sum.at<double>(b, h, i, d) / kSeeds - out.y.at<float>(b, h, i, d);
        if (std::abs(off) > 6 * deviation + 1e-5) {
          wrong += fmt::format("mean of row {} {} {} is off by {}, six deviations are {}\n", b, h,
                               i, off, 6 * deviation);
        }
      }
    });
    return wrong;
  });
}

// More queries behind a row, another tiling: the same bits, dropout included.
TEST(DropoutProperties, MoreQueriesBehindARowChangeNothing) {
  const Domain domain{.batch = 1, .positions = false, .segments = false};
  check_property(domain, 100, [&](Recipe recipe, SimdTarget target) {
    if (recipe.dropout == 0) recipe.dropout = 1 + static_cast<int64_t>(recipe.seed % 2);
    const SweepCase c = make_case(recipe);
    Rng rng(recipe.seed, 85);
    const int64_t count = rng.below(recipe.queries + 1);
    const auto first = [&](const Tensor& t) { return t.slice(2, 0, count); };
    AttentionInputs in = c.in;
    in.q = first(c.in.q);
    for (Tensor* t : {&in.keep, &in.bias}) {
      if (t->defined() && t->rank() > 1 && t->dim(-2) != 1) *t = t->slice(t->rank() - 2, 0, count);
    }
    const AttentionUpstream up{.dy = first(c.up.dy), .dcoverage = c.up.dcoverage};
    const Bound bound = bind_fused(c.spec, c.in, target), part = bind_fused(c.spec, in, target);
    const AttentionOutputs out = bound.forward(), few = part.forward();
    const AttentionGradients g = bound.backward(out, {.dy = c.up.dy, .dcoverage = c.up.dcoverage});
    const AttentionGradients h = part.backward(few, up);
    return failure("y", same_bits(few.y, first(out.y))) +
           failure("row_stat", same_bits(few.row_stat, first(out.row_stat))) +
           failure("entropy", same_bits(few.entropy, first(out.entropy))) +
           failure("max_key", same_bits(few.max_key, first(out.max_key))) +
           failure("dq", same_bits(h.dq, first(g.dq)));
  });
}

}  // namespace
}  // namespace foci::testing
