// What the tape holds on to: less with every step that backward takes.
#include <gtest/gtest.h>

#include <vector>

#include "autograd/gradient_check.h"
#include "foci/core/memory.h"

namespace foci {
namespace {

TEST(TapeMemory, ActivationsGoAsBackwardPasses) {
  constexpr int kLayers = 10;
  const int64_t activation = 512 * 64 * 4;  // bytes
  const Tensor x = testing::random_tensor({512, 64}, 1).to(DType::f32);
  std::vector<Parameter<float>> weights(kLayers);
  for (int i = 0; i < kLayers; ++i) {
    weights[i].value = testing::random_tensor({64, 64}, 2 + i, 0.1).to(DType::f32);
    weights[i].grad = Tensor::zeros({64, 64});
  }
  const int64_t before = tensor_memory().in_use;
  std::vector<int64_t> seen;
  Tape<float> tape;
  {
    Var<float> h = tape.leaf(x);
    for (int i = 0; i < kLayers; ++i) {
      h = ops::linear(tape, h, tape.parameter(weights[i]), {}, ops::Activation::gelu);
      const Var<float> probe = h;
      tape.record({probe}, [&] { seen.push_back(tensor_memory().in_use - before); });
    }
    const int64_t forward = tensor_memory().in_use - before;
    EXPECT_GE(forward, 2 * kLayers * activation);  // each layer's result, and what tells its slope
    reset_tensor_memory_peak();
    const Tensor up = Tensor::full(h.shape(), 1);
    tape.backward(h, up);
    // The gradients of one layer's result and input, and what is multiplied into the former.
    EXPECT_LE(tensor_memory().most_in_use - before, forward + 5 * activation);
  }
  ASSERT_EQ(seen.size(), size_t{kLayers});
  for (int i = 2; i < kLayers; ++i) EXPECT_LE(seen[i], seen[i - 1] - activation) << i;
  EXPECT_EQ(tape.steps(), 0u);
}

}  // namespace
}  // namespace foci
