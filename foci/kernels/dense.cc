// Dense operators: how each call is cut into tasks. The cuts depend on shapes alone; what a task
// does lies in dense_gemm.cc and dense_ops.cc.
#include "foci/kernels/dense.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "foci/core/threads.h"
#include "foci/kernels/dense_ops.h"
#include "foci/kernels/gemm.h"

namespace foci::kernels {
namespace {

// Below this many multiply-adds (some 5 µs of one core) waking a second thread costs more than it
// brings.
constexpr int64_t kSerialWork = 1 << 18;
// Elements of one task of the elementwise operators (64 KB an operand).
constexpr int64_t kElementsPerTask = 16384;
// Columns of one block of C: at 256 terms its part of B fills 256 KB, half of a small L2 cache.
constexpr int64_t kBlockCols = 256;
// Rows of one block: from 2 to 8 tiles of 12, 4 to 16 of 6.
constexpr int64_t kMinBlockRows = 24;
constexpr int64_t kMaxBlockRows = 96;
// Rows of one block of a weight gradient, and blocks below which its sum is cut as well.
constexpr int64_t kWeightBlockRows = 192;
constexpr int64_t kWeightTasks = 16;

int64_t blocks_of(int64_t n, int64_t block) {
  return (n + block - 1) / block;
}
int64_t round_up(int64_t n, int64_t multiple) {
  return blocks_of(n, multiple) * multiple;
}

// 64-byte aligned, not initialised.
class Scratch {
 public:
  explicit Scratch(int64_t floats)
      : data_(static_cast<float*>(std::aligned_alloc(
            64, static_cast<size_t>(round_up(std::max<int64_t>(floats, 1), 16)) * sizeof(float)))) {
    if (!data_) throw std::bad_alloc();
  }
  float* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
};

// Runs f(begin, end) over [0, n) in blocks.
template <class F>
void for_blocks(int64_t n, int64_t block, const F& f) {
  parallel_for(blocks_of(n, block), [&](int64_t i) { f(i * block, std::min(n, (i + 1) * block)); });
}

// Rows of `channels` elements in one task.
int64_t rows_per_task(int64_t channels) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, channels));
}

struct Epilogue {
  const float* bias = nullptr;
  Activation activation = Activation::none;
  float* y = nullptr;
  int64_t ldy = 0;
};

// A's rows lie as rows: B is packed once, then blocks of C are independent.
void gemm_rows(const GemmKernels& kernels, const Gemm& g, const Epilogue& e) {
  if (g.m == 0 || g.n == 0) return;
  const bool transposed = g.layout == GemmLayout::nt;
  const int64_t width = kernels.panel_cols;
  const int64_t panels = blocks_of(g.n, width);
  const int64_t depths = blocks_of(g.k, kDepthBlock);
  const Scratch packed(panels * width * g.k);
  const auto pack = [&](int64_t task) {
    const int64_t k = task / panels * kDepthBlock, panel = task % panels;
    const int64_t depth = std::min(kDepthBlock, g.k - k), j = panel * width;
    kernels.pack(transposed, g.b + (transposed ? j * g.ldb + k : k * g.ldb + j), g.ldb, depth,
                 std::min(width, g.n - j),
                 packed.get() + k * panels * width + panel * depth * width);
  };
  if (g.n * g.k < kSerialWork / 4) {
    for (int64_t i = 0; i < depths * panels; ++i) pack(i);
  } else {
    parallel_for(depths * panels, pack);
  }

  const int64_t block_cols = round_up(kBlockCols, width);
  const int64_t col_blocks = blocks_of(g.n, block_cols);
  // About 64 blocks in all, so that any usual number of threads is kept busy.
  int64_t block_rows =
      std::clamp(round_up(g.m * col_blocks / 64, kMinBlockRows), kMinBlockRows, kMaxBlockRows);
  if (g.m * g.n * g.k < kSerialWork) block_rows = g.m;
  parallel_for(col_blocks * blocks_of(g.m, block_rows), [&](int64_t task) {
    const int64_t i = task / col_blocks * block_rows, j = task % col_blocks * block_cols;
    kernels.block({.m = std::min(block_rows, g.m - i),
                   .n = std::min(block_cols, g.n - j),
                   .k = g.k,
                   .a = g.a + i * g.lda,
                   .lda = g.lda,
                   .a_transposed = false,
                   .b = packed.get(),
                   .packed_cols = panels * width,
                   .first_panel = j / width,
                   .c = g.c + i * g.ldc + j,
                   .ldc = g.ldc,
                   .accumulate = g.accumulate,
                   .bias = e.bias ? e.bias + j : nullptr,
                   .activation = e.activation,
                   .y = e.y ? e.y + i * e.ldy + j : nullptr,
                   .ldy = e.ldy});
  });
}

