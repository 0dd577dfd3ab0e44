// How the ONNX operators are read, beyond what the public cases pin: numbers by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "verify/case_writer.h"
#include "verify/engine_built.h"

namespace foci::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

Tensor floats(std::initializer_list<float> values, const Dims& shape) {
  return Tensor::from(values, shape);
}
Tensor counting(int64_t n) {
  Tensor t = Tensor::zeros({1, 1, n, 1});
  for (int64_t i = 0; i < n; ++i) t.data<float>()[i] = static_cast<float>(i);
  return t;
}

// Through the oracle and, where it agrees, through the engine in every storage type.
std::string both(const std::filesystem::path& path) {
  const std::string oracle = verdict(path);
  return oracle == "passed" && engine_built() ? verdict(path, {}) : oracle;
}

class Onnx : public ::testing::Test {
 protected:
  // Zero logits, values 0, 1, 2 …: every output is the mean of the keys seen.
  std::string attention(const std::string& attributes, int64_t queries, int64_t keys,
                        std::initializer_list<float> y, NamedTensors more = {}) {
    NamedTensors all = {{"in.q", Tensor::zeros({1, 1, queries, 1})},
                        {"in.k", Tensor::zeros({1, 1, keys, 1})},
                        {"in.v", counting(keys)},
                        {"out.y", floats(y, {1, 1, queries, 1})}};
    all.insert(all.end(), more.begin(), more.end());
    write_case(folder_ / "case.safetensors", "Attention", attributes, all);
    return both(folder_ / "case.safetensors");
  }
  static NamedTensors lengths(int64_t n) {
    return {{"in.kv_lengths", Tensor::from<int64_t>({n}, {1})}};
  }

  TemporaryFolder folder_;
};

TEST_F(Onnx, CausalIsTopLeftWithoutACache) {
  EXPECT_EQ(attention(R"({"is_causal":1})", 2, 5, {0, 0.5}), "passed");
}

TEST_F(Onnx, CausalStartsAfterThePast) {
  // Two cached keys (values 5 and 7), then 0, 1.
  EXPECT_EQ(attention(R"({"is_causal":1})", 2, 2, {4, 13 / 4.f},
                      {{"in.past_k", Tensor::zeros({1, 1, 2, 1})},
                       {"in.past_v", floats({5, 7}, {1, 1, 2, 1})},
                       {"out.present_v", floats({5, 7, 0, 1}, {1, 1, 4, 1})}}),
            "passed");
}

TEST_F(Onnx, CausalEndsAtTheLastValidKey) {
  EXPECT_EQ(attention(R"({"is_causal":1})", 2, 5, {1, 1.5}, lengths(4)), "passed");
}

TEST_F(Onnx, FewerValidKeysThanQueriesLeaveRowsEmpty) {
  // p = i − 1: the first query stands before the first key.
  EXPECT_EQ(attention(R"({"is_causal":1})", 3, 5, {0, 0, 0.5}, lengths(2)), "passed");
  EXPECT_EQ(
      attention(R"({"left_window_size":0,"right_window_size":1})", 3, 5, {0, 0.5, 1}, lengths(2)),
      "passed");
  NamedTensors more = lengths(2);
  more.emplace_back("in.mask", Tensor::from<bool>({false, true, true, true, true}, {5}));
  EXPECT_EQ(attention(R"({"is_causal":1})", 3, 5, {0, 0, 1}, more), "passed");
}

TEST_F(Onnx, WindowSidesOfMinusOneAreUnbounded) {
  EXPECT_EQ(attention(R"({"left_window_size":1,"right_window_size":-1})", 3, 3, {1, 1, 1.5}),
            "passed");
  EXPECT_EQ(attention(R"({"left_window_size":-1,"right_window_size":0})", 3, 3, {0, 0.5, 1}),
            "passed");
}

TEST_F(Onnx, ShortMasksHideTheRest) {
  EXPECT_EQ(attention("{}", 1, 4, {0.5}, {{"in.mask", floats({0, 0}, {1, 2})}}), "passed");
  EXPECT_EQ(attention("{}", 1, 4, {1}, {{"in.mask", Tensor::from<bool>({false, true}, {1, 2})}}),
            "passed");
  EXPECT_EQ(attention("{}", 1, 4, {1}, {{"in.mask", Tensor::zeros({1, 5})}}),
            "failed: refused: mask: shape [1, 5] given, but there are only 4 keys");
  EXPECT_EQ(attention("{}", 1, 4, {1}, {{"in.mask", Tensor::zeros({1, 4}, DType::i64)}}),
            "failed: refused: mask: int64 given, bool or a floating type is needed");
}

