// Which blocks of keys top-k must score.
//
// Scores of the few blocks that promise most, by their boxes' middles, give every lane that sees
// more than k of their keys a score that its k-th best cannot be below. A block whose bound is
// below that in every lane is left out: it holds none of the k best, nor a tie with the last of
// them.
#if defined(FOCI_KERNELS_TOPK_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_TOPK_BLOCKS_INL_H_
#undef FOCI_KERNELS_TOPK_BLOCKS_INL_H_
#else
#define FOCI_KERNELS_TOPK_BLOCKS_INL_H_
#endif

#include <cmath>
#include <cstring>
#include <limits>

#include "foci/kernels/attention/boxes-inl.h"
#include "foci/kernels/attention/normalizers/topk_least-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

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

// Blocks of a strip's key span, numbered from the first that it touches.
struct TopKBlocks {
  float* bound;    // [blocks][W] at least any score; −inf where the lane sees none of the block
  float* centre;   // [blocks][W] score of the box's middle; −inf unless the lane sees all of it
  int32_t* place;  // [blocks] row of the strip of weights where its scores lie; −1: not scored
  int32_t* runs;   // [2·blocks] begin and end of runs of rows
  HWY_ALIGN float least[kMaxLanes];  // no score of the k best is below
  int64_t begin0 = 0;                // of block 0, at or before the span's first key
  int64_t count = 0;
  // Of pairs that the masks let through, if asked for.
  bool counts_skipped = false;
  int64_t skipped = 0;

  int64_t begin(const KeySpan& span, int64_t b) const {
    return HWY_MAX(span.begin, begin0 + b * kBoxKeys);
  }
  int64_t end(const KeySpan& span, int64_t b) const {
    return HWY_MIN(span.end, begin0 + (b + 1) * kBoxKeys);
  }
};

inline int64_t most_blocks(int64_t keys) {
  return keys / kBoxKeys + 2;
}

// Whether block b may hold a score of at least `least` in some lane.
HWY_INLINE bool may_reach(const TopKBlocks& blocks, int64_t b, const float* least) {
  const DF d;
  const int64_t L = lanes();
  const float* bound = blocks.bound + b * strip_width();
  return !hn::AllFalse(d, hn::Ge(hn::Load(d, bound), hn::Load(d, least))) ||
         !hn::AllFalse(d, hn::Ge(hn::Load(d, bound + L), hn::Load(d, least + L)));
}

inline HWY_NOINLINE void bound_blocks(const Strip& s, const KeySpan& span, const float* panel,
                                      TopKBlocks& blocks) {
  const int64_t W = strip_width();
  const int64_t first = (span.begin + s.box_skew) / kBoxKeys;
  blocks.begin0 = first * kBoxKeys - s.box_skew;
  blocks.count = (span.end - blocks.begin0 + kBoxKeys - 1) / kBoxKeys;
  bound_strip(s, s.boxes + first * 2 * s.D, blocks.count, panel, blocks.centre, blocks.bound);
  for (int64_t b = 0; b < blocks.count; ++b) {
    blocks.place[b] = -1;
    const int64_t lo = blocks.begin(span, b), hi = blocks.end(span, b);
    if (s.mask.lanes == W && lo >= span.full_begin && hi <= span.full_end) continue;
    for (int64_t lane = 0; lane < W; ++lane) {
      const bool none = lane >= s.mask.lanes || s.mask.begin[lane] >= hi || s.mask.end[lane] <= lo;
      if (none) blocks.bound[b * W + lane] = -kInf;
      if (none || s.mask.begin[lane] > lo || s.mask.end[lane] < hi) {
        blocks.centre[b * W + lane] = -kInf;
      }
    }
  }
}

HWY_INLINE void score_block(const Strip& s, const KeySpan& span, int64_t lo, int64_t hi,
                            const float* panel, uint32_t* bits, float* to, TopKBlock& read) {
  score_keys(s, span, lo, hi, panel, bits, to);
  read_block(s, hi - lo, bits, to, read);
}

