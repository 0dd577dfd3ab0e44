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

// One bit a lane.
HWY_INLINE uint32_t bits_of(hn::Mask<DF> low, hn::Mask<DF> high) {
  const DF d;
  uint8_t bytes[2][8] = {};
  hn::StoreMaskBits(d, low, bytes[0]);
  hn::StoreMaskBits(d, high, bytes[1]);
  uint32_t bits[2];
  std::memcpy(&bits[0], bytes[0], sizeof(uint32_t));
  std::memcpy(&bits[1], bytes[1], sizeof(uint32_t));
  return bits[0] | bits[1] << lanes();
}

// words[w][lane] of counters (group, query + lane, head, batch), for the strip's lanes.
#if HWY_TARGET == HWY_SCALAR
class PhiloxGroups {
 public:
  explicit PhiloxGroups(const StripDropout& d) : d_(d) {}
  void operator()(uint32_t group, uint32_t* words) const {
    const int64_t W = strip_width();
    for (int64_t lane = 0; lane < W; ++lane) {
      const auto x =
          foci::philox(d_.seed, {group, static_cast<uint32_t>(d_.query + lane),
                                 static_cast<uint32_t>(d_.head), static_cast<uint32_t>(d_.batch)});
      for (int w = 0; w < 4; ++w) words[w * W + lane] = x[w];
    }
  }

 private:
  const StripDropout& d_;
};
#else
// Even lanes and odd lanes go separately, as the low halves of 64-bit numbers: there a product is
// one instruction, and what stands in the high halves is of no consequence. Of the first three
// rounds most is the same for all lanes.
class PhiloxGroups {
 public:
  explicit PhiloxGroups(const StripDropout& d)
      : head_(kMul1 * static_cast<uint32_t>(d.head)),
        query_(static_cast<uint32_t>(d.query)),
        batch_(static_cast<uint32_t>(d.batch)) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      key0_[round] = static_cast<uint32_t>(d.seed) + round * 0x9E3779B9u;
      key1_[round] = static_cast<uint32_t>(d.seed >> 32) + round * 0xBB67AE85u;
    }
  }

  HWY_NOINLINE void operator()(uint32_t group, uint32_t* words) const {
    const DU du;
    const DW dw;
    const int64_t L = lanes();
    const int64_t W = strip_width();
    // The first round gives c0 = query ^ first0, and c1, c2, c3 that are the same in all lanes; the
    // second c2 = high ^ second2, c3 = low of c0's product, and c0 and c1 that are the same.
    const uint64_t product0 = kMul0 * group;
    const VU first0 = hn::Set(du, high(head_) ^ key0_[0]);
    const uint64_t product1 = kMul1 * (high(product0) ^ batch_ ^ key1_[0]);
    const VU second2 = hn::Set(du, low(product0) ^ key1_[1]);
    const uint64_t product2 = kMul0 * (high(product1) ^ low(head_) ^ key0_[1]);
    const VU third0 = hn::Set(du, low(product1) ^ key0_[2]);
    const VU third2 = hn::Set(du, high(product2) ^ key1_[2]);
    const VU third3 = hn::Set(du, low(product2));
    const VU mul0 = hn::Set(du, static_cast<uint32_t>(kMul0));
    const VU mul1 = hn::Set(du, static_cast<uint32_t>(kMul1));
    for (int v = 0; v < kVectors; ++v) {
      const auto query = static_cast<uint32_t>(query_ + v * L);
      const VU all = hn::Xor(hn::Add(hn::Iota(du, 0), hn::Set(du, query)), first0);
      VU c0[2] = {all, down(all)}, c1[2], c2[2], c3[2];
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        const VU p0 = multiply(c0[odd], mul0);
        c2[odd] = hn::Xor(down(p0), second2);
        const VU p1 = multiply(c2[odd], mul1);
        c0[odd] = hn::Xor(down(p1), third0);
        c1[odd] = p1;
        c2[odd] = hn::Xor(p0, third2);
        c3[odd] = third3;
      }
      for (int round = 3; round < kRounds; ++round) {
        const VU key0 = hn::Set(du, key0_[round]), key1 = hn::Set(du, key1_[round]);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
          const VU p0 = multiply(c0[odd], mul0), p1 = multiply(c2[odd], mul1);
          c0[odd] = hn::Xor(hn::Xor(down(p1), c1[odd]), key0);
          c2[odd] = hn::Xor(hn::Xor(down(p0), c3[odd]), key1);
          c1[odd] = p1;
          c3[odd] = p0;
        }
      }
      const auto join = [&](const VU* x) HWY_ATTR {
        const VU odd = hn::BitCast(du, hn::ShiftLeft<32>(hn::BitCast(dw, x[1])));
        return hn::OddEven(odd, x[0]);
      };
      hn::Store(join(c0), du, words + v * L);
      hn::Store(join(c1), du, words + W + v * L);
      hn::Store(join(c2), du, words + 2 * W + v * L);
      hn::Store(join(c3), du, words + 3 * W + v * L);
    }
  }

 private:
  using DU = hn::RebindToUnsigned<DF>;
  using DW = hn::RepartitionToWide<DU>;
  using VU = hn::Vec<DU>;
  static constexpr int kRounds = 10;
  static constexpr uint64_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;
  static uint32_t high(uint64_t x) {
    return static_cast<uint32_t>(x >> 32);
  }
  static uint32_t low(uint64_t x) {
    return static_cast<uint32_t>(x);
  }
  // Odd lanes onto the even ones.
  static HWY_INLINE VU down(VU x) {
    return hn::BitCast(DU(), hn::ShiftRight<32>(hn::BitCast(DW(), x)));
  }
  static HWY_INLINE VU multiply(VU a, VU b) {
    return hn::BitCast(DU(), hn::MulEven(a, b));
  }

  uint64_t head_;
  uint32_t query_, batch_;
  uint32_t key0_[kRounds], key1_[kRounds];
};
#endif

