// How fast attention is, for any spec and shape: fused and plain against the multiply-add peak, in
// one run on the same inputs and threads, interleaved.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"

namespace foci::measure {

struct AttentionJob {
  AttentionSpec spec;
  AttentionShape shape;
  uint64_t seed = 1;           // of inputs
  int64_t clusters = 0;        // of queries and keys (cluster_rows); 0: they are random
  bool all_gradients = false;  // beside those of q, k and v
  double seconds = 3;          // for all measurements; one round is the least
  std::function<bool()> keep_going;
};

// One implementation in one direction.
struct AttentionRow {
  bool backward = false;
  Implementation implementation = Implementation::fused;
  double seconds = 0;  // of one call, median
  // Useful operations: 2·(D + Dv) a visible pair forward, 2·(3D + 2Dv) backward, whatever the score
  // and normaliser do beside that.
  double gflops = 0;
  double share = 0;  // of the peak
  size_t workspace_bytes = 0;
  int rounds = 0;
  // Of plain over this one, round by round: median and quartiles. 0 where plain was left out.
  double speedup = 0, speedup_low = 0, speedup_high = 0;
};

struct AttentionReport {
  std::string explanation;  // Plan::explain
  double peak_gflops = 0;   // of all threads, the best of samples taken in every round
  int64_t visible_pairs = 0, pairs = 0;
  int64_t skipped_pairs = 0;  // AttentionOutputs::skipped_pairs of the picked implementation
  std::vector<AttentionRow> rows;
  std::vector<std::string> left_out;  // "plain: why"
  bool stopped = false;               // keep_going ended it: rows may lack
};

// Everything that the spec reads, drawn from the seed: q, k, v, bias and tables normal; keys
// lengths from half of M on; queries after M − N cached keys; four packed segments; three of four
// keep bits [N,M] set; a bias [N,M]; ALiBi's usual slopes.
AttentionInputs random_inputs(const AttentionSpec& spec, const AttentionShape& shape,
                              uint64_t seed);

// Rows of q and k become clusters·Hk groups of neighbours: each a tenth of itself about a normal
// centre that the queries and keys of a group have in common, row i of n in group i·clusters/n.
// Data on which top-k need not score every key. `clusters` ≥ 1; those beyond one a row
// have no members.
void cluster_rows(AttentionInputs& in, int64_t clusters, uint64_t seed);

// Bytes of inputs, outputs, gradients and the largest workspace. Throws ArgumentError where Plan
// refuses spec or shape.
double bytes_needed(const AttentionJob& job);
// Bytes that this process may have: the machine's, or what its control group leaves.
double bytes_available();

// Throws ArgumentError where Plan refuses spec or shape, bad_alloc. Plain is left out where a call
// of fused alone takes a good part of the time given.
AttentionReport measure_attention(const AttentionJob& job);

}  // namespace foci::measure
