// What forward and backward share: scoring a run of keys for a strip, masked.
#if defined(FOCI_KERNELS_ATTENTION_STRIP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_STRIP_INL_H_
#undef FOCI_KERNELS_ATTENTION_STRIP_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_STRIP_INL_H_
#endif

#include "foci/kernels/attention.h"

#include <cstring>
#include "foci/kernels/attention/philox-inl.h"
#include "foci/kernels/attention/score-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// bits[j] gets one bit a lane that may see key begin + j.
inline HWY_NOINLINE void lane_bits(const LaneMask& mask, int64_t begin, int64_t end,
                                   uint32_t* bits) {
  mask_bits(mask, begin, end, bits);
  if (mask.drop_key.threshold == 0) return;
  uint32_t kept[64];
  for (int64_t at = begin; at < end; at += 64) {
    const int64_t n = HWY_MIN(int64_t{64}, end - at);
    dropout_lanes(mask.drop_key, at, nullptr, n, kept);
    for (int64_t j = 0; j < n; ++j) bits[at - begin + j] &= kept[j];
  }
}

// Masks keys [lo, hi) of a scored strip: only the rows that some lane may not see are touched.
// `bits` holds hi − lo words and afterwards the lanes' bits, for the rows outside the full span
// (every row if the mask is more than ranges, or in careful mode).
inline HWY_NOINLINE void mask_keys(const Strip& s, const KeySpan& span, int64_t lo, int64_t hi,
                                   float fill, uint32_t* bits, float* strip) {
  const int64_t W = strip_width();
  if (s.careful || !s.mask.only_ranges()) {
    lane_bits(s.mask, lo, hi, bits);
    mask_strip(hi - lo, bits, fill, strip);
    return;
  }
  const int64_t head = HWY_MIN(hi, HWY_MAX(lo, span.full_begin));
  const int64_t tail = HWY_MAX(head, HWY_MIN(hi, span.full_end));
  if (lo < head) {
    lane_bits(s.mask, lo, head, bits);
    mask_strip(head - lo, bits, fill, strip);
  }
  if (tail < hi) {
    lane_bits(s.mask, tail, hi, bits + (tail - lo));
    mask_strip(hi - tail, bits + (tail - lo), fill, strip + (tail - lo) * W);
  }
}

// strip = finished scores of keys [lo, hi), −inf where a lane may not see the key. `product` and
// `uncapped` as in cap_scores.
HWY_INLINE void score_keys(const Strip& s, const KeySpan& span, int64_t lo, int64_t hi,
                           const float* panel, uint32_t* bits, float* strip,
                           float* product = nullptr, float* uncapped = nullptr) {
  finished_scores(s, lo, hi - lo, panel, strip, product, uncapped);
  mask_keys(s, span, lo, hi, -kInf, bits, strip);
}

// to = rows · factor, one row after another.
inline HWY_NOINLINE void scale_rows(int64_t count, int64_t depth, const float* rows, int64_t stride,
                                    float factor, float* to) {
  const DF d;
  const int64_t L = lanes();
  const VF f = hn::Set(d, factor);
  for (int64_t j = 0; j < count; ++j) {
    const float* row = rows + j * stride;
    float* at = to + j * depth;
    int64_t i = 0;
    for (; i + L <= depth; i += L) hn::StoreU(hn::Mul(hn::LoadU(d, row + i), f), d, at + i);
    for (; i < depth; ++i) at[i] = row[i] * factor;
  }
}

// What kept weights are multiplied by.
HWY_INLINE float kept_scale(const StripDropout& dropout) {
  return static_cast<float>(1 / (1 - dropout.threshold / 65536.0));
}

// The query panel that product_strip reads: panel_floats(D).
HWY_INLINE void pack_queries(const Strip& s, float* panel) {
  pack_panel(s.mask.lanes, s.D, s.q, s.q_stride, 1.0f, panel);
  if (s.score != ScoreKind::additive) return;
  pack_panel(s.mask.lanes, s.D, s.q_exp, s.D, 1.0f, panel + s.D * strip_width());
}

// Which lanes see any key at all. Decided by the masks, never by the scores.
inline HWY_NOINLINE uint32_t lanes_that_see(const Strip& s, const KeySpan& span, uint32_t* bits) {
  uint32_t seen = 0;
  if (s.mask.only_ranges()) {
    for (int lane = 0; lane < s.mask.lanes; ++lane) {
      seen |= s.mask.begin[lane] < s.mask.end[lane] ? 1u << lane : 0u;
    }
    return seen;
  }
  for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
    const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
    lane_bits(s.mask, lo, hi, bits);
    for (int64_t j = 0; j < hi - lo; ++j) seen |= bits[j];
  }
  return seen;
}