// C = Aᵀ·B, summed over the rows of both; sums [m] = column sums of A where wanted. A small C
// leaves too few blocks for many threads, so then the rows are cut into chunks as well, whose
// partial results are added in order.
void gemm_columns(const GemmKernels& kernels, const Gemm& g, float* sums) {
  if (g.k == 0) {
    if (g.accumulate) return;
    for (int64_t i = 0; i < g.m; ++i) std::fill_n(g.c + i * g.ldc, g.n, 0.0f);
    if (sums) std::fill_n(sums, g.m, 0.0f);
    return;
  }
  const int64_t width = kernels.panel_cols;
  const int64_t block_cols = round_up(kBlockCols, width);
  // One even where C has no columns: the sums may be wanted all the same.
  const int64_t col_blocks = std::max<int64_t>(1, blocks_of(g.n, block_cols));
  const int64_t row_blocks = blocks_of(g.m, kWeightBlockRows);
  const int64_t per_chunk = col_blocks * row_blocks;
  int64_t chunks = 1;
  if (g.m * g.n * g.k >= kSerialWork) {
    chunks = std::clamp(blocks_of(kWeightTasks, per_chunk), int64_t{1}, blocks_of(g.k, 64));
  }
  const int64_t chunk_depth = round_up(std::max<int64_t>(1, blocks_of(g.k, chunks)), 8);
  chunks = std::max<int64_t>(1, blocks_of(g.k, chunk_depth));

  const int64_t stride = g.m * g.n, sums_stride = sums ? g.m : 0;
  const Scratch parts(chunks > 1 ? chunks * (stride + sums_stride) : 0);
  float* sums_parts = parts.get() + chunks * stride;
  parallel_for(chunks * per_chunk, [&](int64_t task) {
    const int64_t chunk = task / per_chunk, block = task % per_chunk;
    const int64_t i = block / col_blocks * kWeightBlockRows, j = block % col_blocks * block_cols;
    const int64_t m = std::min(kWeightBlockRows, g.m - i), n = std::min(block_cols, g.n - j);
    const int64_t begin = chunk * chunk_depth, end = std::min(g.k, begin + chunk_depth);
    float* c = chunks > 1 ? parts.get() + chunk * stride + i * g.n + j : g.c + i * g.ldc + j;
    const bool accumulate = chunks == 1 && g.accumulate;
    const int64_t panels = blocks_of(n, width);
    const Scratch packed(panels * width * kDepthBlock);
    for (int64_t k = begin; k < end || k == begin; k += kDepthBlock) {
      const int64_t depth = std::min(kDepthBlock, end - k);
      for (int64_t p = 0; p < panels; ++p) {
        kernels.pack(false, g.b + k * g.ldb + j + p * width, g.ldb, depth,
                     std::min(width, n - p * width), packed.get() + p * depth * width);
      }
      kernels.block({.m = m,
                     .n = n,
                     .k = depth,
                     .a = g.a + k * g.lda + i,
                     .lda = g.lda,
                     .a_transposed = true,
                     .b = packed.get(),
                     .packed_cols = panels * width,
                     .first_panel = 0,
                     .c = c,
                     .ldc = chunks > 1 ? g.n : g.ldc,
                     .accumulate = accumulate || k > begin,
                     .bias = nullptr,
                     .activation = Activation::none,
                     .y = nullptr,
                     .ldy = 0});
    }
    if (sums && j == 0) {
      float* out = chunks > 1 ? sums_parts + chunk * sums_stride + i : sums + i;
      kernels.column_sums(g.a + begin * g.lda + i, g.lda, end - begin, m, out, accumulate);
    }
  });
  if (chunks == 1) return;
  // Rows of C, a few thousand elements a task.
  const int64_t rows = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, g.n * chunks));
  for_blocks(g.m, rows, [&](int64_t begin, int64_t end) {
    if (g.ldc == g.n) {
      kernels.sum_parts(parts.get() + begin * g.n, chunks, stride, (end - begin) * g.n,
                        g.c + begin * g.n, g.accumulate);
    } else {
      for (int64_t i = begin; i < end; ++i) {
        kernels.sum_parts(parts.get() + i * g.n, chunks, stride, g.n, g.c + i * g.ldc,
                          g.accumulate);
      }
    }
  });
  if (sums) kernels.sum_parts(sums_parts, chunks, sums_stride, g.m, sums, g.accumulate);
}

}  // namespace

void gemm(SimdTarget target, const Gemm& a) {
  const GemmKernels& kernels = gemm_kernels(target);
  if (a.layout == GemmLayout::tn) {
    gemm_columns(kernels, a, nullptr);
  } else {
    gemm_rows(kernels, a, {});
  }
}

void linear_forward(SimdTarget target, const LinearForward& a) {
  const bool separate = a.pre != nullptr;
  Epilogue epilogue{.bias = a.bias, .activation = a.activation, .y = a.y, .ldy = a.ldy};
  gemm_rows(gemm_kernels(target),
            {.layout = GemmLayout::nt,
             .m = a.rows,
             .n = a.outputs,
             .k = a.inputs,
             .a = a.x,
             .lda = a.ldx,
             .b = a.w,
             .ldb = a.inputs,
             .c = separate ? a.pre : a.y,
             .ldc = separate ? a.outputs : a.ldy},
            epilogue);
}

