// Attention of random vectors: what comes out, and how widely each query looks.
#include <foci/attention/plan.h>
#include <foci/core/rng.h>

#include <cstdio>

foci::Tensor random_vectors(foci::Rng& rng, const foci::Dims& shape) {
  foci::Tensor t = foci::Tensor::empty(shape);
  for (float& x : t.span<float>()) x = static_cast<float>(rng.normal());
  return t;
}

int main() {
  foci::Rng rng(1);
  foci::Tensor q = random_vectors(rng, {1, 4, 8, 16});  // batch, heads, queries, head size
  foci::Tensor k = random_vectors(rng, {1, 4, 8, 16});
  foci::Tensor v = random_vectors(rng, {1, 4, 8, 16});
  foci::AttentionSpec spec{.normalizer = foci::Sparsemax{},
                           .masks = {foci::Causal{}},
                           .statistics = {foci::Statistic::entropy}};
  foci::AttentionShape shape{.H = 4, .Hk = 4, .N = 8, .M = 8, .D = 16, .Dv = 16};
  foci::AttentionOutputs out =
      foci::Plan::make(spec, shape).bind({.q = q, .k = k, .v = v}).forward();
  for (int64_t i = 0; i < 8; ++i) {
    std::printf("query %d of head 0: y[0] = %+.3f, entropy %.3f nats\n", static_cast<int>(i),
                out.y.at<float>(0, 0, i, 0), out.entropy.at<float>(0, 0, i));
  }
}
