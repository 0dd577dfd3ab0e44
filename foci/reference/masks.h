// Who sees whom: positions of queries and keys, and whether every mask allows a pair.
#pragma once

#include <cstdint>
#include <vector>

#include "foci/reference/problem.h"

namespace foci::reference {

// Positions count from the start of a row's segment; without segments a batch is one segment.
class Masks {
 public:
  explicit Masks(const Problem& problem);

  // Whether causal, windows, lengths, segments and keep bits let query i of head h see key j.
  bool allow(int64_t b, int64_t h, int64_t i, int64_t j) const;
  // The same, and no −inf in the bias tensor, and not dropped by DropKey.
  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const;

  // j − p, as ALiBi and Relative1D count it.
  int64_t distance(int64_t b, int64_t i, int64_t j) const;
  // p in the whole batch, segments or not, as Relative2D counts it.
  int64_t grid_position(int64_t b, int64_t i) const;

 private:
  struct Place {
    int64_t index = 0;              // own number within the segment
    int64_t queries = 0, keys = 0;  // of the segment
  };
  int64_t position(Align align, int64_t b, const Place& place) const;

  const Problem& p_;
  std::vector<Place> queries_;      // [B,N]
  std::vector<int64_t> key_index_;  // [B,M]
};

}  // namespace foci::reference
