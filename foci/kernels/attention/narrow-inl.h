// Forward of a few queries under softmax: decoding, and the last strip of a sequence.
//
// A strip spends 2·lanes() lanes on any number of queries. Here the keys lie in lanes instead: K is
// transposed in registers, four numbers of each key at a time, once for all queries; V is read row
// by row. So the work is what the queries need, and memory is read once, at its own speed.
//
// Every number is made by the operations, in the order, of softmax_forward-inl.h, so that
// a row has the same bits here and there.
#if defined(FOCI_KERNELS_ATTENTION_NARROW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_NARROW_INL_H_
#undef FOCI_KERNELS_ATTENTION_NARROW_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_NARROW_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "foci/kernels/attention/softmax_forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

inline size_t narrow_scratch(int64_t D, int64_t Dv) {
  const int64_t L = lanes();
  return static_cast<size_t>(kNarrowRows) *
             (Carver::bytes<float>(D) + Carver::bytes<float>(kKeyBlock) +
              Carver::bytes<float>(round_up(Dv, L)) + Carver::bytes<double>(Dv)) +
         Carver::bytes<float>(L * D) + Carver::bytes<uint32_t>(kKeyBlock) * 2;
}

// What is known of one query's row so far.
struct NarrowState {
  const Strip* strip;
  int lane;
  float* q;       // [D]
  float* scores;  // [kKeyBlock] of the block; afterwards e^(s−m), −0 where masked
  float* acc;     // [Dv] padded to whole vectors, of the block
  double* wide;   // [Dv], of earlier blocks
  SoftmaxSums sums;
  int64_t best_key = -1;
  int64_t seen = 0;
  // Of the block at hand: keys [visible_begin, visible_end) may be seen, but for what `bits` say.
  int64_t visible_begin = 0, visible_end = 0;
  bool by_bits = false, all_seen = true;
};

// Memory that is needed soon, into the second cache, which waits for more lines at once than the
// first. Rows read a few numbers at a time, or a block after another's arithmetic, are not what
// processors foresee by themselves.
HWY_INLINE void prefetch(const float* p) {
#if HWY_COMPILER_GCC || HWY_COMPILER_CLANG
  __builtin_prefetch(p, 0, 2);
#endif
}
inline constexpr int64_t kLineFloats = 16;
// Rows of V between the one that is read and the one that is fetched: some 1500 cycles.
inline constexpr int64_t kRowsAhead = 40;

// ---- scores -------------------------------------------------------------------------------------

// The lines of rows [depth], one after another in the order of memory.
class Ahead {
 public:
  HWY_INLINE Ahead(const float* rows, int64_t stride, int64_t depth)
      : row_(rows), stride_(stride), depth_(depth) {}
  HWY_INLINE void fetch(int64_t lines) {
    for (int64_t n = 0; n < lines; ++n) {
      prefetch(row_ + column_);
      column_ += kLineFloats;
      if (column_ < depth_) continue;
      column_ = 0;
      row_ += stride_;
    }
  }

 private:
  const float* row_;
  int64_t stride_, depth_, column_ = 0;
};

