// SIMD targets: what was built, what this machine can run, and which one is in use.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "foci/core/api.h"

namespace foci {

// `baseline` is what every machine of the architecture has (SSE2 or portable code; NEON on ARM).
enum class SimdTarget : uint8_t { baseline, avx2, avx512 };

FOCI_API std::string_view name_of(SimdTarget target);  // "baseline", "avx2", "avx512"

// Targets compiled into this library, best first; and those of them that this machine can run.
FOCI_API const std::vector<SimdTarget>& built_targets();
FOCI_API const std::vector<SimdTarget>& supported_targets();

// The target in use: the best, unless set_target or the environment variable FOCI_TARGET forces
// one. Throws ArgumentError where FOCI_TARGET names an unknown target or one the machine lacks.
FOCI_API SimdTarget current_target();
FOCI_API void set_target(SimdTarget target);  // throws ArgumentError where it is not supported
FOCI_API SimdTarget parse_target(std::string_view name);  // likewise, and for unknown names

}  // namespace foci
