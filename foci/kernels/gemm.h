// The matrix product's inner part: what one task runs on one thread, as a table per SIMD target.
// Private to dense*.cc.
//
// Every element is a chain of multiply-adds over k in blocks of kDepthBlock, and these in spans,
// whatever the tile, the vector or the row it falls in. So its bits depend on its own row of A, its
// column of B and K.
#pragma once

#include <cstdint>

#include "foci/core/simd_target.h"
#include "foci/kernels/dense.h"

namespace foci::kernels {

// Terms of a sum that are chained before they are added to what earlier blocks gave. Measured:
// below 256 the passes over C show, above 384 a panel of B (48 KB at 32 columns) falls out of the
// L1 cache and rounding errors grow.
inline constexpr int64_t kDepthBlock = 384;
// Depth blocks that C itself adds up. Beyond them what rounding takes is kept beside, so that the
// error of a sum does not grow with its length (6e-6 for positive terms).
inline constexpr int64_t kSpan = 16 * kDepthBlock;
// Rows of column sums, and of the gradients of a norm's parameters, that are chained.
inline constexpr int64_t kSumRows = 128;

// What is done to elements of C once their sums are whole, while they lie in the L1 cache. Pointers
// stand at C's first element; null where not wanted.
struct Finish {
  Activation activation = Activation::none;
  float* slope = nullptr;  // gelu'(C), beside C = gelu(C)
  int64_t ld_slope = 0;
  const float* add = nullptr;  // C = act(C) + add
  int64_t ld_add = 0;
  const float* factor = nullptr;  // C = C ∘ factor
  int64_t ld_factor = 0;
};

// Where element (i, k) of the tile that begins at `a` lies.
enum class ReadA : uint8_t {
  rows,     // a[i·lda + k]
  columns,  // a[k·lda + i]
  tiles     // a[k·tile_rows + i]: packed
};

// C [m, n] = or += A · B + bias for one block of C over one depth block, k ≤ kDepthBlock.
struct GemmBlock {
  int64_t m, n, k;
  const float* a;
  int64_t lda;
  ReadA read_a;
  int64_t tile_step;  // from one tile's first element to the next one's
  // Panels of B: element (k, j) of panel p is b[p·panel_step + k·ldb + j]. The last panel must be
  // readable at its full width.
  const float* b;
  int64_t ldb;
  int64_t panel_step;
  float* c;
  int64_t ldc;
  bool accumulate;              // C += instead of C =
  const float* bias = nullptr;  // [n]
  Finish finish = {};
};

struct GemmKernels {
  int64_t tile_rows, panel_cols;
  int64_t near_stride;  // a transposed A whose rows are this close is read where it lies
  void (*block)(const GemmBlock&);
  // Up to thin_rows rows of A times one full panel that was not packed: element (k, j) of B is
  // b[j·ldb + k]. Reads read_a, tile_step, panel_step and n not.
  int64_t thin_rows;
  void (*thin)(const GemmBlock&);
  // One panel [depth, panel_cols] of B from `cols` ≤ panel_cols of its columns, zeros behind them.
  // `transposed`: element (k, j) is b[j·ldb + k], else b[k·ldb + j].
  void (*pack)(bool transposed, const float* b, int64_t ldb, int64_t depth, int64_t cols,
               float* panel);
  // The tiles of a transposed A, each [depth, tile_rows], from `rows` of its rows: element (i, k)
  // is a[k·lda + i]. What lies behind the last row stays as it is.
  void (*pack_tiles)(const float* a, int64_t lda, int64_t depth, int64_t rows, float* tiles);
  // sums [cols] = or += column sums of x [rows, cols], in blocks of kSumRows rows.
  void (*column_sums)(const float* x, int64_t ldx, int64_t rows, int64_t cols, float* sums,
                      bool accumulate);
  // out [n] = or += Σ over parts of parts[p·stride + i], in order of p.
  void (*sum_parts)(const float* parts, int64_t count, int64_t stride, int64_t n, float* out,
                    bool accumulate);
  // high + low += x, n elements, with what rounding takes from high kept in low.
  void (*add_kept)(int64_t n, const float* x, float* high, float* low);
  // out = high + low
  void (*kept_sum)(int64_t n, const float* high, const float* low, float* out);
};

const GemmKernels& gemm_kernels(SimdTarget target);

}  // namespace foci::kernels
