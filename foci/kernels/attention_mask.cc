// Lane masks as bits: which lanes of a strip may see which key.
#include <algorithm>

#include "foci/kernels/attention.h"

namespace foci::kernels {

void lane_bits(const LaneMask& mask, int64_t begin, int64_t end, uint32_t* bits) noexcept {
  std::fill_n(bits, end - begin, 0u);
  for (int lane = 0; lane < mask.lanes; ++lane) {
    const uint32_t bit = 1u << lane;
    const int64_t from = std::max(begin, mask.begin[lane]);
    const int64_t to = std::min(end, mask.end[lane]);
    if (from >= to) continue;
    uint32_t* row = bits + (from - begin);
    const int64_t count = to - from;
    if (mask.key_segment == nullptr) {
      for (int64_t j = 0; j < count; ++j) row[j] |= bit;
    } else {
      const int32_t segment = mask.query_segment[lane];
      const int64_t local_begin = mask.local_begin[lane], local_end = mask.local_end[lane];
      for (int64_t j = 0; j < count; ++j) {
        const int64_t local = mask.key_local[from + j];
        const bool seen =
            mask.key_segment[from + j] == segment && local >= local_begin && local < local_end;
        row[j] |= seen ? bit : 0u;
      }
    }
    if (mask.keep == nullptr) continue;
    const uint8_t* keep = mask.keep + lane * mask.keep_query_stride + from * mask.keep_key_stride;
    if (mask.keep_key_stride == 1) {
      for (int64_t j = 0; j < count; ++j) row[j] &= (uint32_t{keep[j]} << lane) | ~bit;
    } else {
      for (int64_t j = 0; j < count; ++j) {
        row[j] &= (uint32_t{keep[j * mask.keep_key_stride]} << lane) | ~bit;
      }
    }
  }
}

}  // namespace foci::kernels
