// Takes turns among candidates until their time is spent; medians, of speed-ups too.
#include "foci/measure/interleaved.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

namespace foci::measure {
namespace {

// libgomp's threads spin for some 3 ms after their work.
constexpr auto kRest = std::chrono::milliseconds(8);
// A call of this many seconds does not notice what a warm-up would bring.
constexpr double kLong = 0.1;

double now(ClockKind clock) {
  if (clock == ClockKind::thread_cpu) {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double time_of(const Candidate& candidate, int calls, ClockKind clock) {
  const double begin = now(clock);
  for (int i = 0; i < calls; ++i) candidate.run();
  return (now(clock) - begin) / calls;
}

double quantile(std::vector<double> v, double q) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(std::lround(q * static_cast<double>(v.size() - 1)))];
}

}  // namespace

std::vector<Timing> interleaved(const std::vector<Candidate>& candidates,
                                const InterleavedOptions& o) {
  if (candidates.empty()) return {};
  const double begin = now(ClockKind::wall);
  const auto going = [&] { return !o.keep_going || o.keep_going(); };
  double once = o.once;
  for (int ask = 0; ask < 2 && o.once <= 0 && once < kLong; ++ask) {
    once = std::max(1e-9, time_of(candidates[0], 1, o.clock));
  }
  const int calls = static_cast<int>(std::clamp(o.sample_seconds / once, 1.0, 1e6));
  std::vector<std::vector<double>> times(candidates.size()), speedups(candidates.size());
  double spent = 0;
  const auto another = [&](int round) {
    if (round == 0) return true;
    if (now(ClockKind::wall) - begin >= o.most_seconds) return false;
    return round < o.least_rounds || spent < o.seconds;
  };
  int rounds = 0;
  for (; another(rounds); ++rounds) {
    if (o.each_round) o.each_round();
    std::vector<double> round;
    for (const Candidate& candidate : candidates) {
      if (!going()) break;
      std::this_thread::sleep_for(kRest);
      if (once < kLong) candidate.run();
      round.push_back(time_of(candidate, calls, o.clock));
      spent += round.back() * calls;
    }
    if (round.size() < candidates.size()) break;  // stopped: this round does not count
    for (size_t i = 0; i < candidates.size(); ++i) {
      times[i].push_back(round[i]);
      speedups[i].push_back(round[0] / round[i]);
    }
  }
  std::vector<Timing> result;
  for (size_t i = 0; i < candidates.size() && rounds > 0; ++i) {
    result.push_back({candidates[i].name, quantile(times[i], 0.5), quantile(speedups[i], 0.5),
                      quantile(speedups[i], 0.25), quantile(speedups[i], 0.75), rounds,
                      quantile(times[i], 0.25), quantile(times[i], 0.75)});
  }
  return result;
}

}  // namespace foci::measure
