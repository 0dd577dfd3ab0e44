// Checks an operator twice: its gradient in double against finite differences, and its float form
// against its double form.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "foci/autograd/ops.h"
#include "foci/core/rng.h"

namespace foci::testing {

inline Tensor random_tensor(const Dims& shape, uint64_t seed, double spread = 1) {
  Rng rng(seed);
  Tensor t = Tensor::empty(shape, DType::f64);
  for (double& x : t.span<double>()) x = spread * rng.normal();
  return t;
}

// The largest |a − b|, relative to the largest |b| (at least 1e-3).
inline double difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  if (a.shape() != b.shape()) return INFINITY;
  const Tensor x = a.to(DType::f64).contiguous(), y = b.to(DType::f64).contiguous();
  double worst = 0, top = 1e-3;
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double p = x.span<double>()[i], q = y.span<double>()[i];
    if (p == q) continue;  // also infinities in the same place
    if (std::isnan(p) != std::isnan(q) || std::isinf(p) || std::isinf(q)) return INFINITY;
    worst = std::max(worst, std::abs(p - q));
    top = std::max(top, std::abs(q));
  }
  return worst / top;
}

template <class T>
struct Run {
  Tensor output;              // the first of the outputs
  std::vector<Tensor> grads;  // of each input; undefined where none arrived
};

// f(tape, inputs) gives a vector of outputs; each receives a fixed random upstream gradient.
template <class T, class F>
Run<T> run_forward_backward(const std::vector<Tensor>& inputs, const F& f) {
  Tape<T> tape;
  std::vector<Var<T>> leaves;
  for (const Tensor& t : inputs) leaves.push_back(tape.leaf(t.to(dtype_v<T>).clone()));
  const std::vector<Var<T>> outputs = f(tape, leaves);
  std::vector<std::pair<Var<T>, Tensor>> upstream;
  for (size_t i = 0; i < outputs.size(); ++i) {
    upstream.emplace_back(outputs[i], random_tensor(outputs[i].shape(), 1000 + i).to(dtype_v<T>));
  }
  Run<T> run{outputs[0].value(), {}};
  tape.backward(upstream);
  EXPECT_EQ(tape.steps(), 0u);
  for (const Var<T>& leaf : leaves) run.grads.push_back(leaf.grad());
  return run;
}

template <class F>
double objective(const std::vector<Tensor>& inputs, const F& f) {
  Tape<double> tape(false);
  std::vector<Var<double>> vars;
  vars.reserve(inputs.size());
  for (const Tensor& t : inputs) vars.push_back(tape.constant(t));
  const std::vector<Var<double>> outputs = f(tape, vars);
  double sum = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Tensor w = random_tensor(outputs[i].shape(), 1000 + i);
    const Tensor y = outputs[i].value().contiguous();
    for (int64_t j = 0; j < w.numel(); ++j) sum += w.span<double>()[j] * y.span<double>()[j];
  }
  return sum;
}

// Central differences with h = 1e-5: truncation h²·f''' ≈ 1e-10, rounding 1e-16/h ≈ 1e-11, both
// relative to values of order 1; 1e-7 leaves room for stiff operators.
template <class F>
void check_finite_differences(const std::vector<Tensor>& inputs, const F& f,
                              double tolerance = 1e-7) {
  const Run<double> run = run_forward_backward<double>(inputs, f);
  for (size_t n = 0; n < inputs.size(); ++n) {
    ASSERT_TRUE(run.grads[n].defined()) << "input " << n << " received no gradient";
    Tensor want = Tensor::zeros(inputs[n].shape(), DType::f64);
    for (int64_t i = 0; i < want.numel(); ++i) {
      const double h = 1e-5;
      double side[2];
      for (int s = 0; s < 2; ++s) {
        std::vector<Tensor> moved = inputs;
        moved[n] = inputs[n].clone();
        moved[n].span<double>()[i] += s ? -h : h;
        side[s] = objective(moved, f);
      }
      want.span<double>()[i] = (side[0] - side[1]) / (2 * h);
    }
    EXPECT_LT(difference(run.grads[n], want), tolerance) << "gradient of input " << n;
  }
}

// f is generic in T: it is called with Tape<double> and Tape<float>.
template <class F>
void check_operator(const std::vector<Tensor>& inputs, const F& f, double float_tolerance = 2e-5) {
  check_finite_differences(inputs, f);
  const Run<double> exact = run_forward_backward<double>(inputs, f);
  const Run<float> single = run_forward_backward<float>(inputs, f);
  EXPECT_LT(difference(single.output, exact.output), float_tolerance);
  for (size_t n = 0; n < inputs.size(); ++n) {
    EXPECT_LT(difference(single.grads[n], exact.grads[n]), float_tolerance)
        << "float gradient of input " << n;
  }
}

// Gradients that are in `parameters` (after a backward pass of loss_of) against central differences
// of loss_of(Tape<double>&), along one random direction through all of them at once.
template <class Loss>
void expect_slope(const std::vector<Parameter<double>*>& parameters, const Loss& loss_of,
                  double size, const std::string& what) {
  std::vector<Tensor> kept, directions;
  double slope = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    ASSERT_TRUE(parameters[i]->grad.defined()) << parameters[i]->name;
    kept.push_back(parameters[i]->value.clone());
    directions.push_back(random_tensor(kept[i].shape(), 50 + i, size));
    for (int64_t j = 0; j < kept[i].numel(); ++j) {
      slope +=
          parameters[i]->grad.template span<double>()[j] * directions[i].template span<double>()[j];
    }
  }
  double sides[2] = {};
  const double h = 1e-6;
  for (int s : {0, 1}) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      for (int64_t j = 0; j < kept[i].numel(); ++j) {
        parameters[i]->value.template span<double>()[j] =
            kept[i].template span<double>()[j] +
            (s ? -h : h) * directions[i].template span<double>()[j];
      }
    }
    Tape<double> off(false);
    sides[s] = loss_of(off).value().item();
  }
  const double want = (sides[0] - sides[1]) / (2 * h);
  EXPECT_NEAR(slope, want, 1e-6 * std::max(1.0, std::abs(want))) << what;
}

}  // namespace foci::testing
