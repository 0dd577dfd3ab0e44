// Top-k over strips: softmax over the k largest scores of a row, the lowest key first among equals.
//
// The k-th largest score of every lane is found by bisection, a vector of lanes at a time. Rows of
// up to kWholeKeys·k keys are scored whole. For longer ones scores come block by block, and each
// lane keeps a buffer of about 4k of its best (score, key): a score below the k-th best of an
// earlier selection is passed over, and full buffers are cut back to their k best. Either way a
// lane chooses the same keys, and its own scores alone say which.
#if defined(FOCI_KERNELS_TOPK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_TOPK_INL_H_
#undef FOCI_KERNELS_TOPK_INL_H_
#else
#define FOCI_KERNELS_TOPK_INL_H_
#endif

#include <cmath>
#include <cstring>
#include <limits>

#include "foci/kernels/attention/normalizers/sparse-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

inline constexpr int64_t kWholeKeys = 64;

inline bool top_k_whole(int64_t k, int64_t keys) {
  return keys <= kKeyBlock || k >= keys / kWholeKeys;
}
// Slots of a lane's buffer. k may be any number ≥ 1.
inline int64_t top_k_slots(int64_t k, int64_t keys) {
  return top_k_whole(k, keys) ? 0 : HWY_MAX(4 * k, int64_t{64});
}
// Rows of the strip of weights that keys of this number or fewer need.
inline int64_t top_k_rows(int64_t k, int64_t keys) {
  static_assert(kMaxLanes <= kWholeKeys, "the lanes of a strip choose up to k keys each");
  if (top_k_whole(k, keys)) return keys;
  return HWY_MIN(keys, HWY_MAX(kKeyBlock, kWholeKeys * (k + 1)));
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

template <class Mask>
HWY_INLINE VI count_if(VI n, const Mask& mask) {
  const DI di;
  return hn::Sub(n, hn::VecFromMask(di, hn::RebindMask(di, mask)));
}

// For one vector of lanes: `least[lane]` such that a row's choice is every score above it and the
// first `ties[lane]` equal to it. Rows of −inf are not there; lanes with no more than k others
// choose them all. No score is −0.
inline HWY_NOINLINE void find_least(int64_t rows, int64_t k, const float* score, float* least,
                                    int32_t* ties) {
  const DF d;
  const DI di;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF inf = hn::Set(d, kInf), minus_inf = hn::Set(d, -kInf);
  VF bottom = inf, top = minus_inf;
  VI n = hn::Zero(di);
  for (int64_t r = 0; r < rows; ++r) {
    const VF s = hn::Load(d, score + r * W);
    const hn::Mask<DF> there = hn::Gt(s, minus_inf);
    bottom = hn::IfThenElse(hn::And(there, hn::Lt(s, bottom)), s, bottom);
    top = hn::IfThenElse(hn::Gt(s, top), s, top);
    n = count_if(n, there);
  }
  // At least k scores reach `low`, fewer than k lie above `high`.
  HWY_ALIGN float low[kMaxLanes];
  HWY_ALIGN float high[kMaxLanes];
  HWY_ALIGN float middle[kMaxLanes];
  HWY_ALIGN int32_t count[kMaxLanes];
  hn::Store(bottom, d, low);
  hn::Store(top, d, high);
  hn::Store(n, di, count);
  for (int64_t lane = 0; lane < L; ++lane) {
    if (count[lane] <= k) low[lane] = high[lane] = -kInf;
  }
  for (int step = 0;; ++step) {
    bool open = false;
    for (int64_t lane = 0; lane < L; ++lane) {
      const int32_t l = ordered(low[lane]), h = ordered(high[lane]);
      // Halves what lies between as numbers, and, should that not end, as bits; rounded up.
      const float mean = low[lane] + (high[lane] - low[lane]) * 0.5f;
      const bool numbers = step < 20 && mean > low[lane] && mean < high[lane];
      middle[lane] = numbers ? mean : from_ordered((l | h) - ((l ^ h) >> 1));
      open = open || l < h;
    }
    if (!open) break;
    const VF m = hn::Load(d, middle);
    n = hn::Zero(di);
    for (int64_t r = 0; r < rows; ++r) n = count_if(n, hn::Ge(hn::Load(d, score + r * W), m));
    hn::Store(n, di, count);
    for (int64_t lane = 0; lane < L; ++lane) {
      if (ordered(low[lane]) >= ordered(high[lane])) continue;
      if (count[lane] >= k) low[lane] = middle[lane];
      if (count[lane] == k) high[lane] = middle[lane];
      if (count[lane] < k) high[lane] = from_ordered(ordered(middle[lane]) - 1);
    }
  }
  const VF l = hn::Load(d, low);
  n = hn::Zero(di);
  for (int64_t r = 0; r < rows; ++r) n = count_if(n, hn::Gt(hn::Load(d, score + r * W), l));
  hn::Store(n, di, count);
  for (int64_t lane = 0; lane < L; ++lane) {
    least[lane] = low[lane];
    ties[lane] = low[lane] == -kInf ? 0 : static_cast<int32_t>(k - count[lane]);
  }
}

// Scores of a block as top-k reads them: −0 becomes +0; and a score of −inf of a key that is seen
// (infinite inputs can do that) becomes the lowest finite one, so that it may be chosen, where
// there are fewer than k others, and take part with weight 0. Maxima and NaN are taken of the
// scores as they were.
struct TopKBlock {
  VF max0, max1;
  hn::Mask<DF> nan0, nan1;
};
inline HWY_NOINLINE void read_block(const Strip& s, int64_t count, const uint32_t* bits,
                                    float* strip, TopKBlock& b) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF zero = hn::Zero(d), minus_inf = hn::Set(d, -kInf);
  const VF lowest = hn::Set(d, std::numeric_limits<float>::lowest());
  for (int64_t j = 0; j < count; ++j) {
    VF s0 = hn::Add(hn::Load(d, strip + j * W), zero);
    VF s1 = hn::Add(hn::Load(d, strip + j * W + L), zero);
    b.nan0 = hn::Or(b.nan0, is_nan(s0));
    b.nan1 = hn::Or(b.nan1, is_nan(s1));
    b.max0 = max_of_scores(s0, b.max0);
    b.max1 = max_of_scores(s1, b.max1);
    if (s.careful) {
      s0 = hn::IfThenElse(hn::And(hn::Eq(s0, minus_inf), lane_mask(bits[j], 0)), lowest, s0);
      s1 = hn::IfThenElse(hn::And(hn::Eq(s1, minus_inf), lane_mask(bits[j], 1)), lowest, s1);
    }
    hn::Store(s0, d, strip + j * W);
    hn::Store(s1, d, strip + j * W + L);
  }
}

