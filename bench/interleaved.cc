#include "interleaved.h"

#include <algorithm>
#include <chrono>

namespace foci::bench {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double time_of(const Candidate& candidate, int calls) {
  const double begin = now();
  for (int i = 0; i < calls; ++i) candidate.run();
  return (now() - begin) / calls;
}

double quantile(std::vector<double> v, double q) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(q * static_cast<double>(v.size() - 1) + 0.5)];
}

}  // namespace

std::vector<Timing> interleaved(const std::vector<Candidate>& candidates, double seconds,
                                double sample_seconds) {
  if (candidates.empty()) return {};
  for (const Candidate& c : candidates) c.run();
  const double once =
      std::max(1e-9, std::min(time_of(candidates[0], 1), time_of(candidates[0], 1)));
  const int calls = static_cast<int>(std::clamp(sample_seconds / once, 1.0, 1e6));
  std::vector<std::vector<double>> times(candidates.size()), speedups(candidates.size());
  const double end = now() + seconds;
  for (int round = 0; round < 5 || now() < end; ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      times[i].push_back(time_of(candidates[i], calls));
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
