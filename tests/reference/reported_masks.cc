// Reports about masks and empty rows (part A).
#include "reference/reported_parts.h"

#include <limits>

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

// A way to hide the second of two keys from every query.
struct Hiding {
  std::string name;
  AttentionSpec spec;
  AttentionInputs in;
};

std::vector<Hiding> hide_second_key(const AttentionInputs& in) {
  std::vector<Hiding> ways;
  for (const Dims& shape : {Dims{2}, Dims{1, 2}, Dims{1, 1, 2}, Dims{1, 1, 1, 2}}) {
    AttentionInputs with = in;
    with.keep = bools({true, false}, shape);
    ways.push_back({fmt::format("Keep{}d", shape.size()), {.masks = {Keep{}}}, with});
    with.keep = Tensor();
    with.bias = floats({0, -kInfinity}, shape);
    ways.push_back({fmt::format("Bias{}d", shape.size()), {.biases = {TensorBias{}}}, with});
  }
  AttentionInputs with = in;
  with.key_lengths = Tensor::from<int64_t>({1}, {1});
  ways.push_back({"KeyLengths", {.masks = {KeyLengths{}}}, with});
  with = in;
  with.q_segments = Tensor::full({1, in.q.dim(2)}, 7, DType::i32);
  with.k_segments = Tensor::from<int32_t>({7, 8}, {1, 2});
  ways.push_back({"Segments", {.masks = {Segments{}}}, with});
  if (in.q.dim(2) == 1) {
    ways.push_back({"Causal", {.masks = {Causal{Align::top_left}}}, in});
    ways.push_back({"Window", {.masks = {Window{1, 0, Align::top_left}}}, in});
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

std::string row4(const Engine& e, AttentionSpec spec, const AttentionInputs& in) {
  spec.statistics = Statistics::all();
  const AttentionOutputs out = e.forward(spec, in);
  const AttentionGradients g = e.backward(spec, in, ones_like_y(in), {});
  return first({differs("y", out.y, {1, 2, 1, 2, 1, 2}), differs("entropy", out.entropy, {0, 0, 0}),
                differs("coverage", out.coverage, {3, 0}),
                differs("support", out.support, {1, 1, 1}), differs("dq", g.dq, {0, 0, 0, 0, 0, 0}),
                differs("dk", g.dk, {0, 0, 0, 0}), differs("dv", g.dv, {3, 3, 0, 0}),
                not_all_zero("dk of the masked key", g.dk.select(2, 1)),
                not_all_zero("dv of the masked key", g.dv.select(2, 1))});
}

std::vector<ReportedCase> rows4() {
  const AttentionInputs in{.q = floats({1, 2, -3, 4, 0, 0}, {1, 1, 3, 2}),
                           .k = floats({1, 0, kNaN, kNaN}, {1, 1, 2, 2}),
                           .v = floats({1, 2, kNaN, kInfinity}, {1, 1, 2, 2})};
  const std::pair<const char*, Normalizer> normalizers[] = {
      {"Softmax", Softmax{}}, {"Sparsemax", Sparsemax{}}, {"Entmax", Entmax{}}, {"TopK", TopK{2}}};
  std::vector<ReportedCase> rows;
  for (Hiding way : hide_second_key(in)) {
    for (const auto& [name, normalizer] : normalizers) {
      way.spec.normalizer = normalizer;
      rows.push_back({kSuite, fmt::format("Row4_NanInMaskedKeys_{}_{}", way.name, name),
                      [way](const Engine& e) { return row4(e, way.spec, way.in); }});
    }
  }
  return rows;
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

std::vector<ReportedCase> rows10() {
  std::vector<ReportedCase> rows;
  for (const Hiding& way : hide_second_key(zero_logits(1, {1, 9}))) {
    rows.push_back({kSuite, "Row10_MaskIgnoredOnOnePath_" + way.name, [way](const Engine& e) {
                      return y_differs_on_any_path(e, way.spec, way.in, {1});
                    }});
  }
  return rows;
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
  return y_differs_on_any_path(e, {.masks = {Causal{}}}, zero_logits(3, {0, 1, 2}), {0, 0.5, 1});
}

std::string row18_dropout(const Engine& e) {
  const AttentionInputs in = zero_logits(3, {0, 1, 2});
  std::string wrong;
  for (DropoutPlace place : {DropoutPlace::weights, DropoutPlace::keys}) {
    const AttentionSpec spec{.masks = {Causal{}}, .dropout = Dropout{0, 1, place}};
    wrong = first({wrong, y_differs_on_any_path(e, spec, in, {0, 0.5, 1})});
  }
  const AttentionSpec spec{.masks = {Causal{}}, .dropout = Dropout{0.5, 1}};
  const double third = 1.0 / 3;
  return first({wrong, weights_differ(e, spec, in, {1, 0, 0, 0.5, 0.5, 0, third, third, third})});
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
  std::vector<ReportedCase> rows = {
      {kSuite, "Row1_MaskRowWithoutTrue",
       [](const Engine& e) {
         const AttentionSpec spec{.masks = {Keep{}}};
         return first({y_differs(e, spec, second_row_empty(), {1, 2, 0, 0}),
                       weights_differ(e, spec, second_row_empty(), {1, 0, 0, 0})});
       }},
      {kSuite, "Row2_GradientsOfAnEmptyRow", row2},
      {kSuite, "Row3_OneHeadFullyMasked", row3},
      {kSuite, "Row6_LowestFloatBias", row6},
      {kSuite, "Row7_LowestHalfBias", row7},
      {kSuite, "Row11_PolarityOfMasks", row11},
      {kSuite, "Row12_BooleanMaskIsNoNumber", row12},
      {kSuite, "Row14_PaddingAndCausal", row14},
      {kSuite, "Row15_BooleanMaskAndCausal", row15},
      {kSuite, "Row17_MaskOfOneHead", row17},
      {kSuite, "Row18_CausalOnEveryPath", row18},
      {kSuite, "Row18_CausalWithDropout", row18_dropout},
      {kSuite, "Row20_HugeMaskedScore", row20}};
  for (const std::vector<ReportedCase>& more : {rows4(), rows10()}) {
    rows.insert(rows.end(), more.begin(), more.end());
  }
  return rows;
}

}  // namespace foci::testing
