// A request run through a plan or through the oracle, within bounds.
#include "foci/verify/engines.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "foci/attention/plan.h"
#include "foci/reference/attention.h"
#include "foci/reference/rotary.h"

namespace foci::verify {
namespace {

void require_rank_4(const Tensor& t, const char* name, const char* letters) {
  require(t.defined(), "{}: no tensor given", name);
  require(t.rank() == 4, "{}: shape {} given, {} is needed", name, t.shape(), letters);
}

AttentionShape checked_shape(const AttentionInputs& in) {
  require_rank_4(in.q, "q", "[B, H, N, D]");
  require_rank_4(in.k, "k", "[B, Hk, M, D]");
  require_rank_4(in.v, "v", "[B, Hk, M, Dv]");
  // The plan would speak of its shape's dtype, which is q's.
  require(is_floating(in.q.dtype()), "q: {} given, a floating type is needed",
          name_of(in.q.dtype()));
  return shape_of(in);
}

void require_bounded(const AttentionShape& s, int64_t most_pairs) {
  require_small("queries × keys [B, H, N, M]", {s.B, s.H, s.N, s.M}, most_pairs);
  require_small("the output [B, H, N, Dv]", {s.B, s.H, s.N, s.Dv}, kMostElements);
}

// The engine computes in float32; cases may be stored in double.
Tensor narrowed(const Tensor& t) {
  return t.defined() && t.dtype() == DType::f64 ? t.to(DType::f32) : t;
}

AttentionRequest for_engine(const AttentionRequest& request) {
  AttentionRequest r = request;
  r.in.q = narrowed(r.in.q);
  r.in.k = narrowed(r.in.k);
  r.in.v = narrowed(r.in.v);
  // A gradient has the dtype of what it is for: y that of q, statistics float32.
  if (r.up.dy.defined() && is_floating(r.up.dy.dtype()) && is_floating(r.in.q.dtype())) {
    r.up.dy = r.up.dy.to(r.in.q.dtype());
  }
  for (Tensor* t : {&r.up.drow_stat, &r.up.dentropy, &r.up.dmax_weight, &r.up.dcoverage}) {
    if (t->defined() && is_floating(t->dtype())) *t = t->to(DType::f32);
  }
  return r;
}

std::optional<Answer> run_attention(const AttentionRequest& request, Implementation implementation,
                                    SimdTarget target) {
  const AttentionRequest r = for_engine(request);
  const AttentionShape shape = checked_shape(r.in);
  require_bounded(shape, kMostPairs);
  // Invalid requests are refused here, whatever the implementation; what it alone refuses, it does
  // not serve.
  (void)Plan::make(r.spec, shape, {.target = target});
  std::optional<Plan> plan;
  try {
    plan = Plan::make(r.spec, shape, {.implementation = implementation, .target = target});
  } catch (const ArgumentError&) {
    return std::nullopt;
  }
  const Bound bound = plan->bind(r.in);
  Answer a;
  a.out = bound.forward();
  if (r.weights) {
    require_small("the weights [B, H, N, M]", {shape.B, shape.H, shape.N, shape.M}, kMostElements);
    std::vector<int64_t> rows(shape.N), heads(shape.H);
    std::iota(rows.begin(), rows.end(), int64_t{0});
    std::iota(heads.begin(), heads.end(), int64_t{0});
    a.weights = bound.weights(a.out, rows, heads);
  }
  if (r.scores) {
    require_small("the scores [B, H, N, M]", {shape.B, shape.H, shape.N, shape.M}, kMostElements);
    a.scores = raw_scores(bound, *r.scores);
  }
  if (r.backward) a.gradients = bound.backward(a.out, r.up, r.wanted);
  return a;
}

Answer run_rotary(const RotaryRequest& r, SimdTarget target) {
  return {.turned = rotary(narrowed(r.x), r.angles, target)};
}

// ---- the oracle ----

Tensor oracle_scores(const AttentionRequest& r) {
  AttentionSpec spec = r.spec;
  if (*r.scores == ScoreStage::scaled || *r.scores == ScoreStage::capped) {
    spec.masks.clear();
    spec.biases.clear();
    spec.dropout.reset();
    if (*r.scores == ScoreStage::scaled) spec.softcap.reset();
    return reference::attention_forward(spec, r.in).scores;
  }
  const reference::Forward f = reference::attention_forward(spec, r.in);
  if (*r.scores == ScoreStage::weights) return f.weights;
  Tensor scores = f.scores;
  const auto allowed = f.allowed.span<bool>();
  for (size_t e = 0; e < allowed.size(); ++e) {
    if (!allowed[e]) scores.data<double>()[e] = -std::numeric_limits<double>::infinity();
  }
  return scores;
}

Answer ask_oracle(const AttentionRequest& r) {
  require_bounded(checked_shape(r.in), kMostOraclePairs);
  const reference::Forward f = reference::attention_forward(r.spec, r.in);
  Answer a{.out = f.out, .weights = f.weights};
  if (r.scores) a.scores = oracle_scores(r);
  if (r.backward) a.gradients = reference::attention_backward(r.spec, r.in, r.up);
  return a;
}

// cosine or sine of each row, [B,N,R/2].
Tensor rows_of(const Tensor& table, const Tensor& position_ids) {
  if (!position_ids.defined()) return table;
  const int64_t B = position_ids.dim(0), N = position_ids.dim(1);
  Tensor rows = Tensor::empty({B, N, table.dim(1)}, DType::f64);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t n = 0; n < N; ++n) {
      rows.select(0, b).select(0, n).copy_from(table.select(0, position_ids.at<int64_t>(b, n)));
    }
  }
  return rows;
}

