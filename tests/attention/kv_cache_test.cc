// KvCache: what it holds, against a list of rows; and what attention over it gives, against one
// call over all tokens.
#include "foci/attention/kv_cache.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "attention/generate.h"
#include "attention/tolerance.h"
#include "foci/core/rng.h"
#include "foci/core/threads.h"

namespace foci {
namespace {

using testing::near;
using testing::same_bits;

Tensor normal(Rng& rng, const Dims& shape, DType dtype = DType::f32) {
  Tensor t = Tensor::empty(shape);
  for (float& x : t.span<float>()) x = static_cast<float>(rng.normal());
  return t.to(dtype);
}

Tensor rows(const Tensor& t, int64_t begin, int64_t end) {
  return t.slice(2, begin, end);
}

// ---- what is held ----

// Appends, truncations and resets at random, beside plain lists of all rows. A row's first channel
// is its number.
void hold(std::optional<int64_t> window, uint64_t seed, DType dtype) {
  Rng rng(seed);
  const int64_t S = 3, Hk = 2, D = 3, Dv = 1;
  KvCache cache({.sequences = S, .Hk = Hk, .D = D, .Dv = Dv, .dtype = dtype}, window);
  std::vector<std::vector<double>> all(S);
  std::vector<int64_t> first(S, 0);
  double next = 1;
  for (int step = 0; step < 80; ++step) {
    const int64_t s = rng.below(S);
    const auto size = static_cast<int64_t>(all[s].size());
    const int64_t what = rng.below(12);
    if (what == 0) {
      cache.reset(s);
      all[s].clear();
      first[s] = 0;
    } else if (what == 1) {
      const int64_t least = first[s] > 0 ? first[s] + *window - 1 : 0;
      const int64_t to = least + rng.below(size - least + 1);
      cache.truncate(s, to);
      all[s].resize(static_cast<size_t>(to));
    } else {
      KvRows which;
      for (int64_t e = 0; e < S; ++e) {
        if (rng.below(2)) which.sequences.insert(which.sequences.begin(), e);
      }
      if (which.sequences.empty()) continue;
      const auto E = static_cast<int64_t>(which.sequences.size());
      const int64_t n = rng.below(10) == 0 ? 40 : rng.below(4);
      Tensor k = Tensor::zeros({E, n, Hk, D + 1}, dtype).slice(3, 0, D).transpose(1, 2);
      Tensor v = Tensor::zeros({E, Hk, n, Dv}, dtype);
      for (int64_t e = 0; e < E; ++e) {
        const int64_t count = rng.below(n + 1), to = which.sequences[e];
        which.counts.push_back(count);
        const auto old = static_cast<int64_t>(all[to].size());
        if (window && count > 0) first[to] = std::max(first[to], old - (*window - 1));
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t h = 0; h < Hk; ++h) {
            k.slice(0, e, e + 1).slice(1, h, h + 1).slice(2, i, i + 1).fill(next + double(h) / 4);
            v.slice(0, e, e + 1).slice(1, h, h + 1).slice(2, i, i + 1).fill(-next);
          }
          if (i < count) all[to].push_back(next);
          next = next < 200 ? next + 1 : 1;  // what bfloat16 holds exactly, with quarters
        }
      }
      cache.append(k, v, which);
    }
    for (int64_t t = 0; t < S; ++t) {
      const auto total = static_cast<int64_t>(all[t].size());
      ASSERT_EQ(cache.position(t), total);
      ASSERT_EQ(cache.first(t), first[t]);
      const Tensor k = cache.keys(t), v = cache.values(t);
      ASSERT_EQ(k.shape(), Dims({Hk, total - first[t], D}));
      ASSERT_EQ(v.shape(), Dims({Hk, total - first[t], Dv}));
      if (step % 8 != 7) continue;
      for (int64_t j = first[t]; j < total; ++j) {
        for (int64_t h = 0; h < Hk; ++h) {
          const Tensor want = Tensor::full({1}, all[t][j] + double(h) / 4).to(dtype);
          ASSERT_EQ(k.item({h, j - first[t], D - 1}), want.item()) << step;
          ASSERT_EQ(v.item({h, j - first[t], 0}), -all[t][j]) << step;
        }
      }
    }
  }
}

