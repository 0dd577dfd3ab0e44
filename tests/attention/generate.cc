#include "attention/generate.h"

#include "attention/tolerance.h"
#include "foci/core/rng.h"

namespace foci::testing {
namespace {

// The same values with spare elements after each row.
Tensor with_gap(const Tensor& t, int64_t gap) {
  Dims wide = t.shape();
  wide[wide.size() - 1] += gap;
  const Tensor room = Tensor::full(wide, 7, t.dtype());
  Tensor view = room.slice(-1, 0, t.shape().back());
  view.copy_from(t);
  return view;
}

double alpha_of(const Normalizer& normalizer) {
  if (std::holds_alternative<Sparsemax>(normalizer)) return 2;
  const auto* e = std::get_if<Entmax>(&normalizer);
  return e ? e->alpha : 0;
}

}  // namespace

SweepCase attention_case(uint64_t n, DType dtype, const SweepLimits& limits) {
  SweepCase c = sweep_case(n, dtype, limits);
  Rng rng(n, 78);
  for (Tensor* t :
       {&c.up.dy, &c.up.drow_stat, &c.up.dentropy, &c.up.dmax_weight, &c.up.dcoverage}) {
    if (rng.below(4) == 0) *t = Tensor();
  }
  return c;
}

Tensor strided_heads(const Tensor& t) {
  if (!t.defined()) return t;
  const int64_t B = t.dim(0), H = t.dim(1), N = t.dim(2), D = t.dim(3);
  const Tensor room = Tensor::full({B, N, H + 1, D + 3}, 7, t.dtype());
  Tensor view = room.slice(2, 1, H + 1).slice(3, 0, D).transpose(1, 2);
  view.copy_from(t);
  return view;
}

AttentionInputs strided(const AttentionInputs& in) {
  AttentionInputs s = in;
  s.q = strided_heads(in.q);
  s.k = strided_heads(in.k);
  s.v = strided_heads(in.v);
  for (Tensor* t : {&s.keep, &s.bias, &s.q_segments, &s.k_segments, &s.table1d, &s.table2d}) {
    if (t->defined() && t->rank() > 0) *t = with_gap(*t, 2);
  }
  return s;
}

AttentionShape shape_of(const AttentionInputs& in) {
  return {.B = in.q.dim(0),
          .H = in.q.dim(1),
          .Hk = in.k.dim(1),
          .N = in.q.dim(2),
          .M = in.k.dim(2),
          .D = in.q.dim(3),
          .Dv = in.v.dim(3),
          .dtype = in.q.dtype()};
}

Fairness make_fair(SweepCase& c, const reference::Forward& f) {
  // Scores are right to about 1e-6. A support that hangs on less is not float32's to decide.
  constexpr double kDecided = 1e-5;
  // log p, and p^(2−α) for α > 2, have no bound as p → 0; below this their float32 error shows.
  constexpr double kSteep = 3e-2;
  const double alpha = alpha_of(c.spec.normalizer);
  Fairness fairness;
  for (Tensor* t : {&c.up.dentropy, &c.up.dmax_weight, &c.up.drow_stat, &c.up.dy}) {
    if (t->defined()) *t = t->clone();
  }
  for (int64_t b = 0; b < c.in.q.dim(0); ++b) {
    for (int64_t h = 0; h < c.in.q.dim(1); ++h) {
      for (int64_t i = 0; i < c.in.q.dim(2); ++i) {
        const Margins m = margins(c.spec, f, b, h, i);
        const bool steep = alpha > 0 && m.support < kSteep;
        const bool unfair = m.support < kDecided || m.largest < kDecided || (steep && alpha > 2);
        fairness.unfair.push_back(unfair);
        fairness.count += unfair;
        if (steep && c.up.dentropy.defined()) c.up.dentropy.at<float>(b, h, i) = 0;
        if (!unfair) continue;
        for (Tensor* t : {&c.up.dentropy, &c.up.dmax_weight, &c.up.drow_stat}) {
          if (t->defined()) t->at<float>(b, h, i) = 0;
        }
        if (c.up.dy.defined()) c.up.dy.select(0, b).select(0, h).select(0, i).fill(0);
      }
    }
  }
  if (fairness.count > 0) c.up.dcoverage = Tensor();
  return fairness;
}

void excuse(const Fairness& fairness, const AttentionOutputs& expected, AttentionOutputs& actual) {
  if (fairness.count == 0) return;
  const int64_t H = expected.y.dim(1), N = expected.y.dim(2);
  for (size_t n = 0; n < fairness.unfair.size(); ++n) {
    if (!fairness.unfair[n]) continue;
    const auto row = static_cast<int64_t>(n);
    const int64_t b = row / (H * N), h = row / N % H, i = row % N;
    const auto copy = [&](const Tensor& from, const Tensor& to) {
      if (!to.defined()) return;
      to.select(0, b).select(0, h).select(0, i).copy_from(
          from.select(0, b).select(0, h).select(0, i));
    };
    copy(expected.y, actual.y);
    copy(expected.row_stat, actual.row_stat);
    copy(expected.entropy, actual.entropy);
    copy(expected.max_weight, actual.max_weight);
    copy(expected.max_key, actual.max_key);
    copy(expected.support, actual.support);
  }
  if (actual.coverage.defined()) actual.coverage.copy_from(expected.coverage);
}

}  // namespace foci::testing
