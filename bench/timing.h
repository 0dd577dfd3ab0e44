// How the benchmarks time: foci/measure/interleaved.h, with samples of the multiply-add peak in
// every round.
#pragma once

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
// flops a second, as a share of the peak.
inline Value share(const measure::Timing& t, double gigaflops, const Peak& peak) {
  const double of = gigaflops / peak.gflops();
  return {of / t.seconds, of / t.seconds_high, of / t.seconds_low};
}

}  // namespace foci::bench
