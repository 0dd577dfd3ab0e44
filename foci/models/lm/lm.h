// A causal language model: token and position tables, pre-LN encoder layers under a causal mask, a
// final norm, and a head over the vocabulary (its own, or the token table again).
//
// A batch is packed: the tokens of its texts one after the other, and each text's length. A text's
// result does not depend on what stands beside it, bit for bit.
#pragma once

#include <cstdint>
#include <vector>

#include "foci/core/api.h"
#include "foci/nn/encoder.h"
#include "foci/nn/positions.h"

namespace foci {

struct LmConfig {
  int64_t vocabulary = 4096;
  int64_t max_length = 256;  // rows of the learned position table
  int64_t width = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t feed_forward = 1024;
  bool tied = true;  // the head is the token table; else a weight [vocabulary, width] of its own
  double dropout = 0;
  double eps = 1e-5;
  AttentionSpec attention;  // causal is added where it lacks, segments by the model

  bool operator==(const LmConfig&) const = default;
};

// Throws ArgumentError naming the field that makes no sense.
FOCI_API void validate(const LmConfig& config);

template <class T>
class FOCI_API Lm : public nn::Module<T> {
 public:
  explicit Lm(const LmConfig& config);

  const LmConfig& config() const { return config_; }

  // ids [T] with Σ lengths = T, each id below the vocabulary and each length at most max_length;
  // logits [T, vocabulary] of the token that follows.
  Var<T> forward(nn::Context<T>& context, const std::vector<int64_t>& ids,
                 const std::vector<int64_t>& lengths);

 private:
  LmConfig config_;

 public:
  nn::Embedding<T> tokens;            // "embeddings.word_embeddings"
  nn::LearnedPositions<T> positions;  // "embeddings.position_embeddings"
  nn::Encoder<T> encoder;
  std::unique_ptr<nn::Linear<T>> head;  // "lm_head", without bias; null where tied
};

}  // namespace foci
