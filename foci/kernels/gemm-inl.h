// The micro-kernel of matrix products and what stands around it in one task: packing, tails,
// bias and activation. See gemm.h for the contract.
#if defined(FOCI_KERNELS_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_GEMM_INL_H_
#undef FOCI_KERNELS_GEMM_INL_H_
#else
#define FOCI_KERNELS_GEMM_INL_H_
#endif

#include <algorithm>

#include "foci/kernels/dense_math-inl.h"
#include "foci/kernels/gemm.h"

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
constexpr int64_t kLanes = hn::MaxLanes(FloatTag());
constexpr int64_t kPanelCols = kTileVectors * kLanes;

// c [kRows, panel] = init + A·B (or += A·B), A being element (r, k) at a[r·row_step +
// k·depth_step].
template <int kRows, bool kTransposed>
HWY_INLINE void tile(int64_t depth, const float* HWY_RESTRICT a, int64_t lda,
                     const float* HWY_RESTRICT b, float* HWY_RESTRICT c, int64_t ldc,
                     const float* HWY_RESTRICT bias, bool accumulate) {
  const FloatTag d;
  FloatVec sum[kRows][kTileVectors];
  const FloatVec init0 = bias ? hn::LoadU(d, bias) : hn::Zero(d);
  const FloatVec init1 = bias ? hn::LoadU(d, bias + kLanes) : hn::Zero(d);
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    sum[r][0] = init0;
    sum[r][1] = init1;
  }
  for (int64_t k = 0; k < depth; ++k) {
    const FloatVec b0 = hn::Load(d, b);
    const FloatVec b1 = hn::Load(d, b + kLanes);
    HWY_UNROLL(16)
    for (int r = 0; r < kRows; ++r) {
      const FloatVec ar = hn::Set(d, kTransposed ? a[r] : a[r * lda]);
      sum[r][0] = hn::MulAdd(ar, b0, sum[r][0]);
      sum[r][1] = hn::MulAdd(ar, b1, sum[r][1]);
    }
    a += kTransposed ? lda : 1;
    b += kPanelCols;
  }
  HWY_UNROLL(16)
  for (int r = 0; r < kRows; ++r) {
    float* row = c + r * ldc;
    if (accumulate) {
      sum[r][0] = hn::Add(hn::LoadU(d, row), sum[r][0]);
      sum[r][1] = hn::Add(hn::LoadU(d, row + kLanes), sum[r][1]);
    }
    hn::StoreU(sum[r][0], d, row);
    hn::StoreU(sum[r][1], d, row + kLanes);
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
      const auto mask = hn::FirstN(d, static_cast<size_t>(cols - j));
      hn::BlendedStore(f(hn::MaskedLoad(mask, d, xr + j)), mask, d, yr + j);
    }
  }
}

struct TileArgs {
  int64_t depth, lda, cols, ldc, ldy;
  const float* b;
  const float* bias;
  bool accumulate;
  Activation activation;  // none before the last depth block
};

template <int kRows, bool kTransposed>
HWY_NOINLINE void finished_tile(const TileArgs& t, const float* a, float* c, float* y) {
  if (t.cols == kPanelCols) {
    tile<kRows, kTransposed>(t.depth, a, t.lda, t.b, c, t.ldc, t.bias, t.accumulate);
  } else {
    // A panel that the matrix does not fill: the same sums, of which the valid ones are kept.
    HWY_ALIGN float full[kRows * kPanelCols];
    HWY_ALIGN float bias[kPanelCols] = {};
    if (t.bias) std::copy_n(t.bias, t.cols, bias);
    tile<kRows, kTransposed>(t.depth, a, t.lda, t.b, full, kPanelCols, t.bias ? bias : nullptr,
                             false);
    for (int r = 0; r < kRows; ++r) {
      for (int64_t j = 0; j < t.cols; ++j) {
        float& out = c[r * t.ldc + j];
        out = t.accumulate ? out + full[r * kPanelCols + j] : full[r * kPanelCols + j];
      }
    }
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
HWY_INLINE void panel_rows(const TileArgs& t, int64_t rows, const float* a, float* c, float* y) {
  int64_t r = 0;
  const auto run = [&](auto tile_of, int64_t count) HWY_ATTR {
    tile_of(t, a + r * (kTransposed ? 1 : t.lda), c + r * t.ldc, y ? y + r * t.ldy : nullptr);
    r += count;
  };
  while (rows - r >= kTileRows) run(finished_tile<kTileRows, kTransposed>, kTileRows);
  if (kTileRows > 8 && rows - r >= 8) run(finished_tile<8, kTransposed>, 8);
  if (rows - r >= 4) run(finished_tile<4, kTransposed>, 4);
  if (rows - r >= 2) run(finished_tile<2, kTransposed>, 2);
  if (rows - r >= 1) run(finished_tile<1, kTransposed>, 1);
}

void gemm_block(const GemmBlock& g) {
  for (int64_t k = 0; k < g.k || k == 0; k += kDepthBlock) {
    const int64_t depth = std::min(kDepthBlock, g.k - k);
    const bool last = k + depth >= g.k;
    const float* b = g.b + k * g.packed_cols + g.first_panel * depth * kPanelCols;
    const float* a = g.a + k * (g.a_transposed ? g.lda : 1);
    for (int64_t j = 0; j < g.n; j += kPanelCols, b += depth * kPanelCols) {
      const TileArgs t{.depth = depth,
                       .lda = g.lda,
                       .cols = std::min(kPanelCols, g.n - j),
                       .ldc = g.ldc,
                       .ldy = g.ldy,
                       .b = b,
                       .bias = k == 0 && g.bias ? g.bias + j : nullptr,
                       .accumulate = g.accumulate || k > 0,
                       .activation = last ? g.activation : Activation::none};
      float* y = g.y && last ? g.y + j : nullptr;
      if (g.a_transposed) {
        panel_rows<true>(t, g.m, a, g.c + j, y);
      } else {
        panel_rows<false>(t, g.m, a, g.c + j, y);
      }
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
