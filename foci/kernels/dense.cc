// Dense operators: how each call is cut into tasks. The cuts depend on shapes alone; what a task
// does lies in dense_gemm.cc and dense_ops.cc.
#include "foci/kernels/dense.h"

#include <algorithm>
#include <cassert>
#include <vector>

#include "foci/core/threads.h"
#include "foci/kernels/dense_ops.h"
#include "foci/kernels/gemm.h"
#include "foci/kernels/scratch.h"

namespace foci::kernels {
namespace {

// Below this many multiply-adds (some 5 µs of one core) waking a second thread costs more than it
// brings.
constexpr int64_t kSerialWork = 1 << 18;
// Elements of one task of the elementwise operators (64 KB an operand).
constexpr int64_t kElementsPerTask = 16384;
// Up to this many rows B is packed where it is used; and the elements of B that one task then reads
// at least (256 KB).
constexpr int64_t kFewRows = 16;
constexpr int64_t kFewRowsElements = 1 << 16;
// Columns of one block of C: its part of B fills 384 KB, three quarters of a small L2 cache.
constexpr int64_t kBlockCols = 256;
// Rows of one block: from 2 to 8 tiles of 12, 4 to 16 of 6.
constexpr int64_t kMinBlockRows = 24;
constexpr int64_t kMaxBlockRows = 96;
// Rows and columns of one block of a weight gradient, and the number of blocks below which the sum
// is cut as well.
constexpr int64_t kWeightBlockRows = 96;
constexpr int64_t kWeightBlockCols = 256;
constexpr int64_t kWeightTasks = 8;
// Up to this many elements between rows, a block's rows share pages and spread over cache sets.
constexpr int64_t kNearStride = 512;
// Rows whose distance is a multiple of 2 KB fall into at most two groups of L1 cache sets, too few
// for the twelve that a tile reads at once; such rows are copied to a distance that is odd in
// lines.
constexpr int64_t kBadStride = 512;
constexpr int64_t kCopyStride = kDepthBlock + 16;

int64_t blocks_of(int64_t n, int64_t block) {
  return (n + block - 1) / block;
}
int64_t round_up(int64_t n, int64_t multiple) {
  return blocks_of(n, multiple) * multiple;
}

// Runs f(begin, end) over [0, n) in blocks.
template <class F>
void for_blocks(int64_t n, int64_t block, const F& f) {
  parallel_for(blocks_of(n, block), [&](int64_t i) { f(i * block, std::min(n, (i + 1) * block)); });
}

void copy_rows(const float* from, int64_t ld_from, int64_t rows, int64_t cols, float* to,
               int64_t ld_to) {
  for (int64_t r = 0; r < rows; ++r) std::copy_n(from + r * ld_from, cols, to + r * ld_to);
}

// Rows of `channels` elements in one task.
int64_t rows_per_task(int64_t channels) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, channels));
}

// What goes into C beside the products. Pointers stand at C's first element.
struct Epilogue {
  const float* bias = nullptr;
  Finish finish = {};
};

// Runs the packing of one depth block and part, for all depth blocks and parts.
template <class F>
void for_parts(int64_t k, int64_t parts, int64_t columns, const F& pack) {
  const int64_t tasks = blocks_of(k, kDepthBlock) * parts;
  const auto run = [&](int64_t task) { pack(task / parts * kDepthBlock, task % parts); };
  if (columns * k < kSerialWork / 4) {
    for (int64_t i = 0; i < tasks; ++i) run(i);
  } else {
    parallel_for(tasks, run);
  }
}

// All of B: for each depth block its panels, one after the other.
Scratch pack_panels(const GemmKernels& kernels, const Gemm& g) {
  const bool transposed = g.layout == GemmLayout::nt;
  const int64_t width = kernels.panel_cols, panels = blocks_of(g.n, width);
  Scratch packed(panels * width * g.k);
  for_parts(g.k, panels, g.n, [&](int64_t k, int64_t panel) {
    const int64_t depth = std::min(kDepthBlock, g.k - k), j = panel * width;
    kernels.pack(transposed, g.b + (transposed ? j * g.ldb + k : k * g.ldb + j), g.ldb, depth,
                 std::min(width, g.n - j), packed.get() + (k * panels + panel * depth) * width);
  });
  return packed;
}

