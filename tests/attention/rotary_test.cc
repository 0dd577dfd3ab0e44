// Rotary positions of the engine against the oracle: storage types, strides, partial widths, ways
// to say where rows stand, gradients, and what is refused.
#include "foci/attention/rotary.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "attention/refusal.h"
#include "attention/tolerance.h"
#include "foci/core/rng.h"
#include "foci/core/threads.h"
#include "foci/reference/rotary.h"

namespace foci {
namespace {

using testing::near;
using testing::refusal;
using testing::same_bits;

// Two products and a sum, each rounded, of elements that grow by √2: 4·2^-24 of the largest, and
// room for the last bit.
constexpr double kRounding = 5 * 0x1p-24;

Tensor normal(Rng& rng, const Dims& shape, DType dtype = DType::f32) {
  Tensor t = Tensor::empty(shape);
  for (float& x : t.span<float>()) x = static_cast<float>(rng.normal());
  return t.to(dtype);
}

reference::RotaryPairs oracle_pairs(RotaryPairs pairs) {
  return pairs == RotaryPairs::interleaved ? reference::RotaryPairs::interleaved
                                           : reference::RotaryPairs::half_split;
}

struct Problem {
  Tensor x;
  RotaryAngles angles;
  Tensor cosine, sine;  // [B,N,R/2] of each row, gathered by hand
};

Problem random_problem(uint64_t n, DType dtype) {
  Rng rng(n, 5);
  const int64_t B = 1 + rng.below(3), H = 1 + rng.below(3), N = rng.below(5), D = 1 + rng.below(70);
  const int64_t half = rng.below(D / 2 + 1), P = N + 1 + rng.below(6);
  Problem p;
  p.x = rng.below(2) ? normal(rng, {B, H, N, D}, dtype)
                     : normal(rng, {B, N, H, D + 3}, dtype).slice(3, 1, D + 1).transpose(1, 2);
  p.angles.pairs = rng.below(2) ? RotaryPairs::interleaved : RotaryPairs::half_split;
  std::vector<int64_t> at(B * N);
  switch (rng.below(5)) {
    case 0: {  // angles of each row, not even of unit length
      p.angles.cosine = p.cosine = normal(rng, {B, N, half});
      p.angles.sine = p.sine = normal(rng, {B, N, half});
      return p;
    }
    case 1:
      for (int64_t& id : at) id = rng.below(P);
      p.angles.position_ids = Tensor::from(at, {B, N});
      break;
    case 2: {
      std::vector<int64_t> ids(N);
      for (int64_t& id : ids) id = rng.below(P);
      for (int64_t r = 0; r < B * N; ++r) at[r] = ids[r % N];
      p.angles.position_ids = Tensor::from(ids, {N});
      break;
    }
    case 3: {
      std::vector<int64_t> offsets(B);
      for (int64_t& o : offsets) o = rng.below(P - N + 1);
      for (int64_t r = 0; r < B * N; ++r) at[r] = offsets[r / N] + r % N;
      p.angles.offsets = Tensor::from(offsets, {B});
      break;
    }
    default:
      for (int64_t r = 0; r < B * N; ++r) at[r] = r % N;
  }
  const RotaryAngles table = rotary_table(P, 2 * half, 100, 1 + static_cast<double>(rng.below(2)));
  p.angles.cosine = table.cosine;
  p.angles.sine = table.sine;
  p.cosine = Tensor::empty({B, N, half});
  p.sine = Tensor::empty({B, N, half});
  for (int64_t r = 0; r < B * N; ++r) {
    p.cosine.select(0, r / N).select(0, r % N).copy_from(table.cosine.select(0, at[r]));
    p.sine.select(0, r / N).select(0, r % N).copy_from(table.sine.select(0, at[r]));
  }
  return p;
}

void sweep(uint64_t first, int cases, DType dtype) {
  const std::vector<SimdTarget>& targets = supported_targets();
  for (int n = 0; n < cases && !::testing::Test::HasFailure(); ++n) {
    const Problem p = random_problem(first + static_cast<uint64_t>(n), dtype);
    const SimdTarget target = targets[static_cast<size_t>(n) % targets.size()];
    SCOPED_TRACE(fmt::format("case {} on {}: x {}, {} angles", n, name_of(target),
                             p.x.shape().str(), p.cosine.dim(2)));
    const auto pairs = oracle_pairs(p.angles.pairs);
    const Tensor y = rotary(p.x, p.angles, target);
    EXPECT_EQ(y.dtype(), dtype);
    EXPECT_TRUE(y.is_contiguous());
    const Tensor want = reference::rotary(p.x, p.cosine, p.sine, pairs);
    EXPECT_TRUE(near(y, want, kRounding));
    // The oracle turns back with negative sines.
    const Tensor minus = p.sine.clone();
    for (float& s : minus.span<float>()) s = -s;
    EXPECT_TRUE(near(rotary_backward(p.x, p.angles, target),
                     reference::rotary(p.x, p.cosine, minus, pairs), kRounding));
    Tensor own = Tensor::empty({p.x.dim(0), p.x.dim(2), p.x.dim(1), p.x.dim(3)}, dtype);
    own = own.transpose(1, 2);
    own.copy_from(p.x);
    rotate(own, p.angles, target);
    EXPECT_TRUE(same_bits(own, y));
  }
}

TEST(Rotary, FollowsTheOracle) {
  sweep(0, 600, DType::f32);
}

TEST(Rotary, FollowsTheOracleInHalfPrecision) {
  sweep(1000, 200, DType::f16);
  sweep(2000, 200, DType::bf16);
}

// ⟨dy, R x⟩ = ⟨Rᵀ dy, x⟩, in double from float32 results.
TEST(Rotary, TheGradientIsTheTranspose) {
  const auto inner = [](const Tensor& a, const Tensor& b) {
    const Tensor x = a.to(DType::f64).contiguous(), y = b.to(DType::f64).contiguous();
    double sum = 0;
    for (int64_t n = 0; n < x.numel(); ++n) sum += x.data<double>()[n] * y.data<double>()[n];
    return sum;
  };
  for (uint64_t n = 3000; n < 3100; ++n) {
    const Problem p = random_problem(n, DType::f32);
    Rng rng(n, 6);
    const Tensor dy = normal(rng, p.x.shape());
    const double size = std::sqrt(inner(dy, dy) * inner(p.x, p.x));
    EXPECT_NEAR(inner(dy, rotary(p.x, p.angles)), inner(rotary_backward(dy, p.angles), p.x),
                1e-6 * (1 + 10 * size));
  }
}

TEST(Rotary, ScoresDependOnTheDistance) {
  Rng rng(1);
  const Tensor q = normal(rng, {1, 1, 1, 32}), k = normal(rng, {1, 1, 1, 32});
  RotaryAngles a = rotary_table(300, 32);
  const auto score = [&](int64_t i, int64_t j) {
    a.offsets = Tensor::from<int64_t>({i}, {1});
    const Tensor x = rotary(q, a);
    a.offsets = Tensor::from<int64_t>({j}, {1});
    const Tensor y = rotary(k, a);
    double sum = 0;
    for (int64_t d = 0; d < 32; ++d) sum += double(x.data<float>()[d]) * y.data<float>()[d];
    return sum;
  };
  for (int64_t shift : {1, 7, 200}) EXPECT_NEAR(score(40, 33), score(40 + shift, 33 + shift), 1e-5);
}

TEST(Rotary, TableIsTheDefinition) {
  const RotaryAngles a = rotary_table(50, 6, 500, 4);
  for (int64_t p = 0; p < 50; ++p) {
    for (int64_t r = 0; r < 3; ++r) {
      const double angle = double(p) / 4 * std::pow(500, -2.0 * double(r) / 6);
      EXPECT_EQ(a.cosine.at<float>(p, r), static_cast<float>(std::cos(angle)));
      EXPECT_EQ(a.sine.at<float>(p, r), static_cast<float>(std::sin(angle)));
    }
  }
}

TEST(Rotary, RowsAndThreadsDoNotMatter) {
  Rng rng(2);
  const Tensor x = normal(rng, {2, 3, 400, 46});
  const RotaryAngles a = rotary_table(1000, 46);
  const int before = num_threads();
  set_num_threads(1);
  const Tensor one = rotary(x, a);
  set_num_threads(3);
  EXPECT_TRUE(same_bits(rotary(x, a), one));
  set_num_threads(before);
  RotaryAngles later = a;
  later.offsets = Tensor::from<int64_t>({133, 133}, {2});
  EXPECT_TRUE(same_bits(rotary(x.slice(2, 133, 150), later), one.slice(2, 133, 150)));
}

TEST(Rotary, RefusesWhatDoesNotFit) {
  const Tensor x = Tensor::zeros({2, 1, 3, 8});
  const RotaryAngles good = rotary_table(5, 8);
  const auto with = [&](auto change) {
    RotaryAngles a = good;
    change(a);
    return refusal([&] { rotary(x, a); });
  };
  const auto ids = [](std::vector<int64_t> v, const Dims& shape) { return Tensor::from(v, shape); };
  EXPECT_EQ(with([](RotaryAngles&) {}), "");
  EXPECT_EQ(refusal([&] {
              rotary(Tensor::zeros({2, 3, 8}), good);
            }),
            "x: shape [2, 3, 8] arrived, [B, H, N, D] is right");
  EXPECT_EQ(refusal([&] { rotary(Tensor(), good); }),
            "x: shape none arrived, [B, H, N, D] is right");
  EXPECT_EQ(refusal([&] { rotary(x.to(DType::f64), good); }),
            "x: float64 arrived, float32, float16 or bfloat16 is right");
  EXPECT_EQ(refusal([&] { rotary_backward(x.transpose(2, 3), good); }),
            "dy: stride 8 in the last dimension arrived; only the other dimensions may be strided "
            "(call contiguous())");
  EXPECT_EQ(refusal([&] {
              rotate(x.slice(0, 0, 1).broadcast_to({2, 1, 3, 8}), good);
            }),
            "x: a view broadcast over dimension 0 arrived, which cannot be written to");
  EXPECT_EQ(with([](RotaryAngles& a) { a.cosine = Tensor(); }), "cosine: no tensor was given");
  EXPECT_EQ(with([](RotaryAngles& a) { a.sine = a.sine.slice(0, 0, 4); }),
            "sine: shape [4, 4] arrived, [5, 4] is right, as for cosine");
  EXPECT_EQ(with([](RotaryAngles& a) {
              a.sine = Tensor::zeros({5, 4}, DType::i32);
            }),
            "sine: int32 arrived, a floating type is right");
  EXPECT_EQ(with([](RotaryAngles& a) { a.cosine = a.sine = Tensor::zeros({5}); }),
            "cosine: shape [5] arrived, a table [P, R/2] or one row each, [B, N, R/2], is right");
  EXPECT_EQ(with([](RotaryAngles& a) { a = rotary_table(5, 10); }),
            "cosine: 5 angles arrived, 8 channels hold at most 4 pairs");
  EXPECT_EQ(with([](RotaryAngles& a) {
              a.cosine = a.sine = Tensor::zeros({2, 4, 4});
            }),
            "cosine: shape [2, 4, 4] arrived, [2, 3, R/2] (B, N, R/2) is right");
  EXPECT_EQ(with([](RotaryAngles& a) { a = rotary_table(2, 8); }),
            "cosine: 3 rows from position 0 on do not fit a table of 2 positions");
  EXPECT_EQ(with([&](RotaryAngles& a) {
              a.offsets = ids({2, 3}, {2});
            }),
            "offsets[1]: 3 rows from position 3 on do not fit a table of 5 positions");
  EXPECT_EQ(with([&](RotaryAngles& a) {
              a.offsets = ids({-1, 0}, {2});
            }),
            "offsets[0]: -1 arrived, it must be >= 0");
  EXPECT_EQ(with([&](RotaryAngles& a) {
              a.offsets = ids({INT64_MAX, 0}, {2});
            }),
            "offsets[0]: 3 rows from position 9223372036854775807 on do not fit a table of 5 "
            "positions");
  EXPECT_EQ(with([&](RotaryAngles& a) {
              a.offsets = ids({1, 1, 1}, {3});
            }),
            "offsets: shape [3] of int64 arrived, int64 [2] (B) is right");
  EXPECT_EQ(with([&](RotaryAngles& a) {
              a.position_ids = ids({0, 5, 1}, {3});
            }),
            "position_ids: row 1 of batch 0 stands at position 5, the table holds [0, 5)");
  EXPECT_EQ(with([&](RotaryAngles& a) {
              a.position_ids = ids({0, 1}, {2});
            }),
            "position_ids: shape [2] of int64 arrived, int64 [2, 3] (B, N) or [3] (N) is right");
  EXPECT_EQ(with([&](RotaryAngles& a) {
              a.position_ids = ids({0, 1, 2}, {3});
              a.offsets = ids({0, 0}, {2});
            }),
            "offsets: given beside position_ids; one of them says where rows stand");
  EXPECT_EQ(with([&](RotaryAngles& a) {
              a.cosine = a.sine = Tensor::zeros({2, 3, 4});
              a.position_ids = ids({0, 1, 2}, {3});
            }),
            "position_ids: given, but cosine [B, N, R/2] holds the angles of each row");
  EXPECT_EQ(refusal([] { rotary_table(-1, 4); }), "positions: -1 arrived, a size is >= 0");
  EXPECT_EQ(refusal([] { rotary_table(4, 3); }),
            "width: 3 arrived, an even number of channels turns");
  EXPECT_EQ(refusal([] { rotary_table(4, 2, 0); }), "base: 0 arrived, a number > 0 is right");
  EXPECT_EQ(refusal([] { rotary_table(4, 2, 10, -1); }),
            "scaling: -1 arrived, a number > 0 is right");
}

}  // namespace
}  // namespace foci
