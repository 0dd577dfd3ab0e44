// Both implementations planned for one spec and shape, timed in turns, and their work counted.
#include "foci/measure/attention.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "foci/core/rng.h"
#include "foci/core/threads.h"
#include "foci/measure/fma_peak.h"
#include "foci/measure/interleaved.h"

namespace foci::measure {
namespace {

// A call of plain takes some such multiple of one of fused, backward three times forward.
constexpr double kPlainCalls = 12;
// Of one call: it is not asked again how long it takes.
constexpr double kLong = 0.5;

struct Ready {
  Implementation implementation;
  Bound bound;
  AttentionOutputs saved;
  size_t forward_bytes, backward_bytes;
};

Ready ready(const AttentionJob& job, const AttentionInputs& in, const PlanOptions& options) {
  const Plan plan = Plan::make(job.spec, job.shape, options);
  return {plan.implementation(),
          plan.bind(in),
          {},
          plan.workspace_bytes(false),
          plan.workspace_bytes(true)};
}

double seconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::string name_of(Implementation id) {
  return id == Implementation::plain ? "plain" : "fused";
}

}  // namespace

AttentionReport measure_attention(const AttentionJob& job) {
  const AttentionShape& s = job.shape;
  const auto going = [&] { return !job.keep_going || job.keep_going(); };
  AttentionReport report;
  const Plan picked = Plan::make(job.spec, s);
  report.explanation = picked.explain();
  AttentionInputs in = random_inputs(job.spec, s, job.seed);
  if (job.clusters > 0) cluster_rows(in, job.clusters, job.seed);
  AttentionUpstream up;
  {
    Rng rng(job.seed, 1);
    Tensor dy = Tensor::empty({s.B, s.H, s.N, s.Dv});
    for (float& x : dy.span<float>()) x = static_cast<float>(rng.normal());
    up.dy = dy.to(s.dtype);
  }
  AttentionWanted wanted;
  if (job.all_gradients) wanted = {true, true, true, true, true, true};

  // The picked implementation first; where that is fused, plain beside it.
  std::vector<Ready> list = {ready(job, in, {})};
  report.visible_pairs = list[0].bound.visible_pairs();
  report.pairs = s.B * s.H * s.N * s.M;
  if (!going()) {
    report.stopped = true;
    return report;
  }
  const double once = seconds_of([&] { list[0].saved = list[0].bound.forward(); });
  report.skipped_pairs = list[0].saved.skipped_pairs;
  if (list[0].implementation == Implementation::plain) {
    report.left_out.push_back("fused: it does not serve this spec");
  } else if (once * kPlainCalls > job.seconds) {
    report.left_out.push_back(fmt::format(
        "plain: one call of fused takes {:.2g} s already; give more than {:.0f} seconds", once,
        once * kPlainCalls));
  } else {
    list.push_back(ready(job, in, {.implementation = Implementation::plain}));
    list[1].saved = list[1].bound.forward();
  }

  const auto target = picked.target();
  const int threads = num_threads();
  const auto sample = [&] {
    report.peak_gflops = std::max(report.peak_gflops, fma_peak_sample(target, threads));
  };
  for (bool backward : {false, true}) {
    std::vector<Candidate> candidates;
    for (auto r = list.rbegin(); r != list.rend(); ++r) {  // plain first: speed-ups are over it
      if (backward) {
        candidates.push_back({name_of(r->implementation),
                              [&up, &wanted, r] { r->bound.backward(r->saved, up, wanted); }});
      } else {
        candidates.push_back({name_of(r->implementation), [r] { r->bound.forward(r->saved); }});
      }
    }
    const std::vector<Timing> timings = interleaved(candidates, {.seconds = job.seconds / 3,
                                                                 .most_seconds = job.seconds / 2,
                                                                 .once = once < kLong ? 0 : once,
                                                                 .each_round = sample,
                                                                 .keep_going = going});
    if (timings.empty()) {
      report.stopped = true;
      break;
    }
    const double flops = 2e-9 * static_cast<double>(report.visible_pairs) *
                         static_cast<double>(backward ? 3 * s.D + 2 * s.Dv : s.D + s.Dv);
    for (size_t i = 0; i < list.size(); ++i) {
      const Ready& r = list[i];
      const Timing& t = timings[list.size() - 1 - i];
      AttentionRow row{.backward = backward,
                       .implementation = r.implementation,
                       .seconds = t.seconds,
                       .gflops = flops / t.seconds,
                       .workspace_bytes = backward ? r.backward_bytes : r.forward_bytes,
                       .rounds = t.rounds};
      if (list.size() == 2 && r.implementation == Implementation::fused) {
        row.speedup = t.speedup;
        row.speedup_low = t.speedup_low;
        row.speedup_high = t.speedup_high;
      }
      report.rows.push_back(row);
    }
    if (!going()) {
      report.stopped = true;
      break;
    }
  }
  for (AttentionRow& row : report.rows) row.share = row.gflops / report.peak_gflops;
  return report;
}

}  // namespace foci::measure
