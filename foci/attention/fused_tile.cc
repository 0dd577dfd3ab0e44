// Tiles: up to three strips of one head, as backward hands them to the kernels.
#include <algorithm>

#include "foci/attention/fused.h"
#include "foci/core/threads.h"
#include "foci/kernels/scratch.h"

namespace foci::fused {

Tile::Tile() : strips_(kernels::kMaxStrips) {}

void Tile::load(const TileContext& c, const Sequence& s, int64_t head, int64_t first,
                int64_t count) {
  const Problem& p = c.problem;
  const int64_t H = p.shape.H, N = p.shape.N, M = p.shape.M;
  const int64_t width = kernels::attention_kernels(p.target).width;
  count_ = 0;
  for (int64_t at = 0; at < count; at += width, ++count_) {
    make_strip(p, c.operands, s, head, first + at, std::min(width, count - at), strips_[count_]);
  }
  const int64_t i0 = s.query_begin + first;
  const int64_t row = (s.batch * H + head) * N + i0;
  const auto at = [&](const Tensor& t) { return t.defined() ? t.data<float>() + row : nullptr; };
  const auto rows_of = [&](const Tensor& t) {
    return t.data<float>() + s.batch * t.stride(0) + head * t.stride(1) + i0 * t.stride(2);
  };
  kernels::TileGradients& g = gradients;
  g = {};
  if (c.up.dy.defined()) {
    g.dy = rows_of(c.up.dy);
    g.dy_stride = c.up.dy.stride(2);
  }
  g.y = rows_of(c.saved.y);
  g.y_stride = c.saved.y.stride(2);
  g.row_stat = at(c.saved.row_stat);
  g.drow_stat = at(c.up.drow_stat);
  g.dentropy = at(c.up.dentropy);
  g.entropy = at(c.saved.entropy);
  g.dmax_weight = at(c.up.dmax_weight);
  g.max_weight = at(c.saved.max_weight);
  if (g.dmax_weight != nullptr) {
    max_key_.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      max_key_[i] = c.saved.max_key.data<int64_t>()[row + i];
      if (max_key_[i] >= 0) max_key_[i] -= s.key_begin;
    }
    g.max_key = max_key_.data();
  }
  if (c.up.dcoverage.defined()) {
    g.dcoverage = c.up.dcoverage.data<float>() + (s.batch * H + head) * M + s.key_begin;
  }
}

void Tile::run(const kernels::AttentionKernels& kernels, const kernels::RowMap& map,
               std::byte* scratch) {
  kernels.backward(map, strips_.data(), count_, gradients, scratch);
}

BiasGradient bias_gradient_of(const Problem& p, const AttentionWanted& wanted) {
  if (!wanted.bias || !p.bias.defined()) return BiasGradient::none;
  const Dims full{p.shape.B, p.shape.H, p.shape.N, p.shape.M};
  const Dims& own = p.in.bias.shape();
  const auto spans = [&](int d) {  // whether the bias has an element for each index of dimension d
    const int at = d - (4 - own.size());
    return full[d] <= 1 || (at >= 0 && own[at] == full[d]);
  };
  if (!spans(3)) return BiasGradient::rows;
  if (!spans(2)) return BiasGradient::keys;
  return spans(0) && spans(1) ? BiasGradient::matrix : BiasGradient::shared;
}

// A task owns some rows of the bias for those (batch, head) that share them, and goes through these
// in order; only scores and their gradients are computed.
void add_shared_bias_gradient(const TileContext& c, const std::vector<Sequence>& sequences,
                              const Tensor& dbias) {
  const Problem& p = c.problem;
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(p.target);
  const int64_t B = p.shape.B, H = p.shape.H, N = p.shape.N;
  const Tensor view = dbias.broadcast_to({B, H, N, p.shape.M});
  const Dims& stride = view.strides();
  const int64_t tile_size = int64_t{kernels::kMaxStrips} * kernels.width;
  const int64_t blocks = (N + tile_size - 1) / tile_size;
  const int64_t own_batches = stride[0] == 0 ? 1 : B, own_heads = stride[1] == 0 ? 1 : H;
  int64_t most_keys = 0;
  for (const Sequence& s : sequences) most_keys = std::max(most_keys, s.keys);
  const size_t scratch_bytes =
      kernels.backward_scratch(largest_row_map(p.spec), most_keys, p.shape.D, p.shape.Dv);
  parallel_for(own_batches * own_heads * blocks, [&](int64_t task) {
    const int64_t row_begin = task % blocks * tile_size;
    const int64_t row_end = std::min(N, row_begin + tile_size);
    const int64_t head = task / blocks % own_heads, batch = task / blocks / own_heads;
    const kernels::Scratch scratch(static_cast<int64_t>(scratch_bytes / sizeof(float)));
    Tile tile;
    for (const Sequence& s : sequences) {
      if (own_batches > 1 && s.batch != batch) continue;
      const int64_t begin = std::max(row_begin, s.query_begin) - s.query_begin;
      const int64_t end = std::min(row_end, s.query_begin + s.queries) - s.query_begin;
      if (begin >= end) continue;
      for (int64_t h = own_heads > 1 ? head : 0; h < (own_heads > 1 ? head + 1 : H); ++h) {
        tile.load(c, s, h, begin, end - begin);
        kernels::TileGradients& g = tile.gradients;
        g.dbias = view.data<float>() + s.batch * stride[0] + h * stride[1] +
                  (s.query_begin + begin) * stride[2] + s.key_begin * stride[3];
        g.dbias_query_stride = stride[2];
        g.dbias_key_stride = stride[3];
        const kernels::RowMap map = row_map_of(p.spec, h);
        tile.run(kernels, map, reinterpret_cast<std::byte*>(scratch.get()));
      }
    }
  });
}

}  // namespace foci::fused