TEST(KvCache, HoldsWhatWasAppended) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    hold(std::nullopt, seed, DType::f32);
    hold(1, seed, DType::f32);
    hold(4, seed, DType::f16);
    hold(9, seed, DType::bf16);
  }
}

TEST(KvCache, GrowsByDoublingAndRollsInBoundedMemory) {
  const auto buffers = [](std::optional<int64_t> window, int64_t tokens, size_t* most) {
    KvCache cache({.D = 1, .Dv = 1}, window);
    const Tensor one = Tensor::zeros({1, 1, 1, 1});
    int made = 0;
    size_t before = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      cache.append(one, one);
      made += cache.bytes() != before;
      before = cache.bytes();
      *most = std::max(*most, before);
    }
    return made;
  };
  size_t most = 0;
  EXPECT_LE(buffers(std::nullopt, 4000, &most), 9);
  EXPECT_LE(most, 2 * 4000 * 2 * sizeof(float));
  most = 0;
  EXPECT_LE(buffers(100, 4000, &most), 5);
  EXPECT_LE(most, 2 * 100 * 2 * sizeof(float));
}

TEST(KvCache, ALongPrefillIsGivenBackByARollingCache) {
  KvCache cache({.D = 1, .Dv = 1}, 10);
  cache.append(Tensor::zeros({1, 1, 5000, 1}), Tensor::zeros({1, 1, 5000, 1}));
  EXPECT_EQ(cache.length(0), 5000);
  cache.append(Tensor::zeros({1, 1, 1, 1}), Tensor::zeros({1, 1, 1, 1}));
  EXPECT_EQ(cache.length(0), 10);
  EXPECT_EQ(cache.first(0), 4991);
  EXPECT_LE(cache.bytes(), 64 * sizeof(float));
  cache.reset(0);
  EXPECT_EQ(cache.bytes(), 0u);
  EXPECT_EQ(cache.position(0), 0);
}

// ---- what attention gives ----

struct Variant {
  const char* name;
  AttentionSpec spec;
};

std::vector<Variant> variants() {
  const auto spec = [](Score score, Normalizer normalizer, std::vector<Mask> masks,
                       std::vector<Bias> biases = {}) {
    return AttentionSpec{
        .score = score,
        .normalizer = normalizer,
        .masks = std::move(masks),
        .biases = std::move(biases),
        .statistics = {Statistic::entropy, Statistic::max_weight, Statistic::support}};
  };
  std::vector<Variant> list = {
      {"dot softmax causal", spec(Dot{}, Softmax{}, {Causal{}})},
      {"dot softmax past", spec(Dot{}, Softmax{}, {Causal{Align::past}})},
      {"cosine sparsemax", spec(Cosine{}, Sparsemax{}, {Causal{}})},
      {"dot softmax window", spec(Dot{}, Softmax{}, {Causal{}, Window{20, 0}})},
      {"dot softmax alibi", spec(Dot{}, Softmax{}, {Causal{}}, {Alibi{}})},
      {"l2 entmax relative", spec(L2{0.1}, Entmax{1.5}, {Causal{}}, {Relative1D{6}})},
      {"additive top-k", spec(Additive{}, TopK{5}, {Causal{}})}};
  list[0].spec.softcap = 3;
  list[1].spec.scale = 1.0;
  return list;
}

struct Setting {
  Tensor q, k, v;
  AttentionInputs tables;
};

Setting setting(uint64_t seed, int64_t S, int64_t N, DType dtype) {
  Rng rng(seed);
  const int64_t H = 4, Hk = 2, D = 17, Dv = 9;
  Setting s;
  s.q = normal(rng, {S, H, N, D}, dtype);
  s.k = normal(rng, {S, Hk, N, D}, dtype);
  s.v = normal(rng, {S, Hk, N, Dv}, dtype);
  s.tables.slopes = normal(rng, {H});
  s.tables.table1d = normal(rng, {H, 13});
  s.tables.score_w = normal(rng, {D});
  return s;
}

