// Forward of one strip under softmax, and exact weights of a strip.
#if defined(FOCI_KERNELS_ATTENTION_SOFTMAX_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_SOFTMAX_FORWARD_INL_H_
#undef FOCI_KERNELS_ATTENTION_SOFTMAX_FORWARD_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_SOFTMAX_FORWARD_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "foci/kernels/attention/normalizers/softmax-inl.h"
#include "foci/kernels/attention/strip-inl.h"
// After foci's choice of targets.
#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// What a row's sums make, 0 (and a log-sum-exp of −inf) where it may see no key. A row whose best
// score is −inf has no weights that mean anything, like one with a NaN.
struct SoftmaxRow {
  float inverse = 0;  // weights are e^(s−m) · inverse
  float log_sum = -kInf;
  float entropy = 0;
  float max_weight = 0;
};

// ln x of positive doubles; other x as std::log.
inline HWY_NOINLINE void logarithms(int64_t count, const double* x, double* to) {
  const hn::ScalableTag<double> d;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  HWY_ALIGN double buffer[kMaxLanes];
  for (int64_t i = 0; i < count; ++i) {
    buffer[i] = x[i] > 0 && x[i] <= std::numeric_limits<double>::max() ? x[i] : 1;
  }
  std::fill(buffer + count, buffer + round_up(count, step), 1.0);
  for (int64_t i = 0; i < count; i += step) {
    hn::Store(hn::Log(d, hn::Load(d, buffer + i)), d, buffer + i);
  }
  for (int64_t i = 0; i < count; ++i) {
    to[i] = x[i] > 0 && x[i] <= std::numeric_limits<double>::max() ? buffer[i] : std::log(x[i]);
  }
}

// Of `count` lanes, of which those in `sees` see a key.
inline HWY_NOINLINE void softmax_results(int count, uint32_t sees, const float* m,
                                         const float* best, const double* sum, const double* moment,
                                         SoftmaxRow* rows) {
  double sums[kMaxLanes], logs[kMaxLanes];
  for (int i = 0; i < count; ++i) sums[i] = m[i] == -kInf ? double{kNaN} : sum[i];
  logarithms(count, sums, logs);
  for (int i = 0; i < count; ++i) {
    rows[i] = {};
    if (!(sees >> i & 1u)) continue;
    rows[i].inverse = static_cast<float>(1 / sums[i]);
    rows[i].log_sum = static_cast<float>(m[i] + logs[i]);
    rows[i].entropy = static_cast<float>(logs[i] - moment[i] / sums[i]);
    const double lead = double{best[i]} - double{m[i]};
    rows[i].max_weight = lead == 0 ? rows[i].inverse : static_cast<float>(std::exp(lead) / sums[i]);
  }
}

inline size_t forward_scratch(int64_t keys, int64_t D, int64_t Dv, bool whole_row) {
  const int64_t W = strip_width();
  const int64_t rows = whole_row ? keys : HWY_MIN(keys, kKeyBlock);
  const int64_t blocks = keys / kKeyBlock + 2;
  return Carver::bytes<float>(panel_floats(D)) + Carver::bytes<float>(Dv * W) +
         Carver::bytes<double>(Dv * W) + Carver::bytes<float>((rows + 1) * W) +
         Carver::bytes<uint32_t>(HWY_MAX(rows, kKeyBlock) + 1) + Carver::bytes<float>(blocks * W) +
         Carver::bytes<int32_t>(rows + 1) + Carver::bytes<float>(HWY_MIN(rows, kKeyBlock) * Dv) +
         Carver::bytes<float>(HWY_MIN(rows, kKeyBlock) * W);
}

