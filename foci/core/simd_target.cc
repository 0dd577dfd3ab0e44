// Targets by name, asked of Highway once.
#include "foci/core/simd_target.h"

#include "foci/core/highway_targets.h"
// After foci's choice of targets.
#include <hwy/highway.h>
#include <hwy/targets.h>

#include <atomic>
#include <cstdlib>
#include <string>

#include "foci/core/error.h"

namespace foci {
namespace {

// HWY_TARGETS are those compiled in; the static one is the fallback that always runs.
int64_t highway_bit(SimdTarget target) {
  switch (target) {
#if HWY_ARCH_X86
    case SimdTarget::avx512:
      return HWY_AVX3;
    case SimdTarget::avx2:
      return HWY_AVX2;
#else
    case SimdTarget::avx512:
    case SimdTarget::avx2:
      return 0;
#endif
    case SimdTarget::baseline:
      return HWY_STATIC_TARGET;
  }
  return 0;
}

constexpr SimdTarget kBestFirst[] = {SimdTarget::avx512, SimdTarget::avx2, SimdTarget::baseline};

std::string list_of(const std::vector<SimdTarget>& targets) {
  std::string s;
  for (SimdTarget t : targets) s += (s.empty() ? "" : ", ") + std::string(name_of(t));
  return s;
}

std::atomic<int> forced{-1};

}  // namespace

std::string_view name_of(SimdTarget target) {
  switch (target) {
    case SimdTarget::baseline:
      return "baseline";
    case SimdTarget::avx2:
      return "avx2";
    case SimdTarget::avx512:
      return "avx512";
  }
  return "?";
}

const std::vector<SimdTarget>& built_targets() {
  static const std::vector<SimdTarget> list = [] {
    std::vector<SimdTarget> l;
    for (SimdTarget t : kBestFirst) {
      if (t == SimdTarget::baseline || (highway_bit(t) & HWY_TARGETS)) l.push_back(t);
    }
    return l;
  }();
  return list;
}

const std::vector<SimdTarget>& supported_targets() {
  static const std::vector<SimdTarget> list = [] {
    std::vector<SimdTarget> l;
    for (SimdTarget t : built_targets()) {
      if (t == SimdTarget::baseline || (highway_bit(t) & hwy::SupportedTargets())) l.push_back(t);
    }
    return l;
  }();
  return list;
}

SimdTarget parse_target(std::string_view name) {
  for (SimdTarget t : supported_targets()) {
    if (name_of(t) == name) return t;
  }
  for (SimdTarget t : kBestFirst) {
    require(name_of(t) != name, "SIMD target: this machine does not run '{}'; it runs {}", name,
            list_of(supported_targets()));
  }
  throw ArgumentError(fmt::format("SIMD target: '{}' is unknown; this machine runs {}", name,
                                  list_of(supported_targets())));
}

SimdTarget current_target() {
  const int f = forced.load(std::memory_order_relaxed);
  if (f >= 0) return static_cast<SimdTarget>(f);
  const char* wanted = std::getenv("FOCI_TARGET");
  if (wanted && *wanted) {
    const SimdTarget t = parse_target(wanted);
    forced = static_cast<int>(t);
    return t;
  }
  return supported_targets().front();
}

void set_target(SimdTarget target) {
  forced = static_cast<int>(parse_target(name_of(target)));
}

}  // namespace foci
