// Top-k over strips: softmax over the k largest scores of a row, the lowest key first among equals.
//
// The k-th largest score of every lane is found by bisection, a vector of lanes at a time. Rows of
// up to kWholeKeys·k keys are scored whole. For longer ones scores come block by block, and each
// lane keeps a buffer of about 4k of its best (score, key): a score below the k-th best of an
// earlier selection is passed over, and full buffers are cut back to their k best. Either way a
// lane chooses the same keys, and its own scores alone say which.
//
// Where keys lie in clusters, bounds leave most blocks of keys out (topk_blocks-inl.h).
#if defined(FOCI_KERNELS_TOPK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_TOPK_INL_H_
#undef FOCI_KERNELS_TOPK_INL_H_
#else
#define FOCI_KERNELS_TOPK_INL_H_
#endif

#include <cmath>
#include <cstring>
#include <limits>

#include "foci/kernels/attention/normalizers/topk_blocks-inl.h"

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
  // Room for one block of keys a lane too (prune_blocks).
  const int64_t rows = HWY_MAX(kKeyBlock, kBoxKeys * strip_width());
  return HWY_MIN(keys, HWY_MAX(rows, kWholeKeys * (k + 1)));
}

struct TopKBuffer {
  float* score;  // [slots][W]
  int32_t* key;  // [slots][W], ascending in each lane
  int64_t slots;
  int64_t k;
  HWY_ALIGN int32_t filled[kMaxLanes];
  HWY_ALIGN float least[kMaxLanes];  // only scores ≥ this can still be chosen
};

// After prune_blocks into the keys' own places: scores the other blocks that may be needed.
// Returns the number of runs of scored rows.
inline HWY_NOINLINE int64_t score_needed(const Strip& s, const KeySpan& span, const float* panel,
                                         uint32_t* bits, TopKBlocks& blocks, SparseStrip& p,
                                         TopKBlock& read) {
  int64_t runs = 0;
  for (int64_t b = 0; b < blocks.count; ++b) {
    const int64_t lo = blocks.begin(span, b), hi = blocks.end(span, b);
    const int64_t at = lo - span.begin;
    if (blocks.place[b] < 0) {
      if (!may_reach(blocks, b, blocks.least)) {
        skip_keys(s.mask, lo, hi, bits, blocks);
        continue;
      }
      score_block(s, span, lo, hi, panel, bits, p.weights + at * strip_width(), read);
    }
    if (runs > 0 && blocks.runs[2 * runs - 1] == at) {
      blocks.runs[2 * runs - 1] = static_cast<int32_t>(hi - span.begin);
      continue;
    }
    blocks.runs[2 * runs] = static_cast<int32_t>(at);
    blocks.runs[2 * runs + 1] = static_cast<int32_t>(hi - span.begin);
    ++runs;
  }
  return runs;
}

// A row scored whole: the strip holds the scores of the chosen keys, −inf elsewhere.
inline HWY_NOINLINE void choose_whole(const Strip& s, const KeySpan& span, const float* panel,
                                      int64_t k, uint32_t* bits, TopKBlocks& blocks,
                                      SparseStrip& p) {
  const DF d;
  const DI di;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  const int64_t keys = span.end - span.begin;
  TopKBlock b;
  begin_blocks(p, b);
  RowRuns rows{blocks.runs, 1};
  if (prune_blocks(s, span, panel, k, keys, bits, blocks, p, b)) {
    rows.count = score_needed(s, span, panel, bits, blocks, p, b);
  } else {
    blocks.runs[0] = 0;
    blocks.runs[1] = static_cast<int32_t>(keys);
    for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
      const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
      score_block(s, span, lo, hi, panel, bits, p.weights + (lo - span.begin) * W, b);
    }
  }
  end_blocks(s, b, p);
  HWY_ALIGN float least[kMaxLanes];
  HWY_ALIGN int32_t ties[kMaxLanes];
  find_least(rows, k, p.weights, least, ties);
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
  each_row(rows, [&](int64_t j) HWY_ATTR {
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
  });
  hn::Store(hn::ConvertTo(d, n0), d, p.support);
  hn::Store(hn::ConvertTo(d, n1), d, p.support + L);
}

