// The causal language model's forward pass over packed texts.
#include "foci/models/lm/lm.h"

#include <algorithm>
#include <cmath>

namespace foci {
namespace {

const LmConfig& checked(const LmConfig& c) {
  validate(c);
  return c;
}

nn::EncoderConfig encoder_config(const LmConfig& c) {
  nn::EncoderConfig e;
  e.attention.channels = c.width;
  e.attention.heads = c.heads;
  e.attention.spec = c.attention;
  if (!has_mask<Causal>(c.attention)) e.attention.spec.masks.push_back(Causal{});
  e.layers = c.layers;
  e.feed_forward = c.feed_forward;
  e.dropout = c.dropout;
  e.eps = c.eps;
  return e;
}

}  // namespace

void validate(const LmConfig& c) {
  const auto positive = [](const char* name, int64_t value) {
    require(value >= 1, "lm {}: {} given, at least 1 is needed", name, value);
  };
  positive("vocabulary", c.vocabulary);
  positive("max_length", c.max_length);
  positive("width", c.width);
  positive("layers", c.layers);
  positive("heads", c.heads);
  positive("feed_forward", c.feed_forward);
  require(c.width % c.heads == 0, "lm heads: {} do not divide a width of {}", c.heads, c.width);
  require(c.dropout >= 0 && c.dropout < 1, "lm dropout: {} given, it lies in [0, 1)", c.dropout);
  require(c.eps > 0 && std::isfinite(c.eps), "lm eps: {} given, a finite number above 0 is right",
          c.eps);
  validate(c.attention);
}

template <class T>
Lm<T>::Lm(const LmConfig& config)
    : config_(checked(config)),
      tokens(config.vocabulary, config.width),
      positions(config.max_length, config.width),
      encoder(encoder_config(config)) {
  this->add_module("embeddings.word_embeddings", tokens);
  this->add_module("embeddings", positions);
  this->add_module("encoder", encoder);
  if (!config_.tied) {
    head = std::make_unique<nn::Linear<T>>(config_.width, config_.vocabulary, false);
    this->add_module("lm_head", *head);
  }
  this->set_path("");
}

template <class T>
Var<T> Lm<T>::forward(nn::Context<T>& context, const std::vector<int64_t>& ids,
                      const std::vector<int64_t>& lengths) {
  Tape<T>& tape = context.tape;
  const auto count = static_cast<int64_t>(ids.size());
  std::vector<int64_t> places;
  places.reserve(ids.size());
  for (const int64_t length : lengths) {
    require(length >= 1 && length <= config_.max_length,
            "lm: a text of {} tokens, 1 to {} are right", length, config_.max_length);
    for (int64_t i = 0; i < length; ++i) places.push_back(i);
  }
  require(places.size() == ids.size(), "lm: {} tokens arrived, the lengths add up to {}",
          ids.size(), places.size());
  require(count >= 1, "lm: no tokens");
  for (size_t i = 0; i < ids.size(); ++i) {
    require(ids[i] >= 0 && ids[i] < config_.vocabulary,
            "lm: ids[{}] is {}, the vocabulary is [0, {})", i, ids[i], config_.vocabulary);
  }
  Var<T> x =
      ops::add(tape, tokens.forward(context, ids), positions.forward(context, std::move(places)));
  x = nn::dropout(context, x, config_.dropout);

  const auto texts = static_cast<int64_t>(lengths.size());
  AttentionInputs masks;
  if (std::all_of(lengths.begin(), lengths.end(), [&](int64_t n) { return n == lengths[0]; })) {
    // Texts of one length need no segments to be kept apart.
    x = ops::reshape(tape, x, {texts, lengths[0], config_.width});
  } else {
    masks.q_segments = Tensor::empty({1, count}, DType::i32);
    int32_t* segment = masks.q_segments.template data<int32_t>();
    for (int64_t s = 0; s < texts; ++s) {
      segment = std::fill_n(segment, lengths[static_cast<size_t>(s)], static_cast<int32_t>(s));
    }
    masks.k_segments = masks.q_segments;
  }
  x = encoder.forward(context, x, masks);
  x = ops::reshape(tape, x, {count, config_.width});
  return head ? head->forward(context, x)
              : ops::linear(tape, x, context.use(tokens.weight), Var<T>());
}

template class Lm<float>;
template class Lm<double>;

}  // namespace foci
