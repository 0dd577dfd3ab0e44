// Philox 4×32-10: a counter-based random number generator. The same (key, counter) gives the same
// four numbers on every machine, in any order, on any thread.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

#include "foci/core/api.h"

namespace foci {

// Four uniform 32-bit numbers of one counter.
FOCI_API std::array<uint32_t, 4> philox(uint64_t key, const std::array<uint32_t, 4>& counter);

// The 16 random bits that decide whether attention drops weight (batch, head, query, key).
// One counter (key/8, query, head, batch) serves eight neighbouring keys; key k takes half
// k mod 2 (low half first) of word (k mod 8)/2.
FOCI_API uint16_t dropout_bits(uint64_t seed, int64_t batch, int64_t head, int64_t query,
                               int64_t key);

// DropKey and weight dropout both drop where dropout_bits < threshold, p quantised to 1/65536.
// p in [0, 1); the result is in [0, 65535].
FOCI_API uint32_t dropout_threshold(double p);

// A stream of numbers over philox(seed, {position, stream}): its whole state is three integers, so
// that a checkpoint can hold it.
class FOCI_API Rng {
 public:
  struct State {
    uint64_t seed = 0;
    uint64_t stream = 0;
    uint64_t position = 0;  // 32-bit numbers drawn so far
    bool operator==(const State&) const = default;
  };

  explicit Rng(uint64_t seed, uint64_t stream = 0) : Rng(State{seed, stream, 0}) {}
  explicit Rng(const State& state) : state_(state) {}

  uint32_t next_u32();
  uint64_t next_u64();
  double uniform();          // [0, 1), 53 bits
  int64_t below(int64_t n);  // [0, n), unbiased; n ≥ 1
  double normal();           // mean 0, variance 1 (Box–Muller, one of the pair)
  const State& state() const { return state_; }

 private:
  State state_;
  std::array<uint32_t, 4> block_{};
  uint64_t block_index_ = ~uint64_t{0};
};

}  // namespace foci