Answer ask_oracle(const RotaryRequest& r) {
  const auto pairs = r.angles.pairs == RotaryPairs::interleaved
                         ? reference::RotaryPairs::interleaved
                         : reference::RotaryPairs::half_split;
  return {.turned = reference::rotary(r.x, rows_of(r.angles.cosine, r.angles.position_ids),
                                      rows_of(r.angles.sine, r.angles.position_ids), pairs)};
}

}  // namespace

void require_small(const char* what, Dims sizes, int64_t most) {
  for (int i = 0; i < sizes.size(); ++i) sizes[i] = std::max<int64_t>(sizes[i], 1);
  require(sizes.product() <= most, "{}: {} is too large to be checked, at most {} in all are", what,
          sizes.str(), most);
}

Engine reference_engine() {
  return {"reference", [](const Request& r) -> std::optional<Answer> {
            return std::visit([](const auto& one) { return ask_oracle(one); }, r);
          }};
}

std::vector<Engine> engines(const VerifyOptions& options) {
  if (options.reference) return {reference_engine()};
  std::vector<Engine> list;
  const std::vector<SimdTarget>& targets =
      options.targets.empty() ? supported_targets() : options.targets;
  for (SimdTarget target : targets) {
    const auto& supported = supported_targets();
    require(std::find(supported.begin(), supported.end(), target) != supported.end(),
            "targets: this machine cannot run {}", name_of(target));
    for (const auto& [implementation, name] :
         {std::pair{Implementation::fused, "fused"}, {Implementation::plain, "plain"}}) {
      if (options.implementation && *options.implementation != implementation) continue;
      list.push_back({fmt::format("{} on {}", name, name_of(target)),
                      [target, i = implementation](const Request& r) {
                        return std::visit(overloaded{[&](const AttentionRequest& a) {
                                                       return run_attention(a, i, target);
                                                     },
                                                     [&](const RotaryRequest& a) {
                                                       return std::optional(run_rotary(a, target));
                                                     }},
                                          r);
                      }});
    }
  }
  return list;
}

}  // namespace foci::verify
