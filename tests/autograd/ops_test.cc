// Every operator but attention: gradients against finite differences in double, float against
// double, and the corners of each.
#include "foci/autograd/ops.h"

#include <cmath>

#include <gtest/gtest.h>

#include "autograd/gradient_check.h"
#include "foci/core/threads.h"

namespace foci {
namespace {

using testing::check_operator;
using testing::random_tensor;

template <class T>
using Vars = std::vector<Var<T>>;

TEST(Linear, EveryActivation) {
  for (auto act : {ops::Activation::none, ops::Activation::relu, ops::Activation::gelu}) {
    check_operator({random_tensor({2, 3, 5}, 1), random_tensor({7, 5}, 2), random_tensor({7}, 3)},
                   [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
                     return Vars<T>{ops::linear(tape, v[0], v[1], v[2], act)};
                   });
  }
}

TEST(Linear, WithoutBiasAndOnAStridedView) {
  check_operator({random_tensor({4, 9}, 1), random_tensor({3, 5}, 2)},
                 [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
                   const Var<T> x = ops::slice(tape, v[0], 1, 2, 7);
                   return Vars<T>{ops::linear(tape, x, v[1], Var<T>())};
                 });
}

TEST(Linear, Residual) {
  for (auto act : {ops::Activation::none, ops::Activation::gelu}) {
    check_operator({random_tensor({6, 5}, 1), random_tensor({7, 5}, 2), random_tensor({7}, 3),
                    random_tensor({6, 7}, 4)},
                   [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
                     return Vars<T>{ops::linear(tape, v[0], v[1], v[2], act, v[3])};
                   });
  }
  // The input itself as the residual, and a value that three operators read.
  check_operator({random_tensor({6, 5}, 1), random_tensor({5, 5}, 2), random_tensor({5}, 3)},
                 [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
                   const Var<T> x = ops::scale(tape, v[0], 0.5);
                   const Var<T> h = ops::layer_norm(tape, x, v[2], v[2], 1e-5);
                   const Var<T> y = ops::linear(tape, h, v[1], v[2], ops::Activation::none, x);
                   return Vars<T>{ops::linear(tape, y, v[1], v[2], ops::Activation::none, y)};
                 });
}

TEST(Linear, FeedForwardIsTwoLinearLayers) {
  for (auto act : {ops::Activation::none, ops::Activation::relu, ops::Activation::gelu}) {
    for (bool with_residual : {false, true}) {
      std::vector<Tensor> inputs = {random_tensor({2, 3, 5}, 1), random_tensor({7, 5}, 2),
                                    random_tensor({7}, 3), random_tensor({4, 7}, 4),
                                    random_tensor({4}, 5)};
      if (with_residual) inputs.push_back(random_tensor({2, 3, 4}, 6));
      check_operator(inputs, [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
        return Vars<T>{ops::feed_forward(tape, v[0], v[1], v[2], act, v[3], v[4],
                                         with_residual ? v[5] : Var<T>())};
      });
      Tape<double> tape(false);
      Vars<double> v;
      for (const Tensor& t : inputs) v.push_back(tape.constant(t));
      const Var<double> residual = with_residual ? v[5] : Var<double>();
      const Tensor y = ops::feed_forward(tape, v[0], v[1], v[2], act, v[3], v[4], residual).value();
      const Var<double> h = ops::linear(tape, v[0], v[1], v[2], act);
      const Tensor z = ops::linear(tape, h, v[3], v[4], ops::Activation::none, residual).value();
      for (int64_t i = 0; i < y.numel(); ++i) EXPECT_EQ(y.data<double>()[i], z.data<double>()[i]);
    }
  }
}

TEST(Linear, NoRows) {
  check_operator({random_tensor({0, 4}, 1), random_tensor({3, 4}, 2), random_tensor({3}, 3)},
                 [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
                   return Vars<T>{ops::linear(tape, v[0], v[1], v[2])};
                 });
}

TEST(Linear, RefusesOtherShapes) {
  Tape<float> tape;
  const Var<float> x = tape.leaf(Tensor::zeros({2, 3})), w = tape.leaf(Tensor::zeros({4, 5}));
  try {
    ops::linear(tape, x, w, Var<float>());
    FAIL();
  } catch (const ArgumentError& e) {
    EXPECT_NE(std::string(e.what()).find("[2, 3] for a weight of shape [4, 5]"), std::string::npos)
        << e.what();
  }
}

TEST(LayerNorm, Gradients) {
  check_operator({random_tensor({3, 2, 6}, 1), random_tensor({6}, 2), random_tensor({6}, 3)},
                 [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
                   return Vars<T>{ops::layer_norm(tape, v[0], v[1], v[2], 1e-5)};
                 });
}

TEST(Add, ResidualStream) {  // one value goes three ways, so that its gradients add up
  check_operator({random_tensor({4, 3}, 1), random_tensor({3, 3}, 2)},
                 [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
                   Var<T> x = ops::add(tape, v[0], ops::linear(tape, v[0], v[1], Var<T>()));
                   x = ops::add(tape, x, ops::linear(tape, x, v[1], Var<T>()));
                   return Vars<T>{ops::add(tape, x, v[0]), x};
                 });
}

TEST(Add, TheSameValueTwice) {
  check_operator({random_tensor({4, 3}, 1)}, [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
    return Vars<T>{ops::add(tape, v[0], v[0])};
  });
}

TEST(Scale, Gradients) {
  check_operator({random_tensor({5}, 1)}, [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
    return Vars<T>{ops::scale(tape, v[0], -2.5)};
  });
}

TEST(GatherRows, RepeatedRows) {
  check_operator({random_tensor({4, 3}, 1)}, [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
    return Vars<T>{ops::gather_rows(tape, v[0], {2, 0, 2, 2, 3})};
  });
  Tape<float> tape;
  EXPECT_THROW(ops::gather_rows(tape, tape.leaf(Tensor::zeros({4, 3})), {4}), ArgumentError);
}

TEST(MixRows, EmptyAndLongMixes) {
  check_operator({random_tensor({4, 3}, 1)}, [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
    return Vars<T>{ops::mix_rows(
        tape, v[0], {.begin = {0, 2, 2, 5}, .row = {0, 1, 3, 3, 2}, .weight = {.5, .5, 1, -2, 3}})};
  });
}

TEST(SegmentMean, EmptySegmentsGiveZero) {
  check_operator({random_tensor({6, 3}, 1)}, [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
    return Vars<T>{ops::segment_mean(tape, v[0], {0, 2, 2, 6})};
  });
}

TEST(CrossEntropy, WithAndWithoutSmoothing) {
  for (double smoothing : {0.0, 0.1}) {
    check_operator({random_tensor({3, 5}, 1, 3)}, [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
      return Vars<T>{ops::softmax_cross_entropy(tape, v[0], {4, 0, 2}, smoothing)};
    });
  }
}

TEST(CrossEntropy, HugeLogitsStayFinite) {
  Tape<float> tape;
  Tensor rows;
  const Var<float> x = tape.leaf(Tensor::from<float>({151.29f, 150.29f, 1e6f, -1e6f}, {2, 2}));
  const Var<float> loss = ops::softmax_cross_entropy(tape, x, {0, 0}, 0, &rows);
  EXPECT_NEAR(rows.at<float>(0), std::log(1 + std::exp(-1.0)), 1e-5);
  EXPECT_EQ(rows.at<float>(1), 0);
  EXPECT_THROW(ops::softmax_cross_entropy(tape, x, {0, 2}, 0), ArgumentError);
}

TEST(Shapes, ViewsAndJoins) {
  check_operator({random_tensor({4, 6}, 1), random_tensor({4, 2}, 2)},
                 [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
                   const Var<T> a = ops::slice(tape, v[0], 1, 1, 4);    // strided
                   const Var<T> b = ops::reshape(tape, a, {2, 6});      // so this one copies
                   const Var<T> c = ops::reshape(tape, v[0], {12, 2});  // this one does not
                   const Var<T> d = ops::slice(tape, c, 0, 3, 7);
                   return Vars<T>{ops::concat(tape, Vars<T>{d, v[1]}, 1), b,
                                  ops::concat(tape, Vars<T>{v[1], d, d}, 0)};
                 });
}

TEST(Shapes, ViewsDoNotCopy) {
  Tape<float> tape;
  const Var<float> x = tape.leaf(Tensor::zeros({4, 6}));
  EXPECT_TRUE(ops::slice(tape, x, 1, 1, 3).value().shares_storage(x.value()));
  EXPECT_TRUE(ops::reshape(tape, x, {24}).value().shares_storage(x.value()));
}

TEST(DropoutOp, GradientsFollowTheSameBits) {
  check_operator({random_tensor({5, 7}, 1)}, [&]<class T>(Tape<T>& tape, const Vars<T>& v) {
    return Vars<T>{ops::dropout(tape, v[0], 0.3, 11, 5)};
  });
}

TEST(DropoutOp, RateMeanAndIndependenceOfThreads) {
  const int64_t n = 100'000;
  const int before = num_threads();
  std::vector<Tensor> results;
  for (int threads : {1, 3}) {
    set_num_threads(threads);
    Tape<float> tape(false);
    results.push_back(ops::dropout(tape, tape.constant(Tensor::full({n}, 1)), 0.25, 7, 1).value());
  }
  set_num_threads(before);
  double kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float y = results[0].at<float>(i);
    ASSERT_EQ(y, results[1].at<float>(i));
    ASSERT_TRUE(y == 0 || std::abs(y - 1 / 0.75f) < 1e-6f);
    kept += y != 0;
  }
  EXPECT_NEAR(kept / n, 0.75, 5 * std::sqrt(0.25 * 0.75 / n));  // five standard deviations
  Tape<float> tape;
  const Var<float> x = tape.leaf(Tensor::full({4}, 1));
  EXPECT_TRUE(ops::dropout(tape, x, 0, 7, 1).value().shares_storage(x.value()));
  EXPECT_THROW(ops::dropout(tape, x, 1, 7, 1), ArgumentError);
}

TEST(TapeTest, GradientsAddUpInParameters) {
  Parameter<float> p{"w", Tensor::full({3}, 2), {}, true};
  for (int step = 0; step < 2; ++step) {
    Tape<float> tape;
    const Var<float> w = tape.parameter(p);
    tape.backward(ops::scale(tape, w, 3), Tensor::full({3}, 1));
  }
  for (float g : p.grad.span<float>()) EXPECT_EQ(g, 6);
}

TEST(TapeTest, WhatNothingNeedsIsNotRecorded) {
  Tape<float> tape;
  const Var<float> x = tape.constant(Tensor::zeros({2, 2}));
  ops::add(tape, x, x);
  EXPECT_EQ(tape.steps(), 0u);
  Tape<float> off(false);
  const Var<float> y = off.leaf(Tensor::zeros({2, 2}));
  ops::add(off, y, y);
  EXPECT_EQ(off.steps(), 0u);
  EXPECT_THROW(off.backward(y), ArgumentError);
  EXPECT_THROW(tape.backward(x), ArgumentError);
}

TEST(TapeTest, BackwardFreesWhatWasSaved) {
  Tape<float> tape;
  auto memory = std::make_shared<std::vector<float>>(4, 1.f);
  std::weak_ptr<std::vector<float>> alive = memory;
  Var<float> loss;
  {
    float* const data = memory->data();
    const Var<float> x =
        tape.leaf(Tensor::wrap(data, {1, 4}, {4, 1}, DType::f32, std::move(memory)));
    const Var<float> w = tape.leaf(Tensor::full({1, 4}, 1));
    loss = ops::linear(tape, x, w, Var<float>());
  }
  EXPECT_FALSE(alive.expired());  // linear keeps its input for dw
  tape.backward(loss);
  EXPECT_TRUE(alive.expired());
}

// Sums over many rows: the error does not grow with their number.
TEST(LongSums, RowsThatManyGoInto) {
  for (const int64_t M : {int64_t{200001}, int64_t{1000000}}) {
    const double limit = 4e-7 * (1 + std::log2(static_cast<double>(M)));
    for (const float value : {1.1f, 0.7f, 1.3f}) {
      const double sum = static_cast<double>(value) * static_cast<double>(M);
      const auto ids = std::vector<int64_t>(static_cast<size_t>(M), 1);
      Tape<float> tape;
      const Var<float> table = tape.leaf(Tensor::full({3, 2}, 1));
      const Var<float> rows = ops::gather_rows(tape, table, ids);
      tape.backward(rows, Tensor::full({1}, value).broadcast_to({M, 2}));
      EXPECT_NEAR(table.grad().item({1, 0}) / sum, 1, limit);
      EXPECT_EQ(table.grad().item({0, 0}), 0);
      // Of one row many taps, forward; to one row of the table, backward.
      const Var<float> mixed = ops::mix_rows(
          tape, table, {{0, M}, ids, std::vector<double>(ids.size(), static_cast<double>(value))});
      EXPECT_NEAR(mixed.value().item({0, 1}) / sum, 1, limit);
      const Var<float> other = tape.leaf(Tensor::full({3, 2}, 1));
      tape.backward(ops::mix_rows(tape, other, {{0, M}, ids, std::vector<double>(ids.size(), 0.5)}),
                    Tensor::full({1, 2}, value));
      EXPECT_NEAR(other.grad().item({1, 1}) / (0.5 * sum), 1, limit);
      const Var<float> x = tape.leaf(Tensor::full({M, 2}, value));
      EXPECT_NEAR(
          ops::segment_mean(tape, x, {0, M}).value().item({0, 1}) / static_cast<double>(value), 1,
          limit);
    }
  }
}

TEST(LongSums, MeanLossOverManyRows) {
  const int64_t M = 1000000;
  Tape<float> tape;
  const Var<float> logits = tape.leaf(Tensor::full({M, 3}, 1.1));
  const Var<float> loss =
      ops::softmax_cross_entropy(tape, logits, std::vector<int64_t>(static_cast<size_t>(M), 1), 0);
  EXPECT_NEAR(loss.value().item() / std::log(3.0), 1, 1e-6);
}

}  // namespace
}  // namespace foci