inline void begin_blocks(const SparseStrip& p, TopKBlock& b) {
  const DF d;
  b.max0 = hn::Load(d, p.max);
  b.max1 = hn::Load(d, p.max + lanes());
  b.nan0 = b.nan1 = is_nan(hn::Zero(d));  // none
}

// Lanes that a NaN or an infinite largest score breaks choose nothing; lanes without a query
// neither.
inline void end_blocks(const Strip& s, const TopKBlock& b, SparseStrip& p) {
  const DF d;
  hn::Store(b.max0, d, p.max);
  hn::Store(b.max1, d, p.max + lanes());
  p.broken = bits_of(b.nan0, b.nan1);
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    if (std::isinf(p.max[lane])) p.broken |= 1u << lane;
  }
}

// A row scored whole: the strip holds the scores of the chosen keys, −inf elsewhere.
inline HWY_NOINLINE void choose_whole(const Strip& s, const KeySpan& span, const float* panel,
                                      int64_t k, uint32_t* bits, SparseStrip& p) {
  const DF d;
  const DI di;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const int64_t keys = span.end - span.begin;
  TopKBlock b;
  begin_blocks(p, b);
  for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
    const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
    float* part = p.weights + (lo - span.begin) * W;
    score_keys(s, span, lo, hi, panel, bits, part);
    read_block(s, hi - lo, bits, part, b);
  }
  end_blocks(s, b, p);
  HWY_ALIGN float least[kMaxLanes];
  HWY_ALIGN int32_t ties[kMaxLanes];
  for (int v = 0; v < kVectors; ++v) {
    find_least(keys, k, p.weights + v * L, least + v * L, ties + v * L);
  }
  for (int lane = 0; lane < W; ++lane) {
    if (lane < s.mask.lanes && !(p.broken >> lane & 1u)) continue;
    least[lane] = kInf;
    ties[lane] = 0;
  }
  const VF least0 = hn::Load(d, least), least1 = hn::Load(d, least + L);
  const VF minus_inf = hn::Set(d, -kInf);
  VI left0 = hn::Load(di, ties), left1 = hn::Load(di, ties + L);
  VI n0 = hn::Zero(di), n1 = n0;
  p.count = 0;
  for (int64_t j = 0; j < keys; ++j) {
    const VF s0 = hn::Load(d, p.weights + j * W), s1 = hn::Load(d, p.weights + j * W + L);
    const hn::Mask<DF> more0 = hn::RebindMask(d, hn::Gt(left0, hn::Zero(di)));
    const hn::Mask<DF> more1 = hn::RebindMask(d, hn::Gt(left1, hn::Zero(di)));
    const hn::Mask<DF> tie0 = hn::And(hn::Eq(s0, least0), more0);
    const hn::Mask<DF> tie1 = hn::And(hn::Eq(s1, least1), more1);
    const hn::Mask<DF> in0 = hn::Or(hn::Gt(s0, least0), tie0);
    const hn::Mask<DF> in1 = hn::Or(hn::Gt(s1, least1), tie1);
    left0 = hn::Add(left0, hn::VecFromMask(di, hn::RebindMask(di, tie0)));
    left1 = hn::Add(left1, hn::VecFromMask(di, hn::RebindMask(di, tie1)));
    n0 = count_if(n0, in0);
    n1 = count_if(n1, in1);
    hn::Store(hn::IfThenElse(in0, s0, minus_inf), d, p.weights + p.count * W);
    hn::Store(hn::IfThenElse(in1, s1, minus_inf), d, p.weights + p.count * W + L);
    p.index[p.count] = static_cast<int32_t>(span.begin + j);
    p.count += hn::AllFalse(d, in0) && hn::AllFalse(d, in1) ? 0 : 1;
  }
  hn::Store(hn::ConvertTo(d, n0), d, p.support);
  hn::Store(hn::ConvertTo(d, n1), d, p.support + L);
}

