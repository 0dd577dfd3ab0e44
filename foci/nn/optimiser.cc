// Flat parameters, AdamW with clipping, and the learning rate's course.
#include "foci/nn/optimiser.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "foci/autograd/elementwise.h"
#include "foci/autograd/profile.h"

namespace foci::nn {
namespace {

constexpr int64_t kAlign = 16;  // floats in 64 bytes: every parameter starts a cache line

int64_t padded(int64_t n) {
  return (n + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

FlatParameters::FlatParameters(std::vector<Parameter<float>*> parameters)
    : parameters_(std::move(parameters)) {
  int64_t size = 0;
  begin_.resize(parameters_.size());
  for (bool decay : {true, false}) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i]->decay != decay) continue;
      begin_[i] = size;
      size += padded(parameters_[i]->value.numel());
    }
    if (decay) decayed_ = size;
  }
  values_ = Tensor::zeros({size});
  grads_ = Tensor::zeros({size});
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter<float>& p = *parameters_[i];
    const Tensor value = part(values_, i), grad = part(grads_, i);
    value.copy_from(p.value);
    if (p.grad.defined()) grad.copy_from(p.grad);
    p.value = value;
    p.grad = grad;
  }
}

Tensor FlatParameters::part(const Tensor& flat, size_t i) const {
  require(flat.shape() == values_.shape(), "optimiser state: shape {} for parameters of shape {}",
          flat.shape(), values_.shape());
  const Dims& shape = parameters_[i]->value.shape();
  return flat.slice(0, begin_[i], begin_[i] + shape.product()).reshape(shape);
}

void FlatParameters::zero_grads() {
  const ProfileScope timed(Operator::optimiser, Pass::backward);
  std::memset(grads_.raw(), 0, grads_.nbytes());
}

double FlatParameters::grad_norm() const {
  return std::sqrt(sum_of_squares(grads_.numel(), grads_.data<float>()));
}

AdamW::AdamW(FlatParameters& parameters, const AdamWConfig& config)
    : parameters_(parameters),
      config_(config),
      m_(Tensor::zeros(parameters.values().shape())),
      v_(Tensor::zeros(parameters.values().shape())) {
  require(config.beta1 >= 0 && config.beta1 < 1 && config.beta2 >= 0 && config.beta2 < 1,
          "AdamW: beta1 {} and beta2 {} lie in [0, 1)", config.beta1, config.beta2);
  require(config.eps > 0 && config.weight_decay >= 0, "AdamW: eps {}, weight decay {}", config.eps,
          config.weight_decay);
}

double AdamW::step(double learning_rate, double max_norm) {
  const ProfileScope timed(Operator::optimiser, Pass::backward);
  const double norm = parameters_.grad_norm();
  if (!std::isfinite(norm)) return norm;
  ++steps_;
  const auto t = static_cast<double>(steps_);
  AdamWStep a;
  a.learning_rate = static_cast<float>(learning_rate);
  a.beta1 = static_cast<float>(config_.beta1);
  a.beta2 = static_cast<float>(config_.beta2);
  a.eps = static_cast<float>(config_.eps);
  a.correction1 = static_cast<float>(1 - std::pow(config_.beta1, t));
  a.correction2 = static_cast<float>(1 - std::pow(config_.beta2, t));
  a.grad_scale = max_norm > 0 && norm > max_norm ? static_cast<float>(max_norm / norm) : 1.0f;
  const auto group = [&](int64_t begin, int64_t end, double decay) {
    a.weight_decay = static_cast<float>(decay);
    adamw_step(end - begin, a, parameters_.grads().data<float>() + begin,
               parameters_.values().data<float>() + begin, m_.data<float>() + begin,
               v_.data<float>() + begin);
  };
  group(0, parameters_.decayed(), config_.weight_decay);
  group(parameters_.decayed(), parameters_.values().numel(), 0);
  return norm;
}

double Schedule::at(double progress) const {
  const double x = std::clamp(progress, 0.0, 1.0);
  if (x < warm_up) return peak * x / warm_up;
  const double rest = warm_up >= 1 ? 0 : (x - warm_up) / (1 - warm_up);
  return peak * (floor + (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * rest)));
}

}  // namespace foci::nn
