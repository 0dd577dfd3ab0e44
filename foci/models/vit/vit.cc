// The vision transformer's forward pass over packed pictures, and what is read of its attention.
#include "foci/models/vit/vit.h"

#include <algorithm>
#include <cmath>

namespace foci {
namespace {

constexpr const char* kEveryLayer = "encoder.layer.*.attention";
constexpr const char* kPooler = "pooler";
constexpr double kTokenDeviation = 0.02;

const VitConfig& checked(const VitConfig& c) {
  validate(c);
  return c;
}

nn::EncoderConfig encoder_config(const VitConfig& c) {
  nn::EncoderConfig e;
  e.attention.channels = c.width;
  e.attention.heads = c.heads;
  e.attention.spec = c.attention;
  e.layers = c.layers;
  e.feed_forward = c.feed_forward;
  e.dropout = c.dropout;
  e.eps = c.eps;
  return e;
}

// The mean of x [1, H, N] over [begin, end) of one head.
template <class T>
float mean_of(const Tensor& x, int64_t head, int64_t begin, int64_t end) {
  const T* const row = x.data<T>() + head * x.dim(2);
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(row[i]);
  return static_cast<float>(sum / static_cast<double>(std::max<int64_t>(1, end - begin)));
}

// Picture p of `count`, whose tokens are [begin, end), `extra` of them before its patches.
template <class T>
PictureAttention read_picture(const std::vector<nn::AttentionRecord>& records,
                              int64_t encoder_layers, int64_t H, int64_t p, int64_t count,
                              int64_t begin, int64_t end, int64_t extra) {
  const auto layers = static_cast<int64_t>(records.size());
  const int64_t P = end - begin - extra;
  PictureAttention picture{Tensor::zeros({layers, H, P}), Tensor::zeros({layers, H}),
                           Tensor::zeros({layers, H})};
  for (int64_t l = 0; l < layers; ++l) {
    const nn::AttentionRecord& r = records[static_cast<size_t>(l)];
    const bool is_pooler = l == encoder_layers;
    const int64_t row = is_pooler ? p : begin, row_end = is_pooler ? p + 1 : end;
    for (int64_t h = 0; h < H; ++h) {
      // The keys of this picture, in the pooling query's row or in the sums over all rows.
      const bool exact = r.weights.defined();
      const T* const from = exact ? r.weights.data<T>() + (h * count + p) * r.weights.dim(3)
                                  : r.coverage.data<T>() + h * r.coverage.dim(2);
      const T share = exact ? T{1} : T{1} / static_cast<T>(P);
      float* const map = picture.maps.data<float>() + (l * H + h) * P;
      for (int64_t j = 0; j < P; ++j) map[j] = static_cast<float>(from[begin + extra + j] * share);
      picture.entropy.at<float>(l, h) = mean_of<T>(r.entropy, h, row, row_end);
      picture.max_weight.at<float>(l, h) = mean_of<T>(r.max_weight, h, row, row_end);
    }
  }
  return picture;
}

}  // namespace

// How the tokens of a batch lie.
template <class T>
struct Vit<T>::Packed {
  std::vector<int64_t> offsets;  // first token of each picture, then the end
  AttentionInputs masks;

