// Training steps after the first ask the system for no tensor and no large scratch: every
// allocation of this program is counted. What remains are the tape's closures, and lists of the
// batch's tokens (ids, segments, key ranges).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "core/replaced_new.h"
#include "foci/core/memory.h"
#include "foci/core/threads.h"
#include "foci/measure/training.h"

namespace {

std::atomic<int64_t> calls = 0, bytes = 0, largest = 0;

void count(size_t n) {
  const auto size = static_cast<int64_t>(n);
  ++calls;
  bytes += size;
  int64_t most = largest;
  while (size > most && !largest.compare_exchange_weak(most, size)) {
  }
}

}  // namespace

// The linker puts these in the place of what foci's libraries call (--wrap), which makes their
// names. NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" {
void* __real_malloc(size_t);
void* __real_calloc(size_t, size_t);
void* __real_realloc(void*, size_t);
void* __real_aligned_alloc(size_t, size_t);
void* __wrap_malloc(size_t n) {
  count(n);
  return __real_malloc(n);
}
void* __wrap_calloc(size_t n, size_t size) {
  count(n * size);
  return __real_calloc(n, size);
}
void* __wrap_realloc(void* p, size_t n) {
  count(n);
  return __real_realloc(p, n);
}
void* __wrap_aligned_alloc(size_t a, size_t n) {
  count(n);
  return __real_aligned_alloc(a, n);
}
}
// NOLINTEND(bugprone-reserved-identifier)

namespace foci::measure {
namespace {

TrainingWorkload pictures() {
  return {.name = "pictures",
          .width = 64,
          .layers = 3,
          .heads = 4,
          .feed_forward = 256,
          .batch = 5,
          .grids = {{8, 8}, {4, 7}, {12, 12}, {1, 1}, {9, 10}},
          .patch_values = 16,
          .classes = 10,
          .position_rows = 8,
          .position_cols = 8,
          .class_token = true,
          .label_smoothing = 0.1};
}

TrainingWorkload texts() {
  return {.name = "texts",
          .language = true,
          .width = 64,
          .layers = 2,
          .heads = 4,
          .feed_forward = 256,
          .batch = 4,
          .length = 128,
          .vocabulary = 500};
}

constexpr int64_t kLargest = 32 << 10, kBytesPerToken = 16, kCallsPerLayer = 400;

TEST(TrainingMemory, StepsAfterTheFirstTakeWhatItLeft) {
  const int threads = num_threads();
  for (const TrainingWorkload& w : {pictures(), texts()}) {
    for (const int n : {1, 2}) {
      set_num_threads(n);
      TrainingJob job(w);  // runs the first step
      job.step();
      const TensorMemory before = tensor_memory();
      for (int step = 0; step < 5; ++step) {
        calls = bytes = largest = 0;
        job.step();
        if (std::getenv("FOCI_SHOW_MEMORY")) {
          std::printf("%s, %d threads: %lld allocations, %lld bytes, the largest %lld\n",
                      w.name.c_str(), n, static_cast<long long>(calls),
                      static_cast<long long>(bytes), static_cast<long long>(largest));
        }
        // How many threads hold scratch at once is chance, so a step may be the first to have two.
        if (n > 1) continue;
        EXPECT_LE(largest, kLargest + kBytesPerToken * w.tokens()) << w.name << " step " << step;
        EXPECT_LE(calls, kCallsPerLayer * (w.layers + 1)) << w.name << " step " << step;
      }
      const TensorMemory after = tensor_memory();
      EXPECT_EQ(after.allocations, before.allocations) << w.name;
      EXPECT_EQ(after.in_use, before.in_use) << w.name;
      EXPECT_GT(after.reuses, before.reuses) << w.name;
    }
  }
  set_num_threads(threads);
}

}  // namespace
}  // namespace foci::measure
