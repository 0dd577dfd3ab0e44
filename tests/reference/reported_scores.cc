// Reports about scores, softmax, softcap and sparse maps (part C), and about heads (part D).
#include "reference/reported_parts.h"

namespace foci::testing {
namespace {

const char* const kSuite = "Reported";

ReportedCase weights_of(const char* name, const Normalizer& normalizer,
                        std::initializer_list<float> scores, std::vector<double> want,
                        double tolerance = 5e-6) {
  const AttentionInputs in = given_scores(scores);
  return {kSuite, name, [=](const Engine& e) {
            return weights_differ(e, {.scale = 1.0, .normalizer = normalizer}, in, want, tolerance);
          }};
}

// −inf comes in as a bias, where it is a mask entry.
AttentionInputs biased(std::initializer_list<float> bias) {
  AttentionInputs in = zero_logits(1, bias);
  in.v = Tensor::full(in.v.shape(), 1);
  in.bias = floats(bias, {static_cast<int64_t>(bias.size())});
  return in;
}

std::string row42(const Engine& e) {
  const AttentionInputs in = biased({-kInfinity, -kInfinity, -kInfinity});
  for (const Normalizer& n : {Normalizer(Sparsemax{}), Normalizer(Entmax{1.5}),
                              Normalizer(Softmax{}), Normalizer(TopK{2})}) {
    const AttentionSpec spec{
        .normalizer = n, .biases = {TensorBias{}}, .statistics = Statistics::all()};
    const AttentionOutputs out = e.forward(spec, in);
    const bool sparse = n.index() == 1 || n.index() == 2;
    const AttentionUpstream up{.dy = Tensor::full(out.y.shape(), 1)};
    const AttentionGradients g = e.backward(spec, in, up, {.bias = true});
    const std::string wrong =
        first({differs("y", out.y, {0}), differs("entropy", out.entropy, {0}),
               differs("support", out.support, {0}), differs("max_weight", out.max_weight, {0}),
               differs("max_key", out.max_key, {-1}),
               differs("row_stat", out.row_stat, {sparse ? kInfinity : -kInfinity}),
               weights_differ(e, spec, in, {0, 0, 0}), differs("dbias", g.dbias, {0, 0, 0}),
               not_all_zero("dv", g.dv), not_all_zero("dk", g.dk), not_all_zero("dq", g.dq)});
    if (!wrong.empty()) return wrong;
  }
  return "";
}

// The same emptiness without a bias, so that implementations without biases meet it too.
std::string row42_masked(const Engine& e) {
  for (const Normalizer& n : {Normalizer(Softmax{}), Normalizer(Sparsemax{})}) {
    AttentionInputs in = given_scores({1, 2, 3});
    in.keep = bools({false}, {1});
    const AttentionSpec spec{.normalizer = n, .masks = {Keep{}}, .statistics = Statistics::all()};
    const AttentionOutputs out = e.forward(spec, in);
    const AttentionGradients g = e.backward(spec, in, ones_like_y(in), {});
    const std::string wrong =
        first({differs("y", out.y, {0}), differs("entropy", out.entropy, {0}),
               differs("max_key", out.max_key, {-1}),
               differs("row_stat", out.row_stat, {n.index() == 1 ? kInfinity : -kInfinity}),
               weights_differ(e, spec, in, {0, 0, 0}), not_all_zero("dv", g.dv),
               not_all_zero("dk", g.dk), not_all_zero("dq", g.dq)});
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string row43(const Engine& e) {
  const AttentionInputs in = biased({1, 0.5, -kInfinity});
  const auto spec = [](const Normalizer& n) {
    return AttentionSpec{.normalizer = n, .biases = {TensorBias{}}};
  };
  const auto finite = [&](const Normalizer& n) {
    const AttentionGradients g = e.backward(spec(n), in, ones_like_y(in), {.bias = true});
    return first({not_finite("dbias", g.dbias), not_finite("dv", g.dv)});
  };
  return first({weights_differ(e, spec(Sparsemax{}), in, {0.75, 0.25, 0}),
                weights_differ(e, spec(Entmax{1.5}), in, {0.673993, 0.326007, 0}),
                finite(Sparsemax{}), finite(Entmax{1.5})});
}

ReportedCase top_k(const char* name, int64_t k, std::initializer_list<float> scores,
                   std::vector<double> want, double max_key) {
  const AttentionInputs in = given_scores(scores);
  return {
      kSuite, name, [=](const Engine& e) {
        const AttentionSpec spec{
            .scale = 1.0, .normalizer = TopK{k}, .statistics = Statistics::all()};
        const AttentionOutputs out = e.forward(spec, in);
        return first({weights_differ(e, spec, in, want), differs("max_key", out.max_key, {max_key}),
                      bits_differ("a second run", out.y, e.forward(spec, in).y)});
      }};
}

// One key: the log-sum-exp is the score itself.
std::string score_differs(const Engine& e, const AttentionSpec& spec, std::vector<float> q,
                          std::vector<float> k, double want) {
  const auto d = static_cast<int64_t>(q.size());
  const AttentionInputs in{.q = Tensor::from(q, {1, 1, 1, d}),
                           .k = Tensor::from(k, {1, 1, 1, d}),
                           .v = Tensor::full({1, 1, 1, 1}, 2)};
  const AttentionOutputs out = e.forward(spec, in);
  return first({differs("score", out.row_stat, {want}), differs("y", out.y, {2})});
}

std::string row37(const Engine& e) {
  const Tensor x = Tensor::full({1, 1, 1, 64}, 133120, DType::bf16);
  const AttentionInputs in{.q = x, .k = x, .v = x};
  return differs("y", e.forward({}, in).y, x, 0);
}

std::string row46(const Engine& e) {
  const AttentionSpec spec{.score = Cosine{}};
  const AttentionInputs zero{.q = Tensor::zeros({1, 1, 1, 2}),
                             .k = floats({3, 4, 0, 0}, {1, 1, 2, 2}),
                             .v = floats({1, 3}, {1, 1, 2, 1})};
  const AttentionGradients g = e.backward(spec, zero, ones_like_y(zero), {});
  return first({score_differs(e, spec, {2}, {-3}, -1), score_differs(e, spec, {3, 4}, {4, 3}, 0.96),
                score_differs(e, spec, {0, 0}, {1, 2}, 0),
                score_differs(e, spec, {1, 2}, {0, 0}, 0), y_differs(e, spec, zero, {2}),
                not_all_zero("dq", g.dq), not_all_zero("dk", g.dk),
                differs("dv", g.dv, {0.5, 0.5})});
}

std::string row47(const Engine& e) {
  AttentionInputs in{.q = Tensor::zeros({1, 4, 1, 1}),
                     .k = Tensor::zeros({1, 2, 1, 1}),
                     .v = floats({10, 20}, {1, 2, 1, 1})};
  AttentionUpstream up{.dy = floats({1, 2, 4, 8}, {1, 4, 1, 1})};
  const std::string wrong = first({y_differs(e, {}, in, {10, 10, 20, 20}),
                                   differs("dv", e.backward({}, in, up, {}).dv, {3, 12})});
  if (!wrong.empty()) return wrong;
  in.q = Tensor::zeros({1, 3, 1, 1});
  try {
    e.forward({}, in);
  } catch (const ArgumentError& error) {
    const std::string text = error.what();
    if (text.find('3') != std::string::npos && text.find('2') != std::string::npos) return "";
    return "the refusal does not name the head counts: " + text;
  }
  return "3 query heads on 2 key/value heads were accepted";
}

}  // namespace

std::vector<ReportedCase> reported_scores() {
  const std::vector<double> one_apart = {0.731059, 0.268941};
  return {weights_of("Row35_LargeScores", Softmax{}, {151.29f, 150.29f}, one_apart, 1e-5),
          weights_of("Row35_HugeScores", Softmax{}, {1e6f, 1e6f - 1}, one_apart),
          {kSuite, "Row37_HugeBfloat16", row37},
          {kSuite, "Row38_NegativeScale",
           [](const Engine& e) {
             return y_differs(e, {.scale = -1.0}, given_scores({1, 2}), {0.268941});
           }},
          {kSuite, "Row39_SoftcapBeforeTheMask",
           [](const Engine& e) {
             AttentionInputs in = zero_logits(1, {1, 1000});
             in.bias = floats({0, -kInfinity}, {2});
             return y_differs(e, {.softcap = 0.5, .biases = {TensorBias{}}}, in, {1});
           }},
          {kSuite, "Row41_SoftcapFormula",
           [](const Engine& e) {
             return score_differs(e, {.scale = 1.0, .softcap = 30.0}, {100}, {1}, 29.923739);
           }},
          {kSuite, "Row42_AllMinusInfinity", row42},
          {kSuite, "Row42_AllMasked", row42_masked},
          {kSuite, "Row43_SomeMinusInfinity", row43},
          top_k("Row45_TiesOfTopOne", 1, {1, 2, 5, 4, 5}, {0, 0, 1, 0, 0}, 2),
          top_k("Row45_TiesOfTopTwo", 2, {1, 2, 5, 4, 5}, {0, 0, 0.5, 0, 0.5}, 2),
          top_k("Row45_MinusZeroTiesZero", 1, {-0.0f, 0.0f}, {1, 0}, 0),
          {kSuite, "Row46_CosineAndZeroVectors", row46},
          {kSuite, "Row47_GroupedHeadsRepeat", row47}};
}

}  // namespace foci::testing
