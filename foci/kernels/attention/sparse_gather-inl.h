// Sums over the keys of a compact strip: Yᵀ = VᵀP and dQᵀ = KᵀdS.
//
// A row of few weights is one chain of multiply-adds. A row of many is cut into runs by key number,
// as dense rows are (RunCut). The weights that a neighbour alone has add exact zeros to either, so
// that a row's bits depend on its own weights only; a strip that holds rows of both kinds is gone
// through twice.
#if defined(FOCI_KERNELS_ATTENTION_SPARSE_GATHER_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOCI_KERNELS_ATTENTION_SPARSE_GATHER_INL_H_
#undef FOCI_KERNELS_ATTENTION_SPARSE_GATHER_INL_H_
#else
#define FOCI_KERNELS_ATTENTION_SPARSE_GATHER_INL_H_
#endif

#include <cstring>

#include "foci/kernels/attention/normalizers/sparse-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Weights of a row up to which it counts as one of few: its chain is off by some 2e-6 at the most.
// Rows of entmax below α = 2 would often lie on both sides of it in one strip, whose keys are dense
// by then: they are always cut.
inline float few_weights(const RowMap& map) {
  return map.kind == RowNormalizer::entmax && map.alpha < 2 ? 0.0f : 64.0f;
}

// Panels [depth][W] of sums over a list of keys.
struct ListSums {
  float* few = nullptr;     // the result
  float* many = nullptr;    // of one block of keys
  double* wide = nullptr;   // of all blocks
  float* buffer = nullptr;  // rows, [kKeyBlock] or as many as there are keys, [depth]
};
inline size_t list_sums_bytes(int64_t keys, int64_t depth) {
  const int64_t W = strip_width();
  return 2 * Carver::bytes<float>(depth * W) + Carver::bytes<double>(depth * W) +
         Carver::bytes<float>(HWY_MIN(keys, kKeyBlock) * depth);
}
inline void take_list_sums(int64_t keys, int64_t depth, Carver& mem, ListSums& sums) {
  const int64_t W = strip_width();
  sums.few = mem.take<float>(depth * W);
  sums.many = mem.take<float>(depth * W);
  sums.wide = mem.take<double>(depth * W);
  sums.buffer = mem.take<float>(HWY_MIN(keys, kKeyBlock) * depth);
}

struct ListPiece {
  const float* strip;    // [n][W]
  const float* weights;  // [n][W], −0 where careful mode steps over the entry
};

// sums.few = Σ_u rows[index[u]] · strip[u], entries [u, u + n) of which piece(u, n) gives.
template <class Piece>
HWY_INLINE void gather_list(const RowMap& map, const Strip& s, const SparseStrip& p, int64_t depth,
                            const float* rows, int64_t stride, const ListSums& sums,
                            const Piece& piece) {
  const int64_t W = strip_width();
  const bool half = half_strip(s.mask.lanes);
  const size_t floats = static_cast<size_t>(depth * W);
  const float few = few_weights(map);
  bool any_few = false, any_many = false;
  for (int lane = 0; lane < s.mask.lanes; ++lane) {
    if (p.support[lane] == 0) continue;
    any_few = any_few || p.support[lane] <= few;
    any_many = any_many || p.support[lane] > few;
  }
  std::memset(sums.few, 0, sizeof(float) * floats);
  RunCut cut;
  const auto gather = [&](int64_t u, int64_t n, float* to) {
    const RowBlock block = rows_together(n, p.index + u, depth, rows, stride, sums.buffer);
    const ListPiece entries = piece(u, n);
    gather_strip(half, s.careful, cut, depth, block.rows, block.stride, entries.strip,
                 entries.weights, to);
  };
  if (any_few || !any_many) {
    cut.chain = true;
    for (int64_t u = 0; u < p.count; u += kKeyBlock) {
      const int64_t n = HWY_MIN(p.count - u, kKeyBlock);
      cut.count = 0;
      cut.add(n);
      gather(u, n, sums.few);
    }
  }
  if (!any_many) return;
  cut.chain = false;
  std::memset(sums.many, 0, sizeof(float) * floats);
  std::memset(sums.wide, 0, sizeof(double) * floats);
  for (int64_t u = 0, end; u < p.count; u = end) {
    const int64_t block = p.index[u] / kKeyBlock;
    cut.count = 0;
    for (end = u; end < p.count && p.index[end] / kKeyBlock == block;) {
      const int64_t run = p.index[end] / kRunKeys;
      while (end < p.count && p.index[end] / kRunKeys == run) ++end;
      cut.add(end - u);
    }
    gather(u, end - u, sums.many);
    fold_panel(depth, nullptr, sums.many, sums.wide);
  }
  unfold_panel(depth, sums.wide, sums.many);
  for (int64_t lane = 0; lane < s.mask.lanes; ++lane) {
    if (p.support[lane] <= few) continue;
    for (int64_t i = 0; i < depth; ++i) sums.few[i * W + lane] = sums.many[i * W + lane];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
