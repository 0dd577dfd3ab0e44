// The multiply-add peak, compiled once a SIMD target.
#define HWY_TARGET_INCLUDE "foci/measure/fma_peak.cc"
#include "foci/core/highway_targets.h"
// After foci's choice of targets.
#include <hwy/foreach_target.h>

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "foci/kernels/simd-inl.h"
#include "foci/measure/fma_peak.h"

#ifndef FOCI_MEASURE_FMA_PEAK_ONCE
#define FOCI_MEASURE_FMA_PEAK_ONCE
namespace foci::kernels {
struct PeakKernels {
  int64_t flops_per_step;
  float (*run)(int64_t steps, float factor);  // the result keeps the loop alive
};
const PeakKernels& peak_kernels(SimdTarget target);
}  // namespace foci::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Twelve independent chains: more than latency times throughput of any core so far.
float peak_run(int64_t steps, float factor) {
  const hn::ScalableTag<float> d;
  const auto f = hn::Set(d, factor);
  auto s0 = hn::Zero(d), s1 = hn::Set(d, 1), s2 = hn::Set(d, 2), s3 = hn::Set(d, 3),
       s4 = hn::Set(d, 4), s5 = hn::Set(d, 5), s6 = hn::Set(d, 6), s7 = hn::Set(d, 7),
       s8 = hn::Set(d, 8), s9 = hn::Set(d, 9), sa = hn::Set(d, 10), sb = hn::Set(d, 11);
  for (int64_t i = 0; i < steps; ++i) {
    s0 = hn::MulAdd(s0, f, f);
    s1 = hn::MulAdd(s1, f, f);
    s2 = hn::MulAdd(s2, f, f);
    s3 = hn::MulAdd(s3, f, f);
    s4 = hn::MulAdd(s4, f, f);
    s5 = hn::MulAdd(s5, f, f);
    s6 = hn::MulAdd(s6, f, f);
    s7 = hn::MulAdd(s7, f, f);
    s8 = hn::MulAdd(s8, f, f);
    s9 = hn::MulAdd(s9, f, f);
    sa = hn::MulAdd(sa, f, f);
    sb = hn::MulAdd(sb, f, f);
  }
  const auto sum = hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)),
                           hn::Add(hn::Add(hn::Add(s4, s5), hn::Add(s6, s7)),
                                   hn::Add(hn::Add(s8, s9), hn::Add(sa, sb))));
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

const PeakKernels* peak_table() {
  static constexpr PeakKernels t{24 * static_cast<int64_t>(hn::MaxLanes(hn::ScalableTag<float>())),
                                 peak_run};
  return &t;
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foci::kernels {
FOCI_KERNEL_TABLE(PeakKernels, peak_table, peak_kernels)
}

namespace foci::measure {
namespace {

// CPU time of this thread: a core that others use as well has the same peak.
double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace

double fma_peak_sample(SimdTarget target, int threads) {
  constexpr int64_t kSteps = 2'000'000;
  const kernels::PeakKernels& peak = kernels::peak_kernels(target);
  std::atomic<int> waiting = threads;
  std::atomic<double> rate = 0;
  std::atomic<float> sink = 0;
  const auto work = [&] {
    // All begin together, so that shared power and clock limits count.
    for (--waiting; waiting > 0;) std::this_thread::yield();
    const double begin = thread_seconds();
    const float result = peak.run(kSteps, 0.5f);
    const double seconds = thread_seconds() - begin;
    sink = result;
    rate += static_cast<double>(kSteps * peak.flops_per_step) / seconds;
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
  return rate.load() * 1e-9;
}

double fma_peak_gflops(SimdTarget target, int threads) {
  constexpr int kSamples = 8;
  double best = 0;
  for (int sample = 0; sample < kSamples; ++sample) {
    best = std::max(best, fma_peak_sample(target, threads));
  }
  return best;
}

}  // namespace foci::measure
#endif
