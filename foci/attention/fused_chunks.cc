// How backward is cut: chunks of queries, which partial sums of dK and dV are held at once, and
// over which keys. All of it depends on shapes alone.
#include <algorithm>

#include "foci/attention/fused.h"
#include "foci/core/threads.h"

namespace foci::fused {
namespace {

// A chunk costs a partial dK and dV; so many queries repay that many times over.
constexpr int64_t kChunkQueries = 256;
constexpr int64_t kMostChunks = 8;
// Floats of partial sums for one key/value head, above which its keys are taken panel by panel:
// 16 MB. A panel's tiles pack their queries again, which thousands of keys repay.
constexpr int64_t kHeadPartial = int64_t{4} << 20;
// Queries, over all heads that share keys and values, above which sums over them would lose digits
// in one chain a chunk (and partial sums of all chunks at once be too large). Then chunks are
// short, and what they add to dK and dV is joined group by group, with the roundings beside it.
constexpr int64_t kLongQueries = 8192;
constexpr int64_t kLongChunk = 16;  // strips

}  // namespace

int64_t queries_per_chunk(int64_t queries, int64_t width, int64_t most) {
  // Equal chunks, of an even number: two threads, or four, that share one head end together.
  const int64_t pairs = (queries + 2 * kChunkQueries - 1) / (2 * kChunkQueries);
  const int64_t count = queries <= kChunkQueries ? 1 : std::min(2 * pairs, most);
  const int64_t each = std::max<int64_t>(1, (queries + count - 1) / count);
  return (each + width - 1) / width * width;
}

ChunkRules chunk_rules(const AttentionSpec& spec, int64_t group, bool row_sums, bool shared_sums) {
  const bool dot =
      std::holds_alternative<Dot>(spec.score) || std::holds_alternative<Cosine>(spec.score);
  const bool softmax = std::holds_alternative<Softmax>(spec.normalizer);
  ChunkRules rules;
  rules.group = group;
  rules.panels = softmax && dot && !row_sums && !shared_sums;
  rules.parts = !softmax && dot && !shared_sums;
  return rules;
}

HeadCut cut_head(const ChunkRules& rules, int64_t queries, int64_t keys, int64_t width,
                 int64_t row) {
  HeadCut cut;
  const bool is_long = queries * rules.group > kLongQueries;
  cut.parts = rules.parts && is_long;
  cut.joins = is_long && !cut.parts;
  if (cut.joins) {
    constexpr int64_t kTile = kernels::kMaxStrips;
    const int64_t strips = std::max<int64_t>(1, kLongChunk / rules.group);
    cut.step = (strips + kTile - 1) / kTile * kTile * width;
  } else {
    cut.step = queries_per_chunk(queries, width, cut.parts ? 1 : kMostChunks);
  }
  cut.chunks = (queries + cut.step - 1) / cut.step;
  cut.at_once = cut.chunks;
  if (cut.joins) {
    // Fewer at once keep the partial sums small against K and V, where keys are not cut too.
    cut.at_once = std::min(cut.chunks, rules.panels ? kMostChunks : queries <= 32768 ? 4 : 2);
  }
  cut.panel = std::max<int64_t>(keys, 1);
  // What a key takes: its partial sums, and the roundings of their joins.
  const int64_t per_key = (cut.joins ? cut.at_once + 1 : cut.chunks - 1) * row;
  if (rules.panels && per_key * keys > kHeadPartial) {
    cut.panel = std::max<int64_t>(1, kHeadPartial / per_key / kernels::kBackwardBlock) *
                kernels::kBackwardBlock;
  }
  return cut;
}

void Chunks::cut(const std::vector<Sequence>& sequences, int64_t kv_heads, int64_t width,
                 const ChunkRules& rules, int64_t row, bool direct) {
  for (size_t q = 0; q < sequences.size(); ++q) {
    const Sequence& s = sequences[q];
    if (s.queries == 0) continue;
    const HeadCut cut = cut_head(rules, s.queries, s.keys, width, row);
    const int64_t panel = std::min(s.keys, cut.panel);
    const bool in_place = direct && !cut.joins;
    for (int64_t hk = 0; hk < kv_heads; ++hk) {
      const int64_t floats = (cut.at_once - (in_place ? 1 : 0)) * panel * row;
      const auto alone = [](const Wave& wave) {
        return wave.parts || wave.joins || wave.panel < wave.keys;
      };
      if (waves.empty() || panel < s.keys || cut.parts || cut.joins || alone(waves.back()) ||
          waves.back().partial + floats > kWavePartial ||
          waves.back().end - waves.back().begin + cut.chunks > rules.wave) {
        const auto at = static_cast<int64_t>(list.size());
        waves.push_back({.begin = at, .end = at, .parts = cut.parts, .joins = cut.joins});
      }
      Wave& wave = waves.back();
      wave.panel = std::max(wave.panel, panel);
      wave.keys = std::max(wave.keys, s.keys);
      for (int64_t n = 0; n < cut.chunks; ++n) {
        const int64_t at = n * cut.step;
        Chunk c{static_cast<int32_t>(q),
                static_cast<int32_t>(hk),
                at,
                std::min(at + cut.step, s.queries),
                n == 0,
                n < cut.at_once,
                -1,
                0};
        if (!c.opens) {
          c.partial_at = list[list.size() - static_cast<size_t>(cut.at_once)].partial_at;
        } else if (n > 0 || !in_place) {
          c.partial_at = wave.partial;
          wave.partial += panel * row;
        }
        list.push_back(c);
      }
      wave.end = static_cast<int64_t>(list.size());
      wave.at_once = cut.joins ? cut.at_once : wave.end - wave.begin;
      most_partial = std::max(most_partial, wave.partial);
      if (cut.joins) most_joined = std::max(most_joined, panel * row);
    }
  }
}

int64_t partial_floats(const ChunkRules& rules, int64_t groups, int64_t queries, int64_t keys,
                       int64_t width, int64_t row) {
  const HeadCut cut = cut_head(rules, queries, keys, width, row);
  const int64_t panel = std::min(keys, cut.panel) * row;
  const int64_t head = cut.at_once * panel;
  const int64_t beside = cut.joins ? panel : (cut.parts ? (keys * row + 1) / 2 : 0);
  if (cut.joins || cut.parts) return head + beside;
  return std::min(groups * head, std::max(head, kWavePartial));
}

int64_t least_parts() {
  return std::max<int64_t>(4, num_threads());
}

int64_t part_floats(int64_t count, int64_t width, int64_t row) {
  // Its pieces one after another; rows of Q and dY may need a line's rest each.
  return whole_lines(count) + 2 * whole_lines(count * width) + whole_lines(width * row) + 16;
}

}  // namespace foci::fused