// scores[r][0, lanes()) = scale · Σ_d rows[key][d] · q[r][d] for lanes() keys.
template <int R>
HWY_INLINE void narrow_tile(int64_t depth, const float* HWY_RESTRICT rows, int64_t stride,
                            const NarrowState* states, int64_t at) {
  const DF d;
  const int64_t L = lanes();
  VF acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = hn::Zero(d);
  int64_t i = 0;
#if FOCI_HAS_FOURS
  Ahead ahead(rows + 2 * L * stride, stride, depth);  // the tile after the next
  for (; i + 4 <= depth; i += 4) {
    ahead.fetch(L / 4);
    const Fours<VF> k = load_columns(d, rows + i, stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float* q = states[r].q + i;
      acc[r] = hn::MulAdd(k.a, hn::Set(d, q[0]), acc[r]);
      acc[r] = hn::MulAdd(k.b, hn::Set(d, q[1]), acc[r]);
      acc[r] = hn::MulAdd(k.c, hn::Set(d, q[2]), acc[r]);
      acc[r] = hn::MulAdd(k.e, hn::Set(d, q[3]), acc[r]);
    }
  }
#endif
  for (; i < depth; ++i) {
    HWY_ALIGN float column[kMaxLanes];
    for (int64_t j = 0; j < L; ++j) column[j] = rows[j * stride + i];
    const VF k = hn::Load(d, column);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] = hn::MulAdd(k, hn::Set(d, states[r].q[i]), acc[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    hn::Store(hn::Mul(acc[r], hn::Set(d, states[r].strip->scale)), d, states[r].scores + at);
  }
}

// `spare` holds lanes() rows: the last keys are copied there, so that no tile reads beyond them.
template <int R>
HWY_NOINLINE void narrow_scores(int64_t count, int64_t depth, const float* rows, int64_t stride,
                                const NarrowState* states, float* spare) {
  const int64_t L = lanes();
  int64_t j = 0;
  for (; j + L <= count; j += L) narrow_tile<R>(depth, rows + j * stride, stride, states, j);
  if (j == count) return;
  std::memset(spare, 0, sizeof(float) * static_cast<size_t>(L * depth));
  for (int64_t n = 0; j + n < count; ++n) {
    std::memcpy(spare + n * depth, rows + (j + n) * stride,
                sizeof(float) * static_cast<size_t>(depth));
  }
  narrow_tile<R>(depth, spare, depth, states, j);
}

// Softcap and biases of one row's scores of keys [begin, begin + count); there is room for whole
// vectors.
inline HWY_NOINLINE void finish_narrow(const Strip& s, int lane, int64_t begin, int64_t count,
                                       float* scores) {
  const DF d;
  const DI di;
  const int64_t L = lanes();
  if (s.softcap > 0) {
    const VF cap = hn::Set(d, s.softcap);
    for (int64_t j = 0; j < count; j += L) {
      const VF x = hn::Load(d, scores + j);
      hn::Store(hn::Mul(cap, tanh_of(hn::Div(x, cap))), d, scores + j);
    }
  }
  if (s.bias.data != nullptr) {
    HWY_ALIGN float buffer[kBiasRun];
    for (int64_t at = 0; at < count; at += kBiasRun) {
      const int64_t n = HWY_MIN(kBiasRun, count - at);
      const int64_t from = lane * s.bias.query_stride + (begin + at) * s.bias.key_stride;
      const bool one = s.bias.key_stride == 0;
      const float* values = bias_run(s.bias, from, one ? 1 : n, buffer);
      for (int64_t j = 0; j < n; ++j) scores[at + j] += values[one ? 0 : j];
    }
  }
  const StripPositions& p = s.positions;
  if (!has_positional(s)) return;
  for (int64_t j = 0; j < count; j += L) {
    const auto n = static_cast<size_t>(HWY_MIN(L, count - j));
    VF x = hn::Load(d, scores + j);
    if (p.alibi || p.table1d != nullptr) {
      const VI key = load_first(di, n, p.key + begin + j), query = hn::Set(di, p.query[lane]);
      if (p.alibi) x = hn::NegMulAdd(hn::Set(d, p.slope), abs_distance(key, query), x);
      if (p.table1d != nullptr) {
        const VI at = table_entry(key, query, hn::Set(di, p.max_distance));
        x = hn::Add(x, hn::GatherIndex(d, p.table1d, at));
      }
    }
    if (p.table2d != nullptr) {
      // Lanes beyond the keys read the query's own cell's entry, which there is.
      HWY_ALIGN int32_t cells[kMaxLanes];
      for (int64_t n0 = 0; n0 < L; ++n0) {
        cells[n0] = j + n0 < count ? p.key_cell[begin + j + n0] : p.query_cell[lane];
      }
      const VI at =
          grid_entry(hn::Load(di, cells), hn::Set(di, p.query_cell[lane]), hn::Set(di, p.centre));
      x = hn::Add(x, hn::GatherIndex(d, p.table2d, at));
    }
    hn::Store(x, d, scores + j);
  }
}

// Masks of one row: −inf where it may not see a key of [begin, begin + count). Beyond the last key
// too, up to a whole vector.
inline HWY_NOINLINE void mask_narrow(NarrowState& row, int64_t begin, int64_t count,
                                     uint32_t* bits) {
  const LaneMask& mask = row.strip->mask;
  std::fill(row.scores + count, row.scores + round_up(count, lanes()), -kInf);
  const int64_t lo = HWY_MIN(count, HWY_MAX(int64_t{0}, mask.begin[row.lane] - begin));
  const int64_t hi = HWY_MAX(lo, HWY_MIN(count, mask.end[row.lane] - begin));
  row.visible_begin = lo;
  row.visible_end = hi;
  row.by_bits = !mask.only_ranges();
  std::fill(row.scores, row.scores + lo, -kInf);
  std::fill(row.scores + hi, row.scores + count, -kInf);
  int64_t seen = hi - lo;
  if (row.by_bits) {
    lane_bits(mask, begin, begin + count, bits);
    for (int64_t j = lo; j < hi; ++j) {
      if (bits[j] >> row.lane & 1u) continue;
      row.scores[j] = -kInf;
      --seen;
    }
  }
  row.seen += seen;
  row.all_seen = seen == count;
}

// Masked weights become −0.
inline void mark_narrow(NarrowState& row, int64_t count, const uint32_t* bits) {
  if (row.all_seen) return;
  std::fill(row.scores, row.scores + row.visible_begin, -0.0f);
  std::fill(row.scores + row.visible_end, row.scores + count, -0.0f);
  for (int64_t j = row.visible_begin; j < row.visible_end && row.by_bits; ++j) {
    if (!(bits[j] >> row.lane & 1u)) row.scores[j] = -0.0f;
  }
}

// ---- softmax and values -------------------------------------------------------------------------

// As softmax_block. Returns what the sums so far are multiplied by.
inline HWY_NOINLINE float narrow_softmax(NarrowState& row, int64_t begin, int64_t count,
                                         bool entropy, bool max_key, Ahead values) {
  const DF d;
  const int64_t L = lanes();
  SoftmaxSums& sums = row.sums;
  VF max = hn::Set(d, sums.best);
  for (int64_t j = 0; j < count; j += L) max = max_of_scores(hn::Load(d, row.scores + j), max);
  HWY_ALIGN float parts[kMaxLanes];
  hn::Store(max, d, parts);
  float best = sums.best;
  for (int64_t i = 0; i < L; ++i) best = parts[i] > best ? parts[i] : best;
  if (max_key && best > sums.best) {
    int64_t j = 0;
    while (row.scores[j] != best) ++j;
    row.best_key = begin + j;
  }
  sums.best = best;
  const float old = sums.m;
  if (best > old + kMaxLead) sums.m = best;
  const auto lane0 = [&](VF v) { return hn::GetLane(v); };
  const VF safe = finite_max(hn::Set(d, sums.m));
  const float correction = lane0(exp_nonpositive(d, hn::Sub(hn::Set(d, old), safe)));
  HWY_ALIGN float steps[kKeyBlock + kMaxLanes];  // s − m, for the entropy
  for (int64_t j = 0; j < count; j += L) {
    values.fetch(kLineFloats);
    const VF x = hn::Sub(hn::Load(d, row.scores + j), safe);
    hn::Store(exp_nonpositive(d, x), d, row.scores + j);
    if (!entropy) continue;
    const VF floor = hn::Set(d, kLeastExponent);
    hn::Store(hn::IfThenElse(hn::Lt(x, floor), floor, x), d, steps + j);
  }
  float l = 0, t = 0;
  for_runs(begin, count, [&](int64_t from, int64_t to) HWY_ATTR {
    float run = 0;
    for (int64_t j = from; j < to; ++j) run += row.scores[j];
    l += run;
    if (!entropy) return;
    VF chain = hn::Zero(d);
    for (int64_t j = from; j < to; ++j) {
      chain = hn::MulAdd(hn::Set(d, row.scores[j]), hn::Set(d, steps[j]), chain);
    }
    t += lane0(chain);
  });
  softmax_join(old, sums.m, correction, l, t, sums.sum, sums.moment);
  return correction;
}

// wide [n] = wide · factor + acc, and acc = 0, as fold_panel does it.
inline HWY_NOINLINE void fold_row(int64_t n, float factor, float* acc, double* wide) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> half;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  const auto f = hn::Set(d, double{factor});
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    const auto x = hn::PromoteTo(d, hn::LoadU(half, acc + i));
    hn::StoreU(hn::MulAdd(hn::LoadU(d, wide + i), f, x), d, wide + i);
  }
  for (; i < n; ++i) {
    const auto sum = hn::MulAdd(hn::Set(d, wide[i]), f, hn::Set(d, double{acc[i]}));
    wide[i] = hn::GetLane(sum);
  }
  std::fill(acc, acc + n, 0.0f);
}