// coverage[j] += Σ_lanes strip[j]·factor. Masked entries (−0) stay out even where factor is NaN.
inline HWY_NOINLINE void add_coverage(int64_t count, const float* strip, const float* factor,
                                      double* coverage) {
  const DF d;
  const int64_t L = lanes();
  const VF f0 = hn::Load(d, factor), f1 = hn::Load(d, factor + L);
  for (int64_t j = 0; j < count; ++j) {
    const VF p0 = hn::Load(d, strip + j * 2 * L), p1 = hn::Load(d, strip + (j * 2 + 1) * L);
    const VF w0 = hn::IfThenZeroElse(is_masked(p0), hn::Mul(p0, f0));
    const VF w1 = hn::IfThenZeroElse(is_masked(p1), hn::Mul(p1, f1));
    coverage[j] += hn::GetLane(hn::SumOfLanes(d, hn::Add(w0, w1)));
  }
}

// What score_keys may leave for keys [lo, hi).
HWY_INLINE BlockScores scores_of(const Strip& s, const KeySpan& span, int64_t lo, int64_t hi) {
  if (s.careful) return BlockScores::any;
  return lo >= span.full_begin && hi <= span.full_end ? BlockScores::finite : BlockScores::masked;
}

inline void forward_softmax(const Strip& s, const StripOutputs& o, std::byte* scratch) {
  const int64_t W = strip_width();
  const KeySpan span = span_of(s.mask);
  const bool whole = o.coverage != nullptr;
  const int64_t rows = whole ? span.end - span.begin : HWY_MIN(span.end - span.begin, kKeyBlock);
  Carver mem(scratch);
  float* panel = mem.take<float>(panel_floats(s.D));
  float* acc = mem.take<float>(s.Dv * W);     // of one block
  double* wide = mem.take<double>(s.Dv * W);  // of all blocks, where there are several
  float* strip = mem.take<float>((rows + 1) * W);
  uint32_t* bits = mem.take<uint32_t>(HWY_MAX(rows, kKeyBlock) + 1);
  float* block_max = mem.take<float>((rows / kKeyBlock + 2) * W);
  float* dropped = mem.take<float>(HWY_MIN(rows, kKeyBlock) * W);
  pack_queries(s, panel);
  std::memset(acc, 0, sizeof(float) * static_cast<size_t>(s.Dv * W));

  SoftmaxRows r;
  softmax_begin(r);
  RunCut cut;
  HWY_ALIGN int32_t key[kMaxLanes];
  for (int32_t& k : key) k = -1;
  const int64_t first_block = span.begin / kKeyBlock * kKeyBlock;
  const bool several = span.end > first_block + kKeyBlock;
  if (several) std::memset(wide, 0, sizeof(double) * static_cast<size_t>(s.Dv * W));
  int64_t block = 0;
  for (int64_t at = first_block; at < span.end; at += kKeyBlock, ++block) {
    const int64_t lo = HWY_MAX(at, span.begin), hi = HWY_MIN(at + kKeyBlock, span.end);
    float* part = strip + (whole ? (lo - span.begin) * W : 0);
    uint32_t* part_bits = bits;
    score_keys(s, span, lo, hi, panel, part_bits, part);
    softmax_block(o.entropy != nullptr, scores_of(s, span, lo, hi), hi - lo, part, r,
                  o.max_key != nullptr ? key : nullptr, lo);
    if (s.careful) mask_strip(hi - lo, part_bits, -0.0f, part);
    const float* kept = part;
    if (s.dropout.threshold > 0) {
      float* left = whole ? dropped : part;
      drop_weights(s.dropout, lo, nullptr, hi - lo, part, left);
      kept = left;
    }
    cut_runs(lo, hi - lo, cut);
    gather_strip(half_strip(s.mask.lanes), s.careful, cut, s.Dv, s.v + lo * s.v_stride, s.v_stride,
                 kept, kept, acc);
    if (several) fold_panel(s.Dv, r.correction, acc, wide);
    if (whole) std::memcpy(block_max + block * W, r.m, sizeof(float) * static_cast<size_t>(W));
  }
  if (several) unfold_panel(s.Dv, wide, acc);

  const uint32_t seen = lanes_that_see(s, span, bits);
  HWY_ALIGN float inverse[kMaxLanes] = {};
  SoftmaxRow made[kMaxLanes];
  softmax_results(s.mask.lanes, seen, r.m, r.best, r.sum, r.moment, made);
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    const SoftmaxRow& row = made[lane];
    inverse[lane] = row.inverse;
    if (o.row_stat) o.row_stat[lane] = row.log_sum;
    if (o.entropy) o.entropy[lane] = row.entropy;
    if (o.max_weight) o.max_weight[lane] = row.max_weight;
    if (o.max_key) o.max_key[lane] = seen >> lane & 1u ? key[lane] : -1;
  }
  if (o.support) count_seen(s, span, bits, o.support);
  if (o.y) {
    HWY_ALIGN float factor[kMaxLanes];
    const float kept = kept_scale(s.dropout);
    bool any_nan = false;
    for (int lane = 0; lane < s.mask.lanes; ++lane) any_nan |= std::isnan(inverse[lane]);
    const uint32_t reached = any_nan ? lanes_with_kept_keys(s, span, bits) : ~0u;
    for (int lane = 0; lane < kMaxLanes; ++lane) {
      factor[lane] = reached >> lane & 1u ? inverse[lane] * kept : 0.0f;
    }
    unpack_panel(s.mask.lanes, s.Dv, acc, factor, o.y, o.y_stride);
  }
  if (whole) {
    block = 0;
    for (int64_t at = first_block; at < span.end; at += kKeyBlock, ++block) {
      const int64_t lo = HWY_MAX(at, span.begin), hi = HWY_MIN(at + kKeyBlock, span.end);
      HWY_ALIGN float factor[kMaxLanes] = {};
      for (int lane = 0; lane < s.mask.lanes; ++lane) {
        const float m = block_max[block * W + lane];
        // A block in which the lane sees nothing has m = −inf, and so may one of a row that is NaN.
        factor[lane] = m == -kInf && !std::isnan(inverse[lane])
                           ? 0.0f
                           : std::exp(m - r.m[lane]) * inverse[lane];
      }
      add_coverage(hi - lo, strip + (lo - span.begin) * W, factor, o.coverage + lo);
    }
  }
}

