// Encoder layers, pre-LN and post-LN, and their stack.
#include "foci/nn/encoder.h"

namespace foci::nn {

template <class T>
EncoderLayer<T>::EncoderLayer(const EncoderConfig& config)
    : pre_norm_(config.pre_norm),
      dropout_(config.dropout),
      activation_(config.activation),
      norm1(config.attention.channels, config.eps),
      attention(config.attention),
      norm2(config.attention.channels, config.eps),
      intermediate(config.attention.channels, config.feed_forward),
      output(config.feed_forward, config.attention.channels) {
  this->add_module("layernorm_before", norm1);
  this->add_module("attention", attention);
  this->add_module("layernorm_after", norm2);
  this->add_module("intermediate", intermediate);
  this->add_module("output", output);
}

template <class T>
Var<T> EncoderLayer<T>::feed_forward(Context<T>& context, const Var<T>& x) {
  const Var<T> hidden = intermediate.forward(context, x, activation_);
  return dropout(context, output.forward(context, dropout(context, hidden, dropout_)), dropout_);
}

template <class T>
Var<T> EncoderLayer<T>::forward(Context<T>& context, const Var<T>& x,
                                const AttentionInputs& masks) {
  Tape<T>& tape = context.tape;
  const auto attend = [&](const Var<T>& in) {
    return dropout(context, attention.forward(context, in, masks), dropout_);
  };
  if (pre_norm_) {
    const Var<T> h = ops::add(tape, x, attend(norm1.forward(context, x)));
    return ops::add(tape, h, feed_forward(context, norm2.forward(context, h)));
  }
  const Var<T> h = norm1.forward(context, ops::add(tape, x, attend(x)));
  return norm2.forward(context, ops::add(tape, h, feed_forward(context, h)));
}

template <class T>
Var<T> EncoderLayer<T>::forward_checkpointed(Context<T>& context, const Var<T>& x,
                                             const AttentionInputs& masks) {
  if (!context.tape.recording()) return forward(context, x, masks);
  // The first run, which records nothing, hands out dropout streams and tells the observer; the
  // second one, in backward, repeats it.
  uint64_t streams = context.streams;
  const auto block = [this, masks, training = context.training, seed = context.seed,
                      begin = context.streams, observer = context.observer,
                      &streams](Tape<T>& tape, const std::vector<Var<T>>& in) {
    const bool first = !tape.recording();
    Context<T> inner{.tape = tape,
                     .training = training,
                     .seed = seed,
                     .observer = first ? observer : nullptr,
                     .streams = begin};
    Var<T> y = forward(inner, in[0], masks);
    if (first) streams = inner.streams;  // still in scope then, and only then
    return y;
  };
  Var<T> y = ops::checkpoint<T>(context.tape, block, {x});
  context.streams = streams;
  return y;
}

template <class T>
Encoder<T>::Encoder(const EncoderConfig& config) : checkpoint(config.checkpoint) {
  require(config.layers >= 0, "encoder layers: {} given", config.layers);
  for (int64_t i = 0; i < config.layers; ++i) {
    layers.push_back(std::make_unique<EncoderLayer<T>>(config));
    this->add_module("layer." + std::to_string(i), *layers.back());
  }
  if (config.final_norm) {
    norm = std::make_unique<LayerNorm<T>>(config.attention.channels, config.eps);
    this->add_module("layernorm", *norm);
  }
}

template <class T>
Var<T> Encoder<T>::forward(Context<T>& context, const Var<T>& x, const AttentionInputs& masks) {
  Var<T> h = x;
  for (auto& layer : layers) {
    h = checkpoint ? layer->forward_checkpointed(context, h, masks)
                   : layer->forward(context, h, masks);
  }
  return norm ? norm->forward(context, h) : h;
}

template class EncoderLayer<float>;
template class EncoderLayer<double>;
template class Encoder<float>;
template class Encoder<double>;

}  // namespace foci::nn
