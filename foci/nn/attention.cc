// Multi-head attention: projections around the operator, masks and dropout of the call, observers.
#include "foci/nn/attention.h"

#include <algorithm>

#include "foci/nn/observe.h"

namespace foci::nn {
namespace {

// A pass's dropout seed for one module, from the pass's seed and a stream: Philox mixes them.
uint64_t stream_seed(uint64_t seed, uint64_t stream) {
  const auto words = philox(
      seed, {static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32), 0x61747465u, 0});
  return words[0] | uint64_t{words[1]} << 32;
}

// Three tensors that lie one after the other in memory, as one: rows below rows. Undefined where
// they do not.
Tensor joint_tensor(const Tensor& a, const Tensor& b, const Tensor& c) {
  for (const Tensor* t : {&a, &b, &c}) {
    if (!t->defined() || !t->is_contiguous() || !t->shares_storage(a)) return {};
  }
  const auto* begin = static_cast<const std::byte*>(a.raw());
  if (b.raw() != begin + a.nbytes() || c.raw() != begin + a.nbytes() + b.nbytes()) return {};
  Dims shape = a.shape();
  shape[0] += b.dim(0) + c.dim(0);
  return Tensor::wrap(a.raw(), shape, contiguous_strides(shape), a.dtype(),
                      std::make_shared<Tensor>(a));
}

}  // namespace

AttentionConfig resolved(AttentionConfig c) {
  require(c.channels >= 1, "attention channels: {} given, at least 1 is needed", c.channels);
  require(c.heads >= 1, "attention heads: {} given, at least 1 is needed", c.heads);
  if (c.kv_channels == 0) c.kv_channels = c.channels;
  if (c.kv_heads == 0) c.kv_heads = c.heads;
  require(c.kv_channels >= 1, "attention kv_channels: {} given", c.kv_channels);
  require(c.kv_heads >= 1 && c.heads % c.kv_heads == 0,
          "attention kv_heads: {} given for {} heads; it must divide them", c.kv_heads, c.heads);
  if (c.head_size == 0) {
    require(c.channels % c.heads == 0,
            "attention heads: {} do not divide {} channels; give head_size then", c.heads,
            c.channels);
    c.head_size = c.channels / c.heads;
  }
  if (c.value_size == 0) c.value_size = c.head_size;
  require(c.head_size >= 1 && c.value_size >= 1, "attention head_size {} and value_size {}",
          c.head_size, c.value_size);
  (void)Dims{c.heads, std::max(c.head_size, c.value_size)}.product();  // refuses what overflows
  validate(c.spec);
  return c;
}

template <class T>
MultiHeadAttention<T>::MultiHeadAttention(const AttentionConfig& config)
    : config_(resolved(config)),
      value_heads_(config_.shared_values ? 1 : config_.kv_heads),
      query(config_.channels, config_.heads * config_.head_size, config_.bias),
      key(config_.kv_channels, config_.kv_heads * config_.head_size, config_.bias),
      value(config_.kv_channels, value_heads_ * config_.value_size, config_.bias) {
  this->add_module("query", query);
  this->add_module("key", key);
  this->add_module("value", value);
  if (config_.output) {
    output = std::make_unique<Linear<T>>(config_.heads * config_.value_size, config_.channels,
                                         config_.bias);
    this->add_module("output", *output);
  }
}

template <class T>
std::optional<std::array<Var<T>, 2>> MultiHeadAttention<T>::joined(Context<T>& context,
                                                                   const Var<T>& queries,
                                                                   const Var<T>& keys,
                                                                   const Var<T>& values) {
  const auto same = [&](const Var<T>& x) {
    return x.value().raw() == queries.value().raw() && x.shape() == queries.shape() &&
           x.slot() == queries.slot();
  };
  if (!same(keys) || !same(values)) return {};
  const auto join = [&](Parameter<T>& a, Parameter<T>& b, Parameter<T>& c) -> Var<T> {
    Parameter<T> all;
    all.value = joint_tensor(a.value, b.value, c.value);
    if (!all.value.defined()) return {};
    if (context.tape.recording()) {
      all.grad = joint_tensor(a.grad, b.grad, c.grad);
      if (!all.grad.defined()) return {};
    }
    return context.tape.parameter(all);
  };
  std::array<Var<T>, 2> out;
  out[0] = join(query.weight, key.weight, value.weight);
  if (!out[0].defined()) return {};
  if (config_.bias) {
    out[1] = join(query.bias, key.bias, value.bias);
    if (!out[1].defined()) return {};
  }
  return out;
}

