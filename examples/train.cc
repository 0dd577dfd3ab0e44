// Trains a one-layer transformer to find the marked token of a sequence and tell its class: only
// attention can carry the answer to where it is read. Ends with 0 if the model learned it.
#include <foci/core/rng.h>
#include <foci/nn/encoder.h>
#include <foci/nn/optimiser.h>

#include <cstdio>
#include <vector>

namespace nn = foci::nn;

constexpr int64_t kClasses = 4, kTokens = 12, kBatch = 32, kWidth = 32;

class Finder : public nn::Module<float> {
 public:
  Finder()
      : embed(kClasses + 1, kWidth),
        encoder({.attention = {.channels = kWidth, .heads = 2}, .layers = 1, .feed_forward = 64}),
        classify(kWidth, kClasses) {
    add_module("embed", embed);
    add_module("encoder", encoder);
    add_module("classify", classify);
  }
  // x [B, tokens, classes + 1] → logits [B, classes], read from the first token alone.
  foci::Var<float> forward(nn::Context<float>& context, const foci::Var<float>& x) {
    auto h = encoder.forward(context, embed.forward(context, x));
    auto first = foci::ops::slice(context.tape, h, 1, 0, 1);
    return classify.forward(context, foci::ops::reshape(context.tape, first, {x.dim(0), kWidth}));
  }
  nn::Linear<float> embed;
  nn::Encoder<float> encoder;
  nn::Linear<float> classify;
};

// Tokens are one-hot classes; one of each sequence has its marker set, and its class is the label.
foci::Tensor make_batch(foci::Rng& rng, std::vector<int64_t>& labels) {
  foci::Tensor x = foci::Tensor::zeros({kBatch, kTokens, kClasses + 1});
  labels.resize(kBatch);
  for (int64_t b = 0; b < kBatch; ++b) {
    const int64_t marked = rng.below(kTokens);
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t c = rng.below(kClasses);
      x.at<float>(b, t, c) = 1;
      if (t == marked) {
        x.at<float>(b, t, kClasses) = 1;
        labels[b] = c;
      }
    }
  }
  return x;
}

int main() {
  foci::Rng rng(7);
  Finder model;
  model.reset(/*seed=*/1);
  nn::FlatParameters parameters(model.parameters());
  nn::AdamW optimiser(parameters, {.weight_decay = 0.01});
  std::vector<int64_t> labels;
  for (int step = 0; step < 300; ++step) {
    foci::Tensor x = make_batch(rng, labels);
    foci::Tape<float> tape;
    nn::Context<float> context{.tape = tape, .training = true};
    auto logits = model.forward(context, tape.constant(x));
    auto loss = foci::ops::softmax_cross_entropy(tape, logits, labels, /*smoothing=*/0);
    tape.backward(loss);
    optimiser.step(/*learning_rate=*/3e-3, /*max_norm=*/1);
    if (step % 50 == 0) std::printf("step %3d  loss %.3f\n", step, loss.value().item());
  }

  int right = 0;
  foci::Tensor x = make_batch(rng, labels);
  foci::Tape<float> tape(/*recording=*/false);
  nn::Context<float> context{.tape = tape};
  foci::Tensor logits = model.forward(context, tape.constant(x)).value();
  for (int64_t b = 0; b < kBatch; ++b) {
    int64_t best = 0;
    for (int64_t c = 1; c < kClasses; ++c) {
      if (logits.at<float>(b, c) > logits.at<float>(b, best)) best = c;
    }
    right += best == labels[b];
  }
  std::printf("%d of %d unseen sequences right\n", right, static_cast<int>(kBatch));
  return right * 10 >= kBatch * 9 ? 0 : 1;
}