void linear_backward_input(SimdTarget target, int64_t rows, int64_t inputs, int64_t outputs,
                           const float* dy, int64_t lddy, const float* w, float* dx, int64_t lddx,
                           bool accumulate) {
  gemm_rows(gemm_kernels(target),
            {.layout = GemmLayout::nn,
             .m = rows,
             .n = inputs,
             .k = outputs,
             .a = dy,
             .lda = lddy,
             .b = w,
             .ldb = inputs,
             .c = dx,
             .ldc = lddx,
             .accumulate = accumulate},
            {});
}

void linear_backward_weight(SimdTarget target, int64_t rows, int64_t inputs, int64_t outputs,
                            const float* dy, int64_t lddy, const float* x, int64_t ldx, float* dw,
                            float* dbias, bool accumulate) {
  gemm_columns(gemm_kernels(target),
               {.layout = GemmLayout::tn,
                .m = outputs,
                .n = inputs,
                .k = rows,
                .a = dy,
                .lda = lddy,
                .b = x,
                .ldb = ldx,
                .c = dw,
                .ldc = inputs,
                .accumulate = accumulate},
               dbias);
}

void activation_backward(SimdTarget target, Activation activation, int64_t n, const float* pre,
                         const float* dy, float* dpre) {
  const DenseOps& ops = dense_ops(target);
  for_blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    ops.activation_backward(activation, end - begin, pre + begin, dy + begin, dpre + begin);
  });
}

void layer_norm_forward(SimdTarget target, int64_t rows, int64_t channels, const float* x,
                        const float* gamma, const float* beta, float eps, float* y, float* mean,
                        float* rstd) {
  const DenseOps& ops = dense_ops(target);
  for_blocks(rows, rows_per_task(channels), [&](int64_t begin, int64_t end) {
    const int64_t at = begin * channels;
    ops.layer_norm_forward(end - begin, channels, x + at, gamma, beta, eps, y + at, mean + begin,
                           rstd + begin);
  });
}

void layer_norm_backward(SimdTarget target, int64_t rows, int64_t channels, const float* x,
                         const float* gamma, const float* mean, const float* rstd, const float* dy,
                         float* dx, float* dgamma, float* dbeta) {
  if (rows == 0 || channels == 0) return;
  const DenseOps& ops = dense_ops(target);
  // At most 256 parts, each with its own sums of the parameters' gradients.
  const int64_t block = std::max(rows_per_task(channels), blocks_of(rows, 256));
  const int64_t parts = blocks_of(rows, block);
  const Scratch sums(parts * 2 * channels);
  for_blocks(rows, block, [&](int64_t begin, int64_t end) {
    const int64_t at = begin * channels;
    float* own = sums.get() + begin / block * 2 * channels;
    ops.layer_norm_backward(end - begin, channels, x + at, gamma, mean + begin, rstd + begin,
                            dy + at, dx + at, own, own + channels);
  });
  const GemmKernels& kernels = gemm_kernels(target);
  kernels.sum_parts(sums.get(), parts, 2 * channels, channels, dgamma, true);
  kernels.sum_parts(sums.get() + channels, parts, 2 * channels, channels, dbeta, true);
}

void softmax_cross_entropy(SimdTarget target, int64_t rows, int64_t classes, const float* logits,
                           const int64_t* labels, float smoothing, float* loss, float* dlogits) {
  const DenseOps& ops = dense_ops(target);
  const float grad_scale = 1.0f / static_cast<float>(rows);
  for_blocks(rows, rows_per_task(classes), [&](int64_t begin, int64_t end) {
    const int64_t at = begin * classes;
    ops.softmax_cross_entropy(end - begin, classes, logits + at, labels + begin, smoothing,
                              grad_scale, loss + begin, dlogits + at);
  });
}

void add(SimdTarget target, int64_t n, const float* a, const float* b, float* y) {
  const DenseOps& ops = dense_ops(target);
  for_blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    ops.add(end - begin, a + begin, b + begin, y + begin);
  });
}

void axpy(SimdTarget target, int64_t n, float scale, const float* x, float* y) {
  const DenseOps& ops = dense_ops(target);
  for_blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    ops.axpy(end - begin, scale, x + begin, y + begin);
  });
}

void scale(SimdTarget target, int64_t n, float scale, float* x) {
  const DenseOps& ops = dense_ops(target);
  for_blocks(n, kElementsPerTask,
             [&](int64_t begin, int64_t end) { ops.scale(end - begin, scale, x + begin); });
}

double sum_of_squares(SimdTarget target, int64_t n, const float* x) {
  const DenseOps& ops = dense_ops(target);
  std::vector<double> parts(static_cast<size_t>(blocks_of(n, kElementsPerTask)));
  for_blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    parts[static_cast<size_t>(begin / kElementsPerTask)] =
        ops.sum_of_squares(end - begin, x + begin);
  });
  double sum = 0;
  for (double part : parts) sum += part;
  return sum;
}

void adamw_step(SimdTarget target, int64_t n, const AdamW& a, const float* grad, float* param,
                float* m, float* v) {
  const DenseOps& ops = dense_ops(target);
  for_blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    ops.adamw_step(end - begin, a, grad + begin, param + begin, m + begin, v + begin);
  });
}

}  // namespace foci::kernels
