// The small modules: Linear, LayerNorm, Embedding; and dropout, which has no parameters.
#pragma once

#include <vector>

#include "foci/core/api.h"
#include "foci/nn/module.h"

namespace foci::nn {

using ops::Activation;

// y = act(x wᵀ + b). weight [outputs, inputs] starts as Xavier normal (Glorot & Bengio 2010), bias
// [outputs] as 0; see Module for the seed.
template <class T>
class FOCI_API Linear : public Module<T> {
 public:
  Linear(int64_t inputs, int64_t outputs, bool with_bias = true);
  // With a residual (not with relu): y + residual.
  Var<T> forward(Context<T>& context, const Var<T>& x, Activation activation = Activation::none,
                 const Var<T>& residual = {});
  Var<T> bias_of(Context<T>& context) { return with_bias_ ? context.use(bias) : Var<T>(); }

  Parameter<T> weight, bias;

 protected:
  void reset_own(Rng& rng) override;

 private:
  bool with_bias_;
};

// Over the last dimension of size `channels`. weight starts as 1, bias as 0.
template <class T>
class FOCI_API LayerNorm : public Module<T> {
 public:
  explicit LayerNorm(int64_t channels, double eps = 1e-5);
  Var<T> forward(Context<T>& context, const Var<T>& x);

  Parameter<T> weight, bias;

 protected:
  void reset_own(Rng& rng) override;

 private:
  double eps_;
};

// A table [rows, channels]; starts as normal numbers of deviation 0.02.
template <class T>
class FOCI_API Embedding : public Module<T> {
 public:
  Embedding(int64_t rows, int64_t channels);
  Var<T> forward(Context<T>& context, std::vector<int64_t> ids);

  Parameter<T> weight;

 protected:
  void reset_own(Rng& rng) override;
};

// In training a fraction p of x becomes 0 and the rest grows by 1/(1−p); else x itself.
template <class T>
FOCI_API Var<T> dropout(Context<T>& context, const Var<T>& x, double p);

}  // namespace foci::nn