// The part of C [i, i + m) × [j, j + n) over the depth block that begins at k: all that does not
// depend on where A and B were copied.
GemmBlock row_block(const GemmKernels& kernels, const Gemm& g, const Epilogue& e, int64_t i,
                    int64_t m, int64_t j, int64_t n, int64_t k) {
  const int64_t depth = std::min(kDepthBlock, g.k - k);
  GemmBlock b{.m = m,
              .n = n,
              .k = depth,
              .a = g.a + i * g.lda + k,
              .lda = g.lda,
              .read_a = ReadA::rows,
              .tile_step = kernels.tile_rows * g.lda,
              .b = nullptr,
              .ldb = kernels.panel_cols,
              .panel_step = depth * kernels.panel_cols,
              .c = g.c + i * g.ldc + j,
              .ldc = g.ldc,
              .accumulate = g.accumulate || k > 0,
              .bias = e.bias && k == 0 ? e.bias + j : nullptr};
  if (k + depth == g.k) {
    b.finish = e.finish;
    if (b.finish.slope) b.finish.slope += i * e.finish.ld_slope + j;
    if (b.finish.add) b.finish.add += i * e.finish.ld_add + j;
    if (b.finish.factor) b.finish.factor += i * e.finish.ld_factor + j;
  }
  return b;
}

// C [m, n] over a long depth: each span of it adds up in a place of its own, and what rounding
// takes where spans are joined is kept beside.
class Spans {
 public:
  // Nothing is needed where one span is all.
  Spans(const GemmKernels& kernels, int64_t m, int64_t n, int64_t depth)
      : kernels_(kernels), m_(m), n_(n), room_(depth > kSpan ? 3 * m * n : 0) {}

  // Runs block over `part`, the depth block that begins k into the sum, or the last one with what
  // finishes C. `begin`: what C holds counts.
  template <class F>
  void run(GemmBlock part, int64_t k, bool last, bool begin, const F& block) {
    if (!room_.get() || m_ * n_ == 0) return block(part);
    float *const span = room_.get(), *const high = span + m_ * n_, *const low = high + m_ * n_;
    const GemmBlock whole = part;
    if (k == 0) {
      std::fill_n(low, m_ * n_, 0.0f);
      for (int64_t i = 0; i < m_; ++i) {
        if (begin) {
          std::copy_n(part.c + i * part.ldc, n_, high + i * n_);
        } else if (part.bias) {
          std::copy_n(part.bias, n_, high + i * n_);
        } else {
          std::fill_n(high + i * n_, n_, 0.0f);
        }
      }
    }
    part.c = span;
    part.ldc = n_;
    part.bias = nullptr;
    part.finish = {};
    part.accumulate = k % kSpan != 0;
    block(part);
    if (!last && (k + kDepthBlock) % kSpan != 0) return;
    kernels_.add_kept(m_ * n_, span, high, low);
    if (!last) return;
    for (int64_t i = 0; i < m_; ++i) {
      kernels_.kept_sum(n_, high + i * n_, low + i * n_, whole.c + i * whole.ldc);
    }
    // A block of no depth, for what is done to whole sums.
    GemmBlock finish = whole;
    finish.k = 0;
    finish.bias = nullptr;
    finish.accumulate = true;
    if (finish.finish.activation != Activation::none || finish.finish.add || finish.finish.factor) {
      kernels_.block(finish);
    }
  }

 private:
  const GemmKernels& kernels_;
  int64_t m_, n_;
  Scratch room_;
};

// Few rows, as of single tokens, leave nothing to gain from packing all of B: each task packs a
// panel at a time into memory that stays in cache and uses it at once, so that B is read once.
void gemm_few_rows(const GemmKernels& kernels, const Gemm& g, const Epilogue& e) {
  const int64_t width = kernels.panel_cols;
  const int64_t per_task =
      std::max<int64_t>(1, kFewRowsElements / (width * std::max<int64_t>(1, g.k)));
  const bool transposed = g.layout == GemmLayout::nt;
  for_blocks(blocks_of(g.n, width), per_task, [&](int64_t begin, int64_t end) {
    const Scratch panel(std::min(kDepthBlock, g.k) * width);
    for (int64_t j = begin * width; j < std::min(g.n, end * width); j += width) {
      const int64_t cols = std::min(width, g.n - j);
      Spans spans(kernels, g.m, cols, g.k);
      for (int64_t k = 0; k < g.k || k == 0; k += kDepthBlock) {
        GemmBlock block = row_block(kernels, g, e, 0, g.m, j, cols, k);
        const bool last = k + kDepthBlock >= g.k;
        const float* b = g.b + (transposed ? j * g.ldb + k : k * g.ldb + j);
        if (transposed && cols == width && g.m <= kernels.thin_rows) {
          block.b = b;
          block.ldb = g.ldb;
          spans.run(block, k, last, g.accumulate, kernels.thin);
          continue;
        }
        kernels.pack(transposed, b, g.ldb, block.k, cols, panel.get());
        block.b = panel.get();
        spans.run(block, k, last, g.accumulate, kernels.block);
      }
    }
  });
}

