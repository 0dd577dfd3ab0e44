// Philox's rounds, numbers drawn from its words, and the bits of dropout.
#include "foci/core/rng.h"

#include <cmath>
#include <numbers>

#include "foci/core/error.h"

namespace foci {

std::array<uint32_t, 4> philox(uint64_t key, const std::array<uint32_t, 4>& counter) {
  // Multipliers and Weyl constants of the paper.
  constexpr uint64_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  auto [c0, c1, c2, c3] = counter;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = kMul0 * c0, p1 = kMul1 * c2;
    const auto n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const auto n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c0 = n0;
    c1 = static_cast<uint32_t>(p1);
    c2 = n2;
    c3 = static_cast<uint32_t>(p0);
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return {c0, c1, c2, c3};
}

uint16_t dropout_bits(uint64_t seed, int64_t batch, int64_t head, int64_t query, int64_t key) {
  const auto words = philox(seed, {static_cast<uint32_t>(key / 8), static_cast<uint32_t>(query),
                                   static_cast<uint32_t>(head), static_cast<uint32_t>(batch)});
  return static_cast<uint16_t>(words[(key % 8) / 2] >> (16 * (key % 2)));
}

uint32_t dropout_threshold(double p) {
  require(p >= 0 && p < 1, "dropout p: {} given, it must lie in [0, 1)", p);
  const auto threshold = static_cast<uint32_t>(std::lround(p * 65536));
  return threshold > 65535 ? 65535 : threshold;
}

uint32_t Rng::next_u32() {
  const uint64_t index = state_.position / 4;
  if (index != block_index_) {
    block_ = philox(state_.seed, {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                                  static_cast<uint32_t>(state_.stream),
                                  static_cast<uint32_t>(state_.stream >> 32)});
    block_index_ = index;
  }
  return block_[state_.position++ % 4];
}

uint64_t Rng::next_u64() {
  const uint64_t low = next_u32();
  return low | uint64_t{next_u32()} << 32;
}

double Rng::uniform() {
  return static_cast<double>(next_u64() >> 11) * 0x1.0p-53;
}

int64_t Rng::below(int64_t n) {
  require(n >= 1, "Rng::below: n is {}, at least 1 is needed", n);
  const auto bound = static_cast<uint64_t>(n);
  const uint64_t reject = (0 - bound) % bound;  // the 2^64 mod n lowest values would bias
  for (;;) {
    const uint64_t x = next_u64();
    if (x >= reject) return static_cast<int64_t>(x % bound);
  }
}

double Rng::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(2 * std::numbers::pi * uniform());
}

}  // namespace foci
