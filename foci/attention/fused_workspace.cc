// What a fused call needs beside its inputs, outputs and gradients, from above: the parts in the
// order in which they are made. Everything grows with N + M (and the sizes of tables).
#include <algorithm>

#include "foci/attention/fused.h"
#include "foci/core/threads.h"

namespace foci {
namespace {

// A vector that grows holds its old and its new place at once: three times its size at most.
constexpr size_t kGrowth = 3;
// Small things that shapes do not change: handles, closures, a Tile and its strips.
constexpr size_t kFixed = size_t{256} << 10;
constexpr size_t kFixedPerThread = size_t{64} << 10;

size_t product(std::initializer_list<int64_t> factors) {
  size_t n = 1;
  for (int64_t f : factors) n *= static_cast<size_t>(f);
  return n;
}

// kernels::Scratch rounds up to pieces that serve each other.
size_t piece(size_t bytes) {
  return bytes + bytes / 4 + (size_t{8} << 10);
}

class Workspace {
 public:
  Workspace(const AttentionSpec& spec, const AttentionShape& shape, SimdTarget target)
      : spec_(spec),
        s_(shape),
        kernels_(kernels::attention_kernels(target)),
        map_(fused::largest_row_map(spec)),
        threads_(static_cast<size_t>(num_threads())),
        segmented_(has_mask<Segments>(spec)),
        queries_(product({s_.B, s_.N})),
        keys_(product({s_.B, s_.M})),
        rows_(product({s_.B, s_.H, s_.N})) {
    rules_ = fused::chunk_rules(spec, s_.H / std::max<int64_t>(s_.Hk, 1), false, false);
    // Segments are cut one by one, each into as many chunks as its own length asks for, so that
    // eight times their keys is the most.
    const int64_t chunk = fused::queries_per_chunk(s_.N, kernels_.width);
    chunks_ = segmented_ ? std::min<int64_t>(8, (s_.N + 127) / 128) : (s_.N + chunk - 1) / chunk;
    sequences_ = segmented_ ? queries_ : static_cast<size_t>(s_.B);
  }

  size_t bytes(bool backward) const {
    const bool half = s_.dtype != DType::f32;
    const size_t bound = bind();
    size_t total = bound + kFixed + threads_ * kFixedPerThread;
    // A problem of its own, on widened tensors.
    if (half) total += bound + float_operands();
    if (half && backward) total += 2 * float_operands() + rows_ * sizeof(float);
    if (!backward) return total + operands() + forward();
    total += operands() + this->backward();
    // Y is made again where it was stored in 16 bits.
    if (half && !map_.sparse()) total += operands() + forward();
    return total;
  }

 private:
  static size_t floats(size_t n) { return n * sizeof(float); }
  int64_t round(int64_t n) const {
    return (n + kernels_.lanes - 1) / kernels_.lanes * kernels_.lanes;
  }

  size_t float_operands() const {
    return floats(product({s_.B, s_.H, s_.N, s_.D + s_.Dv}) +
                  product({s_.B, s_.Hk, s_.M, s_.D + s_.Dv}));
  }

  // What bind keeps (KeyMask, Positions, tables) and what it needs while it sorts segments.
  size_t bind() const {
    size_t n = (2 * queries_) * sizeof(int64_t) + static_cast<size_t>(s_.B);
    if (positioned()) n += (queries_ + keys_) * sizeof(int64_t);
    if (segmented_) {
      n += queries_ * 20 + keys_ * 12;                           // scattered: local numbers
      n += product({s_.M}) * 2 * sizeof(int64_t);                // order, and sorting it
      n += product({s_.N + s_.M}) * (sizeof(int64_t) * 6 + 64);  // a map of segments
    }
    return n + floats(table_size() + product({s_.H + s_.D}));
  }

  bool positioned() const { return find_bias<Alibi>(spec_) || find_bias<Relative1D>(spec_); }

  size_t table_size() const {
    size_t n = 0;
    if (const auto* r = find_bias<Relative1D>(spec_)) n += product({s_.H, 2 * r->max_distance + 1});
    if (const auto* r = find_bias<Relative2D>(spec_)) {
      n += product({s_.H, 2 * r->height - 1, 2 * r->width - 1});
    }
    return n;
  }