// Cuts every lane that holds more than k back to its k best.
inline HWY_NOINLINE void select_top_k(TopKBuffer& b) {
  const int64_t L = lanes();
  const int64_t W = strip_width();
  int64_t rows = 0;
  for (int64_t lane = 0; lane < W; ++lane) rows = HWY_MAX(rows, int64_t{b.filled[lane]});
  if (rows <= b.k) return;
  for (int64_t lane = 0; lane < W; ++lane) {
    for (int64_t r = b.filled[lane]; r < rows; ++r) b.score[r * W + lane] = -kInf;
  }
  HWY_ALIGN float theta[kMaxLanes];
  HWY_ALIGN int32_t ties[kMaxLanes];
  for (int v = 0; v < kVectors; ++v) {
    find_least(rows, b.k, b.score + v * L, theta + v * L, ties + v * L);
  }
  for (int64_t lane = 0; lane < W; ++lane) {
    if (b.filled[lane] <= b.k) continue;
    int32_t left = ties[lane];
    int64_t kept = 0;
    float least = kInf;
    for (int64_t r = 0; r < b.filled[lane]; ++r) {
      const float s = b.score[r * W + lane];
      const int32_t key = b.key[r * W + lane];
      const bool tie = s == theta[lane] && left > 0;
      const bool keep = s > theta[lane] || tie;
      left -= tie ? 1 : 0;
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

// Fills the buffers with each lane's k best.
inline HWY_NOINLINE void fill_buffer(const Strip& s, const KeySpan& span, const float* panel,
                                     uint32_t* bits, float* block, TopKBuffer& b, SparseStrip& p) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  for (int lane = 0; lane < kMaxLanes; ++lane) {
    b.filled[lane] = 0;
    // Masked keys are −inf. Lanes without a query take nothing.
    b.least[lane] = lane < s.mask.lanes ? std::numeric_limits<float>::lowest()
                                        : std::numeric_limits<float>::quiet_NaN();
  }
  int64_t most = 0;  // at least every `filled`
  TopKBlock read;
  begin_blocks(p, read);
  for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
    const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
    score_keys(s, span, lo, hi, panel, bits, block);
    read_block(s, hi - lo, bits, block, read);
    VF least0 = hn::Load(d, b.least), least1 = hn::Load(d, b.least + L);
    for (int64_t j = 0; j < hi - lo; ++j) {
      const hn::Mask<DF> in0 = hn::Ge(hn::Load(d, block + j * W), least0);
      const hn::Mask<DF> in1 = hn::Ge(hn::Load(d, block + j * W + L), least1);
      if (hn::AllFalse(d, in0) && hn::AllFalse(d, in1)) continue;
      if (most == b.slots) {
        select_top_k(b);
        most = 0;
        for (int64_t lane = 0; lane < W; ++lane) most = HWY_MAX(most, int64_t{b.filled[lane]});
        least0 = hn::Load(d, b.least);
        least1 = hn::Load(d, b.least + L);
      }
      for (uint32_t left = bits_of(in0, in1); left != 0; left &= left - 1) {
        const int lane = __builtin_ctz(left);
        const int64_t slot = b.filled[lane]++ * W + lane;
        b.score[slot] = block[j * W + lane];
        b.key[slot] = static_cast<int32_t>(lo + j);
      }
      ++most;
    }
  }
  select_top_k(b);
  end_blocks(s, read, p);
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    if (p.broken >> lane & 1u) b.filled[lane] = 0;
    p.support[lane] = static_cast<float>(b.filled[lane]);
  }
}