KvCache cache_for(const Setting& s, std::optional<int64_t> window = std::nullopt) {
  return KvCache({.sequences = s.q.dim(0),
                  .Hk = s.k.dim(1),
                  .D = s.k.dim(3),
                  .Dv = s.v.dim(3),
                  .dtype = s.q.dtype()},
                 window);
}

// One call over all tokens.
AttentionOutputs at_once(const AttentionSpec& spec, const Setting& s, const PlanOptions& options) {
  AttentionInputs in = s.tables;
  in.q = s.q, in.k = s.k, in.v = s.v;
  if (bias_align(spec) == Align::past) in.past_lengths = Tensor::zeros({s.q.dim(0)}, DType::i64);
  return Plan::make(spec, shape_of(in), options).bind(in).forward();
}

void expect_rows(const AttentionOutputs& part, const AttentionOutputs& whole, int64_t at) {
  const int64_t end = at + part.y.dim(2);
  ASSERT_TRUE(same_bits(part.y, rows(whole.y, at, end))) << "y from " << at;
  ASSERT_TRUE(same_bits(part.row_stat, rows(whole.row_stat, at, end))) << "row_stat from " << at;
  ASSERT_TRUE(same_bits(part.entropy, rows(whole.entropy, at, end))) << "entropy from " << at;
  ASSERT_TRUE(same_bits(part.max_weight, rows(whole.max_weight, at, end))) << at;
  ASSERT_TRUE(same_bits(part.max_key, rows(whole.max_key, at, end))) << at;
  ASSERT_TRUE(same_bits(part.support, rows(whole.support, at, end))) << at;
}

// Prefill in chunks of one size, each attended to at once.
void in_chunks(const Variant& variant, const Setting& s, int64_t chunk, const PlanOptions& options,
               const AttentionOutputs& whole) {
  SCOPED_TRACE(fmt::format("{} in chunks of {}", variant.name, chunk));
  KvCache cache = cache_for(s);
  const int64_t N = s.q.dim(2);
  for (int64_t at = 0; at < N; at += chunk) {
    const int64_t end = std::min(at + chunk, N);
    cache.append(rows(s.k, at, end), rows(s.v, at, end));
    const AttentionOutputs part =
        cache.attend(variant.spec, rows(s.q, at, end), s.tables, {}, options);
    ASSERT_NO_FATAL_FAILURE(expect_rows(part, whole, at));
  }
}

