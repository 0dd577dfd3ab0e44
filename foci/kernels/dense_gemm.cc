// The matrix product's task-level functions, compiled once a SIMD target.
#define HWY_TARGET_INCLUDE "foci/kernels/dense_gemm.cc"
#include "foci/core/highway_targets.h"
// After foci's choice of targets.
#include <hwy/foreach_target.h>

#include "foci/kernels/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

const GemmKernels* gemm_table() {
  static constexpr GemmKernels t{.tile_rows = kTileRows,
                                 .panel_cols = kPanelCols,
                                 .near_stride = kNearColumns,
                                 .block = gemm_block,
                                 .thin_rows = kThinRows,
                                 .thin = gemm_thin,
                                 .pack = gemm_pack,
                                 .pack_tiles = gemm_pack_tiles,
                                 .column_sums = gemm_column_sums,
                                 .sum_parts = gemm_sum_parts,
                                 .add_kept = gemm_add_kept,
                                 .kept_sum = gemm_kept_sum};
  return &t;
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foci::kernels {
FOCI_KERNEL_TABLE(GemmKernels, gemm_table, gemm_kernels)
}
#endif
