// A child of fork() computes attention to the bits of its parent, while the parent's other threads
// are in the middle of theirs.
#include "core/fork_child.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "attention/tolerance.h"
#include "foci/attention/plan.h"
#include "foci/core/memory.h"
#include "foci/core/threads.h"
#include "reference/sweep.h"

namespace foci {
namespace {

using testing::differing_bits;
using testing::in_child;
using testing::make_case;
using testing::SweepCase;

constexpr AttentionWanted kWanted{.qkv = true, .bias = true};

SweepCase a_case() {
  return make_case({.batch = 2,
                    .kv_heads = 2,
                    .group = 2,
                    .queries = 70,
                    .keys = 90,
                    .head = 24,
                    .value = 20,
                    .normalizer = 2,
                    .causal = 1,
                    .bias = 30});
}

TEST(AttentionFork, AChildGivesTheSameBits) {
  const int before = num_threads();
  set_num_threads(3);
  const SweepCase c = a_case();
  const AttentionInputs& in = c.in;
  const Plan plan = Plan::make(c.spec, shape_of(in), {.implementation = Implementation::fused});
  const Bound bound = plan.bind(in);
  const AttentionOutputs out = bound.forward();
  const AttentionGradients gradients = bound.backward(out, c.up, kWanted);
  const auto same = [&] {
    const Bound again = plan.bind(in);
    const AttentionOutputs y = again.forward();
    return differing_bits(y, out).empty() &&
           differing_bits(again.backward(y, c.up, kWanted), gradients).empty();
  };
  ASSERT_TRUE(same());

  std::atomic<bool> over = false;
  std::atomic<int> calls = 0;
  std::vector<std::thread> others;
  for (int t = 0; t < 2; ++t) {
    others.emplace_back([&] {
      const KeepMemory keep;
      for (; !over; ++calls) EXPECT_TRUE(same());
    });
  }
  while (calls < 4) std::this_thread::yield();
  for (int n = 0; n < 20; ++n) {
    const std::string end = in_child([&] { return num_threads() == 1 && same(); });
    EXPECT_EQ(end, "");
    if (!end.empty()) break;
  }
  over = true;
  for (std::thread& t : others) t.join();
  EXPECT_TRUE(same());
  set_num_threads(before);
}

}  // namespace
}  // namespace foci