// acc[r] += Σ_j e[r][j] · v[j] over a run, columns [0, C · lanes()) of a chunk. `skip`: −0 is
// stepped over.
template <int R, int C>
HWY_INLINE void narrow_values(bool skip, int64_t count, int64_t depth, const float* v,
                              int64_t v_stride, int64_t columns, const NarrowState* states,
                              int64_t from, int64_t at) {
  const DF d;
  const int64_t L = lanes();
  VF acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) acc[r][c] = hn::Zero(d);
  }
  const bool whole = columns >= C * L;
  for (int64_t j = 0; j < count; ++j) {
    const float* row = v + j * v_stride + at;
    if (at == 0) {
      for (int64_t i = 0; i < depth; i += kLineFloats) prefetch(row + kRowsAhead * v_stride + i);
    }
    VF x[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      const int64_t left = columns - c * L;
      x[c] = whole ? hn::LoadU(d, row + c * L)
                   : load_first(d, static_cast<size_t>(HWY_MAX(int64_t{0}, HWY_MIN(L, left))),
                                row + c * L);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float e = states[r].scores[from + j];
      if (skip && e == 0 && std::signbit(e)) continue;
      const VF p = hn::Set(d, e);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) acc[r][c] = hn::MulAdd(x[c], p, acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float* const total = states[r].acc + at;
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      hn::Store(hn::Add(hn::Load(d, total + c * L), acc[r][c]), d, total + c * L);
    }
  }
}

