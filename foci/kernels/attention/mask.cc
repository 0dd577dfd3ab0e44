// Lane masks as bits: which lanes of a strip may see which key.
#include <algorithm>
#include <limits>

#include "foci/kernels/attention.h"

namespace foci::kernels {

namespace {

// Clears `bit` in row[j] where element j of a bias row is −inf.
template <class T>
void mask_negative_infinity(const T* bias, int64_t stride, T negative_infinity, int64_t count,
                            uint32_t bit, uint32_t* row) {
  for (int64_t j = 0; j < count; ++j) {
    row[j] &= bias[j * stride] == negative_infinity ? ~bit : ~0u;
  }
}

void mask_by_bias(const StripBias& bias, int lane, int64_t from, int64_t count, uint32_t* row) {
  const uint32_t bit = 1u << lane;
  const int64_t at = lane * bias.query_stride + from * bias.key_stride;
  switch (bias.dtype) {
    case DType::f16:  // by their bits
      return mask_negative_infinity(static_cast<const uint16_t*>(bias.data) + at, bias.key_stride,
                                    uint16_t{0xFC00}, count, bit, row);
    case DType::bf16:
      return mask_negative_infinity(static_cast<const uint16_t*>(bias.data) + at, bias.key_stride,
                                    uint16_t{0xFF80}, count, bit, row);
    default:
      return mask_negative_infinity(static_cast<const float*>(bias.data) + at, bias.key_stride,
                                    -std::numeric_limits<float>::infinity(), count, bit, row);
  }
}

}  // namespace

void mask_bits(const LaneMask& mask, int64_t begin, int64_t end, uint32_t* bits) noexcept {
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
    if (mask.bias.data != nullptr) mask_by_bias(mask.bias, lane, from, count, row);
    if (mask.keep == nullptr) continue;
    const uint8_t* keep = mask.keep + lane * mask.keep_query_stride + from * mask.keep_key_stride;
    if (mask.keep_key_stride == 1) {
      for (int64_t j = 0; j < count; ++j) row[j] &= keep[j] != 0 ? ~0u : ~bit;
    } else {
      for (int64_t j = 0; j < count; ++j) {
        row[j] &= keep[j * mask.keep_key_stride] != 0 ? ~0u : ~bit;
      }
    }
  }
}

}  // namespace foci::kernels
