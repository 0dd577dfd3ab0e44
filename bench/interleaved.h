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

// Each candidate runs once to warm up, then in every round as often as fills `sample_seconds`
// (measured on the first candidate). Rounds last until `seconds` are spent, at least 5.
std::vector<Timing> interleaved(const std::vector<Candidate>& candidates, double seconds = 0.5,
                                double sample_seconds = 0.002);

}  // namespace foci::bench
