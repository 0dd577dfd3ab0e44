// Runs forward, backward and weights of a case, and measures each output.
#include "attention/compare.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/fairness.h"
#include "attention/generate.h"
#include "attention/tolerance.h"
#include "foci/reference/attention.h"

namespace foci::testing {
namespace {

AttentionUpstream doubles(const AttentionUpstream& up) {
  AttentionUpstream d = up;
  for (Tensor* t : {&d.dy, &d.drow_stat, &d.dentropy, &d.dmax_weight, &d.dcoverage}) {
    if (t->defined()) *t = t->to(DType::f64);
  }
  return d;
}

// The excused values must not reach the backward pass.
AttentionOutputs copy_of(const AttentionOutputs& out) {
  AttentionOutputs c = out;
  for (Tensor* t :
       {&c.y, &c.row_stat, &c.entropy, &c.max_weight, &c.max_key, &c.support, &c.coverage}) {
    if (t->defined()) *t = t->clone();
  }
  return c;
}

class Checks {
 public:
  explicit Checks(Comparison& result) : result_(result) {}
  void check(const std::string& name, const Tensor& actual, const Tensor& expected,
             double tolerance, double floor = 0, NonFinite kinds = NonFinite::same_kind) {
    const auto answer = near(actual, expected, tolerance, floor, kinds);
    if (!answer) result_.failures += name + ": " + answer.message() + "\n";
    if (!answer || tolerance == 0) return;
    const double ratio = closeness(actual, expected, floor, kinds).relative() / tolerance;
    if (ratio > result_.worst) {
      result_.worst = ratio;
      result_.worst_name = name;
    }
  }

 private:
  Comparison& result_;
};

}  // namespace

Comparison compare_with_oracle(SweepCase c, Implementation implementation, SimdTarget target) {
  Comparison result;
  Checks checks(result);
  const reference::Forward expected = reference::attention_forward(c.spec, c.in);
  const Fairness fairness = make_fair(c, expected);
  const CaseTolerance tolerance = case_tolerance(c.spec, c.in);
  result.rows = expected.out.row_stat.numel();
  result.unfair = fairness.count;

  const Bound bound =
      Plan::make(c.spec, shape_of(c.in), {implementation, target}).bind(strided(c.in));
  AttentionOutputs out;
  // float32, so that 16-bit storage of the result does not hide errors.
  out.y = Tensor::empty(expected.out.y.shape());
  bound.forward(out);
  AttentionOutputs compared = copy_of(out);
  excuse(fairness, expected.out, compared);
  if (c.poisoned) {
    // Which key of a row of NaN counts as its largest is not promised.
    for (int64_t n = 0; n < result.rows; ++n) {
      if (std::isnan(expected.out.row_stat.data<double>()[n])) {
        compared.max_key.data<int64_t>()[n] = expected.out.max_key.data<int64_t>()[n];
      }
    }
  }
  checks.check("y", compared.y, expected.out.y, tolerance.value);
  // A log-sum-exp and τ are sums that may cancel; entropy weighs errors with the logarithms of
  // weights.
  checks.check("row_stat", compared.row_stat, expected.out.row_stat, tolerance.value, 0.1);
  checks.check("entropy", compared.entropy, expected.out.entropy, tolerance.value, 0.1);
  checks.check("max_weight", compared.max_weight, expected.out.max_weight, tolerance.value);
  checks.check("max_key", compared.max_key, expected.out.max_key, 0);
  checks.check("support", compared.support, expected.out.support, 0);
  checks.check("coverage", compared.coverage, expected.out.coverage, tolerance.value);

  AttentionUpstream up = c.up;
  up.dy = strided_heads(c.up.dy);
  const AttentionGradients g = bound.backward(out, up, kEverything);
  const AttentionGradients e = reference::attention_backward(c.spec, c.in, doubles(c.up));
  const NonFinite kinds = c.poisoned ? NonFinite::same_place : NonFinite::same_kind;
  // Gradients of q, k, v are compared as they are; those that sum over a batch may cancel, and
  // their terms, of about unit size, are as many as there are rows.
  const double sum = 0.5 * std::sqrt(static_cast<double>(result.rows));
  const auto gradient = [&](const char* name, const Tensor& x, const Tensor& y, double floor) {
    if (x.defined() != y.defined()) {
      result.failures += std::string(name) + ": only one of them is defined\n";
    } else if (x.defined()) {
      checks.check(name, x, y, tolerance.gradient, floor, kinds);
    }
  };
  // Where one weight is nearly 1, dP − dY·Y is next to nothing, but its terms are of size √Dv.
  const double small = 0.01 * (1 + std::sqrt(static_cast<double>(c.in.v.dim(3))));
  gradient("dq", g.dq, e.dq, small);
  gradient("dk", g.dk, e.dk, small);
  gradient("dv", g.dv, e.dv, 0.01);
  gradient("dbias", g.dbias, e.dbias, sum);
  // Each term is weighed with its distance.
  const auto distance = static_cast<double>(std::max(c.in.q.dim(2), c.in.k.dim(2)));
  gradient("dslopes", g.dslopes, e.dslopes, sum * std::max(1.0, distance / 8));
  gradient("dtable1d", g.dtable1d, e.dtable1d, sum);
  gradient("dtable2d", g.dtable2d, e.dtable2d, sum);
  gradient("dscore_w", g.dscore_w, e.dscore_w, sum);
  gradient("dscale", g.dscale, e.dscale, sum);
  gradient("dalpha", g.dalpha, e.dalpha, sum);

  std::vector<int64_t> rows, heads;
  for (int64_t i = c.in.q.dim(2) - 1; i >= 0; i -= 2) rows.push_back(i);
  for (int64_t h = 0; h < c.in.q.dim(1); ++h) heads.push_back(h);
  const Tensor w = bound.weights(out, rows, heads);
  const int64_t H = c.in.q.dim(1), N = c.in.q.dim(2);
  for (int64_t b = 0; b < c.in.q.dim(0); ++b) {
    for (int64_t h = 0; h < H; ++h) {
      for (size_t n = 0; n < rows.size(); ++n) {
        if (!fairness.rows[(b * H + h) * N + rows[n]].forward) continue;
        checks.check(fmt::format("weights of row {}, {}, {}", b, h, rows[n]),
                     w.select(0, b).select(0, h).select(0, static_cast<int64_t>(n)),
                     expected.weights.select(0, b).select(0, h).select(0, rows[n]),
                     tolerance.value);
      }
    }
  }
  return result;
}

}  // namespace foci::testing
