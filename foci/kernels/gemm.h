// The matrix product's inner part: what one task runs on one thread, as a table per SIMD target.
// Private to dense*.cc.
//
// Every element is a chain of multiply-adds over k in blocks of kDepthBlock, whatever the tile, the
// vector or the row it falls in. So its bits depend on its own row of A, its column of B and K.
#pragma once

#include <cstdint>

#include "foci/core/simd_target.h"
#include "foci/kernels/dense.h"

namespace foci::kernels {

// Terms of a sum that are chained before they are added to what earlier blocks gave. Measured:
// below 256 the passes over C show, above 384 a panel of B (48 KB at 32 columns) falls out of the
// L1 cache and rounding errors grow.
inline constexpr int64_t kDepthBlock = 384;

// C [m, n] = or += A · B + bias for one block of C over one depth block, k ≤ kDepthBlock.
struct GemmBlock {
  int64_t m, n, k;
  const float* a;
  int64_t lda;
  // Element (i, k) of the tile that begins at row t·tile_rows: a[t·tile_step + k·lda + i] where
  // transposed, else a[t·tile_step + i·lda + k].
  bool a_transposed;
  int64_t tile_step;
  // Panels of B: element (k, j) of panel p is b[p·panel_step + k·ldb + j]. The last panel must be
  // readable at its full width.
  const float* b;
  int64_t ldb;
  int64_t panel_step;
  float* c;
  int64_t ldc;
  bool accumulate;    // C += instead of C =
  const float* bias;  // [n] or null
  Activation activation;
  float* y;  // activation(C) goes here; may be C itself; null where only C is wanted
  int64_t ldy;
};

struct GemmKernels {
  int64_t tile_rows, panel_cols;
  void (*block)(const GemmBlock&);
  // One panel [depth, panel_cols] of B from `cols` ≤ panel_cols of its columns, zeros behind them.
  // `transposed`: element (k, j) is b[j·ldb + k], else b[k·ldb + j].
  void (*pack)(bool transposed, const float* b, int64_t ldb, int64_t depth, int64_t cols,
               float* panel);
  // One tile of a transposed A, [depth, tile_rows], from `rows` ≤ tile_rows of its rows: element
  // (i, k) is a[k·lda + i].
  void (*pack_tile)(const float* a, int64_t lda, int64_t depth, int64_t rows, float* tile);
  // sums [cols] = or += column sums of x [rows, cols], in blocks of kDepthBlock rows.
  void (*column_sums)(const float* x, int64_t ldx, int64_t rows, int64_t cols, float* sums,
                      bool accumulate);
  // out [n] = or += Σ over parts of parts[p·stride + i], in order of p.
  void (*sum_parts)(const float* parts, int64_t count, int64_t stride, int64_t n, float* out,
                    bool accumulate);
};

const GemmKernels& gemm_kernels(SimdTarget target);

}  // namespace foci::kernels
