// Small inputs that broke attention elsewhere (public bug reports), and fixed numbers from public
// tests, as one table that any engine can be run over: the oracle, and every implementation of
// attention on every SIMD target.
//
// A row of the table is a function that asks an engine and returns what was wrong, "" where
// nothing was. Rows have the numbers of ../shared/conformance/reported_cases.md.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"

namespace foci::testing {

// Whatever computes attention. Every function throws ArgumentError for bad arguments.
struct Engine {
  std::function<AttentionOutputs(const AttentionSpec&, const AttentionInputs&)> forward;
  // All rows before dropout, [B,H,N,M].
  std::function<Tensor(const AttentionSpec&, const AttentionInputs&)> weights;
  std::function<AttentionGradients(const AttentionSpec&, const AttentionInputs&,
                                   const AttentionUpstream&, const AttentionWanted&)>
      backward;
};

struct ReportedCase {
  std::string suite;  // "Reported" or "Fixed"
  std::string name;   // "Row14_PaddingAndCausal"
  std::function<std::string(const Engine&)> run;
};

// From reported_cases.md, and the masks and sparse maps of fixed_numbers.md.
std::vector<ReportedCase> reported_cases();

Engine reference_engine();

// Registers every row as a test SUITE_suffix.NAME; call it while static variables are made. The
// factory runs inside each test.
void register_reported_tests(const std::string& suffix, const std::function<Engine()>& factory);

}  // namespace foci::testing