template <class T>
Var<T> MultiHeadAttention<T>::forward(Context<T>& context, const Var<T>& queries,
                                      const Var<T>& keys, const Var<T>& values,
                                      const AttentionInputs& masks, const Var<T>& residual) {
  context.tape.check(queries, "attention: queries");
  context.tape.check(keys, "attention: keys");
  context.tape.check(values, "attention: values");
  context.tape.check_if_given(residual, "attention: residual");
  const int rank = queries.rank();
  require(rank == 2 || rank == 3,
          "attention: input of shape {}; [batch, tokens, channels] or packed [tokens, channels]",
          queries.shape());
  require(keys.rank() == rank && values.rank() == rank,
          "attention: queries {}, keys {}, values {}; all packed, or none", queries.shape(),
          keys.shape(), values.shape());
  require(queries.dim(-1) == config_.channels,
          "attention: queries of shape {}, {} channels are right", queries.shape(),
          config_.channels);
  for (const auto& [name, x] : {std::pair{"keys", &keys}, std::pair{"values", &values}}) {
    require(x->dim(-1) == config_.kv_channels, "attention: {} of shape {}, {} channels are right",
            name, x->shape(), config_.kv_channels);
  }
  // Packed tokens are one batch; segments keep its members apart.
  const auto batched = [&](const Var<T>& x) {
    return rank == 3 ? x : ops::reshape(context.tape, x, {1, x.dim(0), x.dim(1)});
  };

  ops::AttentionArguments<T> a;
  a.spec = config_.spec;
  a.heads = config_.heads;
  a.kv_heads = config_.kv_heads;
  a.value_heads = value_heads_;
  a.masks = masks;
  if (masks.key_lengths.defined() && !has_mask<KeyLengths>(a.spec)) {
    a.spec.masks.push_back(KeyLengths{});
  }
  if (masks.q_segments.defined() && !has_mask<Segments>(a.spec)) {
    a.spec.masks.push_back(Segments{});
  }
  if (masks.keep.defined() && !has_mask<Keep>(a.spec)) a.spec.masks.push_back(Keep{});
  if (!context.training) {
    a.spec.dropout.reset();
  } else if (a.spec.dropout) {
    a.spec.dropout->seed = stream_seed(context.seed, context.next_stream());
  }
  Observer* const observer =
      context.observer && context.observer->watches(this->path()) ? context.observer : nullptr;
  if (observer) {
    for (Statistic s :
         {Statistic::entropy, Statistic::max_weight, Statistic::support, Statistic::coverage}) {
      if (observer->statistics_of(this->path()).has(s)) a.spec.statistics.add(s);
    }
  }

  Var<T> q, k, v;
  if (const auto joint = joined(context, queries, keys, values)) {
    // One product instead of three; the heads are read where they lie.
    const Var<T> all =
        batched(ops::linear(context.tape, queries, (*joint)[0], (*joint)[1], Activation::none));
    const int64_t k_begin = config_.heads * config_.head_size;
    const int64_t v_begin = k_begin + config_.kv_heads * config_.head_size;
    q = ops::slice(context.tape, all, 2, 0, k_begin);
    k = ops::slice(context.tape, all, 2, k_begin, v_begin);
    v = ops::slice(context.tape, all, 2, v_begin, all.dim(2));
  } else {
    q = batched(query.forward(context, queries));
    k = batched(key.forward(context, keys));
    v = batched(value.forward(context, values));
  }
  const ops::AttentionResult<T> r = ops::attention(context.tape, q, k, v, a);
  if (observer) {
    AttentionRecord record;
    record.path = this->path();
    record.heads = config_.heads;
    record.entropy = r.entropy.value();
    record.max_weight = r.max_weight.value();
    record.max_key = r.max_key;
    record.support = r.support;
    record.coverage = r.coverage.value();
    if (const AttentionRequest* wanted = observer->rows_of(this->path())) {
      std::vector<int64_t> heads = wanted->heads;
      for (int64_t h = 0; wanted->heads.empty() && h < config_.heads; ++h) heads.push_back(h);
      record.weights = r.weights(wanted->rows, heads);
    }
    observer->note(std::move(record));
  }

  Var<T> y = r.y;
  if (rank == 2) y = ops::reshape(context.tape, y, {y.dim(1), y.dim(2)});
  if (output) return output->forward(context, y, Activation::none, residual);
  return residual.defined() ? ops::add(context.tape, y, residual) : y;
}

template class MultiHeadAttention<float>;
template class MultiHeadAttention<double>;

}  // namespace foci::nn
