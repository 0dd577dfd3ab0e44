// Top-k over strips: softmax over the k largest scores of a row, the lowest key first among equals.
//
// Scores come block by block. Each lane keeps a buffer of about 4k of its best (score, key); a
// score below the k-th best of an earlier selection is passed over, and a full buffer is cut back
// to its k best. Buffers lie side by side as strips, [slot][W], so that a selection runs down all
// lanes at once. What a lane keeps at the end depends on its own scores alone.
#if defined(FOCI_KERNELS_TOPK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_TOPK_INL_H_
#undef FOCI_KERNELS_TOPK_INL_H_
#else
#define FOCI_KERNELS_TOPK_INL_H_
#endif

#include <cmath>
#include <cstring>
#include <limits>

#include "foci/kernels/normalizers/sparse-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Slots of a lane's buffer; neither this nor the next falls as keys grow. k may be any number ≥ 1.
inline int64_t top_k_slots(int64_t k, int64_t keys) {
  return k > keys / 4 ? keys : HWY_MIN(HWY_MAX(4 * k, int64_t{64}), keys);
}
// Keys that the lanes of a strip choose together, at most.
inline int64_t top_k_keys(int64_t k, int64_t keys) {
  return k > keys / strip_width() ? keys : k * strip_width();
}

struct TopKBuffer {
  float* score;  // [slots][W]
  int32_t* key;  // [slots][W], ascending in each lane
  int64_t slots;
  int64_t k;
  HWY_ALIGN int32_t filled[kMaxLanes];
  HWY_ALIGN float least[kMaxLanes];  // only scores ≥ this can still be chosen
};

// Integers in the order of the floats. −0 stands just below +0.
HWY_INLINE int32_t ordered(float x) {
  int32_t i;
  std::memcpy(&i, &x, sizeof(i));
  return i ^ ((i >> 31) & 0x7FFFFFFF);
}
HWY_INLINE float from_ordered(int32_t i) {
  i ^= (i >> 31) & 0x7FFFFFFF;
  float x;
  std::memcpy(&x, &i, sizeof(x));
  return x;
}

// For one vector of lanes, the largest θ that at least k of `rows` scores reach (in lanes with more
// than k; `low` and `high` hold a lower and an upper bound of it in ordered integers), by halving
// intervals. It stops early where exactly k scores reach it.
inline HWY_NOINLINE void bisect_scores(int64_t rows, int64_t k, const float* score, int32_t* low,
                                       int32_t* high) {
  const DF d;
  const DI di;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  HWY_ALIGN float middle[kMaxLanes];
  HWY_ALIGN int32_t count[kMaxLanes];
  for (;;) {
    bool open = false;
    for (int64_t lane = 0; lane < L; ++lane) {
      // The mean, rounded up, where the sum may overflow.
      const int32_t m = (low[lane] | high[lane]) - ((low[lane] ^ high[lane]) >> 1);
      middle[lane] = from_ordered(m);
      open = open || low[lane] < high[lane];
    }
    if (!open) return;
    const VF m = hn::Load(d, middle);
    VI n = hn::Zero(di);
    for (int64_t r = 0; r < rows; ++r) {
      const hn::Mask<DF> reaches = hn::Ge(hn::Load(d, score + r * W), m);
      n = hn::Sub(n, hn::VecFromMask(di, hn::RebindMask(di, reaches)));
    }
    hn::Store(n, di, count);
    for (int64_t lane = 0; lane < L; ++lane) {
      if (low[lane] >= high[lane]) continue;
      const int32_t m_lane = ordered(middle[lane]);
      if (count[lane] >= k) {
        low[lane] = m_lane;
        if (count[lane] == k) high[lane] = m_lane;
      } else {
        high[lane] = m_lane - 1;
      }
    }
  }
}