TEST_F(Onnx, ScoresAtEachStage) {
  const auto run = [&](int mode, std::initializer_list<float> scores) {
    write_case(folder_ / "case.safetensors", "Attention",
               fmt::format(R"({{"qk_matmul_output_mode":{},"scale":0.5,"softcap":2.0}})", mode),
               {{"in.q", floats({2}, {1, 1, 1, 1})},
                {"in.k", floats({1, 2, 3}, {1, 1, 3, 1})},
                {"in.v", counting(3)},
                {"in.mask", floats({1, 0, -kInf}, {3})},
                {"out.scores", floats(scores, {1, 1, 1, 3})}});
    return both(folder_ / "case.safetensors");
  };
  const auto capped = [](double x) { return static_cast<float>(2 * std::tanh(x / 2)); };
  EXPECT_EQ(run(0, {1, 2, 3}), "passed");
  EXPECT_EQ(run(1, {capped(1), capped(2), capped(3)}), "passed");
  EXPECT_EQ(run(2, {capped(1) + 1, capped(2), -kInf}), "passed");
  const double a = std::exp(capped(1) + 1), b = std::exp(capped(2));
  EXPECT_EQ(run(3, {float(a / (a + b)), float(b / (a + b)), 0}), "passed");
}

// Cases are made in one type and run in two: a result that is right in the file's type alone, as
// one that was computed with more digits than float16 holds, is told from one that is right in
// both.
TEST_F(Onnx, RunsInFloat32AndFloat16) {
  FOCI_SKIP_WITHOUT_AN_ENGINE();
  const auto targets = static_cast<int64_t>(supported_targets().size());
  const auto runs = [&](DType dtype, double size) {
    const Tensor x = Tensor::full({1, 1, 1, 1}, size, dtype);
    write_case(folder_ / "case.safetensors", "Attention", "{}",
               {{"in.q", x}, {"in.k", x}, {"in.v", x}, {"out.y", x}});
    const VerifyReport r =
        verify_paths({folder_ / "case.safetensors"}, {.implementation = Implementation::plain});
    EXPECT_EQ(r.passed, 1);
    return r.runs / targets;
  };
  EXPECT_EQ(runs(DType::f32, 3), 2);
  EXPECT_EQ(runs(DType::f64, 3), 2);
  EXPECT_EQ(runs(DType::f16, 3), 2);
  EXPECT_EQ(runs(DType::bf16, 3), 3);
  EXPECT_EQ(runs(DType::f32, 1e6), 1);  // float16 has no such number
}

// The scores that are compared are the engine's own.
TEST_F(Onnx, WrongScoresAndTurnsAreTold) {
  FOCI_SKIP_WITHOUT_AN_ENGINE();
  const Tensor one = Tensor::full({1, 1, 1, 1}, 1);
  for (int mode = 0; mode < 4; ++mode) {
    write_case(
        folder_ / "case.safetensors", "Attention",
        fmt::format(R"({{"qk_matmul_output_mode":{}}})", mode),
        {{"in.q", one}, {"in.k", one}, {"in.v", one}, {"out.scores", floats({2}, {1, 1, 1, 1})}});
    const std::string said = verdict(folder_ / "case.safetensors", {});
    EXPECT_NE(said.find(": scores [0, 0, 0, 0] is 1, expected 2"), std::string::npos) << said;
    EXPECT_EQ(said.find("reference"), std::string::npos) << said;
  }
  write_case(folder_ / "case.safetensors", "RotaryEmbedding", "{}",
             {{"in.x", floats({1, 2}, {1, 1, 1, 2})},
              {"in.cos", floats({0}, {1, 1, 1})},
              {"in.sin", floats({1}, {1, 1, 1})},
              {"out.y", floats({-2, 2}, {1, 1, 1, 2})}});
  const std::string said = verdict(folder_ / "case.safetensors", {});
  EXPECT_NE(said.find(": y [0, 0, 0, 1] is 1, expected 2"), std::string::npos) << said;
  EXPECT_EQ(said.find("reference"), std::string::npos) << said;
}

