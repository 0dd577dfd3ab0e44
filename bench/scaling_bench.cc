// Time against the number of tokens, forward and backward, with the exponent of the power law that
// fits best (least squares of log time over log N); its least and most between neighbouring lengths
// stand where other rows have quartiles.
//
// --quick stops at 16,384.
#include <cmath>

#include "foci/attention/plan.h"
#include "foci/core/error.h"
#include "inputs.h"
#include "rows.h"
#include "timing.h"

namespace foci::bench {
namespace {

constexpr int64_t kQuickLength = 16384;

struct Point {
  double log_n, log_seconds;
};

double exponent(const Point* begin, const Point* end) {
  const auto count = static_cast<double>(end - begin);
  double n = 0, t = 0, nn = 0, nt = 0;
  for (const Point* p = begin; p < end; ++p) {
    n += p->log_n / count;
    t += p->log_seconds / count;
  }
  for (const Point* p = begin; p < end; ++p) {
    nn += (p->log_n - n) * (p->log_n - n);
    nt += (p->log_n - n) * (p->log_seconds - t);
  }
  return nt / nn;
}

measure::Timing time_of(const measure::Candidate& candidate, bool quick) {
  measure::InterleavedOptions options;
  options.seconds = quick ? 0.2 : 0.6;
  options.least_rounds = 3;
  options.most_seconds = quick ? 1 : 6;  // the longest are timed once
  if (num_threads() == 1) options.clock = measure::ClockKind::thread_cpu;
  return measure::interleaved({candidate}, options)[0];
}

void body(const Options& options, Report& report) {
  for (const Definition& d : definitions("scaling", options)) {
    for (bool backward : {false, true}) {
      const std::string pass = backward ? "backward " : "forward ";
      std::vector<Point> points;
      std::string note;  // of the longest
      for (int64_t n : d.lengths) {
        if (options.quick && n > kQuickLength) continue;
        AttentionShape s = d.shape;
        s.N = s.M = n;
        const Bound bound = Plan::make(d.spec, s).bind(inputs(d, s));
        AttentionOutputs out = bound.forward();
        const AttentionUpstream up = upstream(d.spec, s);
        AttentionGradients gradients;  // made by the first call
        const measure::Timing t =
            backward
                ? time_of({d.row, [&] { bound.backward(out, up, {}, gradients); }}, options.quick)
                : time_of({d.row, [&] { bound.forward(out); }}, options.quick);
        points.push_back({std::log(static_cast<double>(n)), std::log(t.seconds)});
        if (!backward) note = skipped_note(bound, out);
        report.add(d, fmt::format("{}ms, N {}", pass, n),
                   {1e3 * t.seconds, 1e3 * t.seconds_low, 1e3 * t.seconds_high}, note);
      }
      require<Error>(points.size() >= 2, "rows.json, {}: two lengths are the least", d.row);
      Value v;
      v.median = exponent(points.data(), points.data() + points.size());
      v.low = v.high = v.median;
      for (size_t i = 0; i + 1 < points.size(); ++i) {
        const double e = exponent(&points[i], &points[i] + 2);
        v.low = std::min(v.low, e);
        v.high = std::max(v.high, e);
      }
      report.add(d, pass + "exponent", v, note);
    }
  }
}

}  // namespace
}  // namespace foci::bench

int main(int argc, char** argv) {
  return foci::bench::run(argc, argv, "scaling_bench", foci::bench::body);
}
