// forward_narrow, which serves few queries, gives the bits of the strips that serve many.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "attention/generate.h"
#include "attention/tolerance.h"
#include "foci/attention/fused.h"
#include "foci/attention/state.h"
#include "foci/core/rng.h"
#include "foci/core/simd_target.h"
#include "foci/kernels/attention.h"
#include "foci/kernels/scratch.h"

namespace foci {
namespace {

using testing::same_bits;

struct Rows {
  Tensor y, row_stat, entropy, max_weight, max_key, support;
  Rows(int64_t lanes, int64_t Dv)
      : y(Tensor::zeros({lanes, Dv})),
        row_stat(Tensor::zeros({lanes})),
        entropy(Tensor::zeros({lanes})),
        max_weight(Tensor::zeros({lanes})),
        max_key(Tensor::zeros({lanes}, DType::i64)),
        support(Tensor::zeros({lanes})) {}
  kernels::StripOutputs at(int64_t lane) const {
    kernels::StripOutputs o;
    o.y = y.data<float>() + lane * y.stride(0);
    o.y_stride = y.stride(0);
    o.row_stat = row_stat.data<float>() + lane;
    o.entropy = entropy.data<float>() + lane;
    o.max_weight = max_weight.data<float>() + lane;
    o.max_key = max_key.data<int64_t>() + lane;
    o.support = support.data<float>() + lane;
    return o;
  }
};

// Every strip of a problem both ways, the narrow one in pieces of 1, 2, 3 … rows.
int compare(const AttentionSpec& spec, const AttentionInputs& in, SimdTarget target) {
  const Problem p = make_problem(spec, shape_of(in), target, in);
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(target);
  const fused::Operands operands = fused::operands_of(p);
  const kernels::RowMap map = fused::row_map_of(spec, 0);
  int rows = 0;
  for (const fused::Sequence& s : fused::sequences_of(p)) {
    const size_t bytes =
        std::max(kernels.forward_scratch(map, s.keys, p.shape.D, p.shape.Dv, false),
                 kernels.narrow_scratch(p.shape.D, p.shape.Dv));
    const kernels::Scratch scratch(static_cast<int64_t>(bytes / sizeof(float)));
    auto* memory = reinterpret_cast<std::byte*>(scratch.get());
    for (int64_t h = 0; h < p.shape.H; ++h) {
      for (int64_t first = 0; first < s.queries; first += kernels.width) {
        const int64_t count = std::min<int64_t>(kernels.width, s.queries - first);
        kernels::Strip strip;
        fused::make_strip(p, operands, s, h, first, count, strip);
        const Rows many(count, p.shape.Dv), few(count, p.shape.Dv);
        kernels.forward(map, strip, many.at(0), memory);
        int size = 1;
        for (int64_t at = 0; at < count; at += size, size = size % kernels::kNarrowRows + 1) {
          size = std::min<int>(size, static_cast<int>(count - at));
          kernels::NarrowRow piece[kernels::kNarrowRows];
          for (int r = 0; r < size; ++r) {
            piece[r] = {&strip, static_cast<int>(at) + r, few.at(at + r)};
          }
          kernels.forward_narrow(piece, size, memory);
        }
        EXPECT_TRUE(same_bits(few.y, many.y)) << "y";
        EXPECT_TRUE(same_bits(few.row_stat, many.row_stat)) << "row_stat";
        EXPECT_TRUE(same_bits(few.entropy, many.entropy)) << "entropy";
        EXPECT_TRUE(same_bits(few.max_weight, many.max_weight)) << "max_weight";
        EXPECT_TRUE(same_bits(few.max_key, many.max_key)) << "max_key";
        EXPECT_TRUE(same_bits(few.support, many.support)) << "support";
        rows += static_cast<int>(count);
      }
    }
  }
  return rows;
}

void sweep(uint64_t first, int cases, const testing::SweepLimits& limits) {
  int rows = 0;
  for (uint64_t n = first; n < first + static_cast<uint64_t>(cases); ++n) {
    testing::SweepCase c = testing::attention_case(n, DType::f32, limits);
    c.spec.normalizer = Softmax{};
    if (!fused::serves_narrow(c.spec)) c.spec.score = Dot{};
    SCOPED_TRACE(c.text);
    for (SimdTarget target : supported_targets()) {
      SCOPED_TRACE(name_of(target));
      rows += compare(c.spec, c.in, target);
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(rows, cases);
}

TEST(Narrow, HasTheBitsOfStripsOnSmallShapes) {
  sweep(40000, 300, {});
}

// Several blocks of keys, a tail of keys, of numbers a key, and of values.
TEST(Narrow, HasTheBitsOfStripsAcrossBlocks) {
  sweep(41000, 30,
        {.batch = 1,
         .kv_heads = 1,
         .group = 2,
         .queries = 40,
         .keys = 1300,
         .head = 40,
         .value = 70});
}

TEST(Narrow, StepsOverWhatIsMasked) {
  constexpr int64_t kM = 40;
  Rng rng(3);
  const auto random = [&](const Dims& shape) {
    const Tensor t = Tensor::empty(shape);
    for (float& x : t.span<float>()) x = static_cast<float>(rng.normal());
    return t;
  };
  for (SimdTarget target : supported_targets()) {
    AttentionInputs in{.q = random({1, 2, 3, 8}),
                       .k = random({1, 1, kM, 8}),
                       .v = random({1, 1, kM, 6}),
                       .key_lengths = Tensor::full({1}, kM / 2, DType::i64)};
    const AttentionSpec spec{.masks = {KeyLengths{}}};
    const auto y = [&] {
      return Plan::make(spec, shape_of(in), {Implementation::fused, target}).bind(in).forward().y;
    };
    const Tensor good = y();
    in.k.slice(2, kM / 2, kM).fill(std::nan(""));
    in.v.slice(2, kM / 2, kM).fill(INFINITY);
    EXPECT_TRUE(same_bits(y(), good));
    in.v.select(2, 0).fill(std::nan(""));  // one that is seen
    const Tensor bad = y();
    for (float x : bad.span<float>()) EXPECT_TRUE(std::isnan(x));
  }
}

}  // namespace
}  // namespace foci
