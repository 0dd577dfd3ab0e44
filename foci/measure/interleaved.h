// Timing of candidates against each other in one run: A, B, A, B, … so that whatever else the
// machine does meets all of them alike.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace foci::measure {

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
  int rounds;
  double seconds_low, seconds_high;  // quartiles of seconds
};

enum class ClockKind { wall, thread_cpu };  // thread_cpu: of the calling thread alone

struct InterleavedOptions {
  double seconds = 0.5;  // of measured time, after which no round is begun
  int least_rounds = 5;
  double most_seconds = 1e9;  // of all time; from then on one round is enough
  // For candidates with one thread thread_cpu is the clock that a busy machine disturbs least.
  ClockKind clock = ClockKind::wall;
  double sample_seconds = 0.002;
  double once = 0;  // seconds of a call of the first candidate, where known: saves asking it
  std::function<void()> each_round;  // at the start of every round, unmeasured
  std::function<bool()> keep_going;  // asked before every call; where false, all ends
};

// In every round each candidate in turn waits until threads that spin after their work have gone to
// sleep (OpenMP's do so for milliseconds, and would take a core from the next candidate), warms up
// with one call where calls are short, and then runs as often as fills `sample_seconds` (measured
// on the first candidate). Empty where keep_going ended it before the first round was over.
std::vector<Timing> interleaved(const std::vector<Candidate>& candidates,
                                const InterleavedOptions& options = {});

}  // namespace foci::measure
