// KvCache: bad input is refused with one clear line, and a refusal changes nothing.
#include <gtest/gtest.h>

#include <new>

#include "attention/refusal.h"
#include "attention/tolerance.h"
#include "foci/attention/kv_cache.h"

namespace foci {
namespace {

using testing::refusal;
using testing::same_bits;

class Refusals : public ::testing::Test {
 protected:
  // Two sequences: 3 tokens and 1.
  void SetUp() override {
    cache_.append(ones(3), ones(3, 2), {.counts = {3, 1}});
    k_ = cache_.keys(0).clone();
    v_ = cache_.values(1).clone();
    bytes_ = cache_.bytes();
  }
  // The message, after which the cache must be what it was.
  std::string append(const Tensor& k, const Tensor& v, const KvRows& rows = {}) {
    const std::string said = refusal([&] { cache_.append(k, v, rows); });
    expect_unchanged();
    return said;
  }
  std::string attend(const AttentionSpec& spec, const Tensor& q, const KvRows& rows = {}) {
    return refusal([&] { cache_.attend(spec, q, {}, rows); });
  }
  void expect_unchanged() {
    EXPECT_EQ(cache_.position(0), 3);
    EXPECT_EQ(cache_.position(1), 1);
    EXPECT_TRUE(same_bits(cache_.keys(0), k_));
    EXPECT_TRUE(same_bits(cache_.values(1), v_));
    EXPECT_EQ(cache_.bytes(), bytes_);
  }
  static Tensor ones(int64_t n, int64_t channels = 4, int64_t entries = 2, int64_t heads = 1) {
    return Tensor::full({entries, heads, n, channels}, 1);
  }

