// Memory beside inputs, outputs and gradients: every allocation of this program is counted, and the
// peak of one call must stay below Plan::workspace_bytes, which must grow with N + M, not with N·M.
//
// A window keeps the time short: buffers are sized by the keys there are, not by those seen.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "attention/generate.h"
#include "core/replaced_new.h"
#include "foci/core/rng.h"
#include "foci/core/threads.h"
#include "foci/kernels/scratch.h"

namespace {

std::atomic<int64_t> live = 0, peak = 0;
std::atomic<bool> counting = true;
std::atomic<void*> uncounted = nullptr;

void* counted(void* p) {
  if (p == nullptr) return p;
  if (!counting) {
    uncounted = p;
    return p;
  }
  const int64_t now = live += static_cast<int64_t>(malloc_usable_size(p));
  int64_t most = peak;
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
  return p;
}

void let_go(void* p) {
  if (p == nullptr) return;
  void* special = p;
  if (!uncounted.compare_exchange_strong(special, nullptr)) {
    live -= static_cast<int64_t>(malloc_usable_size(p));
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
void __real_free(void*);
void* __wrap_malloc(size_t n) {
  return counted(__real_malloc(n));
}
void* __wrap_calloc(size_t n, size_t size) {
  return counted(__real_calloc(n, size));
}
void* __wrap_realloc(void* p, size_t n) {
  let_go(p);
  return counted(__real_realloc(p, n));
}
void* __wrap_aligned_alloc(size_t a, size_t n) {
  return counted(__real_aligned_alloc(a, n));
}
void __wrap_free(void* p) {
  let_go(p);
  __real_free(p);
}
}
// NOLINTEND(bugprone-reserved-identifier)

namespace foci {
namespace {

using testing::random_normal;

// The pool of scratch keeps what was used before, which would hide what a call needs: one piece as
// large as the pool drives the others out, and is itself not counted.
void empty_the_pool() {
  counting = false;
  { const kernels::Scratch all(kernels::kKeptBytes / sizeof(float)); }
  counting = true;
}

// Bytes at the peak of a call, beyond what was live before it and `kept` that it gives back.
template <class F>
int64_t peak_of(F&& call) {
  empty_the_pool();
  const int64_t before = live;
  peak = before;
  const int64_t kept = call();
  return peak - before - kept;
}

int64_t bytes_of(std::initializer_list<const Tensor*> tensors) {
  int64_t bytes = 0;
  for (const Tensor* t : tensors) bytes += t->defined() ? static_cast<int64_t>(t->nbytes()) : 0;
  return bytes;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kLong = 8192;
const std::vector<SimdTarget>& targets() {
  static const std::vector<SimdTarget> one = {current_target()};
  return one;
}
#else
constexpr int64_t kLong = 65536;
const std::vector<SimdTarget>& targets() {
  return supported_targets();
}
#endif

struct Problem {
  AttentionSpec spec;
  AttentionInputs in;
  AttentionWanted wanted{true, true, true, true, true, true, true};
};

struct Peaks {
  int64_t forward, backward;
};

// Runs forward and backward once and compares with what the plan says.
Peaks measure(const Problem& p, const std::string& name, SimdTarget target) {
  const Plan plan = Plan::make(p.spec, shape_of(p.in), {Implementation::fused, target});
  const AttentionShape& s = plan.shape();
  Rng rng(1);
  const AttentionUpstream up{.dy = random_normal(rng, {s.B, s.H, s.N, s.Dv}).to(s.dtype)};
  Peaks peaks{};
  AttentionOutputs out;
  peaks.forward = peak_of([&] {
    out = plan.bind(p.in).forward();
    return bytes_of({&out.y, &out.row_stat, &out.entropy, &out.max_weight, &out.max_key,
                     &out.support, &out.coverage});
  });
  AttentionGradients g;
  peaks.backward = peak_of([&] {
    g = plan.bind(p.in).backward(out, up, p.wanted);
    return bytes_of({&g.dq, &g.dk, &g.dv, &g.dbias, &g.dslopes, &g.dtable1d, &g.dtable2d,
                     &g.dscore_w, &g.dscale, &g.dalpha});
  });
  EXPECT_LE(peaks.forward, static_cast<int64_t>(plan.workspace_bytes(false))) << name;
  EXPECT_LE(peaks.backward, static_cast<int64_t>(plan.workspace_bytes(true))) << name;
  if (std::getenv("FOCI_SHOW_MEMORY")) {
    std::printf("%s N %lld M %lld: forward %.2f of %.2f MB, backward %.2f of %.2f MB\n",
                name.c_str(), static_cast<long long>(s.N), static_cast<long long>(s.M),
                1e-6 * peaks.forward, 1e-6 * plan.workspace_bytes(false), 1e-6 * peaks.backward,
                1e-6 * plan.workspace_bytes(true));
  }
  return peaks;
}

Problem problem_of(const AttentionSpec& spec, int64_t n, int64_t heads = 1, int64_t batch = 1) {
  Rng rng(2);
  Problem p;
  p.spec = spec;
  p.in.q = random_normal(rng, {batch, heads, n, 8});
  p.in.k = random_normal(rng, {batch, 1, n, 8});
  p.in.v = random_normal(rng, {batch, 1, n, 8});
  return p;
}

// What a call may need for each of the N + M rows, whatever the spec; 8 MB beside that.
constexpr int64_t kBytesPerRow = 768;
constexpr int64_t kBytesAtLeast = 8 << 20;

void expect_linear(const std::string& name, const std::function<Problem(int64_t)>& make,
                   int64_t longest = kLong,
                   const std::vector<SimdTarget>& targets = {current_target()}) {
  const int threads = num_threads();
  for (const SimdTarget target : targets) {
    measure(make(longest), name, target);
    // One thread has one piece of scratch; how many pieces more threads have at once is chance.
    set_num_threads(1);
    const Peaks few = measure(make(longest / 4), name, target);
    const Peaks many = measure(make(longest), name, target);
    set_num_threads(threads);
    // Four times the rows: about four times the bytes, where N·M would take sixteen.
    EXPECT_LE(many.forward, 5 * few.forward + kBytesAtLeast / 8) << name;
    EXPECT_LE(many.backward, 5 * few.backward + kBytesAtLeast / 8) << name;
    EXPECT_LE(many.forward, kBytesPerRow * 2 * longest + kBytesAtLeast) << name;
    EXPECT_LE(many.backward, kBytesPerRow * 2 * longest + kBytesAtLeast) << name;
  }
}

TEST(Memory, IsLinearForEachNormaliser) {
  for (const Normalizer& normalizer : testing::every_normalizer()) {
    const AttentionSpec spec{
        .normalizer = normalizer, .masks = {Window{64, 64}}, .statistics = Statistics::all()};
    expect_linear(
        testing::text_of(normalizer), [&](int64_t n) { return problem_of(spec, n); }, kLong,
        targets());
  }
}

TEST(Memory, IsLinearForEachScoreAndType) {
  for (const Score& score : {Score(Dot{}), Score(Cosine{}), Score(L2{}), Score(Additive{})}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      expect_linear(fmt::format("score {} {}", score.index(), name_of(dtype)), [&](int64_t n) {
        Problem p = problem_of({.score = score, .masks = {Window{64, 64}}}, n);
        Rng rng(3);
        p.in.score_w = random_normal(rng, {8});
        for (Tensor* t : {&p.in.q, &p.in.k, &p.in.v}) *t = t->to(dtype);
        return p;
      });
    }
  }
}

TEST(Memory, IsLinearWithMasksAndBiases) {
  Rng rng(4);
  const auto spec = [](std::vector<Mask> masks, std::vector<Bias> biases) {
    masks.push_back(Window{64, 64});
    return AttentionSpec{
        .masks = std::move(masks), .biases = std::move(biases), .statistics = Statistics::all()};
  };
  expect_linear("key lengths, keep", [&](int64_t n) {
    Problem p = problem_of(spec({KeyLengths{}, Keep{}}, {}), n);
    p.in.key_lengths = Tensor::full({1}, double(n - 3), DType::i64);
    p.in.keep = Tensor::full({1, n}, 1, DType::boolean);
    return p;
  });
  expect_linear("alibi, relative 1-D", [&](int64_t n) {
    Problem p = problem_of(spec({}, {Alibi{}, Relative1D{100}}), n, 2);
    p.in.slopes = random_normal(rng, {2});
    p.in.table1d = random_normal(rng, {2, 201});
    return p;
  });
  expect_linear("relative 2-D", [&](int64_t n) {
    Problem p = problem_of(spec({}, {Relative2D{n / 64, 64}}), n);
    p.in.table2d = random_normal(rng, {1, 2 * (n / 64) - 1, 127});
    return p;
  });
  expect_linear("a bias of keys", [&](int64_t n) {
    Problem p = problem_of(spec({}, {TensorBias{}}), n, 2);
    p.in.bias = random_normal(rng, {1, n});
    return p;
  });
  expect_linear("a bias of queries", [&](int64_t n) {
    Problem p = problem_of(spec({}, {TensorBias{}}), n, 2);
    p.in.bias = random_normal(rng, {n, 1});
    return p;
  });
}

// Segments of one length each, of many lengths, and with queries and keys that do not lie together.
TEST(Memory, IsLinearWithSegments) {
  for (const int kind : {0, 1, 2, 3}) {
    expect_linear(
        fmt::format("segments {}", kind),
        [&](int64_t n) {
          Problem p = problem_of(
              {.masks = {Segments{}, Window{64, 64}}, .statistics = Statistics::all()}, n);
          p.in.q_segments = Tensor::zeros({1, n}, DType::i32);
          p.in.k_segments = Tensor::zeros({1, n}, DType::i32);
          for (int64_t i = 0; i < n; ++i) {
            const auto id = static_cast<int32_t>(kind == 0 ? i : i / 50);
            p.in.q_segments.at<int32_t>(0, i) = kind < 2 ? id : static_cast<int32_t>(i % 2);
            p.in.k_segments.at<int32_t>(0, i) =
                kind < 2 ? id : static_cast<int32_t>(kind == 2 ? i < n / 2 : i % 2);
          }
          return p;
        },
        kLong / 4);
  }
}

// Without a window every key is seen: the same bytes.
TEST(Memory, IsLinearOnFullRows) {
  for (const Normalizer& normalizer : testing::every_normalizer()) {
    const int64_t n = kLong / 16;
    const AttentionSpec spec{.normalizer = normalizer, .statistics = Statistics::all()};
    measure(problem_of(spec, n, 2, 2), testing::text_of(normalizer), current_target());
  }
}

}  // namespace
}  // namespace foci