TEST(KvCacheBits, ChunksOfEverySizeEqualOneCall) {
  const Setting s = setting(1, 1, 41, DType::f32);
  for (const Variant& variant : variants()) {
    for (SimdTarget target : supported_targets()) {
      const PlanOptions options{.target = target};
      const AttentionOutputs whole = at_once(variant.spec, s, options);
      for (int64_t chunk = 1; chunk <= 41; ++chunk) {
        in_chunks(variant, s, chunk, options, whole);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Past one block of keys, and past one block of rows.
TEST(KvCacheBits, ChunksAcrossBlocksEqualOneCall) {
  const Setting s = setting(2, 1, 1100, DType::f32);
  for (const Variant& variant : variants()) {
    const AttentionOutputs whole = at_once(variant.spec, s, {});
    for (int64_t chunk : {97, 700}) {
      in_chunks(variant, s, chunk, {}, whole);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(KvCacheBits, ChunksInHalfPrecision) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    const Setting s = setting(3, 1, 30, dtype);
    for (const Variant& variant : variants()) {
      const AttentionOutputs whole = at_once(variant.spec, s, {});
      EXPECT_EQ(whole.y.dtype(), dtype);
      for (int64_t chunk : {1, 4, 16}) {
        in_chunks(variant, s, chunk, {}, whole);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The unfused path makes the same promise.
TEST(KvCacheBits, ChunksOfThePlainPath) {
  const Setting s = setting(4, 1, 300, DType::f32);
  const PlanOptions options{.implementation = Implementation::plain};
  for (const Variant& variant : variants()) {
    const AttentionOutputs whole = at_once(variant.spec, s, options);
    for (int64_t chunk : {7, 100, 299}) {
      in_chunks(variant, s, chunk, options, whole);
      if (HasFatalFailure()) return;
    }
  }
}

// A long prefill, then one, two and three queries a step.
TEST(KvCacheBits, DecodingEqualsTheRowsOfOneCall) {
  const Setting s = setting(5, 1, 700, DType::f32);
  for (const Variant& variant : variants()) {
    SCOPED_TRACE(variant.name);
    const AttentionOutputs whole = at_once(variant.spec, s, {});
    KvCache cache = cache_for(s);
    cache.append(rows(s.k, 0, 600), rows(s.v, 0, 600));
    int64_t at = 600;
    for (int64_t n = 1; at + n <= 700; n = n % 3 + 1) {
      cache.append(rows(s.k, at, at + n), rows(s.v, at, at + n));
      const auto part = cache.attend(variant.spec, rows(s.q, at, at + n), s.tables);
      expect_rows(part, whole, at);
      if (HasFatalFailure()) return;
      at += n;
    }
    // A guess that is taken back leaves no trace.
    cache.truncate(0, at - 2);
    cache.append(rows(s.k, at - 2, at), rows(s.v, at - 2, at));
    expect_rows(cache.attend(variant.spec, rows(s.q, at - 2, at), s.tables), whole, at - 2);
  }
}

TEST(KvCacheBits, SequencesOfDifferentLengthsEqualOneByOne) {
  const int64_t S = 5, N = 12;
  const Setting s = setting(6, S, 60, DType::f32);
  const std::vector<int64_t> past = {40, 0, 3, 17, 48}, counts = {12, 7, 0, 1, 12};
  const std::vector<int64_t> order = {3, 0, 4, 2, 1};
  for (const std::optional<int64_t> window :
       {std::optional<int64_t>(), std::optional<int64_t>(9)}) {
    KvCache cache = cache_for(s, window);
    for (int64_t t = 0; t < S; ++t) {
      const auto one = [&](const Tensor& x) { return rows(x.slice(0, t, t + 1), 0, past[t]); };
      cache.append(one(s.k), one(s.v), {.sequences = {t}});
    }
    // Entries in another order, each with rows of its own sequence from where it is.
    const auto gather = [&](const Tensor& x) {
      Tensor to = Tensor::full({S, x.dim(1), N, x.dim(3)}, 1e30);
      for (int64_t e = 0; e < S; ++e) {
        const int64_t t = order[e];
        rows(to.slice(0, e, e + 1), 0, counts[t])
            .copy_from(rows(x.slice(0, t, t + 1), past[t], past[t] + counts[t]));
      }
      return to;
    };
    KvRows which{.sequences = order};
    for (int64_t t : order) which.counts.push_back(counts[t]);
    cache.append(gather(s.k), gather(s.v), which);
    for (Variant variant : variants()) {
      SCOPED_TRACE(variant.name);
      variant.spec.statistics = Statistics::all();
      const AttentionOutputs out = cache.attend(variant.spec, gather(s.q), s.tables, which);
      for (int64_t e = 0; e < S; ++e) {
        const int64_t t = order[e], n = counts[t];
        const auto entry = [&](const Tensor& x) { return x.slice(0, e, e + 1); };
        KvCache alone({.Hk = s.k.dim(1), .D = s.k.dim(3), .Dv = s.v.dim(3)}, window);
        const auto one = [&](const Tensor& x, int64_t a, int64_t b) {
          return rows(x.slice(0, t, t + 1), a, b);
        };
        alone.append(one(s.k, 0, past[t]), one(s.v, 0, past[t]));
        alone.append(one(s.k, past[t], past[t] + n), one(s.v, past[t], past[t] + n));
        const AttentionOutputs own =
            alone.attend(variant.spec, one(s.q, past[t], past[t] + n), s.tables);
        EXPECT_TRUE(same_bits(rows(entry(out.y), 0, n), own.y)) << t;
        EXPECT_TRUE(same_bits(rows(entry(out.row_stat), 0, n), own.row_stat)) << t;
        EXPECT_TRUE(same_bits(rows(entry(out.entropy), 0, n), own.entropy)) << t;
        EXPECT_TRUE(same_bits(rows(entry(out.max_key), 0, n), own.max_key)) << t;
        const int64_t held = own.coverage.dim(2);
        EXPECT_TRUE(same_bits(rows(entry(out.coverage), 0, held), own.coverage)) << t;
        // What does not count is an empty row, and a key that is not there gets nothing.
        const Tensor rest = rows(entry(out.y), n, N);
        EXPECT_TRUE(same_bits(rest, Tensor::zeros(rest.shape())));
        const Tensor none = rows(entry(out.row_stat), n, N);
        const bool sparse =
            variant.spec.normalizer.index() == 1 || variant.spec.normalizer.index() == 2;
        EXPECT_TRUE(same_bits(none, Tensor::full(none.shape(), sparse ? INFINITY : -INFINITY)));
        const Tensor beyond = rows(entry(out.coverage), held, out.coverage.dim(2));
        EXPECT_TRUE(same_bits(beyond, Tensor::zeros(beyond.shape())));
      }
    }
  }
}

TEST(KvCacheBits, ThreadsDoNotMatter) {
  const Setting s = setting(7, 4, 200, DType::f32);
  KvCache cache = cache_for(s);
  cache.append(s.k, s.v);
  const int before = num_threads();
  for (const Variant& variant : variants()) {
    set_num_threads(1);
    const AttentionOutputs one = cache.attend(variant.spec, s.q, s.tables);
    for (int threads : {2, 5}) {
      set_num_threads(threads);
      expect_rows(cache.attend(variant.spec, s.q, s.tables), one, 0);
    }
  }
  set_num_threads(before);
}

// Blocks of keys start at other tokens, so that sums run in another order: rounding apart.
TEST(KvCache, RollingEqualsAWindowToRounding) {
  const Setting s = setting(8, 1, 900, DType::f32);
  for (const int64_t window : {1, 6, 600}) {
    for (const Variant& variant : variants()) {
      SCOPED_TRACE(fmt::format("{} over {}", variant.name, window));
      AttentionSpec spec = variant.spec;
      spec.masks.emplace_back(Window{window - 1, std::nullopt});
      const AttentionOutputs whole = at_once(spec, s, {});
      KvCache cache = cache_for(s, window);
      int64_t at = 0;
      for (int64_t n = 1; at < 900; n = n % 5 == 0 ? 211 : n + 1) {
        const int64_t end = std::min<int64_t>(at + n, 900);
        cache.append(rows(s.k, at, end), rows(s.v, at, end));
        const auto part = cache.attend(variant.spec, rows(s.q, at, end), s.tables);
        ASSERT_TRUE(near(part.y, rows(whole.y, at, end))) << at;
        ASSERT_TRUE(near(part.row_stat, rows(whole.row_stat, at, end))) << at;
        at = end;
      }
      // Back over what the last append added, and forward again.
      const int64_t last = cache.position(0) - cache.first(0) - (window - 1);
      const int64_t back = 900 - std::min<int64_t>(last, 3);
      cache.truncate(0, back);
      cache.append(rows(s.k, back, 900), rows(s.v, back, 900));
      const auto again = cache.attend(variant.spec, rows(s.q, back, 900), s.tables);
      EXPECT_TRUE(near(again.y, rows(whole.y, back, 900)));
    }
  }
}

TEST(KvCache, EmptyCallsAndChannels) {
  KvCache cache({.sequences = 2, .D = 0, .Dv = 3});
  const Tensor q = Tensor::zeros({2, 1, 2, 0});
  const AttentionOutputs none = cache.attend({}, q.slice(2, 0, 0));
  EXPECT_EQ(none.y.shape(), Dims({2, 1, 0, 3}));
  cache.append(Tensor::zeros({2, 1, 4, 0}), Tensor::full({2, 1, 4, 3}, 2));
  EXPECT_TRUE(near(cache.attend({}, q).y, Tensor::full({2, 1, 2, 3}, 2), 0));
  KvCache nobody({.sequences = 0, .D = 2, .Dv = 2});
  nobody.append(Tensor::zeros({0, 1, 4, 2}), Tensor::zeros({0, 1, 4, 2}));
  EXPECT_EQ(nobody.attend({}, Tensor::zeros({0, 1, 4, 2})).y.shape(), Dims({0, 1, 4, 2}));
}

}  // namespace
}  // namespace foci