  KvCache cache_{{.sequences = 2, .Hk = 1, .D = 4, .Dv = 2}};
  Tensor k_, v_;
  size_t bytes_ = 0;
};

TEST_F(Refusals, ShapesAndTypesOfNewTokens) {
  EXPECT_EQ(append(Tensor(), ones(1, 2)), "k: no tensor was given");
  EXPECT_EQ(append(ones(1), Tensor()), "v: no tensor was given");
  EXPECT_EQ(append(ones(1).to(DType::f16), ones(1, 2)),
            "k: float16 arrived, the cache holds float32");
  EXPECT_EQ(append(ones(1), ones(1, 2).to(DType::f64)),
            "v: float64 arrived, the cache holds float32");
  EXPECT_EQ(append(ones(1).select(0, 0), ones(1, 2)),
            "k: shape [1, 1, 4] arrived, [E, Hk, n, D] is right");
  EXPECT_EQ(append(ones(1, 4, 2, 2), ones(1, 2)),
            "k: shape [2, 2, 1, 4] arrived, [E, Hk, n, D] with heads 1 is right");
  EXPECT_EQ(append(ones(1, 5), ones(1, 2)),
            "k: shape [2, 1, 1, 5] arrived, [E, Hk, n, D] with channels 4 is right");
  EXPECT_EQ(append(ones(1), ones(1, 4)),
            "v: shape [2, 1, 1, 4] arrived, [E, Hk, n, Dv] with channels 2 is right");
  EXPECT_EQ(append(ones(2), ones(1, 2)),
            "v: shape [2, 1, 1, 2] arrived, 2 entries of 2 rows are right, as for k");
  EXPECT_EQ(append(ones(4).transpose(2, 3), ones(4, 2)),
            "k: stride 4 in the last dimension arrived; only the other dimensions may be strided "
            "(call contiguous())");
}

TEST_F(Refusals, WhichSequencesAndHowManyRows) {
  EXPECT_EQ(append(ones(1, 4, 3), ones(1, 2, 3)), "k: 3 entries arrived for 2 sequences");
  EXPECT_EQ(append(ones(1), ones(1, 2), {.sequences = {0}}),
            "k: 2 entries arrived for 1 sequences");
  EXPECT_EQ(append(ones(1), ones(1, 2), {.sequences = {0, 2}}),
            "rows.sequences[1]: 2 arrived, the cache has sequences [0, 2)");
  EXPECT_EQ(append(ones(1), ones(1, 2), {.sequences = {-1, 0}}),
            "rows.sequences[0]: -1 arrived, the cache has sequences [0, 2)");
  EXPECT_EQ(append(ones(1), ones(1, 2), {.sequences = {1, 1}}),
            "rows.sequences[1]: sequence 1 arrived a second time");
  EXPECT_EQ(append(ones(1), ones(1, 2), {.counts = {1}}),
            "rows.counts: 1 counts arrived for 2 entries");
  EXPECT_EQ(append(ones(1), ones(1, 2), {.counts = {1, 2}}),
            "rows.counts[1]: 2 arrived, k has 1 rows");
  EXPECT_EQ(append(ones(1), ones(1, 2), {.counts = {-1, 1}}),
            "rows.counts[0]: -1 arrived, k has 1 rows");
  EXPECT_EQ(refusal([&] { (void)cache_.position(2); }),
            "sequence: 2 arrived, the cache has sequences [0, 2)");
  EXPECT_EQ(refusal([&] { (void)cache_.keys(-1); }),
            "sequence: -1 arrived, the cache has sequences [0, 2)");
  EXPECT_EQ(refusal([&] { cache_.reset(5); }),
            "sequence: 5 arrived, the cache has sequences [0, 2)");
  EXPECT_EQ(refusal([&] { cache_.truncate(0, 4); }),
            "position: 4 arrived, sequence 0 has 3 tokens");
  EXPECT_EQ(refusal([&] { cache_.truncate(0, -1); }),
            "position: -1 arrived, sequence 0 has 3 tokens");
  expect_unchanged();
}

TEST_F(Refusals, ItsOwnTokens) {
  const Tensor own = cache_.keys(0).unsqueeze(0);
  EXPECT_EQ(append(own, ones(3, 2, 1), {.sequences = {0}}),
            "k: a view of sequence 0 of this cache arrived; append a clone()");
  cache_.append(own.clone(), ones(3, 2, 1), {.sequences = {0}});
  EXPECT_EQ(cache_.position(0), 6);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMayRunOut = false;  // sanitisers end the program instead of throwing bad_alloc
#else
constexpr bool kMayRunOut = true;
#endif

// The first entry would fit: it must not have been appended when the second is refused.
TEST_F(Refusals, MoreThanMemoryHolds) {
  const int64_t many = int64_t{1} << 45;
  const Tensor k = ones(1, 4).broadcast_to({2, 1, many, 4}),
               v = ones(1, 2).broadcast_to({2, 1, many, 2});
  if (kMayRunOut) {
    EXPECT_THROW(cache_.append(k, v, {.counts = {1, many}}), std::bad_alloc);
    expect_unchanged();
  }
  KvCache wide({.sequences = 2, .Hk = 1, .D = 1 << 16, .Dv = 2});
  const Tensor row = Tensor::zeros({1, 1, 1, 1 << 16});
  EXPECT_EQ(refusal([&] {
              wide.append(row.broadcast_to({2, 1, many, 1 << 16}), v, {.counts = {1, many}});
            }),
            "shape: keys [Hk, tokens, D] of sizes [1, 35184372088832, 65536] has more elements "
            "than memory can be addressed");
  EXPECT_EQ(wide.position(0), 0);
  // Rows without channels need no memory, so that tokens can be counted up to the end.
  KvCache thin({.D = 0, .Dv = 0});
  const Tensor nothing = Tensor::empty({1, 1, int64_t{1} << 47, 0});
  thin.append(nothing, nothing);
  thin.append(nothing, nothing);
  EXPECT_EQ(refusal([&] { thin.append(nothing, nothing); }),
            "k: 140737488355328 rows arrived for sequence 0, which then has more than 2^48 tokens");
  EXPECT_EQ(thin.position(0), int64_t{1} << 48);
}

TEST_F(Refusals, Queries) {
  EXPECT_EQ(attend({}, Tensor()), "q: shape none arrived, [E, H, n, D] is right");
  EXPECT_EQ(attend({}, ones(1).select(0, 0)), "q: shape [1, 1, 4] arrived, [E, H, n, D] is right");
  EXPECT_EQ(attend({}, ones(1, 3)),
            "q: shape [2, 1, 1, 3] arrived, [E, H, n, D] with channels 4 is right");
  EXPECT_EQ(attend({}, ones(1).to(DType::bf16)), "q: bfloat16 arrived, the cache holds float32");
  EXPECT_EQ(attend({}, ones(1, 4, 1)), "q: 1 entries arrived for 2 sequences");
  EXPECT_EQ(attend({}, ones(1), {.counts = {2, 0}}), "rows.counts[0]: 2 arrived, q has 1 rows");
  EXPECT_EQ(attend({}, ones(2)), "q: 2 queries arrived for sequence 1, which holds 1 tokens");
  EXPECT_EQ(attend({}, ones(2), {.counts = {2, 1}}), "");
}

TEST_F(Refusals, SpecsThatReadTensorsByKey) {
  const auto said = [&](const AttentionSpec& spec) { return attend(spec, ones(1)); };
  EXPECT_EQ(said({.masks = {Causal{Align::top_left}}}),
            "spec.masks: align top-left arrived, but queries of a cache stand at its end; use "
            "bottom-right or past");
  EXPECT_EQ(said({.masks = {Window{1, 0, Align::top_left}}}),
            "spec.masks: align top-left arrived, but queries of a cache stand at its end; use "
            "bottom-right or past");
  const auto by_key = [](const std::string& what) {
    return "spec: " + what +
           " arrived, whose tensor is laid out by key, which a cache keeps to itself";
  };
  EXPECT_EQ(said({.masks = {KeyLengths{}}}), by_key("the mask key_lengths"));
  EXPECT_EQ(said({.masks = {Segments{}}}), by_key("the mask segments"));
  EXPECT_EQ(said({.masks = {Keep{}}}), by_key("the mask keep"));
  EXPECT_EQ(said({.biases = {TensorBias{}}}), by_key("the bias tensor"));
  EXPECT_EQ(said({.biases = {Relative2D{1, 3}}}), by_key("the bias relative2d"));
  EXPECT_EQ(said({.dropout = Dropout{}}),
            "spec.dropout: p = 0.1 arrived, but a cache is for inference");
  EXPECT_EQ(said({.biases = {Alibi{}}}),
            "slopes: no tensor was given, but the bias alibi reads it");
}

TEST(KvCacheRefusals, RollingCachesForget) {
  KvCache cache({.D = 1, .Dv = 1}, 4);
  const auto rows = [](int64_t n) { return Tensor::zeros({1, 1, n, 1}); };
  cache.append(rows(5), rows(5));
  cache.append(rows(3), rows(3));  // tokens 5, 6, 7; 2, 3, 4 are what they see
  EXPECT_EQ(cache.first(0), 2);
  EXPECT_EQ(refusal([&] { cache.attend({}, rows(4)); }),
            "q: 4 queries arrived for sequence 0, but only the last 3 tokens have their window of "
            "4 still held");
  EXPECT_EQ(refusal([&] { cache.truncate(0, 4); }),
            "position: 4 arrived, but sequence 0 holds tokens from 2 on, and a window of 4 needs 5 "
            "or more");
  EXPECT_EQ(cache.position(0), 8);
  cache.truncate(0, 5);
  EXPECT_EQ(cache.length(0), 3);
}

TEST(KvCacheRefusals, Sizes) {
  const auto make = [](const KvCacheShape& shape, std::optional<int64_t> window = std::nullopt) {
    return refusal([&] { KvCache cache(shape, window); });
  };
  EXPECT_EQ(make({.sequences = -1}), "shape.sequences: -1 arrived, a size is >= 0");
  EXPECT_EQ(make({.D = -2}), "shape.D: -2 arrived, a size is >= 0");
  EXPECT_EQ(make({.Dv = -2}), "shape.Dv: -2 arrived, a size is >= 0");
  EXPECT_EQ(make({.Hk = 0}), "shape.Hk: 0 key/value heads arrived, at least 1 is needed");
  EXPECT_EQ(make({.dtype = DType::f64}),
            "shape.dtype: float64 arrived, a cache holds float32, float16 or bfloat16");
  EXPECT_EQ(make({.Hk = int64_t{1} << 40, .D = int64_t{1} << 40}),
            "shape: keys [sequences, Hk, D] of sizes [1, 1099511627776, 1099511627776] has more "
            "elements than memory can be addressed");
  EXPECT_EQ(make({}, 0), "window: 0 arrived, a token sees at least itself, and at most 2^48");
  EXPECT_EQ(make({}, INT64_MAX),
            "window: 9223372036854775807 arrived, a token sees at least itself, and at most 2^48");
}

}  // namespace
}  // namespace foci
