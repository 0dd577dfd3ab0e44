// Reports about masks and empty rows (part A).
#include "reference/reported_parts.h"

namespace foci::testing {
namespace {

const char* const kSuite = "Reported";

// Row 1 and 2: Q = K = identity, the second row sees nothing.
AttentionInputs second_row_empty() {
  return {.q = floats({1, 0, 0, 1}, {1, 1, 2, 2}),
          .k = floats({1, 0, 0, 1}, {1, 1, 2, 2}),
          .v = floats({1, 2, 3, 4}, {1, 1, 2, 2}),
          .keep = bools({true, false, false, false}, {2, 2})};
}

// All ways to hide the second of two keys from every query.
std::vector<std::pair<AttentionSpec, AttentionInputs>> hide_second_key(const AttentionInputs& in) {
  std::vector<std::pair<AttentionSpec, AttentionInputs>> ways;
  const int64_t n = in.q.dim(2);
  for (const Dims& shape : {Dims{2}, Dims{1, 2}, Dims{1, 1, 2}, Dims{1, 1, 1, 2}}) {
    AttentionInputs with = in;
    with.keep = bools({true, false}, shape);
    ways.emplace_back(AttentionSpec{.masks = {Keep{}}}, with);
    with.keep = Tensor();
    with.bias = floats({0, -kInfinity}, shape);
    ways.emplace_back(AttentionSpec{.biases = {TensorBias{}}}, with);
  }
  AttentionInputs with = in;
  with.key_lengths = Tensor::from<int64_t>({1}, {1});
  ways.emplace_back(AttentionSpec{.masks = {KeyLengths{}}}, with);
  with = in;
  with.q_segments = Tensor::full({1, n}, 7, DType::i32);
  with.k_segments = Tensor::from<int32_t>({7, 8}, {1, 2});
  ways.emplace_back(AttentionSpec{.masks = {Segments{}}}, with);
  if (n == 1) {
    ways.emplace_back(AttentionSpec{.masks = {Causal{Align::top_left}}}, in);
    ways.emplace_back(AttentionSpec{.masks = {Window{1, 0, Align::top_left}}}, in);
  }
  return ways;
}

std::string row2(const Engine& e) {
  const AttentionInputs in = second_row_empty();
  const AttentionGradients g = e.backward({.masks = {Keep{}}}, in, ones_like_y(in), {});
  return first({differs("dq", g.dq, {0, 0, 0, 0}), differs("dk", g.dk, {0, 0, 0, 0}),
                differs("dv", g.dv, {1, 1, 0, 0})});
}

std::string row3(const Engine& e) {
  AttentionInputs in{.q = floats({1, 2, 3, -1, 0, 1}, {1, 3, 2, 1}),
                     .k = floats({1, 2, 3, 4, 5, 6}, {1, 3, 2, 1}),
                     .v = floats({1, 3, 5, 7, 9, 11}, {1, 3, 2, 1})};
  const Tensor open = e.forward({}, in).y;
  in.keep = bools({true, false, true}, {3, 1, 1});
  AttentionSpec spec{.masks = {Keep{}}};
  const Tensor bare = e.forward(spec, in).y;
  const Tensor weights = e.weights(spec, in);
  spec.statistics = Statistics::all();
  const Tensor with = e.forward(spec, in).y;
  return first({bits_differ("y with and without statistics", bare, with),
                not_all_zero("y of the masked head", bare.select(1, 1)),
                not_all_zero("weights of the masked head", weights.select(1, 1)),
                bits_differ("head 0", bare.select(1, 0), open.select(1, 0)),
                bits_differ("head 2", bare.select(1, 2), open.select(1, 2))});
}

std::string row4(const Engine& e) {
  const AttentionInputs in{.q = floats({1, 2, -3, 4, 0, 0}, {1, 1, 3, 2}),
                           .k = floats({1, 0, kNaN, kNaN}, {1, 1, 2, 2}),
                           .v = floats({1, 2, kNaN, kInfinity}, {1, 1, 2, 2})};
  for (auto& [spec, with] : hide_second_key(in)) {
    for (const Normalizer& normalizer : {Normalizer(Softmax{}), Normalizer(Sparsemax{}),
                                         Normalizer(Entmax{}), Normalizer(TopK{2})}) {
      spec.normalizer = normalizer;
      spec.statistics = Statistics::all();
      const AttentionOutputs out = e.forward(spec, with);
      const AttentionGradients g = e.backward(spec, with, ones_like_y(with), {});
      const std::string wrong = first(
          {differs("y", out.y, {1, 2, 1, 2, 1, 2}), differs("entropy", out.entropy, {0, 0, 0}),
           differs("coverage", out.coverage, {3, 0}), differs("support", out.support, {1, 1, 1}),
           differs("dq", g.dq, {0, 0, 0, 0, 0, 0}), differs("dk", g.dk, {0, 0, 0, 0}),
           differs("dv", g.dv, {3, 3, 0, 0}),
           not_all_zero("dk of the masked key", g.dk.select(2, 1)),
           not_all_zero("dv of the masked key", g.dv.select(2, 1))});
      if (!wrong.empty()) return wrong;
    }
  }
  return "";
}

std::string row6(const Engine& e) {
  AttentionInputs in{.q = floats({10}, {1, 1, 1, 1}),
                     .k = floats({1, 0.3f, -1}, {1, 1, 3, 1}),
                     .v = floats({0, 3, 6}, {1, 1, 3, 1}),
                     .bias = Tensor::full({1, 3}, std::numeric_limits<float>::lowest())};
  return y_differs(e, {.scale = 1.0, .biases = {TensorBias{}}}, in, {3});
}

std::string row7(const Engine& e) {
  const auto half = [](std::initializer_list<float> x, const Dims& shape) {
    return floats(x, shape).to(DType::f16);
  };
  const AttentionInputs in{.q = half({4}, {1, 1, 1, 1}),
                           .k = half({-5, -2}, {1, 1, 2, 1}),
                           .v = half({1, 9}, {1, 1, 2, 1}),
                           .bias = half({-65504, -65504}, {1, 2})};
  return y_differs(e, {.scale = 1.0, .biases = {TensorBias{}}}, in, {8.99995}, 1e-3);
}

std::string row10(const Engine& e) {
  for (const auto& [spec, in] : hide_second_key(zero_logits(1, {1, 9}))) {
    const std::string wrong = y_differs_on_any_path(e, spec, in, {1});
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string row11(const Engine& e) {
  AttentionInputs in = zero_logits(1, {1, 9});
  in.keep = bools({true, false}, {2});
  const std::string keep = y_differs(e, {.masks = {Keep{}}}, in, {1});
  in.keep = bools({false, true}, {2});  // the ignore-mask [T,F]
  return first({keep, y_differs(e, {.masks = {Keep{}}}, in, {9})});
}

std::string row12(const Engine& e) {
  AttentionInputs in = zero_logits(1, {1, 9});
  in.keep = bools({true, false}, {2});
  in.bias = floats({1, 0}, {2});
  return first({weights_differ(e, {.masks = {Keep{}}}, in, {1, 0}),
                weights_differ(e, {.biases = {TensorBias{}}}, in, {0.731059, 0.268941})});
}

std::string row14(const Engine& e) {
  AttentionInputs in = zero_logits(3, {100, 2, 4});
  in.keep = bools({false, true, true}, {3});
  return y_differs_on_any_path(e, {.masks = {Causal{}, Keep{}}}, in, {0, 2, 3});
}

std::string row15(const Engine& e) {
  AttentionInputs in = zero_logits(2, {3, 5});
  in.keep = bools({true, false, false, false}, {2, 2});
  return y_differs_on_any_path(e, {.masks = {Causal{}, Keep{}}}, in, {3, 0});
}

std::string row17(const Engine& e) {
  AttentionInputs in{.q = floats({1, 2, 3, -1}, {1, 2, 2, 1}),
                     .k = floats({1, 2, 3, 4, 5, 6}, {1, 2, 3, 1}),
                     .v = floats({1, 3, 5, 7, 9, 11}, {1, 2, 3, 1})};
  const AttentionSpec spec{.masks = {Keep{}}};
  in.keep = bools({true, false, true, false, false, true}, {1, 1, 2, 3});
  const Tensor one = e.forward(spec, in).y;
  in.keep = bools({true, false, true, false, false, true, true, false, true, false, false, true},
                  {1, 2, 2, 3});
  return first({bits_differ("y", one, e.forward(spec, in).y),
                differs("y of row 1", one.slice(2, 1, 2), {5, 11})});
}

std::string row18(const Engine& e) {
  const AttentionInputs in = zero_logits(3, {0, 1, 2});
  std::string wrong = y_differs_on_any_path(e, {.masks = {Causal{}}}, in, {0, 0.5, 1});
  for (DropoutPlace place : {DropoutPlace::weights, DropoutPlace::keys}) {
    const AttentionSpec spec{.masks = {Causal{}}, .dropout = Dropout{0, 1, place}};
    wrong = first({wrong, y_differs_on_any_path(e, spec, in, {0, 0.5, 1})});
  }
  // With p > 0 the first row still has only key 0 to look at.
  const AttentionSpec spec{.masks = {Causal{}}, .dropout = Dropout{0.5, 1}};
  return first(
      {wrong, weights_differ(e, spec, in, {1, 0, 0, 0.5, 0.5, 0, 1 / 3., 1 / 3., 1 / 3.})});
}

std::string row20(const Engine& e) {
  AttentionInputs in = zero_logits(1, {1, 0});  // so that y is p0
  in.bias = floats({36, 10000}, {2});
  in.keep = bools({true, false}, {2});
  const AttentionSpec spec{.masks = {Keep{}}, .biases = {TensorBias{}}};
  const AttentionGradients g = e.backward(spec, in, ones_like_y(in), {.bias = true});
  return first({y_differs(e, spec, in, {1}), differs("dbias", g.dbias, {0, 0})});
}

}  // namespace

std::vector<ReportedCase> reported_masks() {
  return {{kSuite, "Row1_MaskRowWithoutTrue",
           [](const Engine& e) {
             const AttentionSpec spec{.masks = {Keep{}}};
             return first({y_differs(e, spec, second_row_empty(), {1, 2, 0, 0}),
                           weights_differ(e, spec, second_row_empty(), {1, 0, 0, 0})});
           }},
          {kSuite, "Row2_GradientsOfAnEmptyRow", row2},
          {kSuite, "Row3_OneHeadFullyMasked", row3},
          {kSuite, "Row4_NanInMaskedKeysAndValues", row4},
          {kSuite, "Row6_LowestFloatBias", row6},
          {kSuite, "Row7_LowestHalfBias", row7},
          {kSuite, "Row10_MaskIgnoredOnOnePath", row10},
          {kSuite, "Row11_PolarityOfMasks", row11},
          {kSuite, "Row12_BooleanMaskIsNoNumber", row12},
          {kSuite, "Row14_PaddingAndCausal", row14},
          {kSuite, "Row15_BooleanMaskAndCausal", row15},
          {kSuite, "Row17_MaskOfOneHead", row17},
          {kSuite, "Row18_CausalOnEveryPath", row18},
          {kSuite, "Row20_HugeMaskedScore", row20}};
}

}  // namespace foci::testing