// Scores the most promising blocks into the strip of weights, which has room for `rows` (all keys
// of the span: each key at its place; fewer: one block after another), and finds `least`. False,
// with nothing scored, where that would not leave out enough to be worth it.
inline HWY_NOINLINE bool prune_blocks(const Strip& s, const KeySpan& span, const float* panel,
                                      int64_t k, int64_t rows, uint32_t* bits, TopKBlocks& blocks,
                                      SparseStrip& p, TopKBlock& read) {
  const DF d;
  const int64_t L = lanes();
  const int64_t W = strip_width();
  if (s.boxes == nullptr || s.careful || s.score != ScoreKind::dot || s.bias.data != nullptr ||
      has_positional(s)) {
    return false;
  }
  // Some more than k keys, for masks leave some out.
  const int64_t promising = (k + k / 2) / kBoxKeys + 1;
  if (promising >= (span.end - span.begin) / kBoxKeys / 2) return false;
  bound_blocks(s, span, panel, blocks);
  // What the middles say: a guess, for the k-th best may lie below the middle of its block.
  HWY_ALIGN float guess[kMaxLanes];
  HWY_ALIGN int32_t ties[kMaxLanes];
  const int32_t every[2] = {0, static_cast<int32_t>(blocks.count)};
  find_least({every, 1}, promising, blocks.centre, guess, ties);
  const VF lowest = hn::Set(d, std::numeric_limits<float>::lowest());
  const VF guess0 = hn::Max(hn::Load(d, guess), lowest);
  const VF guess1 = hn::Max(hn::Load(d, guess + L), lowest);
  hn::Store(guess0, d, guess);
  hn::Store(guess1, d, guess + L);
  int64_t needed = 0;
  for (int64_t b = 0; b < blocks.count; ++b) needed += may_reach(blocks, b, guess) ? 1 : 0;
  if (needed > blocks.count - blocks.count / 8) return false;

  const bool in_place = rows >= span.end - span.begin;
  int64_t runs = 0, used = 0;
  for (int64_t b = 0; b < blocks.count; ++b) {
    const float* centre = blocks.centre + b * W;
    if (hn::AllFalse(d, hn::Ge(hn::Load(d, centre), guess0)) &&
        hn::AllFalse(d, hn::Ge(hn::Load(d, centre + L), guess1))) {
      continue;
    }
    const int64_t lo = blocks.begin(span, b), hi = blocks.end(span, b);
    const int64_t at = in_place ? lo - span.begin : used;
    if (at + hi - lo > rows) break;
    score_block(s, span, lo, hi, panel, bits, p.weights + at * W, read);
    blocks.place[b] = static_cast<int32_t>(at);
    used += hi - lo;
    if (runs > 0 && blocks.runs[2 * runs - 1] == at) {
      blocks.runs[2 * runs - 1] = static_cast<int32_t>(at + hi - lo);
      continue;
    }
    blocks.runs[2 * runs] = static_cast<int32_t>(at);
    blocks.runs[2 * runs + 1] = static_cast<int32_t>(at + hi - lo);
    ++runs;
  }
  find_least({blocks.runs, runs}, k, p.weights, blocks.least, ties);
  hn::Store(hn::Max(hn::Load(d, blocks.least), lowest), d, blocks.least);
  hn::Store(hn::Max(hn::Load(d, blocks.least + L), lowest), d, blocks.least + L);
  return true;
}

// Counts what leaving keys [lo, hi) out spares.
inline HWY_NOINLINE void skip_keys(const LaneMask& mask, int64_t lo, int64_t hi, uint32_t* bits,
                                   TopKBlocks& blocks) {
  if (!blocks.counts_skipped) return;
  if (mask.keep == nullptr && mask.key_segment == nullptr && mask.bias.data == nullptr) {
    for (int lane = 0; lane < mask.lanes; ++lane) {
      blocks.skipped +=
          HWY_MAX(int64_t{0}, HWY_MIN(hi, mask.end[lane]) - HWY_MAX(lo, mask.begin[lane]));
    }
    return;
  }
  mask_bits(mask, lo, hi, bits);
  for (int64_t j = 0; j < hi - lo; ++j) blocks.skipped += __builtin_popcount(bits[j]);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
