// The plain read, compiled once a SIMD target.
#define HWY_TARGET_INCLUDE "foci/measure/read_rate.cc"
#include "foci/core/highway_targets.h"
// After foci's choice of targets.
#include <hwy/foreach_target.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "foci/core/threads.h"
#include "foci/kernels/simd-inl.h"
#include "foci/measure/read_rate.h"

#ifndef FOCI_MEASURE_READ_RATE_ONCE
#define FOCI_MEASURE_READ_RATE_ONCE
namespace foci::kernels {
struct ReadKernels {
  uint32_t (*read)(const std::byte* data, size_t bytes);
};
const ReadKernels& read_kernels(SimdTarget target);
}  // namespace foci::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Four streams a quarter of the block apart, so that four of the prefetcher's trackers work at
// once, two loads each.
uint32_t read_block(const std::byte* data, size_t bytes) {
  const hn::ScalableTag<uint32_t> d;
  const size_t lanes = hn::Lanes(d), quarter = bytes / 16 / (2 * lanes) * (2 * lanes);
  const auto* p = reinterpret_cast<const uint32_t*>(data);
  auto a = hn::Zero(d), b = a, c = a, e = a, f = a, g = a, h = a, i = a;
  for (size_t at = 0; at < quarter; at += 2 * lanes) {
    a = hn::Xor(a, hn::LoadU(d, p + at));
    b = hn::Xor(b, hn::LoadU(d, p + at + lanes));
    c = hn::Xor(c, hn::LoadU(d, p + quarter + at));
    e = hn::Xor(e, hn::LoadU(d, p + quarter + at + lanes));
    f = hn::Xor(f, hn::LoadU(d, p + 2 * quarter + at));
    g = hn::Xor(g, hn::LoadU(d, p + 2 * quarter + at + lanes));
    h = hn::Xor(h, hn::LoadU(d, p + 3 * quarter + at));
    i = hn::Xor(i, hn::LoadU(d, p + 3 * quarter + at + lanes));
  }
  for (size_t at = 4 * quarter; at + lanes <= bytes / 4; at += lanes) {
    a = hn::Xor(a, hn::LoadU(d, p + at));
  }
  const auto all =
      hn::Xor(hn::Xor(hn::Xor(a, b), hn::Xor(c, e)), hn::Xor(hn::Xor(f, g), hn::Xor(h, i)));
  return hn::GetLane(hn::SumOfLanes(d, all));
}

const ReadKernels* read_table() {
  static constexpr ReadKernels t{read_block};
  return &t;
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foci::kernels {
FOCI_KERNEL_TABLE(ReadKernels, read_table, read_kernels)
}

namespace foci::measure {

uint32_t read_all(SimdTarget target, std::span<const std::span<const std::byte>> blocks) {
  // Long enough that handing out a piece costs nothing, short enough that threads end together.
  constexpr size_t kPiece = size_t{1} << 18;
  std::vector<std::span<const std::byte>> pieces;
  for (auto block : blocks) {
    for (size_t at = 0; at < block.size(); at += kPiece) {
      pieces.push_back(block.subspan(at, std::min(kPiece, block.size() - at)));
    }
  }
  const kernels::ReadKernels& kernels = kernels::read_kernels(target);
  std::atomic<uint32_t> sum = 0;
  parallel_for(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const auto piece = pieces[static_cast<size_t>(i)];
    sum ^= kernels.read(piece.data(), piece.size());
  });
  return sum;
}

}  // namespace foci::measure
#endif
