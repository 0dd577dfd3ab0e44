// Encoder layers (Vaswani et al. 2017), with the norm before each part (pre-LN) or after it
// (post-LN), and stacks of them.
#pragma once

#include <memory>
#include <vector>

#include "foci/core/api.h"
#include "foci/nn/attention.h"

namespace foci::nn {

struct EncoderConfig {
  AttentionConfig attention;  // its channels are the model's
  int64_t layers = 4;
  int64_t feed_forward = 256;
  Activation activation = Activation::gelu;
  bool pre_norm = true;
  bool final_norm = true;  // one more norm after the last layer
  double dropout = 0;      // of both parts' results, and inside the feed-forward part
  double eps = 1e-5;
  bool checkpoint = false;  // see Encoder::checkpoint
};

// Throws ArgumentError naming the field that makes no sense; its attention is MultiHeadAttention's
// to check.
FOCI_API void validate(const EncoderConfig& config);

template <class T>
class FOCI_API EncoderLayer : public Module<T> {
 public:
  explicit EncoderLayer(const EncoderConfig& config);
  // x [B, N, C] or packed [tokens, C] with segments; masks as MultiHeadAttention takes them.
  Var<T> forward(Context<T>& context, const Var<T>& x, const AttentionInputs& masks = {});
  // The same with nothing but x kept for the way back (ops::checkpoint).
  Var<T> forward_checkpointed(Context<T>& context, const Var<T>& x, const AttentionInputs& masks);
  // The result in some rows of packed x [tokens, C] alone, [rows, C]: all tokens are attended to,
  // but nothing else is computed for the others. Masks are segments. Rows lie in [0, tokens).
  Var<T> forward_rows(Context<T>& context, const Var<T>& x, const AttentionInputs& masks,
                      const std::vector<int64_t>& rows);
  // Whether that may stand for the rows of forward's result: attention depends on no positions (by
  // causal masks, windows, biases), and nobody watches the other rows.
  bool rows_suffice(const Context<T>& context) const;

 private:
  bool dropping(const Context<T>& context) const { return context.training && dropout_ > 0; }
  Var<T> attend(Context<T>& context, const Var<T>& queries, const Var<T>& keys,
                const AttentionInputs& masks, const Var<T>& x);
  Var<T> feed_forward(Context<T>& context, const Var<T>& in, const Var<T>& x);
  bool pre_norm_;
  double dropout_;
  Activation activation_;

 public:
  LayerNorm<T> norm1;  // "layernorm_before": of the attention part
  MultiHeadAttention<T> attention;
  LayerNorm<T> norm2;  // "layernorm_after": of the feed-forward part
  Linear<T> intermediate, output;
};

template <class T>
class FOCI_API Encoder : public Module<T> {
 public:
  explicit Encoder(const EncoderConfig& config);
  Var<T> forward(Context<T>& context, const Var<T>& x, const AttentionInputs& masks = {});
  // Some rows of packed x's [tokens, C] result, [rows, C]. Masks are segments. The last layer
  // computes no others where it can.
  Var<T> forward_rows(Context<T>& context, const Var<T>& x, const AttentionInputs& masks,
                      const std::vector<int64_t>& rows);

  std::vector<std::unique_ptr<EncoderLayer<T>>> layers;  // "layer.0", "layer.1", …
  std::unique_ptr<LayerNorm<T>> norm;                    // "layernorm"; null where there is none
  // Of each layer only its input is kept for the way back, which computes the layer again: memory
  // for one layer instead of all of them, for a third more work and the same bits.
  bool checkpoint = false;

 private:
  Var<T> layer(size_t l, Context<T>& context, const Var<T>& x, const AttentionInputs& masks);
};

}  // namespace foci::nn
