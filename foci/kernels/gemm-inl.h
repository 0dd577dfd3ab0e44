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
#include "foci/kernels/math-inl.h"

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
constexpr int64_t kLanes = hn::MaxLanes(FloatTag());
constexpr int64_t kPanelCols = kTileVectors * kLanes;

// c [kRows, kVectors·lanes] = init + A·B (or += A·B).
template <int kRows, int kVectors, bool kTransposed>
HWY_INLINE void tile(int64_t depth, const float* HWY_RESTRICT a, int64_t lda,
                     const float* HWY_RESTRICT b, int64_t ldb, float* HWY_RESTRICT c, int64_t ldc,
                     const float* HWY_RESTRICT bias, bool accumulate) {
  static_assert(kVectors == 1 || kVectors == 2);
  constexpr int kLast = kVectors - 1;
  const FloatTag d;
  if (accumulate) {
    // What the sums are added to lies far from what was used last.
    for (int r = 0; r < kRows; ++r) {
      hwy::Prefetch(c + r * ldc);
      hwy::Prefetch(c + r * ldc + kLast * kLanes);
    }
  }
  FloatVec sum[kRows][kVectors];
  const FloatVec init0 = bias ? hn::LoadU(d, bias) : hn::Zero(d);
  const FloatVec init1 = bias ? hn::LoadU(d, bias + kLast * kLanes) : hn::Zero(d);
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = init0;
    sum[r][kLast] = init1;
  }
  for (int64_t k = 0; k < depth; ++k) {
    if (kTransposed && kFetchAhead) {
      hwy::Prefetch(a + kAhead * lda);
      hwy::Prefetch(b + kAhead * ldb);
      hwy::Prefetch(b + kAhead * ldb + kLast * kLanes);
    }
    const FloatVec b0 = hn::LoadU(d, b);
    const FloatVec b1 = hn::LoadU(d, b + kLast * kLanes);
    HWY_UNROLL(16)
    for (int r = 0; r < kRows; ++r) {
      const FloatVec ar = hn::Set(d, kTransposed ? a[r] : a[r * lda]);
      sum[r][0] = hn::MulAdd(ar, b0, sum[r][0]);
      if (kVectors == 2) sum[r][kLast] = hn::MulAdd(ar, b1, sum[r][kLast]);
    }
    a += kTransposed ? lda : 1;
    b += ldb;
  }
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

// y [rows, cols] = f(x)
template <class F>
HWY_INLINE void map_rows(int64_t rows, int64_t cols, const float* x, int64_t ldx, float* y,
                         int64_t ldy, F f) {
  const FloatTag d;
  for (int64_t r = 0; r < rows; ++r) {
    const float* xr = x + r * ldx;
    float* yr = y + r * ldy;
    int64_t j = 0;
    for (; j + kLanes <= cols; j += kLanes) hn::StoreU(f(hn::LoadU(d, xr + j)), d, yr + j);
    if (j < cols) {
      const auto rest = static_cast<size_t>(cols - j);
      store_first(f(load_first(d, rest, xr + j)), d, rest, yr + j);
    }
  }
}

// What the tiles of one panel share.
struct PanelArgs {
  int64_t depth, lda, ldb, cols, ldc, ldy;
  const float* b;
  const float* bias;
  bool accumulate;
  Activation activation;
};

// A tile of a panel that the matrix does not fill: the same sums, of which the valid ones are kept.
template <int kRows, int kVectors, bool kTransposed>
HWY_INLINE void partial_tile(const PanelArgs& t, const float* a, float* c) {
  constexpr int64_t kCols = kVectors * kLanes;
  HWY_ALIGN float full[kRows * kCols];
  HWY_ALIGN float bias[kCols] = {};
  if (t.bias) std::copy_n(t.bias, t.cols, bias);
  tile<kRows, kVectors, kTransposed>(t.depth, a, t.lda, t.b, t.ldb, full, kCols,
                                     t.bias ? bias : nullptr, false);
  for (int r = 0; r < kRows; ++r) {
    for (int64_t j = 0; j < t.cols; ++j) {
      float& out = c[r * t.ldc + j];
      out = t.accumulate ? out + full[r * kCols + j] : full[r * kCols + j];
    }
  }
}

template <int kRows, bool kTransposed>
HWY_NOINLINE void finished_tile(const PanelArgs& t, const float* a, float* c, float* y) {
  if (t.cols == kPanelCols) {
    tile<kRows, kTileVectors, kTransposed>(t.depth, a, t.lda, t.b, t.ldb, c, t.ldc, t.bias,
                                           t.accumulate);
  } else if (t.cols > kLanes) {
    partial_tile<kRows, kTileVectors, kTransposed>(t, a, c);
  } else {
    partial_tile<kRows, 1, kTransposed>(t, a, c);
  }
  switch (t.activation) {
    case Activation::none:
      if (y && y != c) {
        map_rows(kRows, t.cols, c, t.ldc, y, t.ldy, [](FloatVec x) HWY_ATTR { return x; });
      }
      break;
    case Activation::relu:
      map_rows(kRows, t.cols, c, t.ldc, y, t.ldy, [](FloatVec x) HWY_ATTR { return relu(x); });
      break;
    case Activation::gelu:
      map_rows(kRows, t.cols, c, t.ldc, y, t.ldy, [](FloatVec x) HWY_ATTR { return gelu(x); });
      break;
  }
}

