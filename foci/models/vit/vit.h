// A vision transformer (Dosovitskiy et al. 2021) over pictures of any grid, packed in one batch.
//
// A batch is [T, P·P·channels]: the patches of its pictures one after the other, and each picture's
// (rows, columns). A picture's result does not depend on what stands beside it, bit for bit.
#pragma once

#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "foci/core/api.h"
#include "foci/models/vit/config.h"
#include "foci/nn/encoder.h"
#include "foci/nn/observe.h"
#include "foci/nn/positions.h"

namespace foci {

using PatchGrid = std::pair<int64_t, int64_t>;  // rows, columns

// The attention of one picture, layer by layer and head by head. L layers, H heads, P patches.
//
// `maps` is what the picture's vector was read from: the weights of the class token (pooling
// class_token), or of the pooling query, to each patch. In layers without such a query (all of them
// under mean pooling, the encoder's under attention pooling) it is the mean weight that the tokens
// give each patch. Under attention pooling the pooling query is one more layer, the last. A class
// token's weight to itself is left out, so a map may sum to less than 1.
struct PictureAttention {
  Tensor maps;        // [L, H, P]
  Tensor entropy;     // [L, H]: mean entropy in nats of all tokens' weights
  Tensor max_weight;  // [L, H]: mean largest weight
};

template <class T>
class FOCI_API Vit : public nn::Module<T> {
 public:
  explicit Vit(const VitConfig& config);

  const VitConfig& config() const { return config_; }

  // patches [T, P·P·channels] with Σ rows·columns = T; logits [pictures, classes].
  Var<T> forward(nn::Context<T>& context, const Var<T>& patches,
                 const std::vector<PatchGrid>& grids);

  struct Look {
    Tensor logits;                           // [pictures, classes]
    std::vector<PictureAttention> pictures;  // one each
  };
  // Forward without a tape, and the attention of every picture. Memory is linear in the tokens: no
  // weights but those of the asked rows are made.
  Look look(const Tensor& patches, const std::vector<PatchGrid>& grids);

  // Exact weights of one token of one picture, every layer and head, to all its tokens: [L, H, n].
  // Tokens count as in the model: under class_token pooling token 0 is the class token and n is
  // P + 1, else n is P. Under attention pooling the pooling query's layer is not among them.
  Tensor weights(const Tensor& patches, const PatchGrid& grid, int64_t token);

  // Layers that `maps` has: the encoder's, and one more under attention pooling.
  int64_t map_layers() const {
    return config_.layers + (config_.pooling == Pooling::attention ? 1 : 0);
  }

 protected:
  void reset_own(Rng& rng) override;

 private:
  struct Packed;
  VitConfig config_;

 public:
  nn::Linear<T> embedding;
  nn::GridPositions<T> positions;
  Parameter<T> token;  // [1, width]: the class token, or the pooling query; undefined for mean
  nn::Encoder<T> encoder;
  std::unique_ptr<nn::MultiHeadAttention<T>> pooler;  // attention pooling only
  nn::Linear<T> classifier;
};

// A model folder: config.json and model.safetensors. Throws IoError or FormatError: no folder, no
// config, a tensor that lacks, is too many, or has another shape (named, with both shapes).
FOCI_API std::unique_ptr<Vit<float>> load_vit(const std::filesystem::path& folder);
// Writes both files, each all or nothing; makes the folder where it is missing.
FOCI_API void save_vit(const std::filesystem::path& folder, Vit<float>& model);

}  // namespace foci
