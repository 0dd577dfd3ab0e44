// Linear, LayerNorm, Embedding: what their parameters start as, and their forward passes.
#include "foci/nn/layers.h"

#include <cmath>

namespace foci::nn {
namespace {

constexpr double kTableDeviation = 0.02;

double xavier(int64_t inputs, int64_t outputs) {
  return std::sqrt(2.0 / (static_cast<double>(inputs) + static_cast<double>(outputs)));
}

}  // namespace

template <class T>
Linear<T>::Linear(int64_t inputs, int64_t outputs, bool with_bias) : with_bias_(with_bias) {
  require(inputs >= 1 && outputs >= 1, "Linear: {} inputs and {} outputs", inputs, outputs);
  this->add_normal_parameter("weight", weight, {outputs, inputs}, true, xavier(inputs, outputs));
  if (with_bias) this->add_parameter("bias", bias, {outputs}, false);
}

template <class T>
void Linear<T>::reset_own(Rng& rng) {
  const double spread = xavier(weight.value.dim(1), weight.value.dim(0));
  for (T& w : weight.value.template span<T>()) w = static_cast<T>(spread * rng.normal());
  if (with_bias_) bias.value.fill(0);
}

template <class T>
Var<T> Linear<T>::forward(Context<T>& context, const Var<T>& x, Activation activation,
                          const Var<T>& residual) {
  return ops::linear(context.tape, x, context.use(weight), bias_of(context), activation, residual);
}

template <class T>
LayerNorm<T>::LayerNorm(int64_t channels, double eps) : eps_(eps) {
  require(channels >= 1, "LayerNorm: {} channels", channels);
  require(std::isfinite(eps) && eps >= 0, "LayerNorm: eps {} given, a finite number >= 0 is right",
          eps);
  this->add_parameter("weight", weight, {channels}, false, 1);
  this->add_parameter("bias", bias, {channels}, false);
}

template <class T>
void LayerNorm<T>::reset_own(Rng&) {
  weight.value.fill(1);
  bias.value.fill(0);
}

template <class T>
Var<T> LayerNorm<T>::forward(Context<T>& context, const Var<T>& x) {
  return ops::layer_norm(context.tape, x, context.use(weight), context.use(bias), eps_);
}

template <class T>
Embedding<T>::Embedding(int64_t rows, int64_t channels) {
  require(rows >= 1 && channels >= 1, "Embedding: {} rows of {} channels", rows, channels);
  this->add_normal_parameter("weight", weight, {rows, channels}, false, kTableDeviation);
}

template <class T>
void Embedding<T>::reset_own(Rng& rng) {
  for (T& w : weight.value.template span<T>()) w = static_cast<T>(kTableDeviation * rng.normal());
}

template <class T>
Var<T> Embedding<T>::forward(Context<T>& context, std::vector<int64_t> ids) {
  for (size_t i = 0; i < ids.size(); ++i) {
    require(ids[i] >= 0 && ids[i] < weight.value.dim(0),
            "ids[{}]: {} given, the embedding has rows [0, {})", i, ids[i], weight.value.dim(0));
  }
  return ops::gather_rows(context.tape, context.use(weight), std::move(ids));
}

template <class T>
Var<T> dropout(Context<T>& context, const Var<T>& x, double p) {
  (void)dropout_threshold(p);  // refuses what is no probability, in training or not
  if (!context.training || p == 0) return x;
  return ops::dropout(context.tape, x, p, context.seed, context.next_stream());
}

template class Linear<float>;
template class Linear<double>;
template class LayerNorm<float>;
template class LayerNorm<double>;
template class Embedding<float>;
template class Embedding<double>;
template Var<float> dropout(Context<float>&, const Var<float>&, double);
template Var<double> dropout(Context<double>&, const Var<double>&, double);

}  // namespace foci::nn
