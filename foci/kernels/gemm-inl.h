// The micro-kernel of matrix products and what stands around it in one task: packing, tails,
// bias and activation. See gemm.h for the contract.
#if defined(FOCI_KERNELS_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_GEMM_INL_H_
#undef FOCI_KERNELS_GEMM_INL_H_
#else
#define FOCI_KERNELS_GEMM_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>
#include <cstring>

#include "foci/kernels/gemm.h"
#include "foci/kernels/long_sum-inl.h"
#include "foci/kernels/math-inl.h"
#include "foci/kernels/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Rows × vectors of one tile. With 32 registers 12×2 sums, 2 vectors of B and one of A fit; with 16
// registers 6×2.
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
constexpr int kTileVectors = 2;
// Rows of both operands, read where they lie, are asked for this many steps early: at 24 cycles a
// step that covers the way from L3. Tiles of 6 rows have no loads to spare for it.
constexpr int64_t kAhead = 32;
constexpr bool kFetchAhead = kTileRows > 8;
// Up to this many floats between its rows a transposed A is read in place. Measured: the fetching
// ahead makes up for about one page in two.
constexpr int64_t kNearColumns = kFetchAhead ? 512 : 128;
constexpr int64_t kLanes = hn::MaxLanes(FloatTag());
constexpr int64_t kPanelCols = kTileVectors * kLanes;

// Keeps the compiler from expressing p by another pointer and an offset of its own: a dozen offsets
// do not fit the registers, and it moves those that do not through vector registers, where each
// costs a multiply-add's place.
template <class T>
HWY_INLINE void in_own_register(T*& p) {
  asm("" : "+r"(p));
}

// c [kRows, kVectors·lanes] = init + A·B (or += A·B).
template <int kRows, int kVectors, ReadA kRead>
HWY_INLINE void tile(int64_t depth, const float* HWY_RESTRICT a, int64_t lda,
                     const float* HWY_RESTRICT b, int64_t ldb, float* c, int64_t ldc,
                     const float* HWY_RESTRICT bias, bool accumulate) {
  static_assert(kVectors == 1 || kVectors == 2);
  constexpr int kLast = kVectors - 1;
  const FloatTag d;
  FloatVec sum[kRows][kVectors];
  const FloatVec init0 = bias ? hn::LoadU(d, bias) : hn::Zero(d);
  const FloatVec init1 = bias ? hn::LoadU(d, bias + kLast * kLanes) : hn::Zero(d);
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = init0;
    sum[r][kLast] = init1;
  }
  // Row r lies r % 4 rows behind its group's first.
  constexpr int kGroups = kRead == ReadA::rows ? (kRows + 3) / 4 : 1;
  const float* group[kGroups];
  for (int i = 0; i < kGroups; ++i) {
    group[i] = a + 4 * i * lda;
    in_own_register(group[i]);
  }
  for (int64_t k = 0; k < depth; ++k) {
    if (kRead == ReadA::columns && kFetchAhead) {
      hwy::Prefetch(group[0] + kAhead * lda);
      hwy::Prefetch(b + kAhead * ldb);
      hwy::Prefetch(b + kAhead * ldb + kLast * kLanes);
    }
    const FloatVec b0 = hn::LoadU(d, b);
    const FloatVec b1 = hn::LoadU(d, b + kLast * kLanes);
    HWY_UNROLL(16)
    for (int r = 0; r < kRows; ++r) {
      const FloatVec ar =
          hn::Set(d, kRead == ReadA::rows ? group[r / 4][r % 4 * lda] : group[0][r]);
      sum[r][0] = hn::MulAdd(ar, b0, sum[r][0]);
      if (kVectors == 2) sum[r][kLast] = hn::MulAdd(ar, b1, sum[r][kLast]);
    }
    HWY_UNROLL(4)
    for (int i = 0; i < kGroups; ++i) {
      group[i] += kRead == ReadA::rows ? 1 : kRead == ReadA::columns ? lda : kTileRows;
    }
    b += ldb;
  }
  in_own_register(c);  // nor are C's rows to be remembered from before the loop
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    float* row = c + r * ldc;
    if (accumulate) sum[r][0] = hn::Add(hn::LoadU(d, row), sum[r][0]);
    hn::StoreU(sum[r][0], d, row);
    if (kVectors == 2) {
      if (accumulate) sum[r][kLast] = hn::Add(hn::LoadU(d, row + kLanes), sum[r][kLast]);
      hn::StoreU(sum[r][kLast], d, row + kLanes);
    }
  }
}