// A's rows lie as rows: B is packed once, then blocks of C are independent.
void gemm_rows(const GemmKernels& kernels, const Gemm& g, const Epilogue& e) {
  if (g.m == 0 || g.n == 0) return;
  if (g.m <= kFewRows) return gemm_few_rows(kernels, g, e);
  const int64_t width = kernels.panel_cols, panels = blocks_of(g.n, width);
  const Scratch packed = pack_panels(kernels, g);
  const bool copy_a = g.n > width && g.lda > 0 && g.lda % kBadStride == 0;
  // Copied rows serve all columns.
  const int64_t block_cols = round_up(copy_a ? g.n : kBlockCols, width);
  const int64_t col_blocks = blocks_of(g.n, block_cols);
  // About 64 blocks in all, so that any usual number of threads is kept busy.
  int64_t block_rows =
      std::clamp(round_up(g.m * col_blocks / 64, kMinBlockRows), kMinBlockRows, kMaxBlockRows);
  if (g.m * g.n * g.k < kSerialWork) block_rows = g.m;
  parallel_for(col_blocks * blocks_of(g.m, block_rows), [&](int64_t task) {
    const int64_t i = task / col_blocks * block_rows, j = task % col_blocks * block_cols;
    const int64_t m = std::min(block_rows, g.m - i), n = std::min(block_cols, g.n - j);
    const Scratch copy(copy_a ? m * kCopyStride : 0);
    Spans spans(kernels, m, n, g.k);
    for (int64_t k = 0; k < g.k || k == 0; k += kDepthBlock) {
      GemmBlock block = row_block(kernels, g, e, i, m, j, n, k);
      block.b = packed.get() + k * panels * width + j * block.k;
      if (copy_a) {
        copy_rows(block.a, g.lda, m, block.k, copy.get(), kCopyStride);
        block.a = copy.get();
        block.lda = kCopyStride;
        block.tile_step = kernels.tile_rows * kCopyStride;
      }
      spans.run(block, k, k + kDepthBlock >= g.k, g.accumulate, kernels.block);
    }
  });
}