// Cuts every lane that holds more than k back to its k best.
inline HWY_NOINLINE void select_top_k(TopKBuffer& b) {
  const int64_t L = lanes();
  const int64_t W = strip_width();
  int64_t rows = 0;
  for (int64_t lane = 0; lane < W; ++lane) rows = HWY_MAX(rows, int64_t{b.filled[lane]});
  if (rows <= b.k) return;
  HWY_ALIGN int32_t low[kMaxLanes];
  HWY_ALIGN int32_t high[kMaxLanes];
  for (int64_t lane = 0; lane < W; ++lane) {
    float least = kInf, largest = -kInf;
    for (int64_t r = 0; r < b.filled[lane]; ++r) {
      const float s = b.score[r * W + lane];
      least = s < least ? s : least;
      largest = s > largest ? s : largest;
    }
    for (int64_t r = b.filled[lane]; r < rows; ++r) b.score[r * W + lane] = -kInf;
    low[lane] = ordered(least);
    high[lane] = b.filled[lane] > b.k ? ordered(largest) : low[lane];
  }
  for (int v = 0; v < kVectors; ++v) {
    bisect_scores(rows, b.k, b.score + v * L, low + v * L, high + v * L);
  }
  for (int64_t lane = 0; lane < W; ++lane) {
    const int64_t filled = b.filled[lane];
    if (filled <= b.k) continue;
    const float theta = from_ordered(low[lane]);
    int64_t ties = b.k;
    for (int64_t r = 0; r < filled; ++r) ties -= b.score[r * W + lane] > theta ? 1 : 0;
    int64_t kept = 0;
    float least = kInf;
    for (int64_t r = 0; r < filled; ++r) {
      const float s = b.score[r * W + lane];
      const int32_t key = b.key[r * W + lane];
      const bool tie = s == theta && ties > 0;
      const bool keep = s > theta || tie;
      ties -= tie ? 1 : 0;
      b.score[kept * W + lane] = s;
      b.key[kept * W + lane] = key;
      least = keep && s < least ? s : least;
      kept += keep ? 1 : 0;
    }
    b.filled[lane] = static_cast<int32_t>(kept);
    // Later keys lose ties against it. The next float up from +inf is NaN, which nothing reaches.
    b.least[lane] = from_ordered(ordered(least) + 1);
  }
}

// Fills the buffers with each lane's k best; marks lanes that saw NaN.
inline HWY_NOINLINE void choose_top_k(const Strip& s, const KeySpan& span, const float* panel,
                                      uint32_t* bits, float* block, TopKBuffer& b, uint32_t& nan) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  for (int lane = 0; lane < kMaxLanes; ++lane) {
    b.filled[lane] = 0;
    // Masked keys are −inf. Lanes without a query take nothing.
    b.least[lane] = lane < s.mask.lanes ? std::numeric_limits<float>::lowest()
                                        : std::numeric_limits<float>::quiet_NaN();
  }
  int32_t most = 0;  // at least every `filled`
  const VF zero = hn::Zero(d);
  hn::Mask<DF> nan0 = is_nan(zero), nan1 = nan0;  // none
  for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
    const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
    score_keys(s, span, lo, hi, panel, bits, block);
    VF least0 = hn::Load(d, b.least), least1 = hn::Load(d, b.least + L);
    for (int64_t j = 0; j < hi - lo; ++j) {
      const VF s0 = hn::Load(d, block + j * W), s1 = hn::Load(d, block + j * W + L);
      nan0 = hn::Or(nan0, is_nan(s0));
      nan1 = hn::Or(nan1, is_nan(s1));
      const hn::Mask<DF> in0 = hn::Ge(s0, least0), in1 = hn::Ge(s1, least1);
      if (hn::AllFalse(d, in0) && hn::AllFalse(d, in1)) continue;
      if (most == b.slots) {
        select_top_k(b);
        most = 0;
        for (int64_t lane = 0; lane < W; ++lane) most = HWY_MAX(most, b.filled[lane]);
        least0 = hn::Load(d, b.least);
        least1 = hn::Load(d, b.least + L);
      }
      // −0 and +0 become one number to the bisection.
      hn::Store(hn::Add(s0, zero), d, block + j * W);
      hn::Store(hn::Add(s1, zero), d, block + j * W + L);
      for (uint32_t left = bits_of(in0, in1); left != 0; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        const int32_t slot = b.filled[lane]++;
        b.score[slot * W + lane] = block[j * W + lane];
        b.key[slot * W + lane] = static_cast<int32_t>(lo + j);
      }
      ++most;
    }
  }
  nan = bits_of(nan0, nan1);
  select_top_k(b);
}

// A row with fewer than k scores above −inf (infinite inputs can do that to keys it sees) chooses
// among the others by number: their weight is 0, but they take part. Their score becomes the lowest
// finite one, whose exponential is 0 too.
inline HWY_NOINLINE void choose_infinite(const Strip& s, const KeySpan& span, uint32_t* bits,
                                         TopKBuffer& b) {
  const int64_t W = strip_width();
  int32_t next[kMaxLanes] = {}, found[kMaxLanes];
  for (int lane = 0; lane < kMaxLanes; ++lane) found[lane] = b.filled[lane];
  for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
    const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
    lane_bits(s.mask, lo, hi, bits);
    for (int lane = 0; lane < s.mask.lanes; ++lane) {
      for (int64_t j = lo; j < hi && b.filled[lane] < b.k; ++j) {
        if (!(bits[j - lo] >> lane & 1u)) continue;
        if (next[lane] < found[lane] && b.key[next[lane] * W + lane] == j) {
          ++next[lane];
          continue;
        }
        const int64_t slot = b.filled[lane]++ * W + lane;
        b.score[slot] = std::numeric_limits<float>::lowest();
        b.key[slot] = static_cast<int32_t>(j);
      }
    }
  }
}