// All tiles of one panel: full ones, then the remaining rows in powers of two.
template <bool kTransposed>
HWY_INLINE void panel_rows(const PanelArgs& t, int64_t rows, const float* a, int64_t tile_step,
                           float* c, float* y) {
  const auto run = [&](auto tile_of, int64_t count) HWY_ATTR {
    tile_of(t, a, c, y);
    rows -= count;
    a += count == kTileRows ? tile_step : count * (kTransposed ? 1 : t.lda);
    c += count * t.ldc;
    if (y) y += count * t.ldy;
  };
  while (rows >= kTileRows) run(finished_tile<kTileRows, kTransposed>, kTileRows);
  if (kTileRows > 8 && rows >= 8) run(finished_tile<8, kTransposed>, 8);
  if (rows >= 4) run(finished_tile<4, kTransposed>, 4);
  if (rows >= 2) run(finished_tile<2, kTransposed>, 2);
  if (rows >= 1) run(finished_tile<1, kTransposed>, 1);
}

void gemm_block(const GemmBlock& g) {
  const float* b = g.b;
  for (int64_t j = 0; j < g.n; j += kPanelCols, b += g.panel_step) {
    const PanelArgs t{.depth = g.k,
                      .lda = g.lda,
                      .ldb = g.ldb,
                      .cols = std::min(kPanelCols, g.n - j),
                      .ldc = g.ldc,
                      .ldy = g.ldy,
                      .b = b,
                      .bias = g.bias ? g.bias + j : nullptr,
                      .accumulate = g.accumulate,
                      .activation = g.activation};
    float* y = g.y ? g.y + j : nullptr;
    if (g.a_transposed) {
      panel_rows<true>(t, g.m, g.a, g.tile_step, g.c + j, y);
    } else {
      panel_rows<false>(t, g.m, g.a, g.tile_step, g.c + j, y);
    }
  }
}

void gemm_pack(bool transposed, const float* b, int64_t ldb, int64_t depth, int64_t cols,
               float* HWY_RESTRICT panel) {
  const FloatTag d;
  if (transposed) {
    for (int64_t k = 0; k < depth; ++k) {
      float* row = panel + k * kPanelCols;
      for (int64_t j = 0; j < cols; ++j) row[j] = b[j * ldb + k];
      for (int64_t j = cols; j < kPanelCols; ++j) row[j] = 0;
    }
  } else if (cols == kPanelCols) {
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t j = 0; j < kPanelCols; j += kLanes) {
        hn::Store(hn::LoadU(d, b + k * ldb + j), d, panel + k * kPanelCols + j);
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

void gemm_pack_tile(const float* a, int64_t lda, int64_t depth, int64_t rows,
                    float* HWY_RESTRICT packed) {
  if (rows == kTileRows) {
    for (int64_t k = 0; k < depth; ++k) {
      std::memcpy(packed + k * kTileRows, a + k * lda, kTileRows * sizeof(float));
    }
  } else {
    for (int64_t k = 0; k < depth; ++k) std::copy_n(a + k * lda, rows, packed + k * kTileRows);
  }
}

template <int kVectors>
HWY_INLINE void column_sums_strip(const float* x, int64_t ldx, int64_t rows, float* sums,
                                  bool accumulate) {
  const FloatTag d;
  for (int64_t begin = 0; begin < rows || begin == 0; begin += kDepthBlock) {
    FloatVec sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = hn::Zero(d);
    const int64_t end = std::min(rows, begin + kDepthBlock);
    for (int64_t r = begin; r < end; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        sum[v] = hn::Add(sum[v], hn::LoadU(d, x + r * ldx + v * kLanes));
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      float* out = sums + v * kLanes;
      hn::StoreU(accumulate || begin > 0 ? hn::Add(hn::LoadU(d, out), sum[v]) : sum[v], d, out);
    }
  }
}

void gemm_column_sums(const float* x, int64_t ldx, int64_t rows, int64_t cols, float* sums,
                      bool accumulate) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= cols; j += 4 * kLanes) {
    column_sums_strip<4>(x + j, ldx, rows, sums + j, accumulate);
  }
  for (; j + kLanes <= cols; j += kLanes) {
    column_sums_strip<1>(x + j, ldx, rows, sums + j, accumulate);
  }
  for (; j < cols; ++j) {
    for (int64_t begin = 0; begin < rows || begin == 0; begin += kDepthBlock) {
      float sum = 0;
      const int64_t end = std::min(rows, begin + kDepthBlock);
      for (int64_t r = begin; r < end; ++r) sum += x[r * ldx + j];
      sums[j] = accumulate || begin > 0 ? sums[j] + sum : sum;
    }
  }
}

void gemm_sum_parts(const float* parts, int64_t count, int64_t stride, int64_t n, float* out,
                    bool accumulate) {
  const FloatTag d;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    FloatVec sum = accumulate ? hn::LoadU(d, out + i) : hn::Zero(d);
    for (int64_t p = 0; p < count; ++p) sum = hn::Add(sum, hn::LoadU(d, parts + p * stride + i));
    hn::StoreU(sum, d, out + i);
  }
  for (; i < n; ++i) {
    float sum = accumulate ? out[i] : 0.0f;
    for (int64_t p = 0; p < count; ++p) sum += parts[p * stride + i];
    out[i] = sum;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