// C = Aᵀ·B, summed over the rows of both; sums [m] = column sums of A where wanted. A small C
// leaves too few blocks for many threads, so then the rows are cut into chunks as well, whose
// partial results are added in order.
void gemm_columns(const GemmKernels& kernels, const Gemm& g, float* sums) {
  if (g.m == 0) return;
  if (g.k == 0) {
    if (g.accumulate) return;
    for (int64_t i = 0; i < g.m; ++i) std::fill_n(g.c + i * g.ldc, g.n, 0.0f);
    if (sums) std::fill_n(sums, g.m, 0.0f);
    return;
  }
  const int64_t width = kernels.panel_cols, height = kernels.tile_rows;
  // Rows that lie close are read where they are. Those far apart would fight for few cache sets and
  // pages; and a panel that the matrix does not fill must be padded.
  const bool near_a = g.lda <= kernels.near_stride;
  const bool near_b = g.ldb <= kNearStride && g.n % width == 0;
  // A packed panel of B is used by all rows of a block, packed tiles of A by all columns.
  int64_t block_rows = kWeightBlockRows, block_cols = kWeightBlockCols;
  if (!near_b) {
    block_rows *= near_a ? 4 : 2;
    block_cols = near_a ? kWeightBlockCols / 2 : kWeightBlockCols * 3 / 4;
  }
  block_cols = round_up(block_cols, width);
  // One even where C has no columns: the sums may be wanted all the same.
  const int64_t col_blocks = std::max<int64_t>(1, blocks_of(g.n, block_cols));
  const int64_t per_chunk = col_blocks * blocks_of(g.m, block_rows);
  const int64_t depths = blocks_of(g.k, kDepthBlock);
  const int64_t chunk_depth =
      kDepthBlock * blocks_of(depths, std::min(depths, blocks_of(kWeightTasks, per_chunk)));
  const int64_t chunks = blocks_of(g.k, chunk_depth);

  const int64_t stride = g.m * g.n, sums_stride = sums ? g.m : 0;
  const Scratch parts(chunks > 1 ? chunks * (stride + sums_stride) : 0);
  float* sums_parts = parts.get() + chunks * stride;
  parallel_for(chunks * per_chunk, [&](int64_t task) {
    const int64_t chunk = task / per_chunk, block = task % per_chunk;
    const int64_t i = block / col_blocks * block_rows, j = block % col_blocks * block_cols;
    const int64_t m = std::min(block_rows, g.m - i);
    const int64_t begin = chunk * chunk_depth, end = std::min(g.k, begin + chunk_depth);
    float* c = chunks > 1 ? parts.get() + chunk * stride + i * g.n + j : g.c + i * g.ldc + j;
    const bool accumulate = chunks == 1 && g.accumulate;
    const int64_t n = std::min(block_cols, g.n - j), most = std::min(kDepthBlock, g.k);
    const Scratch tiles(near_a ? 0 : round_up(m, height) * most), panel(near_b ? 0 : width * most);
    Spans spans(kernels, m, n, end - begin);
    for (int64_t k = begin; k < end; k += kDepthBlock) {
      const int64_t depth = std::min(kDepthBlock, end - k);
      const float* a = g.a + k * g.lda + i;
      const float* b = g.b + k * g.ldb + j;
      if (!near_a) kernels.pack_tiles(a, g.lda, depth, m, tiles.get());
      GemmBlock part{.m = m,
                     .n = n,
                     .k = depth,
                     .a = near_a ? a : tiles.get(),
                     .lda = g.lda,
                     .read_a = near_a ? ReadA::columns : ReadA::tiles,
                     .tile_step = near_a ? height : height * depth,
                     .b = b,
                     .ldb = near_b ? g.ldb : width,
                     .panel_step = width,
                     .c = c,
                     .ldc = chunks > 1 ? g.n : g.ldc,
                     .accumulate = accumulate || k > begin};
      spans.run(part, k - begin, k + kDepthBlock >= end, accumulate, [&](GemmBlock to) {
        if (near_b) return kernels.block(to);
        float* const first = to.c;
        for (int64_t col = 0; col < n; col += width) {
          to.n = std::min(width, n - col);
          kernels.pack(false, b + col, g.ldb, depth, to.n, panel.get());
          to.b = panel.get();
          to.c = first + col;
          kernels.block(to);
        }
      });
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
  assert(!a.slope || a.activation == Activation::gelu);
  gemm_rows(gemm_kernels(target),
            {.layout = GemmLayout::nt,
             .m = a.rows,
             .n = a.outputs,
             .k = a.inputs,
             .a = a.x,
             .lda = a.ldx,
             .b = a.w,
             .ldb = a.inputs,
             .c = a.y,
             .ldc = a.ldy},
            {.bias = a.bias,
             .finish = {.activation = a.activation,
                        .slope = a.slope,
                        .ld_slope = a.outputs,
                        .add = a.residual,
                        .ld_add = a.outputs}});
}

void linear_backward_input(SimdTarget target, const LinearBackwardInput& a) {
  const bool in_place = a.add == a.dx && a.add != nullptr;
  assert(!in_place || (!a.factor && a.lddx == a.inputs));
  gemm_rows(gemm_kernels(target),
            {.layout = GemmLayout::nn,
             .m = a.rows,
             .n = a.inputs,
             .k = a.outputs,
             .a = a.dy,
             .lda = a.lddy,
             .b = a.w,
             .ldb = a.inputs,
             .c = a.dx,
             .ldc = a.lddx,
             .accumulate = in_place},
            {.finish = {.add = in_place ? nullptr : a.add,
                        .ld_add = a.inputs,
                        .factor = a.factor,
                        .ld_factor = a.inputs}});
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

void activation_backward(SimdTarget target, Activation activation, int64_t n, const float* saved,
                         const float* dy, float* dpre) {
  const DenseOps& ops = dense_ops(target);
  for_blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    ops.activation_backward(activation, end - begin, saved + begin, dy + begin, dpre + begin);
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
                         const float* add, float* dx, float* dgamma, float* dbeta) {
  if (rows == 0 || channels == 0) return;
  const DenseOps& ops = dense_ops(target);
  // At most 256 parts, each with its own sums of the parameters' gradients.
  const int64_t block = std::max(rows_per_task(channels), blocks_of(rows, 256));
  const int64_t parts = blocks_of(rows, block);
  const Scratch sums(parts * 2 * channels);
  const GemmKernels& kernels = gemm_kernels(target);
  for_blocks(rows, block, [&](int64_t begin, int64_t end) {
    float* const own = sums.get() + begin / block * 2 * channels;
    const auto run = [&](int64_t from, int64_t to, float* both) {
      const int64_t at = from * channels;
      ops.layer_norm_backward(to - from, channels, x + at, gamma, mean + from, rstd + from, dy + at,
                              add ? add + at : nullptr, dx + at, both, both + channels);
    };
    if (end - begin <= kSumRows) return run(begin, end, own);
    const Scratch few(2 * channels), low(2 * channels);
    std::fill_n(own, 2 * channels, 0.0f);
    std::fill_n(low.get(), 2 * channels, 0.0f);
    for (int64_t r = begin; r < end; r += kSumRows) {
      run(r, std::min(end, r + kSumRows), few.get());
      kernels.add_kept(2 * channels, few.get(), own, low.get());
    }
    kernels.kept_sum(2 * channels, own, low.get(), own);
  });
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

void adamw_step(SimdTarget target, int64_t n, const AdamW& a, float* grad, float* param, float* m,
                float* v) {
  const DenseOps& ops = dense_ops(target);
  for_blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    ops.adamw_step(end - begin, a, grad + begin, param + begin, m + begin, v + begin);
  });
}

}  // namespace foci::kernels
