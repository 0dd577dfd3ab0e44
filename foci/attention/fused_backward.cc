// Fused backward: tiles of strips into partial dK and dV, summed in a fixed order.
#include <algorithm>
#include <cmath>

#include "foci/attention/fused.h"
#include "foci/core/threads.h"
#include "foci/kernels/scratch.h"

namespace foci {
namespace {

using fused::Operands;
using fused::Sequence;

// One task: queries [begin, end) of a sequence, every query head of one key/value head.
struct Chunk {
  int32_t sequence;
  int32_t kv_head;
  int64_t begin, end;
  int64_t dk_at, dv_at;  // partial sums
};

// dx of x̂ = x/‖x‖ from dx̂, in place: (dx̂ − x̂ (x̂·dx̂))/‖x‖.
void project_rows(const Tensor& unit, const Tensor& inverse, const Tensor& grad) {
  const int64_t rows = inverse.numel(), depth = unit.dim(3);
  const float* u = unit.data<float>();
  float* g = grad.data<float>();
  parallel_for((rows + 255) / 256, [&](int64_t block) {
    for (int64_t r = block * 256; r < std::min(rows, (block + 1) * 256); ++r) {
      // A key without a gradient keeps none, whatever it holds: it may be masked and NaN.
      if (std::all_of(g + r * depth, g + (r + 1) * depth, [](float x) { return x == 0; })) continue;
      double dot = 0;
      for (int64_t i = 0; i < depth; ++i) dot += double{u[r * depth + i]} * g[r * depth + i];
      const float inv = inverse.data<float>()[r];
      for (int64_t i = 0; i < depth; ++i) {
        float& x = g[r * depth + i];
        x = inv == 0 ? 0 : static_cast<float>((x - u[r * depth + i] * dot) * inv);
      }
    }
  });
}

}  // namespace

void fused_backward(const Problem& p, const AttentionOutputs& saved, const AttentionUpstream& up,
                    const AttentionWanted& wanted, AttentionGradients& grads) {
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(p.target);
  const kernels::RowMap map = fused::row_map_of(p.spec);
  const int64_t B = p.shape.B, H = p.shape.H, Hk = p.shape.Hk, N = p.shape.N, M = p.shape.M;
  const int64_t D = p.shape.D, Dv = p.shape.Dv;
  const int64_t group = H / Hk;
  const Tensor dy = up.dy.defined() ? up.dy : Tensor::zeros({B, H, N, Dv});
  const Operands operands = fused::operands_of(p, &dy);
  const std::vector<Sequence> sequences = fused::sequences_of(p);
  const auto round = [&](int64_t n) {
    return (n + kernels.lanes - 1) / kernels.lanes * kernels.lanes;
  };
  const int64_t dk_stride = round(D), dv_stride = round(Dv);
  const int64_t tile = kernels::kMaxStrips * kernels.width;

  std::vector<Chunk> chunks;
  int64_t partial_size = 0, most_keys = 0;
  for (size_t q = 0; q < sequences.size(); ++q) {
    const Sequence& s = sequences[q];
    most_keys = std::max(most_keys, s.keys);
    const int64_t step = fused::queries_per_chunk(s.queries, tile);
    for (int64_t hk = 0; hk < Hk; ++hk) {
      for (int64_t at = 0; at < s.queries; at += step) {
        chunks.push_back({static_cast<int32_t>(q), static_cast<int32_t>(hk), at,
                          std::min(at + step, s.queries), partial_size,
                          partial_size + s.keys * dk_stride});
        partial_size += s.keys * (dk_stride + dv_stride);
      }
    }
  }
  const kernels::Scratch partial(partial_size);
  const Tensor dq = wanted.qkv ? grads.dq : Tensor::empty({B, H, N, D});
  const size_t scratch_bytes = kernels.backward_scratch(map, most_keys, D, Dv);

  parallel_for(static_cast<int64_t>(chunks.size()), [&](int64_t task) {
    const Chunk& c = chunks[task];
    const Sequence& s = sequences[c.sequence];
    const kernels::Scratch scratch(static_cast<int64_t>(scratch_bytes / sizeof(float)));
    float* sums = partial.get();
    std::fill_n(sums + c.dk_at, s.keys * (dk_stride + dv_stride), 0.0f);
    std::vector<kernels::Strip> strips(kernels::kMaxStrips);
    std::vector<int64_t> max_key(tile);
    for (int64_t h = c.kv_head * group; h < (c.kv_head + 1) * group; ++h) {
      for (int64_t first = c.begin; first < c.end; first += tile) {
        const int64_t count = std::min(tile, c.end - first);
        int n = 0;
        for (int64_t at = 0; at < count; at += kernels.width, ++n) {
          fused::make_strip(p, operands, s, h, first + at,
                            std::min<int64_t>(kernels.width, count - at), strips[n]);
        }
        const int64_t i0 = s.query_begin + first;
        const int64_t row = (s.batch * H + h) * N + i0;
        const auto at = [&](const Tensor& t) {
          return t.defined() ? t.data<float>() + row : nullptr;
        };
        kernels::TileGradients g;
        g.dy = dy.data<float>() + s.batch * dy.stride(0) + h * dy.stride(1) + i0 * dy.stride(2);
        g.dy_stride = dy.stride(2);
        g.row_stat = at(saved.row_stat);
        g.drow_stat = at(up.drow_stat);
        g.dentropy = at(up.dentropy);
        g.entropy = at(saved.entropy);
        g.dmax_weight = at(up.dmax_weight);
        g.max_weight = at(saved.max_weight);
        g.y = saved.y.data<float>() + s.batch * saved.y.stride(0) + h * saved.y.stride(1) +
              i0 * saved.y.stride(2);
        g.y_stride = saved.y.stride(2);
        if (g.dmax_weight != nullptr) {
          for (int64_t i = 0; i < count; ++i) {
            max_key[i] = saved.max_key.data<int64_t>()[row + i];
            if (max_key[i] >= 0) max_key[i] -= s.key_begin;
          }
        }
        g.max_key = max_key.data();
        if (up.dcoverage.defined()) {
          g.dcoverage = up.dcoverage.data<float>() + (s.batch * H + h) * M + s.key_begin;
        }
        g.dq = dq.data<float>() + row * D;
        g.dq_stride = D;
        g.dk = sums + c.dk_at;
        g.dk_stride = dk_stride;
        g.dv = sums + c.dv_at;
        g.dv_stride = dv_stride;
        kernels.backward(map, strips.data(), n, g, reinterpret_cast<std::byte*>(scratch.get()));
      }
    }
  });

  if (wanted.scale && grads.dscale.defined()) {
    // dS·(q·k) summed over keys is (dq without the scale)·q; rows in order, in double.
    std::vector<double> per_head(H, 0.0);
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t i = 0; i < N; ++i) {
          if (p.mask.begin[b * N + i] >= p.mask.end[b * N + i]) continue;
          const float* g = dq.data<float>() + ((b * H + h) * N + i) * D;
          const float* q = operands.q.data<float>() + b * operands.q.stride(0) +
                           h * operands.q.stride(1) + i * operands.q.stride(2);
          for (int64_t d = 0; d < D; ++d) per_head[h] += g[d] == 0 ? 0 : double{g[d]} * q[d];
        }
      }
    }
    float* to = grads.dscale.data<float>();
    std::fill_n(to, grads.dscale.numel(), 0.0f);
    if (grads.dscale.numel() == H) {
      for (int64_t h = 0; h < H; ++h) to[h] = static_cast<float>(per_head[h]);
    } else {
      double sum = 0;
      for (double x : per_head) sum += x;
      to[0] = static_cast<float>(sum);
    }
  }
  if (!wanted.qkv) return;

  parallel_for(B * H, [&](int64_t task) {
    const float scale = p.scale[task % H];
    float* x = grads.dq.data<float>() + task * N * D;
    for (int64_t i = 0; i < N * D; ++i) x[i] *= scale;
  });
  // Chunks of one (batch, kv head) in order; chunks lie in order of (sequence, kv head, begin).
  grads.dk.fill(0);
  grads.dv.fill(0);
  parallel_for(B * Hk, [&](int64_t task) {
    const int64_t b = task / Hk, hk = task % Hk;
    for (const Chunk& c : chunks) {
      const Sequence& s = sequences[c.sequence];
      if (s.batch != b || c.kv_head != hk) continue;
      const float* sums = partial.get();
      float* dk = grads.dk.data<float>() + (task * M + s.key_begin) * D;
      float* dv = grads.dv.data<float>() + (task * M + s.key_begin) * Dv;
      for (int64_t j = 0; j < s.keys; ++j) {
        for (int64_t d = 0; d < D; ++d) dk[j * D + d] += sums[c.dk_at + j * dk_stride + d];
        for (int64_t d = 0; d < Dv; ++d) dv[j * Dv + d] += sums[c.dv_at + j * dv_stride + d];
      }
    }
  });
  if (operands.q_inverse_norm.defined()) {
    project_rows(operands.q, operands.q_inverse_norm, grads.dq);
    project_rows(operands.k, operands.k_inverse_norm, grads.dk);
  }
}

}  // namespace foci