// Loads and stores of whole vectors, and of the first n lanes.
struct WholeVector {
  HWY_INLINE FloatVec load(const float* p) const { return hn::LoadU(FloatTag(), p); }
  HWY_INLINE void store(FloatVec v, float* p) const { hn::StoreU(v, FloatTag(), p); }
};
struct FirstLanes {
  size_t n;
  HWY_INLINE FloatVec load(const float* p) const { return load_first(FloatTag(), n, p); }
  HWY_INLINE void store(FloatVec v, float* p) const { store_first(v, FloatTag(), n, p); }
};

// c = finish(sums), or finish(c + sums), for a whole tile; `sums` are `ld` apart, in the L1 cache.
template <Activation kActivation>
HWY_INLINE void finish_tile(const Finish& e, bool accumulate, int64_t rows, int64_t cols,
                            const float* sums, int64_t ld, float* c, int64_t ldc) {
  const auto finish = [&](int64_t r, int64_t j, auto part) HWY_ATTR {
    float* at = c + r * ldc + j;
    FloatVec x = part.load(sums + r * ld + j);
    if (accumulate) x = hn::Add(part.load(at), x);
    if (kActivation == Activation::relu) x = relu(x);
    if (kActivation == Activation::gelu) {
      FloatVec slope;
      x = gelu(x, &slope);
      if (e.slope) part.store(slope, e.slope + r * e.ld_slope + j);
    }
    if (e.factor) x = hn::Mul(x, part.load(e.factor + r * e.ld_factor + j));
    if (e.add) x = hn::Add(x, part.load(e.add + r * e.ld_add + j));
    part.store(x, at);
  };
  if (cols == kPanelCols) {  // one loop, before which all constants are loaded
    for (int64_t r = 0; r < rows; ++r) {
      finish(r, 0, WholeVector());
      finish(r, kPanelCols - kLanes, WholeVector());
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    int64_t j = 0;
    for (; j + kLanes <= cols; j += kLanes) finish(r, j, WholeVector());
    if (j < cols) finish(r, j, FirstLanes{static_cast<size_t>(cols - j)});
  }
}

HWY_NOINLINE void finish_sums(const Finish& e, bool accumulate, int64_t rows, int64_t cols,
                              const float* sums, int64_t ld, float* c, int64_t ldc) {
  switch (e.activation) {
    case Activation::none:
      return finish_tile<Activation::none>(e, accumulate, rows, cols, sums, ld, c, ldc);
    case Activation::relu:
      return finish_tile<Activation::relu>(e, accumulate, rows, cols, sums, ld, c, ldc);
    case Activation::gelu:
      return finish_tile<Activation::gelu>(e, accumulate, rows, cols, sums, ld, c, ldc);
  }
}

// What the tiles of one panel share. Pointers stand at the panel's first column.
struct PanelArgs {
  int64_t depth, lda, ldb, cols, ldc;
  const float* b;
  float* c;
  const float* bias;
  bool accumulate;
  bool aside;  // not full, or with something to finish
  Finish finish;
};

// A tile that the matrix does not fill, or whose sums are not what goes into C: the sums go to a
// place of their own, from where the valid ones are taken.
template <int kRows, int kVectors, ReadA kRead>
HWY_INLINE void tile_aside(const PanelArgs& t, const float* a, int64_t row) {
  constexpr int64_t kCols = kVectors * kLanes;
  HWY_ALIGN float sums[kRows * kCols];
  HWY_ALIGN float padded[kCols];
  const float* bias = t.bias;
  if (bias && t.cols < kCols) {
    std::fill(std::copy_n(bias, t.cols, padded), padded + kCols, 0.0f);
    bias = padded;
  }
  tile<kRows, kVectors, kRead>(t.depth, a, t.lda, t.b, t.ldb, sums, kCols, bias, false);
  Finish e = t.finish;
  if (e.slope) e.slope += row * e.ld_slope;
  if (e.add) e.add += row * e.ld_add;
  if (e.factor) e.factor += row * e.ld_factor;
  finish_sums(e, t.accumulate, kRows, t.cols, sums, kCols, t.c + row * t.ldc, t.ldc);
}

template <int kRows, ReadA kRead>
HWY_NOINLINE void any_tile(const PanelArgs& t, const float* a, int64_t row) {
  // C lies far from what was used last, and so does what it is to be finished with.
  const auto fetch = [&](const float* rows, int64_t stride) HWY_ATTR {
    for (int r = 0; r < kRows; ++r) {
      const float* at = rows + (row + r) * stride;
      hwy::Prefetch(at);
      if (t.cols > kLanes) hwy::Prefetch(at + kLanes);
    }
  };
  fetch(t.c, t.ldc);
  if (t.finish.factor) fetch(t.finish.factor, t.finish.ld_factor);
  if (t.finish.add) fetch(t.finish.add, t.finish.ld_add);
  if (t.finish.slope) fetch(t.finish.slope, t.finish.ld_slope);
  if (t.cols <= kLanes) return tile_aside<kRows, 1, kRead>(t, a, row);
  if (t.aside) return tile_aside<kRows, kTileVectors, kRead>(t, a, row);
  tile<kRows, kTileVectors, kRead>(t.depth, a, t.lda, t.b, t.ldb, t.c + row * t.ldc, t.ldc, t.bias,
                                   t.accumulate);
}

// All tiles of one panel: full ones, then the remaining rows in powers of two.
template <ReadA kRead>
HWY_INLINE void panel_rows(const PanelArgs& t, int64_t rows, const float* a, int64_t tile_step) {
  int64_t row = 0;
  const auto run = [&](auto tile_of, int64_t count) HWY_ATTR {
    tile_of(t, a, row);
    row += count;
    a += count == kTileRows ? tile_step : count * (kRead == ReadA::rows ? t.lda : 1);
  };
  while (rows - row >= kTileRows) run(any_tile<kTileRows, kRead>, kTileRows);
  if (kTileRows > 8 && rows - row >= 8) run(any_tile<8, kRead>, 8);
  if (rows - row >= 4) run(any_tile<4, kRead>, 4);
  if (rows - row >= 2) run(any_tile<2, kRead>, 2);
  if (rows - row >= 1) run(any_tile<1, kRead>, 1);
}

void gemm_block(const GemmBlock& g) {
  const Finish& e = g.finish;
  const bool finished = e.activation != Activation::none || e.add || e.factor;
  const float* b = g.b;
  for (int64_t j = 0; j < g.n; j += kPanelCols, b += g.panel_step) {
    const int64_t cols = std::min(kPanelCols, g.n - j);
    PanelArgs t{.depth = g.k,
                .lda = g.lda,
                .ldb = g.ldb,
                .cols = cols,
                .ldc = g.ldc,
                .b = b,
                .c = g.c + j,
                .bias = g.bias ? g.bias + j : nullptr,
                .accumulate = g.accumulate,
                .aside = finished || cols < kPanelCols,
                .finish = e};
    if (e.slope) t.finish.slope += j;
    if (e.add) t.finish.add += j;
    if (e.factor) t.finish.factor += j;
    switch (g.read_a) {
      case ReadA::rows:
        panel_rows<ReadA::rows>(t, g.m, g.a, g.tile_step);
        break;
      case ReadA::columns:
        panel_rows<ReadA::columns>(t, g.m, g.a, g.tile_step);
        break;
      case ReadA::tiles:
        panel_rows<ReadA::tiles>(t, g.m, g.a, g.tile_step);
        break;
    }
  }
}

// Up to this many rows of A thin_panel beats a packed panel: their sums stay in registers beside a
// square of B. Measured: with four rows it is a quarter slower.
#if FOCI_HAS_FOURS
constexpr int64_t kThinRows = 2;
#else
constexpr int64_t kThinRows = 0;
#endif

#if FOCI_HAS_FOURS
// The first kLanes numbers of kLanes rows, as columns: a row in each lane. Each row is loaded
// whole, since rows at some distances push each other out of the L1 cache.
HWY_INLINE void load_turned(const float* p, int64_t stride, FloatVec* columns) {
  const FloatTag d;
  constexpr int64_t kBlocks = kLanes / 4;
  Fours<FloatVec> rows[kBlocks];  // block b of rows[q]'s number i is column 4·b + i of rows 4·q…
  HWY_UNROLL(4)
  for (int64_t q = 0; q < kBlocks; ++q, p += 4 * stride) {
    rows[q] = transpose_fours(
        d, Fours<FloatVec>{hn::LoadU(d, p), hn::LoadU(d, p + stride), hn::LoadU(d, p + 2 * stride),
                           hn::LoadU(d, p + 3 * stride)});
  }
  const auto even = [d](FloatVec x, FloatVec y) HWY_ATTR {  // x0 y0 x2 y2
    (void)d;
    return hn::OddEvenBlocks(hn::SwapAdjacentBlocks(y), x);
  };
  const auto odd = [d](FloatVec x, FloatVec y) HWY_ATTR {  // x1 y1 x3 y3
    (void)d;
    return hn::OddEvenBlocks(y, hn::SwapAdjacentBlocks(x));
  };
  const auto place = [&](int64_t i, auto part) HWY_ATTR {
    if constexpr (kBlocks == 1) {
      columns[i] = part(rows[0]);
    } else if constexpr (kBlocks == 2) {
      columns[i] = even(part(rows[0]), part(rows[1]));
      columns[4 + i] = odd(part(rows[0]), part(rows[1]));
    } else {
      const FloatVec e0 = even(part(rows[0]), part(rows[1])),
                     e1 = even(part(rows[2]), part(rows[3]));
      const FloatVec o0 = odd(part(rows[0]), part(rows[1])), o1 = odd(part(rows[2]), part(rows[3]));
      columns[i] = hn::ConcatLowerLower(d, e1, e0);
      columns[4 + i] = hn::ConcatLowerLower(d, o1, o0);
      columns[8 + i] = hn::ConcatUpperUpper(d, e1, e0);
      columns[12 + i] = hn::ConcatUpperUpper(d, o1, o0);
    }
  };
  place(0, [](const Fours<FloatVec>& f) HWY_ATTR { return f.a; });
  place(1, [](const Fours<FloatVec>& f) HWY_ATTR { return f.b; });
  place(2, [](const Fours<FloatVec>& f) HWY_ATTR { return f.c; });
  place(3, [](const Fours<FloatVec>& f) HWY_ATTR { return f.e; });
}

// One panel of C for few rows of A, where B's columns lie as rows, ldb apart: they are turned on
// the way, so that B is read once and nothing is written but C. The sums are those of tile().
template <int kRows>
HWY_NOINLINE void thin_panel(const GemmBlock& g) {
  const FloatTag d;
  constexpr int64_t kThinAhead = 32;
  FloatVec sum[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = g.bias ? hn::LoadU(d, g.bias) : hn::Zero(d);
    sum[r][1] = g.bias ? hn::LoadU(d, g.bias + kLanes) : hn::Zero(d);
  }
  int64_t k = 0;
  for (; k + kLanes <= g.k; k += kLanes) {
    HWY_UNROLL(2)
    for (int v = 0; v < 2; ++v) {
      const float* rows = g.b + v * kLanes * g.ldb + k;
      for (int64_t j = 0; j < kLanes; ++j) hwy::Prefetch(rows + j * g.ldb + kThinAhead);
      FloatVec columns[kLanes];
      load_turned(rows, g.ldb, columns);
      HWY_UNROLL(16)
      for (int64_t i = 0; i < kLanes; ++i) {
        HWY_UNROLL(4)
        for (int r = 0; r < kRows; ++r) {
          sum[r][v] = hn::MulAdd(hn::Set(d, g.a[r * g.lda + k + i]), columns[i], sum[r][v]);
        }
      }
    }
  }
  HWY_ALIGN float sums[kRows * kPanelCols];
  for (; k < g.k; ++k) {
    for (int64_t j = 0; j < kPanelCols; ++j) sums[j] = g.b[j * g.ldb + k];
    for (int r = 0; r < kRows; ++r) {
      const FloatVec ar = hn::Set(d, g.a[r * g.lda + k]);
      sum[r][0] = hn::MulAdd(ar, hn::Load(d, sums), sum[r][0]);
      sum[r][1] = hn::MulAdd(ar, hn::Load(d, sums + kLanes), sum[r][1]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    hn::Store(sum[r][0], d, sums + r * kPanelCols);
    hn::Store(sum[r][1], d, sums + r * kPanelCols + kLanes);
  }
  finish_sums(g.finish, g.accumulate, kRows, kPanelCols, sums, kPanelCols, g.c, g.ldc);
}
#endif

void gemm_thin(const GemmBlock& g) {
#if FOCI_HAS_FOURS
  if (g.m == 1) return thin_panel<1>(g);
  return thin_panel<2>(g);
#else
  (void)g;
#endif
}

// A panel of rows that become columns. Rows of a wide matrix lie on pages of their own, which no
// hardware prefetcher crosses, so what comes next is asked for.
HWY_INLINE void pack_transposed(const float* b, int64_t ldb, int64_t depth, int64_t cols,
                                float* HWY_RESTRICT panel) {
  int64_t first = 0;  // columns of the panel that are done
#if FOCI_HAS_FOURS
  const FloatTag d;
  constexpr int64_t kLine = 16, kPackAhead = 64;
  const int64_t whole = depth / 4 * 4;
  for (; first + kLanes <= cols; first += kLanes) {
    const float* rows = b + first * ldb;
    for (int64_t k = 0; k < whole; k += 4) {
      if (k % kLine == 0) {  // beyond `depth` the rows go on into the next depth block
        for (int64_t j = 0; j < kLanes; ++j) hwy::Prefetch(rows + j * ldb + k + kPackAhead);
      }
      const auto t = load_columns(d, rows + k, ldb);
      float* to = panel + k * kPanelCols + first;
      hn::StoreU(t.a, d, to);
      hn::StoreU(t.b, d, to + kPanelCols);
      hn::StoreU(t.c, d, to + 2 * kPanelCols);
      hn::StoreU(t.e, d, to + 3 * kPanelCols);
    }
    for (int64_t k = whole; k < depth; ++k) {
      for (int64_t j = 0; j < kLanes; ++j) panel[k * kPanelCols + first + j] = rows[j * ldb + k];
    }
  }
#endif
  if (first == kPanelCols) return;
  for (int64_t k = 0; k < depth; ++k) {
    float* row = panel + k * kPanelCols;
    for (int64_t j = first; j < cols; ++j) row[j] = b[j * ldb + k];
    for (int64_t j = cols; j < kPanelCols; ++j) row[j] = 0;
  }
}

void gemm_pack(bool transposed, const float* b, int64_t ldb, int64_t depth, int64_t cols,
               float* HWY_RESTRICT panel) {
  const FloatTag d;
  constexpr int64_t kPackAhead = 16;
  if (transposed) {
    pack_transposed(b, ldb, depth, cols, panel);
  } else if (cols == kPanelCols) {
    for (int64_t k = 0; k < depth; ++k) {
      hwy::Prefetch(b + (k + kPackAhead) * ldb);
      hwy::Prefetch(b + (k + kPackAhead) * ldb + kPanelCols - kLanes);
      for (int64_t j = 0; j < kPanelCols; j += kLanes) {
        hn::StoreU(hn::LoadU(d, b + k * ldb + j), d, panel + k * kPanelCols + j);
      }
    }
  } else {
    for (int64_t k = 0; k < depth; ++k) {
      float* row = panel + k * kPanelCols;
      for (int64_t j = 0; j < cols; ++j) row[j] = b[k * ldb + j];
      for (int64_t j = cols; j < kPanelCols; ++j) row[j] = 0;
    }
  }
}

void gemm_pack_tiles(const float* a, int64_t lda, int64_t depth, int64_t rows,
                     float* HWY_RESTRICT packed) {
  // Three lines of a row at a time, so that each line is read once.
  constexpr int64_t kGroup = 48, kTiles = kGroup / kTileRows, kPackAhead = 16;
  static_assert(kGroup % kTileRows == 0);
  const int64_t step = kTileRows * depth;
  for (; rows >= kGroup; rows -= kGroup, a += kGroup, packed += kTiles * step) {
    for (int64_t k = 0; k < depth; ++k) {
      const float* from = a + k * lda;
      for (int64_t line = 0; line < kGroup; line += 16) {
        hwy::Prefetch(from + kPackAhead * lda + line);
      }
      for (int64_t t = 0; t < kTiles; ++t) {
        std::memcpy(packed + t * step + k * kTileRows, from + t * kTileRows,
                    kTileRows * sizeof(float));
      }
    }
  }
  for (; rows > 0; rows -= kTileRows, a += kTileRows, packed += step) {
    const int64_t count = std::min<int64_t>(rows, kTileRows);
    for (int64_t k = 0; k < depth; ++k) std::copy_n(a + k * lda, count, packed + k * kTileRows);
  }
}

template <int kVectors, class D>
HWY_INLINE void column_sums_strip(D d, const float* x, int64_t ldx, int64_t rows, float* sums,
                                  bool accumulate) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<D> high[kVectors], low[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    high[v] = accumulate ? hn::LoadU(d, sums + v * lanes) : hn::Zero(d);
    low[v] = hn::Zero(d);
  }
  for (int64_t begin = 0; begin < rows; begin += kSumRows) {
    hn::Vec<D> sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::Zero(d);
    const int64_t end = std::min(rows, begin + kSumRows);
    for (int64_t r = begin; r < end; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = hn::Add(sum[v], hn::LoadU(d, x + r * ldx + v * lanes));
      }
    }
    for (int v = 0; v < kVectors; ++v) add_kept(sum[v], high[v], low[v]);
  }
  for (int v = 0; v < kVectors; ++v) {
    hn::StoreU(kept_sum(d, high[v], low[v]), d, sums + v * lanes);
  }
}

void gemm_column_sums(const float* x, int64_t ldx, int64_t rows, int64_t cols, float* sums,
                      bool accumulate) {
  const FloatTag d;
  const hn::CappedTag<float, 1> one;
  int64_t j = 0;
  for (; j + 4 * kLanes <= cols; j += 4 * kLanes) {
    column_sums_strip<4>(d, x + j, ldx, rows, sums + j, accumulate);
  }
  for (; j + kLanes <= cols; j += kLanes) {
    column_sums_strip<1>(d, x + j, ldx, rows, sums + j, accumulate);
  }
  for (; j < cols; ++j) column_sums_strip<1>(one, x + j, ldx, rows, sums + j, accumulate);
}

template <class D>
HWY_INLINE void sum_parts_strip(D d, const float* parts, int64_t count, int64_t stride, float* out,
                                bool accumulate) {
  hn::Vec<D> high = accumulate ? hn::LoadU(d, out) : hn::Zero(d), low = hn::Zero(d);
  for (int64_t p = 0; p < count; ++p) add_kept(hn::LoadU(d, parts + p * stride), high, low);
  hn::StoreU(kept_sum(d, high, low), d, out);
}

void gemm_sum_parts(const float* parts, int64_t count, int64_t stride, int64_t n, float* out,
                    bool accumulate) {
  const FloatTag d;
  const hn::CappedTag<float, 1> one;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    sum_parts_strip(d, parts + i, count, stride, out + i, accumulate);
  }
  for (; i < n; ++i) sum_parts_strip(one, parts + i, count, stride, out + i, accumulate);
}

template <class D>
HWY_INLINE void add_kept_at(D d, const float* x, float* high, float* low) {
  hn::Vec<D> h = hn::LoadU(d, high), l = hn::LoadU(d, low);
  add_kept(hn::LoadU(d, x), h, l);
  hn::StoreU(h, d, high);
  hn::StoreU(l, d, low);
}

void gemm_add_kept(int64_t n, const float* x, float* high, float* low) {
  const FloatTag d;
  const hn::CappedTag<float, 1> one;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add_kept_at(d, x + i, high + i, low + i);
  for (; i < n; ++i) add_kept_at(one, x + i, high + i, low + i);
}

void gemm_kept_sum(int64_t n, const float* high, const float* low, float* out) {
  const FloatTag d;
  const hn::CappedTag<float, 1> one;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(kept_sum(d, hn::LoadU(d, high + i), hn::LoadU(d, low + i)), d, out + i);
  }
  for (; i < n; ++i) {
    hn::StoreU(kept_sum(one, hn::LoadU(one, high + i), hn::LoadU(one, low + i)), one, out + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
