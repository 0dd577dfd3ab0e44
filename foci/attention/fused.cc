// Fused forward of float32 problems, exact weights of chosen rows, and what fused serves.
#include "foci/attention/fused.h"

#include <algorithm>
#include <cstring>

#include "foci/core/threads.h"
#include "foci/kernels/scratch.h"

namespace foci {
namespace {

using fused::Operands;
using fused::Sequence;

// Multiply-adds below which a task is not worth a thread's attention: about 20 µs.
constexpr int64_t kTaskWork = int64_t{1} << 19;

// Strips [begin, end) of one sequence and head.
struct Unit {
  int32_t sequence;
  int32_t head;
  int64_t begin, end;  // queries of the sequence
};

}  // namespace

std::optional<std::string> fused_refuses(const AttentionSpec& spec, const AttentionShape&) {
  if (const auto* r = find_bias<Relative1D>(spec)) {
    if (r->max_distance >= int64_t{1} << 30) return "fused serves max_distance below 2^30";
  }
  return std::nullopt;
}

size_t fused_workspace_bytes(const AttentionSpec& spec, const AttentionShape& s, SimdTarget target,
                             bool backward) {
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(target);
  const kernels::RowMap map = fused::row_map_of(spec);
  const auto round = [&](int64_t n) {
    return (n + kernels.lanes - 1) / kernels.lanes * kernels.lanes;
  };
  const auto floats = [](int64_t n) { return static_cast<size_t>(n) * sizeof(float); };
  size_t bytes = 0;
  if (std::holds_alternative<Cosine>(spec.score)) {
    bytes += floats(s.B * s.H * s.N * (s.D + 1) + s.B * s.Hk * s.M * (s.D + 1));
  }
  const auto threads = static_cast<size_t>(num_threads());
  const int64_t chunk = fused::queries_per_chunk(s.N, kernels::kMaxStrips * kernels.width);
  const int64_t chunks = s.N == 0 ? 0 : (s.N + chunk - 1) / chunk;
  if (!backward) {
    const bool coverage = spec.statistics.has(Statistic::coverage);
    bytes += threads * kernels.forward_scratch(map, s.M, s.D, s.Dv, coverage);
    if (coverage) bytes += floats(s.B * s.H * chunks * s.M);
    return bytes;
  }
  bytes += threads * kernels.backward_scratch(map, s.M, s.D, s.Dv);
  return bytes + floats(s.B * s.Hk * chunks * s.M * (round(s.D) + round(s.Dv)));
}

void fused::forward_f32(const Problem& p, AttentionOutputs& out) {
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(p.target);
  const kernels::RowMap map = fused::row_map_of(p.spec);
  const int64_t H = p.shape.H, N = p.shape.N, M = p.shape.M, D = p.shape.D, Dv = p.shape.Dv;
  const Operands operands = fused::operands_of(p);
  const std::vector<Sequence> sequences = fused::sequences_of(p);
  const bool coverage = out.coverage.defined();

  // Units are cut at strips; with coverage at chunks, each with a partial sum of its own.
  std::vector<Unit> units;
  std::vector<int64_t> partial_at;  // of each unit
  int64_t partial_size = 0;
  std::vector<int64_t> tasks = {0};  // first unit of each task
  int64_t work = 0, most_keys = 0;
  for (size_t q = 0; q < sequences.size(); ++q) {
    const Sequence& s = sequences[q];
    most_keys = std::max(most_keys, s.keys);
    const int64_t step =
        coverage ? fused::queries_per_chunk(s.queries, kernels::kMaxStrips * kernels.width)
                 : kernels.width;
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t at = 0; at < s.queries; at += step) {
        const int64_t end = std::min(at + step, s.queries);
        units.push_back({static_cast<int32_t>(q), static_cast<int32_t>(h), at, end});
        if (coverage) {
          partial_at.push_back(partial_size);
          partial_size += s.keys;
        }
        work += (end - at + kernels.width - 1) / kernels.width * kernels.width * (s.keys + 1) *
                (D + Dv + 1);
        if (work >= kTaskWork) {
          tasks.push_back(static_cast<int64_t>(units.size()));
          work = 0;
        }
      }
    }
  }
  if (tasks.back() != static_cast<int64_t>(units.size())) {
    tasks.push_back(static_cast<int64_t>(units.size()));
  }
  const Tensor partial = coverage ? Tensor::zeros({partial_size}) : Tensor();
  const size_t scratch_bytes = kernels.forward_scratch(map, most_keys, D, Dv, coverage);

  parallel_for(static_cast<int64_t>(tasks.size()) - 1, [&](int64_t task) {
    const kernels::Scratch scratch(static_cast<int64_t>(scratch_bytes / sizeof(float)));
    for (int64_t u = tasks[task]; u < tasks[task + 1]; ++u) {
      const Unit& unit = units[u];
      const Sequence& s = sequences[unit.sequence];
      for (int64_t first = unit.begin; first < unit.end; first += kernels.width) {
        const int64_t count = std::min<int64_t>(kernels.width, unit.end - first);
        kernels::Strip strip;
        fused::make_strip(p, operands, s, unit.head, first, count, strip);
        const int64_t row = (s.batch * H + unit.head) * N + s.query_begin + first;
        const auto at = [&](const Tensor& t) {
          return t.defined() ? t.data<float>() + row : nullptr;
        };
        kernels::StripOutputs o;
        o.y = out.y.data<float>() + s.batch * out.y.stride(0) + unit.head * out.y.stride(1) +
              (s.query_begin + first) * out.y.stride(2);
        o.y_stride = out.y.stride(2);
        o.row_stat = at(out.row_stat);
        o.entropy = at(out.entropy);
        o.max_weight = at(out.max_weight);
        o.max_key = out.max_key.defined() ? out.max_key.data<int64_t>() + row : nullptr;
        o.support = at(out.support);
        o.coverage = coverage ? partial.data<float>() + partial_at[u] : nullptr;
        kernels.forward(map, strip, o, reinterpret_cast<std::byte*>(scratch.get()));
        if (o.max_key != nullptr) {
          for (int64_t i = 0; i < count; ++i) o.max_key[i] += o.max_key[i] < 0 ? 0 : s.key_begin;
        }
      }
    }
  });

  if (coverage) {
    out.coverage.fill(0);
    // Chunk order within a head, whatever thread computed them.
    for (size_t u = 0; u < units.size(); ++u) {
      const Sequence& s = sequences[units[u].sequence];
      const float* from = partial.data<float>() + partial_at[u];
      float* to = out.coverage.data<float>() + (s.batch * H + units[u].head) * M + s.key_begin;
      for (int64_t j = 0; j < s.keys; ++j) to[j] += from[j];
    }
  }
}

