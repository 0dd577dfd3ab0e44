// bind and the checks around forward, backward and weights: every refusal in its words, and key
// ranges against the oracle's pair-by-pair masks.
#include <gtest/gtest.h>

#include <limits>

#include "attention/generate.h"
#include "attention/refusal.h"
#include "attention/tolerance.h"
#include "foci/attention/plan.h"
#include "foci/attention/state.h"
#include "foci/reference/attention.h"

namespace foci {
namespace {

using testing::refusal;

// B 2, H 4, Hk 2, N 3, M 5, D 4, Dv 6, with every tensor that any spec reads.
AttentionInputs inputs() {
  return {.q = Tensor::zeros({2, 4, 3, 4}),
          .k = Tensor::zeros({2, 2, 5, 4}),
          .v = Tensor::zeros({2, 2, 5, 6}),
          .key_lengths = Tensor::full({2}, 4, DType::i64),
          .past_lengths = Tensor::full({2}, 2, DType::i64),
          .q_segments = Tensor::zeros({2, 3}, DType::i32),
          .k_segments = Tensor::zeros({2, 5}, DType::i32),
          .keep = Tensor::full({3, 5}, 1, DType::boolean),
          .bias = Tensor::zeros({4, 3, 5}),
          .slopes = Tensor::zeros({4}),
          .table1d = Tensor::zeros({4, 7}),
          .table2d = Tensor::zeros({4, 1, 9}),
          .score_w = Tensor::zeros({4})};
}

AttentionSpec spec_of_everything() {
  AttentionSpec spec;
  spec.score = Additive{};
  spec.masks = {Causal{Align::past}, KeyLengths{}, Segments{}, Keep{}};
  spec.biases = {TensorBias{}, Alibi{}, Relative1D{3}, Relative2D{1, 5}};
  return spec;
}

Plan plan_of(const AttentionSpec& spec) {
  return Plan::make(spec, {.B = 2, .H = 4, .Hk = 2, .N = 3, .M = 5, .D = 4, .Dv = 6},
                    {.implementation = Implementation::plain});
}

// The message when one input is another tensor.
std::string bind_refusal(Tensor AttentionInputs::*member, const Tensor& t) {
  AttentionInputs in = inputs();
  in.*member = t;
  return refusal([&] { plan_of(spec_of_everything()).bind(in); });
}

// A view of this shape whose last dimension has stride 2.
Tensor sparse_rows(const Dims& shape, DType dtype = DType::f32) {
  Dims wide = shape;
  wide.push_back(2);
  return Tensor::zeros(wide, dtype).select(-1, 0);
}

TEST(Bind, AcceptsWhatIsRight) {
  EXPECT_EQ(refusal([] { plan_of(spec_of_everything()).bind(inputs()); }), "");
  // Tensors that the spec does not read may be missing.
  const AttentionInputs in{.q = inputs().q, .k = inputs().k, .v = inputs().v};
  EXPECT_EQ(refusal([&] { plan_of({}).bind(in); }), "");
}

TEST(Bind, RefusesMissingTensors) {
  using I = AttentionInputs;
  EXPECT_EQ(bind_refusal(&I::q, {}), "q: no tensor was given, but attention reads it");
  EXPECT_EQ(bind_refusal(&I::k, {}), "k: no tensor was given, but attention reads it");
  EXPECT_EQ(bind_refusal(&I::v, {}), "v: no tensor was given, but attention reads it");
  EXPECT_EQ(bind_refusal(&I::key_lengths, {}),
            "key_lengths: no tensor was given, but the mask key_lengths reads it");
  EXPECT_EQ(bind_refusal(&I::past_lengths, {}),
            "past_lengths: no tensor was given, but a mask aligned to \"past\" reads it");
  EXPECT_EQ(bind_refusal(&I::q_segments, {}),
            "q_segments: no tensor was given, but the mask segments reads it");
  EXPECT_EQ(bind_refusal(&I::k_segments, {}),
            "k_segments: no tensor was given, but the mask segments reads it");
  EXPECT_EQ(bind_refusal(&I::keep, {}), "keep: no tensor was given, but the mask keep reads it");
  EXPECT_EQ(bind_refusal(&I::bias, {}), "bias: no tensor was given, but the bias tensor reads it");
  EXPECT_EQ(bind_refusal(&I::slopes, {}),
            "slopes: no tensor was given, but the bias alibi reads it");
  EXPECT_EQ(bind_refusal(&I::table1d, {}),
            "table1d: no tensor was given, but the bias relative1d reads it");
  EXPECT_EQ(bind_refusal(&I::table2d, {}),
            "table2d: no tensor was given, but the bias relative2d reads it");
  EXPECT_EQ(bind_refusal(&I::score_w, {}),
            "score_w: no tensor was given, but the score additive reads it");
}

TEST(Bind, RefusesOtherShapes) {
  using I = AttentionInputs;
  EXPECT_EQ(bind_refusal(&I::q, Tensor::zeros({2, 4, 3, 5})),
            "q: shape [2, 4, 3, 5] arrived, [2, 4, 3, 4] (B, H, N, D) is right");
  EXPECT_EQ(bind_refusal(&I::k, Tensor::zeros({2, 4, 5, 4})),
            "k: shape [2, 4, 5, 4] arrived, [2, 2, 5, 4] (B, Hk, M, D) is right");
  EXPECT_EQ(bind_refusal(&I::v, Tensor::zeros({2, 5, 6})),
            "v: shape [2, 5, 6] arrived, [2, 2, 5, 6] (B, Hk, M, Dv) is right");
  EXPECT_EQ(bind_refusal(&I::key_lengths, Tensor::zeros({3}, DType::i64)),
            "key_lengths: shape [3] arrived, [2] (B) is right");
  EXPECT_EQ(bind_refusal(&I::q_segments, Tensor::zeros({2, 5}, DType::i32)),
            "q_segments: shape [2, 5] arrived, [2, 3] (B, N) is right");
  EXPECT_EQ(bind_refusal(&I::k_segments, Tensor::zeros({5}, DType::i32)),
            "k_segments: shape [5] arrived, [2, 5] (B, M) is right");
  EXPECT_EQ(bind_refusal(&I::keep, Tensor::zeros({2, 3, 5}, DType::boolean)),
            "keep: shape [2, 3, 5] arrived, it must broadcast right-aligned to [2, 4, 3, 5] "
            "(B, H, N, M)");
  EXPECT_EQ(bind_refusal(&I::bias, Tensor::zeros({1, 2, 4, 3, 5})),
            "bias: shape [1, 2, 4, 3, 5] arrived, it must broadcast right-aligned to "
            "[2, 4, 3, 5] (B, H, N, M)");
  EXPECT_EQ(bind_refusal(&I::slopes, Tensor::zeros({2})),
            "slopes: shape [2] arrived, [4] (H) is right");
  EXPECT_EQ(bind_refusal(&I::table1d, Tensor::zeros({4, 6})),
            "table1d: shape [4, 6] arrived, [4, 7] (H, 2*max_distance+1) is right");
  EXPECT_EQ(bind_refusal(&I::table2d, Tensor::zeros({4, 9})),
            "table2d: shape [4, 9] arrived, [4, 1, 9] (H, 2*height-1, 2*width-1) is right");
  EXPECT_EQ(bind_refusal(&I::score_w, Tensor::zeros({6})),
            "score_w: shape [6] arrived, [4] (D) is right");
}

TEST(Bind, RefusesOtherTypes) {
  using I = AttentionInputs;
  EXPECT_EQ(bind_refusal(&I::q, Tensor::zeros({2, 4, 3, 4}, DType::f16)),
            "q: float16 arrived, float32 is right");
  EXPECT_EQ(bind_refusal(&I::k, Tensor::zeros({2, 2, 5, 4}, DType::f64)),
            "k: float64 arrived, float32 is right");
  EXPECT_EQ(bind_refusal(&I::v, Tensor::zeros({2, 2, 5, 6}, DType::bf16)),
            "v: bfloat16 arrived, float32 is right");
  EXPECT_EQ(bind_refusal(&I::key_lengths, Tensor::zeros({2}, DType::i32)),
            "key_lengths: int32 arrived, int64 is right");
  EXPECT_EQ(bind_refusal(&I::past_lengths, Tensor::zeros({2})),
            "past_lengths: float32 arrived, int64 is right");
  EXPECT_EQ(bind_refusal(&I::q_segments, Tensor::zeros({2, 3}, DType::i64)),
            "q_segments: int64 arrived, int32 is right");
  EXPECT_EQ(bind_refusal(&I::k_segments, Tensor::zeros({2, 5}, DType::i64)),
            "k_segments: int64 arrived, int32 is right");
  EXPECT_EQ(bind_refusal(&I::keep, Tensor::zeros({3, 5}, DType::u8)),
            "keep: uint8 arrived, bool is right (true attends)");
  EXPECT_EQ(bind_refusal(&I::bias, Tensor::zeros({3, 5}, DType::boolean)),
            "bias: bool arrived, a floating type is right");
  EXPECT_EQ(bind_refusal(&I::slopes, Tensor::zeros({4}, DType::i32)),
            "slopes: int32 arrived, a floating type is right");
  EXPECT_EQ(bind_refusal(&I::table1d, Tensor::zeros({4, 7}, DType::i32)),
            "table1d: int32 arrived, a floating type is right");
  EXPECT_EQ(bind_refusal(&I::table2d, Tensor::zeros({4, 1, 9}, DType::i32)),
            "table2d: int32 arrived, a floating type is right");
  EXPECT_EQ(bind_refusal(&I::score_w, Tensor::zeros({4}, DType::u8)),
            "score_w: uint8 arrived, a floating type is right");
}

TEST(Bind, RefusesStridesInTheLastDimension) {
  using I = AttentionInputs;
  const std::string rest =
      ": stride 2 in the last dimension arrived; only the other dimensions may be strided (call "
      "contiguous())";
  EXPECT_EQ(bind_refusal(&I::q, sparse_rows({2, 4, 3, 4})), "q" + rest);
  EXPECT_EQ(bind_refusal(&I::k, sparse_rows({2, 2, 5, 4})), "k" + rest);
  EXPECT_EQ(bind_refusal(&I::v, sparse_rows({2, 2, 5, 6})), "v" + rest);
  EXPECT_EQ(bind_refusal(&I::key_lengths, sparse_rows({2}, DType::i64)), "key_lengths" + rest);
  EXPECT_EQ(bind_refusal(&I::keep, sparse_rows({3, 5}, DType::boolean)), "keep" + rest);
  EXPECT_EQ(bind_refusal(&I::bias, sparse_rows({3, 5})), "bias" + rest);
  EXPECT_EQ(bind_refusal(&I::q_segments, sparse_rows({2, 3}, DType::i32)), "q_segments" + rest);
  EXPECT_EQ(bind_refusal(&I::table1d, sparse_rows({4, 7})), "table1d" + rest);
  // A broadcast is no stride: one row of bits for all keys.
  EXPECT_EQ(bind_refusal(&I::keep, Tensor::zeros({3, 1}, DType::boolean).broadcast_to({3, 5})), "");
}

TEST(Bind, RefusesLengthsOutOfRange) {
  using I = AttentionInputs;
  EXPECT_EQ(bind_refusal(&I::key_lengths, Tensor::from<int64_t>({5, 6}, {2})),
            "key_lengths[1]: 6 arrived, it must lie in [0, M = 5]");
  EXPECT_EQ(bind_refusal(&I::key_lengths, Tensor::from<int64_t>({-1, 5}, {2})),
            "key_lengths[0]: -1 arrived, it must lie in [0, M = 5]");
  EXPECT_EQ(bind_refusal(&I::past_lengths, Tensor::from<int64_t>({0, -2}, {2})),
            "past_lengths[1]: -2 arrived, it must lie in [0, 2^30]");
  EXPECT_EQ(bind_refusal(&I::past_lengths,
                         Tensor::from<int64_t>({0, std::numeric_limits<int64_t>::max()}, {2})),
            "past_lengths[1]: 9223372036854775807 arrived, it must lie in [0, 2^30]");
  EXPECT_EQ(bind_refusal(&I::past_lengths, Tensor::from<int64_t>({2, 3}, {2})),
            "past_lengths[1]: 3 arrived, but 3 queries after it leave the relative2d grid of 5 "
            "positions");
}

AttentionSpec with_statistics() {
  AttentionSpec spec;
  spec.statistics = Statistics::all();
  return spec;
}

std::string forward_refusal(Tensor AttentionOutputs::*member, const Tensor& t,
                            const AttentionSpec& spec = with_statistics()) {
  AttentionOutputs out;
  out.*member = t;
  return refusal([&] { plan_of(spec).bind(inputs()).forward(out); });
}

TEST(Bound, RefusesOutputsThatDoNotFit) {
  using O = AttentionOutputs;
  EXPECT_EQ(forward_refusal(&O::y, Tensor::zeros({2, 4, 3, 5})),
            "outputs.y: shape [2, 4, 3, 5] arrived, [2, 4, 3, 6] (B, H, N, Dv) is right");
  EXPECT_EQ(forward_refusal(&O::y, Tensor::zeros({2, 4, 3, 6}, DType::f64)),
            "outputs.y: float64 arrived, float32 is right");
  EXPECT_EQ(forward_refusal(&O::y, sparse_rows({2, 4, 3, 6})),
            "outputs.y: stride 2 in the last dimension arrived; only the other dimensions may be "
            "strided (call contiguous())");
  EXPECT_EQ(forward_refusal(&O::y, Tensor::zeros({3, 6}).broadcast_to({2, 4, 3, 6})),
            "outputs.y: the view's strides [0, 0, 6, 1] make elements share memory");
  EXPECT_EQ(forward_refusal(&O::row_stat, Tensor::zeros({2, 4, 4})),
            "outputs.row_stat: shape [2, 4, 4] arrived, [2, 4, 3] (B, H, N) is right");
  EXPECT_EQ(forward_refusal(&O::max_key, Tensor::zeros({2, 4, 3})),
            "outputs.max_key: float32 arrived, int64 is right");
  EXPECT_EQ(forward_refusal(&O::entropy, Tensor::zeros({2, 3, 4}).transpose(1, 2)),
            "outputs.entropy: a strided view arrived, it must be contiguous");
  EXPECT_EQ(forward_refusal(&O::coverage, Tensor::zeros({2, 4, 3})),
            "outputs.coverage: shape [2, 4, 3] arrived, [2, 4, 5] (B, H, M) is right");
  EXPECT_EQ(forward_refusal(&O::support, Tensor::zeros({2, 4, 3}), {}),
            "outputs.support: a tensor arrived, but spec.statistics does not ask for it");
  EXPECT_EQ(forward_refusal(&O::y, Tensor::zeros({2, 3, 4, 6}).transpose(1, 2)), "");
}

TEST(Bound, RefusesOverlap) {
  AttentionInputs in = inputs();
  const Tensor buffer = Tensor::zeros({2, 2, 4, 3, 6});
  in.q = buffer.select(0, 0).slice(3, 0, 4);
  AttentionOutputs out;
  out.y = buffer.select(0, 0);
  EXPECT_EQ(refusal([&] { plan_of({}).bind(in).forward(out); }),
            "outputs.y: its memory overlaps that of the input q");
  out.y = buffer.select(0, 1);
  EXPECT_EQ(refusal([&] { plan_of({}).bind(in).forward(out); }), "");
  AttentionOutputs twice;
  twice.row_stat = twice.entropy = Tensor::zeros({2, 4, 3});
  EXPECT_EQ(refusal([&] { plan_of(with_statistics()).bind(in).forward(twice); }),
            "outputs.entropy: its memory overlaps that of outputs.row_stat");
}

TEST(Bound, AFailedForwardLeavesOutputsAlone) {
  AttentionOutputs out;
  out.max_key = Tensor::zeros({1});
  EXPECT_NE(refusal([&] { plan_of(with_statistics()).bind(inputs()).forward(out); }), "");
  EXPECT_FALSE(out.y.defined());
}

TEST(Bound, RefusesGradientsThatDoNotFit) {
  const Bound bound = plan_of({}).bind(inputs());
  const AttentionOutputs saved = bound.forward();
  const auto back = [&](const AttentionOutputs& s, const AttentionUpstream& up) {
    return refusal([&] { bound.backward(s, up); });
  };
  EXPECT_EQ(back({}, {}), "saved.y: no tensor was given; pass what forward gave");
  EXPECT_EQ(back({.y = saved.y}, {}),
            "saved.row_stat: no tensor was given; pass what forward gave");
  EXPECT_EQ(back({.y = Tensor::zeros({2, 4, 3, 4}), .row_stat = saved.row_stat}, {}),
            "saved.y: shape [2, 4, 3, 4] arrived, [2, 4, 3, 6] (B, H, N, Dv) is right");
  EXPECT_EQ(back(saved, {.dy = Tensor::zeros({2, 4, 3, 4})}),
            "upstream.dy: shape [2, 4, 3, 4] arrived, [2, 4, 3, 6] (B, H, N, Dv) is right");
  EXPECT_EQ(back(saved, {.dy = Tensor::zeros({2, 4, 3, 6}, DType::f16)}),
            "upstream.dy: float16 arrived, float32 is right");
  EXPECT_EQ(back(saved, {.drow_stat = Tensor::zeros({2, 4, 3}, DType::f64)}),
            "upstream.drow_stat: float64 arrived, float32 is right");
  EXPECT_EQ(back(saved, {.dcoverage = Tensor::zeros({2, 4, 3})}),
            "upstream.dcoverage: shape [2, 4, 3] arrived, [2, 4, 5] (B, H, M) is right");
  EXPECT_EQ(back(saved, {.dentropy = Tensor::zeros({2, 4, 3})}),
            "saved.entropy: no tensor was given, but upstream.dentropy needs it; ask for it in "
            "spec.statistics");
  EXPECT_EQ(back(saved, {.dmax_weight = Tensor::zeros({2, 4, 3})}),
            "saved.max_key: no tensor was given, but upstream.dmax_weight needs it; ask for "
            "max_weight in spec.statistics");
  EXPECT_EQ(back(saved, {}), "");
}

TEST(Bound, WritesIntoGivenGradients) {
  const AttentionInputs in = inputs();
  const Bound bound = plan_of({}).bind(in);
  const AttentionOutputs saved = bound.forward();
  AttentionUpstream up;
  up.dy = Tensor::zeros(saved.y.shape());
  up.dy.fill(1);
  const AttentionGradients want = bound.backward(saved, up);
  AttentionGradients g;
  g.dq = Tensor::zeros(in.q.shape());
  g.dk = Tensor::zeros(in.k.shape());
  g.dk.fill(7);
  const void* place = g.dk.raw();
  bound.backward(saved, up, {}, g);
  EXPECT_EQ(g.dk.raw(), place);
  EXPECT_TRUE(testing::same_bits(g.dq, want.dq));
  EXPECT_TRUE(testing::same_bits(g.dk, want.dk));
  EXPECT_TRUE(testing::same_bits(g.dv, want.dv));

  const auto refused = [&](Tensor AttentionGradients::*member, const Tensor& t) {
    AttentionGradients given;
    given.*member = t;
    return refusal([&] { bound.backward(saved, up, {}, given); });
  };
  using G = AttentionGradients;
  EXPECT_EQ(refused(&G::dk, Tensor::zeros({2, 2, 5, 9})),
            "gradients.dk: shape [2, 2, 5, 9] arrived, " + in.k.shape().str() + " is right");
  EXPECT_EQ(refused(&G::dq, Tensor::zeros(in.q.shape(), DType::f64)),
            "gradients.dq: float64 arrived, float32 is right");
  EXPECT_EQ(refused(&G::dq, in.q), "gradients.dq: its memory overlaps that of q");
  EXPECT_EQ(
      refused(&G::dslopes, Tensor::zeros({4})),
      "gradients.dslopes: a tensor arrived, but it is not among the gradients that are wanted");
}

TEST(Bound, RefusesRowsAndHeadsOutOfRange) {
  const Bound bound = plan_of({}).bind(inputs());
  const AttentionOutputs saved = bound.forward();
  const auto ask = [&](std::vector<int64_t> rows, std::vector<int64_t> heads) {
    return refusal([&] { bound.weights(saved, rows, heads); });
  };
  EXPECT_EQ(ask({0, 3}, {0}), "rows: 3 arrived, a query lies in [0, N = 3)");
  EXPECT_EQ(ask({-1}, {0}), "rows: -1 arrived, a query lies in [0, N = 3)");
  EXPECT_EQ(ask({0}, {4}), "heads: 4 arrived, a head lies in [0, H = 4)");
  EXPECT_EQ(refusal([&] { bound.weights({}, {}, {}); }),
            "saved.row_stat: no tensor was given; pass what forward gave");
  EXPECT_EQ(bound.weights(saved, {}, {}).shape(), (Dims{2, 0, 0, 5}));
}

// ---- ranges ---------------------------------------------------------------------------------

// Keeps the masks of a case; what it sees, the oracle decides pair by pair.
testing::SweepCase masks_only(uint64_t n) {
  testing::SweepCase c = testing::sweep_case(
      n, DType::f32,
      {.batch = 3, .kv_heads = 1, .group = 2, .queries = 14, .keys = 14, .head = 1, .value = 1});
  c.spec.biases.clear();
  c.spec.dropout.reset();
  return c;
}

TEST(Ranges, AreThePairsThatTheMasksAllow) {
  int scattered = 0, plain_ranges = 0;
  for (uint64_t n = 0; n < 3000 && !HasFailure(); ++n) {
    const testing::SweepCase c = masks_only(n);
    SCOPED_TRACE(c.text);
    const AttentionShape s = shape_of(c.in);
    const Problem p = make_problem(c.spec, s, SimdTarget::baseline, testing::strided(c.in));
    const Tensor allowed = reference::attention_forward(c.spec, c.in).allowed;
    scattered += p.mask.scattered;
    plain_ranges += p.mask.only_ranges();
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t i = 0; i < s.N; ++i) {
        const int64_t begin = p.mask.begin[b * s.N + i], end = p.mask.end[b * s.N + i];
        ASSERT_TRUE(0 <= begin && begin <= end && end <= s.M);
        for (int64_t h = 0; h < s.H; ++h) {
          for (int64_t j = 0; j < s.M; ++j) {
            ASSERT_EQ(p.mask.allows(b, h, i, j), allowed.at<bool>(b, h, i, j))
                << b << " " << h << " " << i << " " << j;
          }
        }
        // No wider than they must be, but for keep bits.
        if (begin < end && !p.mask.keep.defined()) {
          ASSERT_TRUE(allowed.at<bool>(b, 0, i, begin) && allowed.at<bool>(b, 0, i, end - 1));
        }
      }
    }
  }
  EXPECT_GT(scattered, 100);
  EXPECT_GT(plain_ranges, 1000);
}

