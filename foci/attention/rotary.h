// Rotary positions: pairs of channels of q and k turned by an angle that grows with the position,
// so that q·k depends on the distance alone. Source: Su et al., "RoFormer: Enhanced transformer
// with rotary position embedding", 2021.
//
//   RotaryAngles angles = rotary_table(4096, 64);
//   angles.offsets = Tensor::from<int64_t>({cached}, {1});   // row n stands at cached + n
//   q = rotary(q, angles), k = rotary(k, angles);
//
// Letters beside those of spec.h: R, even and at most D, channels that turn (the first ones; the
// others stay as they are), P positions of a table.
#pragma once

#include <cstdint>
#include <optional>

#include "foci/core/api.h"
#include "foci/core/simd_target.h"
#include "foci/core/tensor.h"

namespace foci {

enum class RotaryPairs : uint8_t {
  half_split,  // channel c turns with channel c + R/2 (GPT-NeoX, Hugging Face Llama)
  interleaved  // channel 2c turns with channel 2c + 1 (RoFormer, GPT-J)
};

// By how much each row turns. Any scaling of positions or frequencies is a matter of the table.
struct RotaryAngles {
  // [P,R/2]: a table, read at each row's position. Or [B,N,R/2]: the angles of each row, with
  // neither position_ids nor offsets. Any floating type; computed with in float32.
  Tensor cosine, sine;
  // At most one of them; with neither, row n stands at position n.
  Tensor position_ids;  // [B,N] or [N] int64, in [0, P)
  Tensor offsets;       // [B] int64: row n of batch b stands at offsets[b] + n, below P
  RotaryPairs pairs = RotaryPairs::half_split;
};

// The table of angles position / scaling · base^(−2r/R), r in [0, R/2), computed in double and
// stored as float32. `scaling` > 1 stretches it over longer sequences (position interpolation, Chen
// et al. 2023). Throws ArgumentError for an odd width, negative sizes, base or scaling not above 0.
FOCI_API RotaryAngles rotary_table(int64_t positions, int64_t width, double base = 10000,
                                   double scaling = 1);

// x [B,H,N,D] turned: float32, float16 or bfloat16, of any strides but the last; the result is
// contiguous and of the same type. Rounded once: arithmetic is in float32. A row's result depends
// on that row and its angles alone. `target`: nullopt is current_target(). Throws ArgumentError,
// naming the argument, where shapes, types or positions do not fit.
FOCI_API Tensor rotary(const Tensor& x, const RotaryAngles& angles,
                       std::optional<SimdTarget> target = std::nullopt);
// The same in place, for k that goes into a cache. x may not be a broadcast view.
FOCI_API void rotate(const Tensor& x, const RotaryAngles& angles,
                     std::optional<SimdTarget> target = std::nullopt);

// The gradient of x, given that of rotary(x): every row turned back by the same angles (the
// transposed rotation, which is right for scaled cosines and sines too). As rotary otherwise.
FOCI_API Tensor rotary_backward(const Tensor& dy, const RotaryAngles& angles,
                                std::optional<SimdTarget> target = std::nullopt);

}  // namespace foci