  // Operands and sequences.
  size_t operands() const {
    size_t n = kGrowth * sequences_ * sizeof(fused::Sequence);
    if (segmented_) n += product({s_.M}) * 96;  // keys by segment
    if (std::holds_alternative<Cosine>(spec_.score) ||
        std::holds_alternative<Additive>(spec_.score)) {
      n += floats(product({s_.B, s_.H, s_.N, s_.D + 1}) + product({s_.B, s_.Hk, s_.M, s_.D + 1}));
    }
    if (positioned()) n += (queries_ + keys_) * sizeof(int32_t);
    if (find_bias<Relative2D>(spec_)) n += (queries_ + product({s_.M})) * sizeof(int32_t);
    if (std::holds_alternative<TopK>(spec_.normalizer) && !fused::top_k_scores_all(spec_, s_)) {
      const int64_t blocks = (s_.M + kernels::kBoxKeys - 1) / kernels::kBoxKeys;
      n += floats(product({s_.B, s_.Hk, blocks, 2, s_.D}));
    }
    return n;
  }

  size_t forward() const {
    const bool coverage = spec_.statistics.has(Statistic::coverage);
    const auto width = static_cast<size_t>(kernels_.width);
    const size_t units = static_cast<size_t>(s_.H) * (queries_ / width + sequences_ + 1);
    const size_t scratch = std::max(kernels_.forward_scratch(map_, s_.M, s_.D, s_.Dv, coverage),
                                    kernels_.narrow_scratch(s_.D, s_.Dv));
    size_t n = threads_ * piece(scratch) + kGrowth * units * 6 * sizeof(int64_t);
    if (coverage) n += product({s_.B, s_.H, chunks_, s_.M}) * sizeof(double);
    return n;
  }

  // Partial sums of dK and dV, with the rules under which they are larger: whether gradients that
  // are sums over rows will be wanted is not known yet.
  size_t partial() const {
    const int64_t row = round(s_.D) + round(s_.Dv), groups = s_.B * s_.Hk;
    if (segmented_) {
      // No more than what all segments' chunks together would hold, or a wave, or one segment.
      const int64_t all = groups * chunks_ * s_.M * row;
      return std::min(all, std::max(chunks_ * s_.M * row, fused::kWavePartial));
    }
    size_t most = 0;
    fused::ChunkRules plain;
    plain.group = rules_.group;
    for (const fused::ChunkRules& rules : {rules_, plain}) {
      most = std::max(most, static_cast<size_t>(fused::partial_floats(rules, groups, s_.N, s_.M,
                                                                      kernels_.width, row)));
    }
    return most;
  }

  size_t backward() const {
    const size_t own = product({s_.B, s_.Hk}) * static_cast<size_t>(chunks_);
    const size_t chunks = own + (segmented_ ? product({s_.Hk}) * sequences_ : 0);
    size_t n = threads_ * piece(kernels_.backward_scratch(map_, s_.M, s_.D, s_.Dv));
    n += piece(floats(partial()));
    if (rules_.parts) {
      const int64_t part = fused::part_floats(s_.M, kernels_.width, round(s_.D) + round(s_.Dv));
      n += floats(fused::kPartFloats + fused::least_parts() * part) / 4 * 5;  // as Scratch rounds
    }
    n += sizeof(kernels::RowConstants) * product({s_.H / s_.Hk, s_.N});  // of panels
    n += kGrowth * chunks * 8 * sizeof(int64_t);
    n += 3 * floats(rows_);  // sums over keys for scale, slopes and alpha
    if (find_bias<TensorBias>(spec_)) {
      // Of the forms that its gradient may take, those whose bias is [.., M] and [.., N, 1].
      n += floats(rows_) + rows_ * sizeof(double);
      n += (kGrowth * product({s_.B, s_.H, chunks_, s_.M}) + product({s_.B, s_.H, s_.M})) *
           sizeof(double);
    }
    const size_t tables = table_size();
    // Of at most 32 chunks at once, each of one group of heads; and their sum.
    n += (tables / static_cast<size_t>(s_.Hk) * std::min<size_t>(chunks, 32) + tables) *
         sizeof(double);
    if (std::holds_alternative<Additive>(spec_.score)) {
      n += chunks * product({s_.D}) * sizeof(double) + floats(product({s_.B, s_.H, s_.N, s_.D}));
    }
    return n;
  }

  const AttentionSpec& spec_;
  const AttentionShape& s_;
  const kernels::AttentionKernels& kernels_;
  const kernels::RowMap map_;
  const size_t threads_;
  const bool segmented_;
  const size_t queries_, keys_, rows_;
  fused::ChunkRules rules_;
  int64_t chunks_ = 0;    // of one sequence
  size_t sequences_ = 0;  // of all batch entries
};

}  // namespace

size_t fused_workspace_bytes(const AttentionSpec& spec, const AttentionShape& shape,
                             SimdTarget target, bool backward) {
  return Workspace(spec, shape, target).bytes(backward);
}

}  // namespace foci