void fused::weights_f32(const Problem& p, std::span<const int64_t> rows,
                        std::span<const int64_t> heads, Tensor& weights) {
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(p.target);
  const kernels::RowMap map = fused::row_map_of(p.spec);
  const int64_t M = p.shape.M;
  const Operands operands = fused::operands_of(p);
  const std::vector<Sequence> sequences = fused::sequences_of(p);
  weights.fill(0);
  const auto R = static_cast<int64_t>(rows.size()), G = static_cast<int64_t>(heads.size());
  const size_t scratch_bytes = kernels.weights_scratch(map, M, p.shape.D, p.shape.Dv);
  parallel_for(p.shape.B * G * R, [&](int64_t task) {
    const int64_t b = task / (G * R), g = task / R % G, r = task % R;
    // Sequences lie in order of (batch, first query).
    const auto after = std::upper_bound(sequences.begin(), sequences.end(), std::pair{b, rows[r]},
                                        [](const auto& want, const Sequence& s) {
                                          return want < std::pair{s.batch, s.query_begin};
                                        });
    const Sequence& s = *(after - 1);
    kernels::Strip strip;
    fused::make_strip(p, operands, s, heads[g], rows[r] - s.query_begin, 1, strip);
    float* row = weights.data<float>() + task * M + s.key_begin;
    const kernels::Scratch scratch(static_cast<int64_t>(scratch_bytes / sizeof(float)));
    kernels.weights(map, strip, row, M, reinterpret_cast<std::byte*>(scratch.get()));
  });
}

}  // namespace foci