// weights[lane][j], j over the span; zero elsewhere was written by the caller.
inline void softmax_strip_weights(const Strip& s, float* weights, int64_t stride,
                                  std::byte* scratch) {
  const int64_t W = strip_width();
  const KeySpan span = span_of(s.mask);
  const int64_t keys = span.end - span.begin;
  if (keys == 0) return;
  Carver mem(scratch);
  float* panel = mem.take<float>(panel_floats(s.D));
  mem.take<float>(s.Dv * W);
  mem.take<double>(s.Dv * W);
  float* strip = mem.take<float>((keys + 1) * W);
  uint32_t* bits = mem.take<uint32_t>(HWY_MAX(keys, kKeyBlock) + 1);
  pack_queries(s, panel);
  score_keys(s, span, span.begin, span.end, panel, bits, strip);
  SoftmaxRows r;
  softmax_begin(r);
  for (int64_t n = 0; n < keys * W; ++n) {
    float& m = r.m[n % W];
    if (strip[n] > m) m = strip[n];
  }
  const int64_t first_block = span.begin / kKeyBlock * kKeyBlock;
  for (int64_t at = first_block; at < span.end; at += kKeyBlock) {
    const int64_t lo = HWY_MAX(at, span.begin), hi = HWY_MIN(at + kKeyBlock, span.end);
    softmax_block(false, scores_of(s, span, lo, hi), hi - lo, strip + (lo - span.begin) * W, r,
                  nullptr, lo);
  }
  if (s.careful) mask_strip(keys, bits, -0.0f, strip);
  const uint32_t seen = lanes_that_see(s, span, bits);
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    if (!(seen >> lane & 1u)) continue;
    const auto sum = static_cast<float>(r.sum[lane]);
    for (int64_t j = 0; j < keys; ++j) {
      const float e = strip[j * W + lane];
      weights[lane * stride + span.begin + j] = std::signbit(e) && e == 0 ? 0.0f : e / sum;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
