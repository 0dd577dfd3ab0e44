// Reports about strides, shapes, gradients, dropout and reproducibility (part E).
#include "foci/core/rng.h"

#include <cmath>
#include <optional>
#include "foci/core/threads.h"
#include "foci/reference/attention.h"
#include "reference/reported_parts.h"

namespace foci::testing {
namespace {

const char* const kSuite = "Reported";

Tensor random(Rng& rng, const Dims& shape) {
  Tensor t = Tensor::empty(shape);
  for (float& x : t.span<float>()) x = static_cast<float>(rng.normal());
  return t;
}

std::string row54(const Engine& e, bool biased) {
  Rng rng(54);
  AttentionInputs in{.q = random(rng, {2, 4, 9, 5}),
                     .k = random(rng, {2, 2, 43, 5}),
                     .v = random(rng, {2, 2, 43, 3})};
  AttentionSpec spec{.statistics = Statistics::all()};
  if (biased) {
    in.bias = random(rng, {4, 9, 43});
    spec.biases = {TensorBias{}};
  }
  const AttentionUpstream up{.dy = random(rng, {2, 4, 9, 3})};
  const AttentionOutputs got = e.forward(spec, in);
  const reference::Forward want = reference::attention_forward(spec, in);
  const AttentionGradients g = e.backward(spec, in, up, {.bias = biased});
  const AttentionGradients r = reference::attention_backward(spec, in, up);
  return first({differs("y", got.y, want.out.y), differs("entropy", got.entropy, want.out.entropy),
                differs("coverage", got.coverage, want.out.coverage),
                differs("weights", e.weights(spec, in), want.weights), differs("dq", g.dq, r.dq),
                differs("dk", g.dk, r.dk), differs("dv", g.dv, r.dv),
                biased ? differs("dbias", g.dbias, r.dbias) : ""});
}

// Forward and backward with empty sizes.
std::string empty_sizes(const Engine& e, int64_t B, int64_t N, int64_t M, int64_t D) {
  const AttentionInputs in{.q = Tensor::zeros({B, 2, N, D}),
                           .k = Tensor::zeros({B, 1, M, D}),
                           .v = Tensor::full({B, 1, M, 3}, 7)};
  const AttentionSpec spec{.statistics = Statistics::all()};
  const AttentionOutputs out = e.forward(spec, in);
  if (out.y.shape() != Dims({B, 2, N, 3})) return "y has shape " + out.y.shape().str();
  const AttentionGradients g = e.backward(spec, in, ones_like_y(in), {});
  if (g.dq.shape() != in.q.shape() || g.dk.shape() != in.k.shape()) return "gradients' shapes";
  const Tensor want = Tensor::full(out.y.shape(), M > 0 ? 7 : 0);
  return first({differs("y", out.y, want), not_all_zero("dq", g.dq), not_all_zero("dk", g.dk)});
}

std::string row56(const Engine& e) {
  for (const Normalizer& n : {Normalizer(Softmax{}), Normalizer(Sparsemax{})}) {
    AttentionInputs in{.q = Tensor::zeros({1, 1, 2, 4}),
                       .k = Tensor::zeros({1, 1, 0, 4}),
                       .v = Tensor::zeros({1, 1, 0, 3})};
    const std::string wrong = y_differs(e, {.normalizer = n}, in, {0, 0, 0, 0, 0, 0});
    if (!wrong.empty()) return wrong;
  }
  const std::string wrong = first({empty_sizes(e, 1, 0, 3, 4), empty_sizes(e, 1, 2, 0, 4),
                                   empty_sizes(e, 0, 2, 3, 4), empty_sizes(e, 1, 0, 0, 4)});
  if (!wrong.empty()) return wrong;
  try {  // head size 0: uniform weights, or a clean refusal
    return empty_sizes(e, 1, 2, 3, 0);
  } catch (const ArgumentError&) {
    return "";
  }
}

std::string row59(const Engine& e) {
  const AttentionInputs in = zero_logits(1, {1});
  constexpr int kSeeds = 2000;
  const double p = dropout_threshold(0.2) / 65536.0;
  double mean = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const AttentionSpec spec{.dropout = Dropout{0.2, static_cast<uint64_t>(seed)}};
    const double y = e.forward(spec, in).y.item();
    if (y != 0 && std::abs(y - 1 / (1 - p)) > 1e-6) return fmt::format("y is {}", y);
    mean += y / kSeeds;
    if (seed < 10) {
      const std::string wrong = weights_differ(e, spec, in, {1});
      if (!wrong.empty()) return wrong;
    }
  }
  const double deviation = std::sqrt(p / (1 - p) / kSeeds);
  return std::abs(mean - 1) < 5 * deviation ? "" : fmt::format("the mean over seeds is {}", mean);
}

std::string row61(const Engine& e, bool zero) {
  Rng rng(61);
  const AttentionInputs in{.q = random(rng, {1, 2, 5, 4}),
                           .k = random(rng, {1, 2, 6, 4}),
                           .v = random(rng, {1, 2, 6, 4})};
  const AttentionSpec second{.dropout = zero ? std::optional(Dropout{0, 3}) : std::nullopt};
  return bits_differ("two calls", e.forward({}, in).y, e.forward(second, in).y);
}

std::string row62(const Engine& e) {
  AttentionInputs in = zero_logits(1, {0, 1});
  const AttentionSpec spec{.biases = {TensorBias{}}};
  for (const Dims& shape : {Dims{2}, Dims{1, 2}, Dims{1, 1, 1, 2}}) {
    in.bias = Tensor::zeros(shape);
    const AttentionGradients g =
        e.backward(spec, in, ones_like_y(in), {.qkv = false, .bias = true});
    if (!g.dbias.defined() || g.dbias.shape() != shape) return "dbias has not the bias's shape";
    const std::string wrong = differs("dbias", g.dbias, {-0.25, 0.25});
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string row64(const Engine& e) {
  Rng rng(64);
  const AttentionInputs in{.q = random(rng, {1, 2, 40, 8}),
                           .k = random(rng, {1, 2, 50, 8}),
                           .v = random(rng, {1, 2, 50, 8})};
  const int before = num_threads();
  const Tensor whole = e.forward({}, in).y;
  std::string wrong;
  for (int64_t chunk : {1, 7, 16}) {
    for (int64_t at = 0; at < 40; at += chunk) {
      const int64_t end = std::min<int64_t>(at + chunk, 40);
      AttentionInputs part = in;
      part.q = in.q.slice(2, at, end);
      wrong = first({wrong, bits_differ("a chunk of the queries", e.forward({}, part).y,
                                        whole.slice(2, at, end))});
    }
  }
  for (int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    wrong = first({wrong, bits_differ("another number of threads", e.forward({}, in).y, whole)});
  }
  set_num_threads(before);
  return wrong;
}

}  // namespace

std::vector<ReportedCase> reported_shapes() {
  return {
      {kSuite, "Row54_SizesThatAreNoMultipleOfEight",
       [](const Engine& e) { return row54(e, false); }},
      {kSuite, "Row54_BiasOfThoseSizes", [](const Engine& e) { return row54(e, true); }},
      {kSuite, "Row56_EmptyDimensions", row56},
      {kSuite, "Row59_WeightsAreBeforeDropout", row59},
      {kSuite, "Row61_NoDropoutIsDeterministic", [](const Engine& e) { return row61(e, false); }},
      {kSuite, "Row61_DropoutOfZeroIsNone", [](const Engine& e) { return row61(e, true); }},
      {kSuite, "Row62_GradientOfTheBiasAlone", row62},
      {kSuite, "Row64_ChunksAndThreads", row64}};
}

}  // namespace foci::testing