// The lanes' choices side by side: index and a strip of scores, −inf where a lane did not choose
// the key. `place` [keys of the span] is room for where each key went.
inline HWY_NOINLINE void merge_top_k(const KeySpan& span, const TopKBuffer& b, uint32_t* place,
                                     SparseStrip& p) {
  const int64_t W = strip_width();
  const int64_t keys = span.end - span.begin;
  std::memset(place, 0, sizeof(uint32_t) * static_cast<size_t>(keys));
  for (int64_t lane = 0; lane < W; ++lane) {
    for (int64_t r = 0; r < b.filled[lane]; ++r) place[b.key[r * W + lane] - span.begin] = 1;
  }
  p.count = 0;
  for (int64_t j = 0; j < keys; ++j) {
    if (place[j] == 0) continue;
    place[j] = static_cast<uint32_t>(p.count);
    p.index[p.count++] = static_cast<int32_t>(span.begin + j);
  }
  for (int64_t n = 0; n < p.count * W; ++n) p.weights[n] = -kInf;
  for (int64_t lane = 0; lane < W; ++lane) {
    for (int64_t r = 0; r < b.filled[lane]; ++r) {
      p.weights[place[b.key[r * W + lane] - span.begin] * W + lane] = b.score[r * W + lane];
    }
  }
}

inline HWY_NOINLINE void solve_top_k(const Strip& s, const KeySpan& span, const float* panel,
                                     uint32_t* bits, float* block, TopKBuffer& b, SparseStrip& p) {
  const DF d;
  const DI di;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  begin_rows(s, p);
  choose_top_k(s, span, panel, bits, block, b, p.broken);
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    for (int64_t r = 0; r < b.filled[lane]; ++r) {
      p.max[lane] = HWY_MAX(p.max[lane], b.score[r * W + lane]);
    }
    // A NaN, or an infinite largest score: no weight means anything.
    if (p.broken >> lane & 1u || std::isinf(p.max[lane])) {
      p.broken |= 1u << lane;
      b.filled[lane] = 0;
    }
  }
  if (s.careful) choose_infinite(s, span, bits, b);
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    if (p.broken >> lane & 1u) b.filled[lane] = 0;
    p.support[lane] = static_cast<float>(b.filled[lane]);
  }
  merge_top_k(span, b, bits, p);
  const VF minus_inf = hn::Set(d, -kInf);
  for (int v = 0; v < kVectors; ++v) {
    float* strip = p.weights + v * L;
    const VF max = hn::Load(d, p.max + v * L);
    VI key = hn::Load(di, p.max_key + v * L);
    VF sum[1] = {hn::Zero(d)};
    sum_rows(p.count, p.index, sum, [&](int64_t u, VF* part) HWY_ATTR {
      const VF x = hn::Load(d, strip + u * W);
      const hn::Mask<DF> first =
          hn::MaskFromVec(hn::BitCast(d, hn::BroadcastSignBit(key)));  // −1: none so far
      const hn::Mask<DF> found = hn::And(first, hn::Eq(x, max));
      key = hn::IfThenElse(hn::RebindMask(di, found), hn::Set(di, p.index[u]), key);
      const VF e = exp_nonpositive(d, hn::Sub(x, max));
      // +0 is a weight that underflowed, −0 none.
      const VF w = hn::IfThenElse(hn::Eq(x, minus_inf), hn::Set(d, -0.0f), e);
      hn::Store(w, d, strip + u * W);
      part[0] = hn::Add(part[0], w);
    });
    hn::Store(key, di, p.max_key + v * L);
    const VF inverse = hn::Div(hn::Set(d, 1.0f), sum[0]);
    for (int64_t u = 0; u < p.count; ++u) {
      const VF w = hn::Load(d, strip + u * W);
      hn::Store(hn::IfThenElse(is_masked(w), w, hn::Mul(w, inverse)), d, strip + u * W);
    }
    hn::Store(inverse, d, p.max_weight + v * L);
    HWY_ALIGN float sums[kMaxLanes];
    hn::Store(sum[0], d, sums);
    for (int64_t lane = 0; lane < L; ++lane) {
      const double log_sum = double{p.max[v * L + lane]} + std::log(double{sums[lane]});
      p.row_stat[v * L + lane] = static_cast<float>(log_sum);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
