// Memory of tensors: what is kept, for how long, and how much of it.
#include "foci/core/memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "foci/core/tensor.h"

namespace foci {
namespace {

TEST(TensorMemory, CountsWhatLives) {
  const TensorMemory before = tensor_memory();
  {
    const Tensor t = Tensor::empty({1000});
    const Tensor view = t.slice(0, 10, 20);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(t.raw()) % 64, 0u);
    const TensorMemory now = tensor_memory();
    EXPECT_GE(now.in_use - before.in_use, 4000);
    EXPECT_LE(now.in_use - before.in_use, 4000 + 128);
    EXPECT_EQ(now.allocations, before.allocations + 1);
    EXPECT_GE(now.most_in_use, now.in_use);
  }
  EXPECT_EQ(tensor_memory().in_use, before.in_use);
  EXPECT_EQ(tensor_memory().kept, 0);  // nobody asked to keep it
}

TEST(TensorMemory, IsKeptFromOneTensorToTheNext) {
  const KeepMemory keep;
  void* first = nullptr;
  {
    const Tensor t = Tensor::full({300, 7}, 5);
    first = t.raw();
  }
  EXPECT_GE(tensor_memory().kept, 300 * 7 * 4);
  const int64_t allocations = tensor_memory().allocations;
  const Tensor t = Tensor::zeros({2100});
  EXPECT_EQ(t.raw(), first);
  for (float x : t.span<float>()) EXPECT_EQ(x, 0);
  EXPECT_EQ(tensor_memory().kept, 0);
  const Tensor other = Tensor::empty({2100});
  EXPECT_NE(other.raw(), t.raw());
  EXPECT_EQ(tensor_memory().allocations, allocations + 1);
}

TEST(TensorMemory, GoesBackWithTheLastKeeper) {
  {
    const KeepMemory outer;
    {
      const KeepMemory inner;
      Tensor::empty({1 << 16});
    }
    EXPECT_GE(tensor_memory().kept, 4 << 16);
    // Made under a keeper, outlives it.
  }
  EXPECT_EQ(tensor_memory().kept, 0);
  Tensor stays;
  {
    const KeepMemory keep;
    stays = Tensor::full({100}, 3);
  }
  EXPECT_EQ(stays.at<float>(99), 3);
  stays = {};
  EXPECT_EQ(tensor_memory().kept, 0);
}

// Every size finds room for itself, and pieces of every size come back to serve that size again.
TEST(TensorMemory, SizesOfAllKinds) {
  const KeepMemory keep;
  for (int round : {0, 1}) {
    const int64_t allocations = tensor_memory().allocations;
    std::vector<Tensor> all;
    for (int64_t n = 1; n < 300000; n += 1 + n / 7) {
      all.push_back(Tensor::full({n}, static_cast<double>(n)));
    }
    for (const Tensor& t : all) {
      ASSERT_EQ(t.at<float>(0), static_cast<float>(t.numel()));
      ASSERT_EQ(t.at<float>(t.numel() - 1), static_cast<float>(t.numel()));
    }
    if (round == 1) {
      EXPECT_EQ(tensor_memory().allocations, allocations);
    }
  }
}

// Shapes that never come again must not pile up.
TEST(TensorMemory, WhatNobodyAsksForGoes) {
  const KeepMemory keep;
  const int64_t begin = tensor_memory().in_use;
  for (int64_t i = 0; i < 60; ++i) {
    const int64_t n = 1000 + 40000 * i;
    const Tensor t = Tensor::empty({n});
    const TensorMemory m = tensor_memory();
    EXPECT_LE(m.in_use - begin + m.kept, 4 * n * 3 / 2 * 9 / 8 + 4096) << n;
  }
}

}  // namespace
}  // namespace foci
