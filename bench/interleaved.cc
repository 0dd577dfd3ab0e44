#include "interleaved.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace foci::bench {
namespace {

// libgomp's threads spin for some 3 ms after their work.
constexpr auto kRest = std::chrono::milliseconds(8);

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
  return v[static_cast<size_t>(q * static_cast<double>(v.size() - 1) + 0.5)];
}

}  // namespace

std::vector<Timing> interleaved(const std::vector<Candidate>& candidates, double seconds,
                                ClockKind clock, double sample_seconds) {
  if (candidates.empty()) return {};
  time_of(candidates[0], 1, clock);
  const double once = std::max(1e-9, time_of(candidates[0], 1, clock));
  const int calls = static_cast<int>(std::clamp(sample_seconds / once, 1.0, 1e6));
  std::vector<std::vector<double>> times(candidates.size()), speedups(candidates.size());
  double spent = 0;
  for (int round = 0; round < 5 || spent < seconds; ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      std::this_thread::sleep_for(kRest);
      candidates[i].run();
      times[i].push_back(time_of(candidates[i], calls, clock));
      spent += times[i].back() * calls;
      speedups[i].push_back(times[0].back() / times[i].back());
    }
  }
  std::vector<Timing> result;
  for (size_t i = 0; i < candidates.size(); ++i) {
    result.push_back({candidates[i].name, quantile(times[i], 0.5), quantile(speedups[i], 0.5),
                      quantile(speedups[i], 0.25), quantile(speedups[i], 0.75)});
  }
  return result;
}

}  // namespace foci::bench
