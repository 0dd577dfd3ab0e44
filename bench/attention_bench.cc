// Attention, forward and backward, of many shapes: fused as a share of the multiply-add peak and
// against plain (unfused GEMM and row operators), in one run on the same inputs and threads,
// interleaved.
//
// The operations counted are those that any implementation needs: 2·(D + Dv) a visible pair forward
// and 2·(3D + 2Dv) backward. Bind (masks, non-finite values) is outside; results are
// written into given tensors.
#include "foci/attention/plan.h"
#include "inputs.h"
#include "rows.h"
#include "timing.h"

namespace foci::bench {
namespace {

void measured(const Definition& d, bool backward, const Options& options, Peak& peak,
              Report& report) {
  const AttentionShape& s = d.shape;
  const AttentionInputs in = inputs(d, s);
  const AttentionUpstream up = upstream(d.spec, s);
  const auto candidate = [&](Implementation id) {
    const Bound bound = Plan::make(d.spec, s, {id, std::nullopt}).bind(in);
    AttentionOutputs saved = bound.forward();
    measure::Candidate c;
    c.name = id == Implementation::plain ? "plain" : "fused";
    if (backward) {
      c.run = [=, gradients = bound.backward(saved, up)]() mutable {
        bound.backward(saved, up, {}, gradients);
      };
    } else {
      c.run = [bound, out = saved]() mutable { bound.forward(out); };
    }
    return c;
  };
  // Plain over a few heads of 8192 keys would take gigabytes and minutes.
  const bool with_plain = s.B * s.H * s.N * s.M <= int64_t{1} << 27;
  std::vector<measure::Candidate> candidates;
  if (with_plain) candidates.push_back(candidate(Implementation::plain));
  candidates.push_back(candidate(Implementation::fused));
  const auto t = timed(candidates, options.quick ? 0.3 : 1.2, &peak);
  const auto pairs = static_cast<double>(Plan::make(d.spec, s).bind(in).visible_pairs());
  const auto width = static_cast<double>(backward ? 3 * s.D + 2 * s.Dv : s.D + s.Dv);
  const std::string pass = backward ? "backward " : "forward ";
  report.add(d, pass + "of peak", share(t.back(), 2e-9 * pairs * width, peak));
  if (with_plain) report.add(d, pass + "plain / fused", speedup(t.back()));
}

void body(const Options& options, Report& report) {
  Peak peak;
  for (int i = 0; i < 8; ++i) peak.sample();
  for (const Definition& d : definitions("attention", options)) {
    for (bool backward : {false, true}) measured(d, backward, options, peak, report);
  }
  report.fact("peak_gflops", peak.gflops());
}

}  // namespace
}  // namespace foci::bench

int main(int argc, char** argv) {
  return foci::bench::run(argc, argv, "attention_bench", foci::bench::body);
}