// So few keys at a time, a run, that their values stay in the first cache while the columns are
// gone through. `first` is the block's first key.
template <int R>
HWY_NOINLINE void add_narrow_values(bool skip, int64_t first, int64_t count, int64_t depth,
                                    const float* v, int64_t v_stride, const NarrowState* states) {
  const int64_t L = lanes();
  for_runs(first, count, [&](int64_t j, int64_t end) HWY_ATTR {
    const int64_t n = end - j;
    int64_t at = 0;
    // Four chains hide each other's latency; more queries have enough of them.
    for (; R <= 2 && at + 4 * L <= depth; at += 4 * L) {
      narrow_values<R, R <= 2 ? 4 : 2>(skip, n, depth, v + j * v_stride, v_stride, 4 * L, states, j,
                                       at);
    }
    for (; at + 2 * L <= depth; at += 2 * L) {
      narrow_values<R, 2>(skip, n, depth, v + j * v_stride, v_stride, 2 * L, states, j, at);
    }
    for (; at < depth; at += L) {
      narrow_values<R, 1>(skip, n, depth, v + j * v_stride, v_stride, HWY_MIN(L, depth - at),
                          states, j, at);
    }
  });
}

template <int R>
HWY_NOINLINE void narrow_rows(const NarrowRow* rows, int count, std::byte* scratch) {
  const int64_t L = lanes();
  const Strip& s0 = *rows[0].strip;
  const int64_t D = s0.D, Dv = s0.Dv;
  Carver mem(scratch);
  NarrowState states[R];
  int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
  bool entropy = false, max_key = false;
  for (int r = 0; r < R; ++r) {
    NarrowState& row = states[r];
    const NarrowRow& from = rows[HWY_MIN(r, count - 1)];  // beyond `count`: again, and unused
    row.strip = from.strip;
    row.lane = from.lane;
    row.q = mem.take<float>(D);
    row.scores = mem.take<float>(kKeyBlock);
    row.acc = mem.take<float>(round_up(Dv, L));
    row.wide = mem.take<double>(Dv);
    for (int64_t i = 0; i < D; ++i) {
      row.q[i] = row.strip->q[row.lane * row.strip->q_stride + i];
    }
    std::fill(row.acc, row.acc + round_up(Dv, L), 0.0f);
    std::fill(row.wide, row.wide + Dv, 0.0);
    const LaneMask& mask = row.strip->mask;
    if (mask.begin[row.lane] < mask.end[row.lane]) {
      begin = HWY_MIN(begin, mask.begin[row.lane]);
      end = HWY_MAX(end, mask.end[row.lane]);
    }
    entropy = entropy || from.out.entropy != nullptr;
    max_key = max_key || from.out.max_key != nullptr;
  }
  float* spare = mem.take<float>(L * D);
  uint32_t* bits = mem.take<uint32_t>(kKeyBlock);
  uint32_t* kept = mem.take<uint32_t>(kKeyBlock);

  const int64_t first_block = begin / kKeyBlock * kKeyBlock;
  const bool several = end - kKeyBlock > first_block;  // no row sees a key: begin is the largest
  float correction[R];
  for (int64_t at = end > 0 ? first_block : end; at < end; at += kKeyBlock) {
    const int64_t lo = HWY_MAX(at, begin), hi = HWY_MIN(at + kKeyBlock, end);
    narrow_scores<R>(hi - lo, D, s0.k + lo * s0.k_stride, s0.k_stride, states, spare);
    bool skip = false;
    for (int r = 0; r < count; ++r) {
      NarrowState& row = states[r];
      const Strip& s = *row.strip;
      finish_narrow(s, row.lane, lo, hi - lo, row.scores);
      mask_narrow(row, lo, hi - lo, bits);
      correction[r] = narrow_softmax(row, lo, hi - lo, entropy, max_key,
                                     Ahead(s0.v + lo * s0.v_stride, s0.v_stride, Dv));
      mark_narrow(row, hi - lo, bits);
      if (s.dropout.threshold > 0) {
        dropout_lanes(s.dropout, lo, nullptr, hi - lo, kept);
        for (int64_t j = 0; j < hi - lo; ++j) {
          if (!(kept[j] >> row.lane & 1u)) row.scores[j] = -0.0f;
        }
        skip = true;
      }
      skip = skip || !row.all_seen;
    }
    for (int r = count; r < R; ++r) {
      std::fill(states[r].scores, states[r].scores + (hi - lo), -0.0f);
      skip = true;
    }
    add_narrow_values<R>(skip, lo, hi - lo, Dv, s0.v + lo * s0.v_stride, s0.v_stride, states);
    for (int r = 0; several && r < count; ++r) {
      fold_row(Dv, correction[r], states[r].acc, states[r].wide);
    }
  }

  for (int r = 0; r < count; ++r) {
    const NarrowState& row = states[r];
    const StripOutputs& o = rows[r].out;
    const bool any = row.seen > 0;
    SoftmaxRow made;
    softmax_results(1, any ? 1 : 0, &row.sums.m, &row.sums.best, &row.sums.sum, &row.sums.moment,
                    &made);
    const float inverse = made.inverse;
    if (o.row_stat) *o.row_stat = made.log_sum;
    if (o.entropy) *o.entropy = made.entropy;
    if (o.max_weight) *o.max_weight = made.max_weight;
    if (o.max_key) *o.max_key = any ? row.best_key : -1;
    if (o.support) *o.support = static_cast<float>(row.seen);
    if (o.y == nullptr) continue;
    float factor = inverse * kept_scale(row.strip->dropout);
    if (std::isnan(inverse) && row.strip->dropout.threshold > 0) {
      const KeySpan span = span_of(row.strip->mask);
      const uint32_t reached = lanes_with_kept_keys(*row.strip, span, bits);
      if (!(reached >> row.lane & 1u)) factor = 0;
    }
    for (int64_t i = 0; i < Dv; ++i) {
      o.y[i] = (several ? static_cast<float>(row.wide[i]) : row.acc[i]) * factor;
    }
  }
}

inline void forward_narrow(const NarrowRow* rows, int count, std::byte* scratch) {
  if (count == 1) return narrow_rows<1>(rows, count, scratch);
  if (count == 2) return narrow_rows<2>(rows, count, scratch);
  if (count <= 4) return narrow_rows<4>(rows, count, scratch);
  narrow_rows<kNarrowRows>(rows, count, scratch);
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