// Cuts every lane that holds more than k back to its k best.
inline HWY_NOINLINE void select_top_k(TopKBuffer& b) {
  const int64_t W = strip_width();
  int64_t rows = 0;
  for (int64_t lane = 0; lane < W; ++lane) rows = HWY_MAX(rows, int64_t{b.filled[lane]});
  if (rows <= b.k) return;
  for (int64_t lane = 0; lane < W; ++lane) {
    for (int64_t r = b.filled[lane]; r < rows; ++r) b.score[r * W + lane] = -kInf;
  }
  HWY_ALIGN float theta[kMaxLanes];
  HWY_ALIGN int32_t ties[kMaxLanes];
  const int32_t every[2] = {0, static_cast<int32_t>(rows)};
  find_least({every, 1}, b.k, b.score, theta, ties);
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

// The next keys that fill_buffer reads, from span.begin on in ascending order.
struct NextKeys {
  int64_t lo, hi;
  const float* scores;
};
// Scores keys from `at` on, or finds them scored; lo == hi: there are no more.
inline HWY_NOINLINE NextKeys next_keys(const Strip& s, const KeySpan& span, const float* panel,
                                       int64_t at, bool pruned, const float* least, uint32_t* bits,
                                       float* block, TopKBlocks& blocks, const SparseStrip& p,
                                       TopKBlock& read) {
  int64_t hi = HWY_MIN(at + kKeyBlock, span.end);
  if (pruned && at < hi) {
    int64_t b = (at - blocks.begin0) / kBoxKeys;
    for (; b < blocks.count && blocks.place[b] < 0 && !may_reach(blocks, b, least); ++b) {
      skip_keys(s.mask, blocks.begin(span, b), blocks.end(span, b), bits, blocks);
    }
    if (b == blocks.count) return {span.end, span.end, nullptr};
    at = blocks.begin(span, b);
    hi = blocks.end(span, b);
    if (blocks.place[b] >= 0) return {at, hi, p.weights + blocks.place[b] * strip_width()};
    for (++b; b < blocks.count && blocks.place[b] < 0 && may_reach(blocks, b, least) &&
              blocks.end(span, b) - at <= kKeyBlock;
         ++b) {
      hi = blocks.end(span, b);
    }
  }
  if (at < hi) score_block(s, span, at, hi, panel, bits, block, read);
  return {at, hi, block};
}

// Fills the buffers with each lane's k best. The strip of weights is room for `rows` rows.
inline HWY_NOINLINE void fill_buffer(const Strip& s, const KeySpan& span, const float* panel,
                                     int64_t rows, uint32_t* bits, float* block, TopKBuffer& b,
                                     TopKBlocks& blocks, SparseStrip& p) {
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
  const bool pruned = prune_blocks(s, span, panel, b.k, rows, bits, blocks, p, read);
  if (pruned) {
    for (int lane = 0; lane < s.mask.lanes; ++lane) b.least[lane] = blocks.least[lane];
  }
  NextKeys keys{span.begin, span.begin, nullptr};
  for (;;) {
    keys = next_keys(s, span, panel, keys.hi, pruned, b.least, bits, block, blocks, p, read);
    if (keys.lo == keys.hi) break;
    const int64_t lo = keys.lo, hi = keys.hi;
    const float* scores = keys.scores;
    VF least0 = hn::Load(d, b.least), least1 = hn::Load(d, b.least + L);
    for (int64_t j = 0; j < hi - lo; ++j) {
      const hn::Mask<DF> in0 = hn::Ge(hn::Load(d, scores + j * W), least0);
      const hn::Mask<DF> in1 = hn::Ge(hn::Load(d, scores + j * W + L), least1);
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
        b.score[slot] = scores[j * W + lane];
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

// `rows`: of the strip of weights, top_k_rows.
inline void solve_top_k(const Strip& s, const KeySpan& span, const float* panel, int64_t rows,
                        uint32_t* bits, float* block, TopKBuffer& b, TopKBlocks& blocks,
                        SparseStrip& p) {
  begin_rows(s, p);
  blocks.skipped = 0;
  if (top_k_whole(b.k, span.end - span.begin)) {
    choose_whole(s, span, panel, b.k, bits, blocks, p);
  } else {
    fill_buffer(s, span, panel, rows, bits, block, b, blocks, p);
    merge_buffer(span, b, bits, p);
  }
  weigh_chosen(p);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