TEST_F(Onnx, RefusesWhatDoesNotFit) {
  const auto run = [&](const std::string& attributes, const NamedTensors& tensors) {
    NamedTensors all = tensors;
    all.emplace_back("out.y", Tensor::zeros({1}));
    write_case(folder_ / "case.safetensors", "Attention", attributes, all);
    return both(folder_ / "case.safetensors");
  };
  const Tensor x = Tensor::zeros({1, 1, 2, 4}), flat = Tensor::zeros({1, 2, 6});
  EXPECT_EQ(run("{}", {{"in.q", x}}), "failed: refused: k: no tensor given");
  EXPECT_EQ(run("{}", {{"in.q", flat}, {"in.k", flat}, {"in.v", flat}}),
            "failed: refused: q: shape [1, 2, 6] given, 3 dimensions need a number of heads >= 1");
  EXPECT_EQ(run(R"({"q_num_heads":4,"kv_num_heads":2})",
                {{"in.q", flat}, {"in.k", flat}, {"in.v", flat}}),
            "failed: refused: q: 6 channels given, 4 heads do not divide them");
  EXPECT_EQ(run("{}", {{"in.q", x}, {"in.k", x}, {"in.v", x}, {"in.past_k", x}}),
            "failed: refused: past_k, past_v: one is given without the other");
  EXPECT_EQ(run("{}", {{"in.q", x},
                       {"in.k", x},
                       {"in.v", x},
                       {"in.past_k", Tensor::zeros({1, 1, 2, 3})},
                       {"in.past_v", x}}),
            "failed: refused: past_k: shape [1, 1, 2, 3] of float32 given, it does not continue in "
            "[1, 1, 2, 4] of float32");
  EXPECT_EQ(run("{}", {{"in.q", x},
                       {"in.k", x},
                       {"in.v", x},
                       {"in.kv_lengths", Tensor::from<int64_t>({3}, {1})}}),
            "failed: refused: kv_lengths[0]: 3 given, it must lie in [0, 2]");
  EXPECT_EQ(run(R"({"qk_matmul_output_mode":4})", {{"in.q", x}, {"in.k", x}, {"in.v", x}}),
            "failed: refused: qk_matmul_output_mode: 4 given, it lies in [0, 3]");
  EXPECT_EQ(run(R"({"causal":1})", {{"in.q", x}}), "unreadable: attribute causal: unknown");
  EXPECT_EQ(run(R"({"is_causal":"1"})", {{"in.q", x}, {"in.k", x}, {"in.v", x}}),
            "unreadable: attribute is_causal: an integer is needed");
  EXPECT_EQ(run("[", {{"in.q", x}}),
            "unreadable: metadata attributes: the text is not JSON: wrong at line 1, column 2");
}

TEST_F(Onnx, RotaryEmbedding) {
  const auto run = [&](const std::string& attributes, const NamedTensors& tensors) {
    write_case(folder_ / "case.safetensors", "RotaryEmbedding", attributes, tensors);
    return both(folder_ / "case.safetensors");
  };
  const Tensor x = floats({1, 2, 3, 4}, {1, 1, 1, 4});
  const Tensor zero = floats({0, 0}, {1, 1, 2}), one = floats({1, 1}, {1, 1, 2});
  // A quarter turn of each pair (u, v) is (−v, u).
  EXPECT_EQ(run("{}", {{"in.x", x},
                       {"in.cos", zero},
                       {"in.sin", one},
                       {"out.y", floats({-3, -4, 1, 2}, {1, 1, 1, 4})}}),
            "passed");
  EXPECT_EQ(run(R"({"interleaved":1})", {{"in.x", x},
                                         {"in.cos", zero},
                                         {"in.sin", one},
                                         {"out.y", floats({-2, 1, -4, 3}, {1, 1, 1, 4})}}),
            "passed");
  EXPECT_EQ(run("{}", {{"in.x", x},
                       {"in.cos", floats({1, 1, 0, 0}, {2, 2})},
                       {"in.sin", floats({0, 0, 1, 1}, {2, 2})},
                       {"in.position_ids", Tensor::from<int64_t>({1}, {1, 1})},
                       {"out.y", floats({-3, -4, 1, 2}, {1, 1, 1, 4})}}),
            "passed");
  EXPECT_EQ(run("{}", {{"in.x", x},
                       {"in.cos", floats({1, 1, 0, 0}, {2, 2})},
                       {"in.sin", floats({0, 0, 1, 1}, {2, 2})},
                       {"in.position_ids", Tensor::from<int64_t>({2}, {1, 1})},
                       {"out.y", x}}),
            "failed: refused: position_ids[0, 0]: 2 given, cos has 2 positions");
  EXPECT_EQ(run(R"({"rotary_embedding_dim":2})",
                {{"in.x", x}, {"in.cos", zero}, {"in.sin", one}, {"out.y", x}}),
            "failed: refused: cos: 2 angles given, 2 channels turn");
}

}  // namespace
}  // namespace foci::testing