KeyMask ranges(const AttentionSpec& spec, const AttentionInputs& in) {
  return make_problem(spec, shape_of(in), SimdTarget::baseline, in).mask;
}

TEST(Ranges, HugeWindowsDoNotOverflow) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  AttentionInputs in{.q = Tensor::zeros({1, 1, 3, 1}),
                     .k = Tensor::zeros({1, 1, 5, 1}),
                     .v = Tensor::zeros({1, 1, 5, 1}),
                     .past_lengths = Tensor::full({1}, 0x1p30, DType::i64)};
  for (const Align align : {Align::bottom_right, Align::top_left, Align::past}) {
    AttentionSpec spec;
    spec.masks = {Window{kMost, kMost, align}};
    const KeyMask m = ranges(spec, in);
    EXPECT_EQ(m.begin, (std::vector<int64_t>{0, 0, 0}));
    EXPECT_EQ(m.end, (std::vector<int64_t>{5, 5, 5}));
  }
  AttentionSpec spec;
  spec.masks = {Window{2, kMost, Align::past}};
  EXPECT_EQ(ranges(spec, in).end, (std::vector<int64_t>{0, 0, 0}));
  spec.masks = {Causal{Align::past}};
  EXPECT_EQ(ranges(spec, in).end, (std::vector<int64_t>{5, 5, 5}));
}