// The lanes' buffers side by side, in the form that choose_whole gives. `place` [keys of the span]
// is room for where each key went.
inline HWY_NOINLINE void merge_buffer(const KeySpan& span, const TopKBuffer& b, uint32_t* place,
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

// Chosen scores become weights.
inline HWY_NOINLINE void weigh_chosen(SparseStrip& p) {
  const DF d;
  const DI di;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const VF minus_inf = hn::Set(d, -kInf);
  for (int v = 0; v < kVectors; ++v) {
    float* strip = p.weights + v * L;
    const VF max = hn::Load(d, p.max + v * L);
    VI key = hn::Load(di, p.max_key + v * L);
    VF sum[1] = {hn::Zero(d)};
    sum_rows(p.count, p.index, sum, [&](int64_t u, VF* part) HWY_ATTR {
      const VF x = hn::Load(d, strip + u * W);
      const hn::Mask<DF> none =
          hn::MaskFromVec(hn::BitCast(d, hn::BroadcastSignBit(key)));  // −1: none so far
      const hn::Mask<DF> found = hn::And(none, hn::Eq(x, max));
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

inline void solve_top_k(const Strip& s, const KeySpan& span, const float* panel, uint32_t* bits,
                        float* block, TopKBuffer& b, SparseStrip& p) {
  begin_rows(s, p);
  if (top_k_whole(b.k, span.end - span.begin)) {
    choose_whole(s, span, panel, b.k, bits, p);
  } else {
    fill_buffer(s, span, panel, bits, block, b, p);
    merge_buffer(span, b, bits, p);
  }
  weigh_chosen(p);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