// visit.row(u, kept0, kept1) for count keys index[u] (index null: begin + u), with the lanes of
// either vector in which the key is not dropped. `index` ascends; keys count from the sequence's
// first.
template <class Visit>
HWY_INLINE void visit_kept(const StripDropout& d, int64_t begin, const int32_t* index,
                           int64_t count, const Visit& visit) {
  const DF df;
  const DI di;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  HWY_ALIGN uint32_t words[4 * kMaxLanes];
  const auto* const numbers = reinterpret_cast<const int32_t*>(words);
  const VI below = hn::Set(di, static_cast<int32_t>(d.threshold) - 1);
  const VI low = hn::Set(di, 0xFFFF);
  const PhiloxGroups philox(d);
  int64_t group = -1;
  for (int64_t u = 0; u < count;) {
    const int64_t key = d.key + (index != nullptr ? index[u] : begin + u);
    if (key / 8 != group) {
      group = key / 8;
      philox(static_cast<uint32_t>(group), words);
    }
    const int32_t* word = numbers + (key % 8) / 2 * W;
    const VI x0 = hn::Load(di, word), x1 = hn::Load(di, word + L);
    const auto above = [&](VI x)
                           HWY_ATTR { return hn::RebindMask(df, hn::Gt(hn::And(x, low), below)); };
    // The next key, where it is the next half of the word.
    if (key % 2 == 0) visit.row(u++, above(x0), above(x1));
    if (key % 2 == 0 && (u == count || (index != nullptr && d.key + index[u] != key + 1))) continue;
    visit.row(u++, above(hn::ShiftRight<16>(x0)), above(hn::ShiftRight<16>(x1)));
  }
}

// kept[u] gets one bit a lane for which key index[u] (index null: begin + u) is not dropped.
struct KeptBits {
  uint32_t* kept;
  HWY_INLINE void row(int64_t u, hn::Mask<DF> kept0, hn::Mask<DF> kept1) const {
    kept[u] = bits_of(kept0, kept1);
  }
};
inline HWY_NOINLINE void dropout_lanes(const StripDropout& d, int64_t begin, const int32_t* index,
                                       int64_t count, uint32_t* kept) {
  visit_kept(d, begin, index, count, KeptBits{kept});
}

// What dropout leaves of `count` keys' weights; dropped ones become −0, so that not even a NaN
// passes through them. from and to may be one.
struct KeptWeights {
  const float* from;
  float* to;
  HWY_INLINE void row(int64_t u, hn::Mask<DF> kept0, hn::Mask<DF> kept1) const {
    const DF d;
    const int64_t at = u * strip_width(), next = at + lanes();
    const VF none = hn::Set(d, -0.0f);
    hn::Store(hn::IfThenElse(kept0, hn::Load(d, from + at), none), d, to + at);
    hn::Store(hn::IfThenElse(kept1, hn::Load(d, from + next), none), d, to + next);
  }
};
inline HWY_NOINLINE void drop_weights(const StripDropout& d, int64_t begin, const int32_t* index,
                                      int64_t count, const float* from, float* to) {
  visit_kept(d, begin, index, count, KeptWeights{from, to});
}

// The same, and the weights' gradients become 0 where they are dropped.
struct KeptGradients {
  KeptWeights weights;
  float* gradients;
  HWY_INLINE void row(int64_t u, hn::Mask<DF> kept0, hn::Mask<DF> kept1) const {
    const DF d;
    float* at = gradients + u * strip_width();
    float* next = at + lanes();
    weights.row(u, kept0, kept1);
    hn::Store(hn::IfThenElseZero(kept0, hn::Load(d, at)), d, at);
    hn::Store(hn::IfThenElseZero(kept1, hn::Load(d, next)), d, next);
  }
};
inline HWY_NOINLINE void drop_gradients(const StripDropout& d, int64_t begin, int64_t count,
                                        const float* from, float* to, float* gradients) {
  visit_kept(d, begin, nullptr, count, KeptGradients{{from, to}, gradients});
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