// Which lanes have a key that they see and dropout keeps: a row of NaN weights is 0 without one.
inline HWY_NOINLINE uint32_t lanes_with_kept_keys(const Strip& s, const KeySpan& span,
                                                  uint32_t* bits) {
  if (s.dropout.threshold == 0) return ~0u;
  uint32_t any = 0;
  uint32_t kept[64];
  for (int64_t lo = span.begin; lo < span.end; lo += 64) {
    const int64_t n = HWY_MIN(int64_t{64}, span.end - lo);
    lane_bits(s.mask, lo, lo + n, bits);
    dropout_lanes(s.dropout, lo, nullptr, n, kept);
    for (int64_t j = 0; j < n; ++j) any |= bits[j] & kept[j];
  }
  return any;
}

// Keys that each lane may see.
inline HWY_NOINLINE void count_seen(const Strip& s, const KeySpan& span, uint32_t* bits,
                                    float* support) {
  int64_t counts[kMaxLanes] = {};
  if (s.mask.only_ranges()) {
    for (int lane = 0; lane < s.mask.lanes; ++lane) {
      counts[lane] = HWY_MAX(int64_t{0}, s.mask.end[lane] - s.mask.begin[lane]);
    }
  } else {
    for (int64_t lo = span.begin; lo < span.end; lo += kKeyBlock) {
      const int64_t hi = HWY_MIN(lo + kKeyBlock, span.end);
      lane_bits(s.mask, lo, hi, bits);
      for (int64_t j = 0; j < hi - lo; ++j) {
        for (int lane = 0; lane < s.mask.lanes; ++lane) counts[lane] += bits[j] >> lane & 1u;
      }
    }
  }
  for (int lane = 0; lane < s.mask.lanes; ++lane) support[lane] = static_cast<float>(counts[lane]);
}

// Rows `index` of a matrix, one after another; columns beyond `depth` are not written.
inline HWY_NOINLINE void copy_rows(int64_t count, const int32_t* index, int64_t depth,
                                   const float* rows, int64_t stride, float* to) {
  for (int64_t u = 0; u < count; ++u) {
    std::memcpy(to + u * depth, rows + index[u] * stride,
                sizeof(float) * static_cast<size_t>(depth));
  }
}

// Rows `index` of a matrix, one after another: where they stand if they are neighbours, or else as
// a copy in `buffer`.
struct RowBlock {
  const float* rows;
  int64_t stride;
};
inline RowBlock rows_together(int64_t count, const int32_t* index, int64_t depth, const float* rows,
                              int64_t stride, float* buffer) {
  if (count > 0 && index[count - 1] - index[0] == count - 1) {
    return {rows + index[0] * stride, stride};
  }
  copy_rows(count, index, depth, rows, stride, buffer);
  return {buffer, depth};
}

// y[lane][d] = (or with kAdd, +=) acc[d][lane] · factor[lane].
template <bool kAdd = false>
HWY_NOINLINE void unpack_panel(int64_t count, int64_t depth, const float* acc, const float* factor,
                               float* y, int64_t y_stride) {
  const int64_t W = strip_width();
  int64_t lane = 0;
#if FOCI_HAS_FOURS
  const DF d;
  const int64_t L = lanes();
  for (; lane + L <= count; lane += L) {
    const VF f = hn::Load(d, factor + lane);
    const float* from = acc + lane;
    float* to = y + lane * y_stride;
    int64_t i = 0;
    for (; i + 4 <= depth; i += 4) {
      const Fours<VF> x{
          hn::Mul(hn::Load(d, from + i * W), f), hn::Mul(hn::Load(d, from + (i + 1) * W), f),
          hn::Mul(hn::Load(d, from + (i + 2) * W), f), hn::Mul(hn::Load(d, from + (i + 3) * W), f)};
      each_row(d, x, to + i, y_stride, [](auto four, float* at, auto v) HWY_ATTR {
        hn::StoreU(kAdd ? hn::Add(hn::LoadU(four, at), v) : v, four, at);
      });
    }
    for (; i < depth; ++i) {
      for (int64_t n = 0; n < L; ++n) {
        float& y_n = to[n * y_stride + i];
        const float x = from[i * W + n] * factor[lane + n];
        y_n = kAdd ? y_n + x : x;
      }
    }
  }
#endif
  for (; lane < count; ++lane) {
    for (int64_t i = 0; i < depth; ++i) {
      float& y_i = y[lane * y_stride + i];
      const float x = acc[i * W + lane] * factor[lane];
      y_i = kAdd ? y_i + x : x;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
