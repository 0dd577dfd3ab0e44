// Dropout's random bits, eight keys to a counter, for all lanes of a strip at once. The numbers are
// those of core/rng.h's dropout_bits.
#if defined(FOCI_KERNELS_ATTENTION_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_PHILOX_INL_H_
#undef FOCI_KERNELS_ATTENTION_PHILOX_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_PHILOX_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "foci/core/rng.h"
#include "foci/kernels/attention.h"
#include "foci/kernels/attention/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// words[w][lane] of counter (group, query + lane, head, batch), for the strip's 2·lanes() lanes.
#if HWY_TARGET == HWY_SCALAR
inline void philox_group(const StripDropout& d, uint32_t group, uint32_t* words) {
  const int64_t W = strip_width();
  for (int64_t lane = 0; lane < W; ++lane) {
    const auto x =
        foci::philox(d.seed, {group, static_cast<uint32_t>(d.query + lane),
                              static_cast<uint32_t>(d.head), static_cast<uint32_t>(d.batch)});
    for (int w = 0; w < 4; ++w) words[w * W + lane] = x[w];
  }
}
#else
using DU = hn::RebindToUnsigned<DF>;
using VU = hn::Vec<DU>;

// Low and high halves of the 64-bit products a · b.
HWY_INLINE void multiply_halves(VU a, VU b, VU& low, VU& high) {
  const DU du;
  const hn::RepartitionToWide<DU> dw;
  const auto even = hn::MulEven(a, b);
  const auto odd = hn::MulEven(hn::BitCast(du, hn::ShiftRight<32>(hn::BitCast(dw, a))), b);
  const auto low_half = hn::Set(dw, 0xFFFFFFFFull);
  low = hn::BitCast(du, hn::Or(hn::And(even, low_half), hn::ShiftLeft<32>(odd)));
  high = hn::BitCast(du, hn::Or(hn::ShiftRight<32>(even), hn::AndNot(low_half, odd)));
}

inline HWY_NOINLINE void philox_group(const StripDropout& d, uint32_t group, uint32_t* words) {
  const DU du;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VU mul0 = hn::Set(du, 0xD2511F53u), mul1 = hn::Set(du, 0xCD9E8D57u);
  const VU weyl0 = hn::Set(du, 0x9E3779B9u), weyl1 = hn::Set(du, 0xBB67AE85u);
  for (int v = 0; v < kVectors; ++v) {
    VU c0 = hn::Set(du, group);
    VU c1 = hn::Add(hn::Iota(du, 0), hn::Set(du, static_cast<uint32_t>(d.query + v * L)));
    VU c2 = hn::Set(du, static_cast<uint32_t>(d.head));
    VU c3 = hn::Set(du, static_cast<uint32_t>(d.batch));
    VU k0 = hn::Set(du, static_cast<uint32_t>(d.seed));
    VU k1 = hn::Set(du, static_cast<uint32_t>(d.seed >> 32));
    for (int round = 0; round < 10; ++round) {
      VU low0, high0, low1, high1;
      multiply_halves(c0, mul0, low0, high0);
      multiply_halves(c2, mul1, low1, high1);
      c0 = hn::Xor(hn::Xor(high1, c1), k0);
      c1 = low1;
      c2 = hn::Xor(hn::Xor(high0, c3), k1);
      c3 = low0;
      k0 = hn::Add(k0, weyl0);
      k1 = hn::Add(k1, weyl1);
    }
    hn::Store(c0, du, words + v * L);
    hn::Store(c1, du, words + W + v * L);
    hn::Store(c2, du, words + 2 * W + v * L);
    hn::Store(c3, du, words + 3 * W + v * L);
  }
}
#endif

// One bit a lane whose 16 bits for key (of the group that `words` holds) reach the threshold.
HWY_INLINE uint32_t kept_lanes(const uint32_t* words, int64_t key, uint32_t threshold) {
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const uint32_t* word = words + (key % 8) / 2 * W;
  uint32_t kept = 0;
  const DI di;
  const VI below = hn::Set(di, static_cast<int32_t>(threshold) - 1);
  for (int v = 0; v < kVectors; ++v) {
    VI x = hn::Load(di, reinterpret_cast<const int32_t*>(word) + v * L);
    x = key % 2 == 0 ? hn::And(x, hn::Set(di, 0xFFFF))
                     : hn::And(hn::ShiftRight<16>(x), hn::Set(di, 0xFFFF));
    uint8_t bytes[8] = {};
    hn::StoreMaskBits(di, hn::Gt(x, below), bytes);
    uint32_t part;
    std::memcpy(&part, bytes, sizeof(part));
    kept |= part << (v * static_cast<int>(L));
  }
  return kept;
}

// kept[u] gets one bit a lane for which key index[u] (index null: begin + u) is not dropped.
// `index` ascends; keys count from the sequence's first.
inline HWY_NOINLINE void dropout_lanes(const StripDropout& d, int64_t begin, const int32_t* index,
                                       int64_t count, uint32_t* kept) {
  HWY_ALIGN uint32_t words[4 * kMaxLanes];
  int64_t group = -1;
  for (int64_t u = 0; u < count; ++u) {
    const int64_t key = d.key + (index != nullptr ? index[u] : begin + u);
    if (key / 8 != group) {
      group = key / 8;
      philox_group(d, static_cast<uint32_t>(group), words);
    }
    kept[u] = kept_lanes(words, key, d.threshold);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
