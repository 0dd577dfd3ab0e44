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

// Terms of a sum that are chained before they are added to what earlier blocks gave. 256 keep a
// panel of B (32 KB at 32 columns) near the L1 cache, and rounding errors short.
inline constexpr int64_t kDepthBlock = 256;

// C [m, n] = or += A · B + bias for one block of C, B packed.
struct GemmBlock {
  int64_t m, n, k;
  const float* a;
  int64_t lda;
  bool a_transposed;    // element (i, k) of A: a[k·lda + i], else a[i·lda + k]
  const float* b;       // packed: depth blocks one after the other, in each the panels
  int64_t packed_cols;  // columns of all panels in the buffer b points into
  int64_t first_panel;  // panel of this block's first column
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
  // sums [cols] = or += column sums of x [rows, cols], in blocks of kDepthBlock rows.
  void (*column_sums)(const float* x, int64_t ldx, int64_t rows, int64_t cols, float* sums,
                      bool accumulate);
  // out [n] = or += Σ over parts of parts[p·stride + i], in order of p.
  void (*sum_parts)(const float* parts, int64_t count, int64_t stride, int64_t n, float* out,
                    bool accumulate);
};

const GemmKernels& gemm_kernels(SimdTarget target);

}  // namespace foci::kernels
