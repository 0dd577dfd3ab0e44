// Encoder layers, pre-LN and post-LN, and their stack.
#include "foci/nn/encoder.h"

#include <cmath>

namespace foci::nn {
namespace {

const EncoderConfig& checked(const EncoderConfig& config) {
  validate(config);
  return config;
}

}  // namespace

void validate(const EncoderConfig& c) {
  require(c.attention.channels >= 1, "encoder attention.channels: {} given, at least 1 is needed",
          c.attention.channels);
  require(c.layers >= 0, "encoder layers: {} given, a number >= 0 is right", c.layers);
  require(c.feed_forward >= 1, "encoder feed_forward: {} given, at least 1 is needed",
          c.feed_forward);
  require(c.dropout >= 0 && c.dropout < 1, "encoder dropout: {} given, it lies in [0, 1)",
          c.dropout);
  require(std::isfinite(c.eps) && c.eps >= 0,
          "encoder eps: {} given, a finite number >= 0 is right", c.eps);
  require(c.attention.kv_channels == 0 || c.attention.kv_channels == c.attention.channels,
          "encoder attention.kv_channels: {} given, an encoder attends to its own {} channels",
          c.attention.kv_channels, c.attention.channels);
}

template <class T>
EncoderLayer<T>::EncoderLayer(const EncoderConfig& config)
    : pre_norm_(checked(config).pre_norm),
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

// x + dropout(f(…)), in one operator where nothing is dropped.
template <class T>
Var<T> EncoderLayer<T>::attend(Context<T>& context, const Var<T>& queries, const Var<T>& keys,
                               const AttentionInputs& masks, const Var<T>& x) {
  if (!dropping(context)) return attention.forward(context, queries, keys, keys, masks, x);
  const Var<T> y = attention.forward(context, queries, keys, keys, masks);
  return ops::add(context.tape, x, dropout(context, y, dropout_));
}

template <class T>
Var<T> EncoderLayer<T>::feed_forward(Context<T>& context, const Var<T>& in, const Var<T>& x) {
  if (!dropping(context)) {
    return ops::feed_forward(context.tape, in, context.use(intermediate.weight),
                             intermediate.bias_of(context), activation_, context.use(output.weight),
                             output.bias_of(context), x);
  }
  const Var<T> hidden = dropout(context, intermediate.forward(context, in, activation_), dropout_);
  return ops::add(context.tape, x, dropout(context, output.forward(context, hidden), dropout_));
}

template <class T>
Var<T> EncoderLayer<T>::forward(Context<T>& context, const Var<T>& x,
                                const AttentionInputs& masks) {
  if (pre_norm_) {
    const Var<T> n = norm1.forward(context, x);
    const Var<T> h = attend(context, n, n, masks, x);
    return feed_forward(context, norm2.forward(context, h), h);
  }
  const Var<T> h = norm1.forward(context, attend(context, x, x, masks, x));
  return norm2.forward(context, feed_forward(context, h, h));
}

template <class T>
bool EncoderLayer<T>::rows_suffice(const Context<T>& context) const {
  const AttentionSpec& spec = attention.config().spec;
  return !context.observer && spec.masks.empty() && spec.biases.empty();
}

template <class T>
Var<T> EncoderLayer<T>::forward_rows(Context<T>& context, const Var<T>& x,
                                     const AttentionInputs& masks,
                                     const std::vector<int64_t>& rows) {
  Tape<T>& tape = context.tape;
  require(x.rank() == 2 && masks.q_segments.defined(),
          "encoder rows: input of shape {} {} segments; packed [tokens, channels] with segments is "
          "right",
          x.shape(), masks.q_segments.defined() ? "with" : "without");
  require(masks.q_segments.dtype() == DType::i32 && masks.q_segments.numel() == x.dim(0),
          "encoder rows: q_segments of {} and shape {} for {} tokens; int32 [1, {}] is right",
          name_of(masks.q_segments.dtype()), masks.q_segments.shape(), x.dim(0), x.dim(0));
  for (int64_t r : rows) {
    require(r >= 0 && r < x.dim(0), "encoder rows: {} given, there are {} tokens", r, x.dim(0));
  }
  AttentionInputs own;
  own.k_segments = masks.k_segments;
  own.q_segments = Tensor::empty({1, static_cast<int64_t>(rows.size())}, DType::i32);
  const Tensor of_token = masks.q_segments.contiguous();
  for (size_t i = 0; i < rows.size(); ++i) {
    own.q_segments.template data<int32_t>()[i] =
        of_token.template span<int32_t>()[static_cast<size_t>(rows[i])];
  }
  const Var<T> kept = ops::gather_rows(tape, x, rows);
  if (pre_norm_) {
    const Var<T> n = norm1.forward(context, x);
    const Var<T> h = attend(context, ops::gather_rows(tape, n, rows), n, own, kept);
    return feed_forward(context, norm2.forward(context, h), h);
  }
  const Var<T> h = norm1.forward(context, attend(context, kept, x, own, kept));
  return norm2.forward(context, feed_forward(context, h, h));
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
  validate(config);
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
Var<T> Encoder<T>::layer(size_t l, Context<T>& context, const Var<T>& x,
                         const AttentionInputs& masks) {
  return checkpoint ? layers[l]->forward_checkpointed(context, x, masks)
                    : layers[l]->forward(context, x, masks);
}

template <class T>
Var<T> Encoder<T>::forward(Context<T>& context, const Var<T>& x, const AttentionInputs& masks) {
  Var<T> h = x;
  for (size_t l = 0; l < layers.size(); ++l) h = layer(l, context, h, masks);
  return norm ? norm->forward(context, h) : h;
}

template <class T>
Var<T> Encoder<T>::forward_rows(Context<T>& context, const Var<T>& x, const AttentionInputs& masks,
                                const std::vector<int64_t>& rows) {
  if (layers.empty() || !layers.back()->rows_suffice(context)) {
    return ops::gather_rows(context.tape, forward(context, x, masks), rows);
  }
  Var<T> h = x;
  for (size_t l = 0; l + 1 < layers.size(); ++l) h = layer(l, context, h, masks);
  h = layers.back()->forward_rows(context, h, masks, rows);
  return norm ? norm->forward(context, h) : h;
}

template class EncoderLayer<float>;
template class EncoderLayer<double>;
template class Encoder<float>;
template class Encoder<double>;

}  // namespace foci::nn