  // `extra` tokens stand before each picture's patches.
  Packed(const Tensor& patches, const std::vector<PatchGrid>& grids, int64_t extra,
         int64_t patch_values) {
    require(patches.defined(), "vit: no patches were given");
    require(patches.rank() == 2 && patches.dim(1) == patch_values,
            "vit: patches of shape {}; [patches, {}] is right", patches.shape(), patch_values);
    require(!grids.empty(), "vit: no pictures, the list of grids is empty");
    offsets.push_back(0);
    for (const auto& [rows, cols] : grids) {
      require(rows >= 1 && cols >= 1, "vit: a grid of {} × {} patches", rows, cols);
      constexpr int64_t kMost = int64_t{1} << 40;  // far from overflow, in sums too
      require(rows <= kMost / cols, "vit: a grid of {} × {} patches, there may be up to 2^40", rows,
              cols);
      offsets.push_back(offsets.back() + rows * cols + extra);
    }
    const auto pictures = static_cast<int64_t>(grids.size());
    const int64_t tokens = offsets.back();
    require(tokens - pictures * extra == patches.dim(0),
            "vit: {} patches arrived, the grids hold {}", patches.dim(0),
            tokens - pictures * extra);
    masks.q_segments = Tensor::empty({1, tokens}, DType::i32);
    int32_t* const segment = masks.q_segments.template data<int32_t>();
    for (int64_t p = 0; p < pictures; ++p) {
      std::fill(segment + offsets[p], segment + offsets[p + 1], static_cast<int32_t>(p));
    }
    masks.k_segments = masks.q_segments;
  }
};

template <class T>
Vit<T>::Vit(const VitConfig& config)
    : config_(checked(config)),
      embedding(config.patch_values(), config.width),
      positions(config.position_rows, config.position_cols, config.width),
      encoder(encoder_config(config)),
      classifier(config.width, std::max<int64_t>(1, static_cast<int64_t>(config.classes.size()))) {
  this->add_module("embeddings.patch_embeddings", embedding);
  this->add_module("embeddings", positions);
  if (config_.pooling == Pooling::class_token) {
    this->add_normal_parameter("embeddings.cls_token", token, {1, config_.width}, false,
                               kTokenDeviation);
  }
  this->add_module("encoder", encoder);
  if (config_.pooling == Pooling::attention) {
    this->add_normal_parameter("pooler.probe", token, {1, config_.width}, false, kTokenDeviation);
    pooler = std::make_unique<nn::MultiHeadAttention<T>>(encoder_config(config).attention);
    this->add_module(kPooler, *pooler);
  }
  this->add_module("classifier", classifier);
  this->set_path("");
}

template <class T>
void Vit<T>::reset_own(Rng& rng) {
  if (!token.value.defined()) return;
  for (T& x : token.value.template span<T>()) x = static_cast<T>(kTokenDeviation * rng.normal());
}

template <class T>
Var<T> Vit<T>::forward(nn::Context<T>& context, const Var<T>& patches,
                       const std::vector<PatchGrid>& grids) {
  Tape<T>& tape = context.tape;
  const int64_t extra = config_.pooling == Pooling::class_token ? 1 : 0;
  const Packed packed(patches.value(), grids, extra, config_.patch_values());
  const auto pictures = static_cast<int64_t>(grids.size());
  Var<T> x = ops::add(tape, embedding.forward(context, patches), positions.forward(context, grids));
  if (extra) {
    // Row 0 of the joined table is the class token; each picture begins with it.
    std::vector<int64_t> rows;
    rows.reserve(static_cast<size_t>(packed.offsets.back()));
    int64_t next = 1;
    for (int64_t p = 0; p < pictures; ++p) {
      rows.push_back(0);
      for (int64_t i = packed.offsets[p] + 1; i < packed.offsets[p + 1]; ++i)
        rows.push_back(next++);
    }
    x = ops::gather_rows(tape, ops::concat(tape, {context.use(token), x}, 0), std::move(rows));
  }
  x = nn::dropout(context, x, config_.dropout);
  if (config_.pooling != Pooling::class_token) x = encoder.forward(context, x, packed.masks);
  Var<T> pooled;
  switch (config_.pooling) {
    case Pooling::mean:
      pooled = ops::segment_mean(tape, x, packed.offsets);
      break;
    case Pooling::class_token: {
      pooled = encoder.forward_rows(context, x, packed.masks,
                                    {packed.offsets.begin(), packed.offsets.end() - 1});
      break;
    }
    case Pooling::attention: {
      AttentionInputs masks;
      masks.k_segments = packed.masks.k_segments;
      masks.q_segments = Tensor::empty({1, pictures}, DType::i32);
      for (int64_t p = 0; p < pictures; ++p) {
        masks.q_segments.template at<int32_t>(0, p) = static_cast<int32_t>(p);
      }
      const Var<T> probe = ops::gather_rows(tape, context.use(token),
                                            std::vector<int64_t>(static_cast<size_t>(pictures), 0));
      pooled = pooler->forward(context, probe, x, masks);
      break;
    }
  }
  return classifier.forward(context, pooled);
}

template <class T>
typename Vit<T>::Look Vit<T>::look(const Tensor& patches, const std::vector<PatchGrid>& grids) {
  // Rows of weights are as long as their batch, so batches are kept short: memory stays linear.
  constexpr size_t kPictures = 16;
  const int64_t extra = config_.pooling == Pooling::class_token ? 1 : 0;
  const Packed all(patches, grids, 0, config_.patch_values());
  const int64_t H = config_.heads;
  Look look;
  look.logits = Tensor::zeros(
      {static_cast<int64_t>(grids.size()), static_cast<int64_t>(config_.classes.size())});
  for (size_t first = 0; first < grids.size(); first += kPictures) {
    const size_t last = std::min(grids.size(), first + kPictures);
    const std::vector<PatchGrid> some(grids.begin() + static_cast<std::ptrdiff_t>(first),
                                      grids.begin() + static_cast<std::ptrdiff_t>(last));
    const Tensor part = patches.slice(0, all.offsets[first], all.offsets[last]);
    const Packed packed(part, some, extra, config_.patch_values());
    const auto count = static_cast<int64_t>(some.size());

    nn::AttentionRequest encoder_request{.path = kEveryLayer,
                                         .statistics = {Statistic::entropy, Statistic::max_weight}};
    if (extra) {
      encoder_request.rows.assign(packed.offsets.begin(), packed.offsets.end() - 1);
    } else {
      encoder_request.statistics.add(Statistic::coverage);
    }
    nn::AttentionRequest pooler_request{.path = kPooler,
                                        .statistics = {Statistic::entropy, Statistic::max_weight}};
    for (int64_t p = 0; p < count; ++p) pooler_request.rows.push_back(p);
    nn::Observer observer;
    observer.add(encoder_request);
    observer.add(pooler_request);
    Tape<T> tape(false);
    nn::Context<T> context{.tape = tape, .observer = &observer};
    const Var<T> logits = forward(context, tape.constant(part.to(dtype_v<T>)), some);
    look.logits.slice(0, static_cast<int64_t>(first), static_cast<int64_t>(last))
        .copy_from(logits.value());

    for (int64_t p = 0; p < count; ++p) {
      look.pictures.push_back(read_picture<T>(observer.records(), config_.layers, H, p, count,
                                              packed.offsets[p], packed.offsets[p + 1], extra));
    }
  }
  return look;
}

template <class T>
Tensor Vit<T>::weights(const Tensor& patches, const PatchGrid& grid, int64_t token_index) {
  require(patches.defined() && patches.rank() == 2,
          "vit: patches of shape {}; [patches, {}] is right",
          patches.defined() ? patches.shape().str() : "none", config_.patch_values());
  require(grid.first >= 1 && grid.second >= 1 && grid.first <= patches.dim(0) &&
              grid.second <= patches.dim(0),
          "vit: a grid of {} × {} patches, {} patches arrived", grid.first, grid.second,
          patches.dim(0));
  const int64_t tokens =
      grid.first * grid.second + (config_.pooling == Pooling::class_token ? 1 : 0);
  require(token_index >= 0 && token_index < tokens, "vit: token {} of {}", token_index, tokens);
  nn::Observer observer;
  observer.add({.path = kEveryLayer, .rows = {token_index}});
  Tape<T> tape(false);
  nn::Context<T> context{.tape = tape, .observer = &observer};
  forward(context, tape.constant(patches.to(dtype_v<T>)), {grid});
  Tensor all = Tensor::empty({config_.layers, config_.heads, tokens});
  for (int64_t l = 0; l < config_.layers; ++l) {
    all.select(0, l).copy_from(
        observer.records()[static_cast<size_t>(l)].weights.select(2, 0).select(0, 0));
  }
  return all;
}

template class Vit<float>;
template class Vit<double>;

}  // namespace foci
