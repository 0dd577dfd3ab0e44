// The table of reported cases and fixed numbers on every implementation and SIMD target, as
// Reported_fused_avx2.Row14_PaddingAndCausal and so on.
#include <numeric>

#include "attention/generate.h"
#include "foci/attention/plan.h"
#include "reference/reported_cases.h"

namespace foci::testing {
namespace {

Bound bind(const AttentionSpec& spec, const AttentionInputs& in, const PlanOptions& options) {
  return Plan::make(spec, shape_of(in), options).bind(in);
}

// Backward needs the statistics whose gradients arrive.
AttentionSpec with_statistics_for(AttentionSpec spec, const AttentionUpstream& up) {
  if (up.dentropy.defined()) spec.statistics.add(Statistic::entropy);
  if (up.dmax_weight.defined()) spec.statistics.add(Statistic::max_weight);
  return spec;
}

Engine plan_engine(const PlanOptions& options) {
  return {.forward = [=](const AttentionSpec& spec,
                         const AttentionInputs& in) { return bind(spec, in, options).forward(); },
          .weights =
              [=](const AttentionSpec& spec, const AttentionInputs& in) {
                const Bound bound = bind(spec, in, options);
                std::vector<int64_t> rows(in.q.dim(2)), heads(in.q.dim(1));
                std::iota(rows.begin(), rows.end(), int64_t{0});
                std::iota(heads.begin(), heads.end(), int64_t{0});
                return bound.weights(bound.forward(), rows, heads);
              },
          .backward =
              [=](const AttentionSpec& spec, const AttentionInputs& in, const AttentionUpstream& up,
                  const AttentionWanted& wanted) {
                const Bound bound = bind(with_statistics_for(spec, up), in, options);
                return bound.backward(bound.forward(), up, wanted);
              }};
}

[[maybe_unused]] const bool registered = [] {
  for (SimdTarget target : supported_targets()) {
    for (const auto& [implementation, name] :
         {std::pair{Implementation::plain, "plain"}, {Implementation::fused, "fused"}}) {
      const PlanOptions options{.implementation = implementation, .target = target};
      register_reported_tests(fmt::format("{}_{}", name, name_of(target)),
                              [options] { return plan_engine(options); });
    }
  }
  return true;
}();

}  // namespace
}  // namespace foci::testing
