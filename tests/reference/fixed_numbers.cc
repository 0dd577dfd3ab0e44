// Fixed numbers of sparse maps and masks (fixed_numbers.md; whole layers are tested by nn).
#include "reference/reported_parts.h"

#include <cmath>

namespace foci::testing {
namespace {

const char* const kSuite = "Fixed";

ReportedCase sparse(const char* name, const Normalizer& normalizer,
                    std::initializer_list<float> scores, std::vector<double> want) {
  const AttentionInputs in = given_scores(scores);
  return {kSuite, name, [=](const Engine& e) {
            const AttentionSpec spec{
                .scale = 1.0, .normalizer = normalizer, .statistics = Statistics::all()};
            double support = 0, entropy = 0, y = 0;
            for (size_t j = 0; j < want.size(); ++j) {
              y += static_cast<double>(j) * want[j];
              if (want[j] > 0) {
                ++support;
                entropy -= want[j] * std::log(want[j]);
              }
            }
            const AttentionOutputs out = e.forward(spec, in);
            return first({weights_differ(e, spec, in, want), differs("y", out.y, {y}),
                          differs("support", out.support, {support}),
                          differs("entropy", out.entropy, {entropy}, 2e-5),
                          differs("coverage", out.coverage, want)});
          }};
}

// Which keys each query sees, as rows of 0 and 1; scores are all zero.
ReportedCase pattern(const char* name, const AttentionSpec& spec, AttentionInputs in,
                     const std::vector<std::string>& rows) {
  std::vector<double> want;
  for (const std::string& row : rows) {
    double seen = 0;
    for (char c : row) seen += c == '1';
    for (char c : row) want.push_back(c == '1' ? 1 / seen : 0);
  }
  return {kSuite, name, [=](const Engine& e) { return weights_differ(e, spec, in, want); }};
}

AttentionInputs blank(int64_t n) {
  return {.q = Tensor::zeros({1, 1, n, 1}),
          .k = Tensor::zeros({1, 1, n, 1}),
          .v = Tensor::zeros({1, 1, n, 1})};
}

AttentionInputs packed() {
  AttentionInputs in = blank(10);
  in.q_segments = Tensor::from<int32_t>({0, 0, 0, 0, 1, 1, 2, 2, 2, 2}, {1, 10});
  in.k_segments = in.q_segments;
  return in;
}

// Keras: Q = K = identity of 8, so the diagonal has score 1/√8 and the rest 0.
std::string keras_identity(const Engine& e) {
  AttentionInputs in{.q = Tensor::zeros({1, 1, 8, 8}),
                     .k = Tensor::zeros({1, 1, 8, 8}),
                     .v = Tensor::zeros({1, 1, 8, 1})};
  std::vector<double> want(64, 0.11871);
  for (int64_t i = 0; i < 8; ++i) {
    in.q.at<float>(0, 0, i, i) = in.k.at<float>(0, 0, i, i) = 1;
    want[i * 9] = 0.16905;
  }
  return weights_differ(e, {}, in, want, 1e-5);
}

}  // namespace

std::vector<ReportedCase> fixed_numbers() {
  const double third = 1.0 / 3;
  return {sparse("Sparsemax_Steps", Sparsemax{}, {0, 0.25f, 0.5f, 0.75f, 1},
                 {0, 0, 0.083333, 0.333333, 0.583333}),
          sparse("Entmax15_Steps", Entmax{1.5}, {0, 0.25f, 0.5f, 0.75f, 1},
                 {0.025854, 0.081677, 0.16875, 0.287073, 0.436646}),
          sparse("Sparsemax_Pair", Sparsemax{}, {1, 0.5f}, {0.75, 0.25}),
          sparse("Sparsemax_OneHot", Sparsemax{}, {2, 1, 0}, {1, 0, 0}),
          sparse("Sparsemax_Uniform", Sparsemax{}, {0, 0, 0}, {third, third, third}),
          sparse("Sparsemax_FarBelow", Sparsemax{}, {0.1f, 0.1f, -5}, {0.5, 0.5, 0}),
          sparse("Entmax15_Pair", Entmax{1.5}, {1, 0.5f}, {0.673993, 0.326007}),
          sparse("Entmax15_Three", Entmax{1.5}, {2, 1, 0}, {0.830719, 0.169281, 0}),
          sparse("Entmax15_OneHot", Entmax{1.5}, {3, 0, 0}, {1, 0, 0}),
          sparse("Entmax125", Entmax{1.25}, {2, 1, 0}, {0.7507, 0.21485, 0.03445}),
          sparse("Entmax175", Entmax{1.75}, {2, 1, 0}, {0.901807, 0.098193, 0}),
          sparse("Entmax2_IsSparsemax", Entmax{2}, {0, 0.25f, 0.5f, 0.75f, 1},
                 {0, 0, 0.083333, 0.333333, 0.583333}),
          pattern("Window_Left1Right2", {.masks = {Window{1, 2}}}, blank(4),
                  {"1110", "1111", "0111", "0011"}),
          pattern("Window_Local32", {.masks = {Window{3, 2}}}, blank(10),
                  {"1110000000", "1111000000", "1111100000", "1111110000", "0111111000",
                   "0011111100", "0001111110", "0000111111", "0000011111", "0000001111"}),
          pattern("Window_SlidingThreeCausal", {.masks = {Causal{}, Window{2, 2}}}, blank(5),
                  {"10000", "11000", "11100", "01110", "00111"}),
          pattern("Window_SlidingThree", {.masks = {Window{2, 2}}}, blank(5),
                  {"11100", "11110", "11111", "01111", "00111"}),
          pattern("Segments_PackedCausal", {.masks = {Causal{}, Segments{}}}, packed(),
                  {"1000000000", "1100000000", "1110000000", "1111000000", "0000100000",
                   "0000110000", "0000001000", "0000001100", "0000001110", "0000001111"}),
          {kSuite, "Softmax_Identity", keras_identity}};
}

}  // namespace foci::testing