TEST(Ranges, MoreQueriesThanKeys) {
  const AttentionInputs in{.q = Tensor::zeros({1, 1, 5, 1}),
                           .k = Tensor::zeros({1, 1, 3, 1}),
                           .v = Tensor::zeros({1, 1, 3, 1})};
  AttentionSpec spec;
  spec.masks = {Causal{}};
  EXPECT_EQ(ranges(spec, in).end, (std::vector<int64_t>{0, 0, 1, 2, 3}));
  spec.masks = {Causal{Align::top_left}};
  EXPECT_EQ(ranges(spec, in).end, (std::vector<int64_t>{1, 2, 3, 3, 3}));
}

TEST(Ranges, ScatteredInALaterBatchMarksTheEarlierOnes) {
  AttentionInputs in{.q = Tensor::zeros({2, 1, 2, 1}),
                     .k = Tensor::zeros({2, 1, 3, 1}),
                     .v = Tensor::zeros({2, 1, 3, 1})};
  in.q_segments = Tensor::from<int32_t>({0, 1, 0, 1}, {2, 2});
  in.k_segments = Tensor::from<int32_t>({0, 0, 1, 0, 1, 0}, {2, 3});
  AttentionSpec spec;
  spec.masks = {Segments{}};
  const KeyMask m = ranges(spec, in);
  EXPECT_TRUE(m.scattered);
  EXPECT_TRUE(m.allows(0, 0, 0, 1) && !m.allows(0, 0, 0, 2) && m.allows(0, 0, 1, 2));
  EXPECT_TRUE(m.allows(1, 0, 0, 2) && !m.allows(1, 0, 0, 1) && m.allows(1, 0, 1, 1));
}

