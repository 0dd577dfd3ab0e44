// A call that is interrupted gives back all it took, and the next one has the bits of any other.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "foci/attention/plan.h"
#include "foci/core/error.h"
#include "foci/core/memory.h"
#include "foci/core/rng.h"
#include "foci/core/threads.h"

namespace foci {
namespace {

Tensor numbers(const Dims& shape, uint64_t seed) {
  Tensor t = Tensor::empty(shape);
  Rng rng(seed);
  for (float& x : t.span<float>()) x = static_cast<float>(rng.normal());
  return t;
}

void expect_same(const Tensor& a, const Tensor& b, const char* what) {
  ASSERT_EQ(a.nbytes(), b.nbytes()) << what;
  EXPECT_EQ(std::memcmp(a.raw(), b.raw(), a.nbytes()), 0) << what;
}

struct Case {
  const char* name;
  Implementation implementation;
  Normalizer normalizer;
  int threads;
};

class InterruptedAttention : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { set_num_threads(GetParam().threads); }
  void TearDown() override { set_num_threads(before_); }

  Bound bind(int64_t batch, int64_t n, AttentionInputs& in) const {
    AttentionSpec spec;
    spec.normalizer = GetParam().normalizer;
    spec.masks = {Causal{}};
    spec.biases = {TensorBias{}};
    spec.statistics = Statistics::all();
    // The batch repeats, so that a long call needs little memory.
    const Dims shape{batch, 4, n, 16};
    in.q = numbers({1, 4, n, 16}, 1).broadcast_to(shape);
    in.k = numbers({1, 4, n, 16}, 2).broadcast_to(shape);
    in.v = numbers({1, 4, n, 16}, 3).broadcast_to(shape);
    in.bias = numbers({n}, 4);
    const AttentionShape sizes{
        .B = batch, .H = 4, .Hk = 4, .N = n, .M = n, .D = 16, .Dv = 16, .dtype = DType::f32};
    return Plan::make(spec, sizes, {.implementation = GetParam().implementation}).bind(in);
  }
  const int before_ = num_threads();
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(
    Calls, InterruptedAttention,
    ::testing::Values(Case{"fused", Implementation::fused, Softmax{}, 2},
                      Case{"fused_one_thread", Implementation::fused, Softmax{}, 1},
                      Case{"fused_entmax", Implementation::fused, Entmax{1.5}, 3},
                      Case{"fused_topk", Implementation::fused, TopK{8}, 2},
                      Case{"plain", Implementation::plain, Sparsemax{}, 2}),
    case_name);

TEST_P(InterruptedAttention, LeavesNothingBehind) {
  const AttentionWanted wanted{.qkv = true, .bias = true};
  AttentionInputs in, long_in;
  const Bound bound = bind(2, 70, in);
  const Tensor dy = numbers({2, 4, 70, 16}, 5);
  const AttentionOutputs out = bound.forward();
  const AttentionGradients gradients = bound.backward(out, {.dy = dy}, wanted);

  const Bound long_call = bind(16, 400, long_in);
  const AttentionOutputs saved = long_call.forward();
  const Tensor long_dy = numbers({1, 4, 400, 16}, 5).broadcast_to({16, 4, 400, 16});
  const int64_t in_use = tensor_memory().in_use;
  {
    // Several calls may fit into the time after which it is asked.
    const InterruptScope scope([] { return true; });
    EXPECT_THROW(for (;;) long_call.forward(), Interrupted);
    EXPECT_THROW(for (;;) long_call.backward(saved, {.dy = long_dy}, wanted), Interrupted);
  }
  EXPECT_EQ(tensor_memory().in_use, in_use);

  const AttentionOutputs again = bound.forward();
  const AttentionGradients gradients_again = bound.backward(again, {.dy = dy}, wanted);
  expect_same(out.y, again.y, "y");
  expect_same(out.coverage, again.coverage, "coverage");
  expect_same(out.entropy, again.entropy, "entropy");
  expect_same(gradients.dq, gradients_again.dq, "dq");
  expect_same(gradients.dk, gradients_again.dk, "dk");
  expect_same(gradients.dv, gradients_again.dv, "dv");
  expect_same(gradients.dbias, gradients_again.dbias, "dbias");
}

}  // namespace
}  // namespace foci
