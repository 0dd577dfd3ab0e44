// Timing of candidates against each other in one run: A, B, A, B, … so that whatever else the
// machine does meets all of them alike.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace foci::bench {

struct Candidate {
  std::string name;
  std::function<void()> run;
};

struct Timing {
  std::string name;
  double seconds;  // of one call: median over the rounds
  // Time of the first candidate over time of this one, round by round: above 1, this one is
  // faster. Median and quartiles.
  double speedup, speedup_low, speedup_high;
};

enum class ClockKind { wall, thread_cpu };  // thread_cpu: of the calling thread alone

// In every round each candidate in turn waits until threads that spin after their work have gone to
// sleep (OpenMP's do so for milliseconds, and would take a core from the next candidate), warms up
// with one call, and then runs as often as fills `sample_seconds` (measured on the first
// candidate). Rounds last until `seconds` of measured time are spent, at least 5.
// For candidates with one thread thread_cpu is the clock that a busy machine disturbs least.
std::vector<Timing> interleaved(const std::vector<Candidate>& candidates, double seconds = 0.5,
                                ClockKind clock = ClockKind::wall, double sample_seconds = 0.002);

}  // namespace foci::bench