TEST(Bind, NoHeadsGiveNothing) {
  AttentionSpec spec = spec_of_everything();
  spec.statistics.add(Statistic::coverage);
  for (const Normalizer& normalizer : {Normalizer{Softmax{}}, Normalizer{Sparsemax{}},
                                       Normalizer{Entmax{1.5}}, Normalizer{TopK{2}}}) {
    spec.normalizer = normalizer;
    AttentionInputs in = inputs();
    in.q = Tensor::zeros({2, 0, 3, 4});
    in.k = Tensor::zeros({2, 0, 5, 4});
    in.v = Tensor::zeros({2, 0, 5, 6});
    in.bias = Tensor::full({3, 5}, 1);
    in.slopes = Tensor::zeros({0});
    in.table1d = Tensor::zeros({0, 7});
    in.table2d = Tensor::zeros({0, 1, 9});
    const Plan plan = Plan::make(spec, shape_of(in));
    const Bound bound = plan.bind(in);
    const AttentionOutputs out = bound.forward();
    EXPECT_EQ(out.y.shape(), Dims({2, 0, 3, 6}));
    EXPECT_EQ(out.coverage.shape(), Dims({2, 0, 5}));
    const AttentionGradients g = bound.backward(
        out, {.dy = out.y}, {.bias = true, .slopes = true, .tables = true, .score_w = true});
    EXPECT_EQ(g.dq.shape(), in.q.shape());
    EXPECT_EQ(g.dv.shape(), in.v.shape());
    EXPECT_EQ(g.dbias.shape(), in.bias.shape());
    for (int64_t n = 0; n < 15; ++n) EXPECT_EQ(g.dbias.data<float>()[n], 0);
    for (int64_t n = 0; n < 4; ++n) EXPECT_EQ(g.dscore_w.data<float>()[n], 0);
    EXPECT_EQ(bound.weights(out, {}, {}).numel(), 0);
    EXPECT_EQ(reference::attention_forward(spec, in).out.y.shape(), Dims({2, 0, 3, 6}));
  }
}

}  // namespace
}  // namespace foci
