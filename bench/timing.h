// How the benchmarks time: foci/measure/interleaved.h, with samples of the multiply-add peak in
// every round.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "foci/core/threads.h"
#include "foci/measure/fma_peak.h"
#include "foci/measure/interleaved.h"
#include "rows.h"

namespace foci::bench {

// The best sample so far, of all threads.
class Peak {
 public:
  void sample() {
    best_ = std::max(best_, measure::fma_peak_sample(current_target(), num_threads()));
  }
  double gflops() const { return best_; }

 private:
  double best_ = 0;
};

// Takes turns for `seconds`. One thread is timed by its CPU time, which a busy machine disturbs
// least.
inline std::vector<measure::Timing> timed(const std::vector<measure::Candidate>& candidates,
                                          double seconds, Peak* peak = nullptr) {
  measure::InterleavedOptions options;
  options.seconds = seconds;
  if (num_threads() == 1) options.clock = measure::ClockKind::thread_cpu;
  if (peak != nullptr) options.each_round = [peak] { peak->sample(); };
  return measure::interleaved(candidates, options);
}

// The first candidate's time over this one's.
inline Value speedup(const measure::Timing& t) {
  return {t.speedup, t.speedup_low, t.speedup_high};
}
// This one's time over the first candidate's.
inline Value slowdown(const measure::Timing& t) {
  return {1 / t.speedup, 1 / t.speedup_high, 1 / t.speedup_low};
}
// What top-k's bounds spared a forward pass, of all visible pairs; empty where that is nothing.
inline std::string skipped_note(const Bound& bound, const AttentionOutputs& out) {
  if (out.skipped_pairs == 0) return "";
  return fmt::format(
      "{:.0f} % of the scores never computed",
      100 * static_cast<double>(out.skipped_pairs) / static_cast<double>(bound.visible_pairs()));
}

// flops a second, as a share of the peak.
inline Value share(const measure::Timing& t, double gigaflops, const Peak& peak) {
  const double of = gigaflops / peak.gflops();
  return {of / t.seconds, of / t.seconds_high, of / t.seconds_low};
}

}  // namespace foci::bench
