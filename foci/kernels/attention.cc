// The table of fused attention kernels, compiled once a SIMD target.
#include "foci/kernels/attention.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "foci/kernels/attention.cc"
#include "foci/core/highway_targets.h"
// After foci's choice of targets.
#include <hwy/foreach_target.h>

#include "foci/kernels/attention/narrow-inl.h"
#include "foci/kernels/attention/softmax_backward-inl.h"
#include "foci/kernels/attention/sparse_backward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

size_t forward_bytes(const RowMap& map, int64_t keys, int64_t D, int64_t Dv, bool coverage) {
  return map.sparse() ? sparse_scratch(map, keys, D, Dv) : forward_scratch(keys, D, Dv, coverage);
}

size_t backward_bytes(const RowMap& map, int64_t keys, int64_t D, int64_t Dv) {
  return map.sparse() ? sparse_backward_scratch(map, keys, D, Dv) : backward_scratch(keys, D, Dv);
}

size_t weights_bytes(const RowMap& map, int64_t keys, int64_t D, int64_t Dv) {
  return forward_bytes(map, keys, D, Dv, true);
}

void forward_strip(const RowMap& map, const Strip& s, const StripOutputs& o, std::byte* scratch) {
  if (map.sparse()) return forward_sparse(map, s, o, scratch);
  forward_softmax(s, o, scratch);
}

void backward_strips(const RowMap& map, const Strip* strips, int count, const TileGradients& g,
                     std::byte* scratch) {
  if (!map.sparse()) return backward_softmax(strips, count, g, scratch);
  for (int t = 0; t < count; ++t) {
    backward_sparse_strip(map, strips[t], g, t * strip_width(), scratch);
  }
}

void strip_weights(const RowMap& map, const Strip& s, float* weights, int64_t stride,
                   std::byte* scratch) {
  if (map.sparse()) return sparse_strip_weights(map, s, weights, stride, scratch);
  softmax_strip_weights(s, weights, stride, scratch);
}

void add_rows(int64_t rows, int64_t depth, const float* from, int64_t from_stride, float* to,
              int64_t to_stride, bool accumulate) {
  const DF d;
  const int64_t L = lanes();
  for (int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride) {
    int64_t i = 0;
    for (; i + L <= depth; i += L) {
      const VF x = hn::LoadU(d, from + i);
      hn::StoreU(accumulate ? hn::Add(hn::LoadU(d, to + i), x) : x, d, to + i);
    }
    for (; i < depth; ++i) to[i] = accumulate ? to[i] + from[i] : from[i];
  }
}

void join_rows(int64_t rows, int64_t depth, const float* from, int64_t from_stride, float* to,
               int64_t to_stride, float* low, int64_t low_stride) {
  const DF d;
  const int64_t L = lanes();
  for (int64_t r = 0; r < rows; ++r, from += from_stride, to += to_stride, low += low_stride) {
    for (int64_t i = 0; i < depth; i += L) {
      const auto n = static_cast<size_t>(HWY_MIN(L, depth - i));
      VF lo = hn::LoadU(d, low + i);
      const VF sum = add_exactly(load_first(d, n, from + i), load_first(d, n, to + i), lo);
      store_first(sum, d, n, to + i);
      hn::StoreU(lo, d, low + i);
    }
  }
}

bool any_beyond(const float* x, int64_t n) {
  const DF d;
  const int64_t L = lanes();
  const VF limit = hn::Set(d, kProductLimit);
  // A comparison with NaN is false.
  hn::Mask<DF> fine = hn::Eq(limit, limit);
  int64_t i = 0;
  for (; i + L <= n; i += L) fine = hn::And(fine, hn::Le(hn::Abs(hn::LoadU(d, x + i)), limit));
  bool result = !hn::AllTrue(d, fine);
  for (; i < n; ++i) result = result || !(std::abs(x[i]) <= kProductLimit);
  return result;
}

const AttentionKernels* attention_table() {
  static const AttentionKernels table{static_cast<int>(strip_width()),
                                      static_cast<int>(lanes()),
                                      forward_bytes,
                                      backward_bytes,
                                      weights_bytes,
                                      forward_strip,
                                      narrow_scratch,
                                      forward_narrow,
                                      backward_strips,
                                      add_part,
                                      break_keys,
                                      strip_weights,
                                      any_beyond,
                                      exponentials,
                                      add_rows,
                                      join_rows,
                                      box_rows,
                                      widen_run};
  return &table;
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foci::kernels {
FOCI_KERNEL_TABLE(AttentionKernels, attention_table, attention_kernels)
}  // namespace foci::kernels
#endif
