// Flat parameters, AdamW with clipping, and the learning rate's course.
#include "foci/nn/optimiser.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numbers>
#include <numeric>
#include <unordered_set>

#include "foci/autograd/elementwise.h"
#include "foci/autograd/profile.h"

namespace foci::nn {
namespace {

constexpr int64_t kAlign = 16;  // floats in 64 bytes: every parameter starts a cache line

int64_t padded(int64_t n) {
  return (n + kAlign - 1) / kAlign * kAlign;
}

std::string named(const Parameter<float>& p, size_t i) {
  return p.name.empty() ? fmt::format("parameters[{}]", i) : "parameter " + p.name;
}

void check(const Parameter<float>& p, size_t i) {
  require(p.value.defined(), "{}: it has no value", named(p, i));
  require(p.value.dtype() == DType::f32, "{}: a value of {} arrived, float32 is right", named(p, i),
          name_of(p.value.dtype()));
  for (int d = 0; d < p.value.rank(); ++d) {
    require(
        p.value.dim(d) <= 1 || p.value.stride(d) != 0,
        "{}: it has a shape, but no values of its own yet; reset(seed) or load_parameters gives "
        "them",
        named(p, i));
  }
  require(!p.grad.defined() || (p.grad.dtype() == DType::f32 && p.grad.shape() == p.value.shape()),
          "{}: a gradient of {} and shape {} for a value of shape {}", named(p, i),
          name_of(p.grad.dtype()), p.grad.shape(), p.value.shape());
}

// For each parameter the first one whose value is the same tensor. Refuses those that share a part.
std::vector<size_t> first_of_tied(const std::vector<Parameter<float>*>& all) {
  std::vector<size_t> same(all.size()), order(all.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::less<>()(all[a]->value.raw(), all[b]->value.raw());
  });
  const std::byte* end = nullptr;  // of those before that lie dense
  size_t holder = 0;
  for (size_t k = 0; k < order.size(); ++k) {
    const size_t i = order[k];
    const Tensor& t = all[i]->value;
    const auto* begin = static_cast<const std::byte*>(t.raw());
    same[i] = i;
    for (size_t l = k; l-- > 0 && all[order[l]]->value.raw() == t.raw();) {
      const Tensor& other = all[order[l]]->value;
      if (t.numel() > 0 && other.shape() == t.shape() && other.strides() == t.strides()) {
        same[i] = same[order[l]];
        break;
      }
    }
    if (same[i] != i || t.numel() == 0 || !t.is_contiguous()) continue;
    require(end == nullptr || !std::less<>()(begin, end),
            "{}: its value shares a part of its memory with that of {}", named(*all[i], i),
            named(*all[holder], holder));
    end = begin + t.nbytes();
    holder = i;
  }
  return same;
}

void check_finite(const char* name, double x) {
  require(std::isfinite(x) && x >= 0 && x <= std::numeric_limits<float>::max(),
          "{}: {} given, a finite number >= 0 is right", name, x);
}

}  // namespace

FlatParameters::FlatParameters(std::vector<Parameter<float>*> parameters) {
  std::unordered_set<const Parameter<float>*> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter<float>* const p = parameters[i];
    require(p != nullptr, "parameters[{}]: null given, a parameter is needed", i);
    if (!seen.insert(p).second) continue;
    check(*p, i);
    parameters_.push_back(p);
  }
  const std::vector<size_t> same = first_of_tied(parameters_);
  int64_t size = 0;
  begin_.resize(parameters_.size());
  for (bool decay : {true, false}) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (parameters_[i]->decay != decay || same[i] != i) continue;
      begin_[i] = size;
      require(!__builtin_add_overflow(size, padded(parameters_[i]->value.numel()), &size),
              "{}: it and those before have too many elements", named(*parameters_[i], i));
    }
    if (decay) decayed_ = size;
  }
  for (size_t i = 0; i < parameters_.size(); ++i) begin_[i] = begin_[same[i]];
  values_ = Tensor::zeros({size});
  grads_ = Tensor::zeros({size});
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter<float>& p = *parameters_[i];
    const Tensor &first = parameters_[same[i]]->grad, own = p.grad;
    if (same[i] == i) part(values_, i).copy_from(p.value);
    // One gradient that tied parameters share counts once, those of their own add up.
    if (own.defined() && (same[i] == i || !first.defined() || first.raw() != own.raw())) {
      add_into<float>(part(grads_, i), own);
    }
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i]->value = part(values_, i);
    parameters_[i]->grad = part(grads_, i);
  }
}

Tensor FlatParameters::part(const Tensor& flat, size_t i) const {
  require(i < parameters_.size(), "part: parameter {} of {}", i, parameters_.size());
  require(flat.defined() && flat.shape() == values_.shape(),
          "part: a flat tensor of shape {} for parameters of shape {}",
          flat.defined() ? flat.shape().str() : "none", values_.shape());
  const Dims& shape = parameters_[i]->value.shape();
  return flat.slice(0, begin_[i], begin_[i] + shape.product()).reshape(shape);
}

void FlatParameters::check_views() const {
  const auto here = [](const Tensor& t, const Tensor& flat, int64_t begin) {
    return t.defined() && t.dtype() == DType::f32 && t.data<float>() == flat.data<float>() + begin;
  };
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter<float>& p = *parameters_[i];
    require(
        here(p.value, values_, begin_[i]) && here(p.grad, grads_, begin_[i]),
        "{}: it was given another {} after FlatParameters took it; copy into the one it has, or "
        "make FlatParameters anew",
        named(p, i), here(p.value, values_, begin_[i]) ? "gradient" : "value");
  }
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
  require(parameters.values().defined(), "parameters: they were moved from");
  require(config.beta1 >= 0 && config.beta1 < 1, "beta1: {} given, it lies in [0, 1)",
          config.beta1);
  require(config.beta2 >= 0 && config.beta2 < 1, "beta2: {} given, it lies in [0, 1)",
          config.beta2);
  check_finite("eps", config.eps);
  require(static_cast<float>(config.eps) > 0, "eps: {} given, float32 must hold it above 0",
          config.eps);
  check_finite("weight_decay", config.weight_decay);
}

void AdamW::restore_steps(int64_t steps) {
  require(steps >= 0, "steps: {} given, a number >= 0 is right", steps);
  steps_ = steps;
}

double AdamW::step(double learning_rate, double max_norm) {
  check_finite("learning_rate", learning_rate);
  check_finite("max_norm", max_norm);
  parameters_.check_views();
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
  check_finite("peak", peak);
  require(warm_up >= 0 && warm_up <= 1, "warm_up: {} given, it lies in [0, 1]", warm_up);
  require(floor >= 0 && floor <= 1, "floor: {} given, it lies in [0, 1]", floor);
  require(std::isfinite(progress), "progress: {} given, a finite number is right", progress);
  const double x = std::clamp(progress, 0.0, 1.0);
  if (x < warm_up) return peak * x / warm_up;
  const double rest = warm_up >= 1 ? 0 : (x - warm_up) / (1 - warm_up);
  return peak * (floor + (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * rest)));
}

}  // namespace foci::nn
