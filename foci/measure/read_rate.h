// A plain read of memory, as fast as the machine does it: what a kernel that must read its operands
// once can reach at best.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "foci/core/simd_target.h"

namespace foci::measure {

// Reads every whole vector of every block by parallel_for, several streams of vector loads a
// thread. The result, which depends on all bytes read, is there so that no compiler leaves the
// reads out.
uint32_t read_all(SimdTarget target, std::span<const std::span<const std::byte>> blocks);

}  // namespace foci::measure
