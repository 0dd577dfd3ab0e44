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

}  // namespace

int64_t queries_per_chunk(int64_t queries, int64_t width, int64_t most) {
  // Equal chunks, of an even number: two threads, or four, that share one head end together.
  const int64_t pairs = (queries + 2 * kChunkQueries - 1) / (2 * kChunkQueries);
  const int64_t count = queries <= kChunkQueries ? 1 : std::min(2 * pairs, most);
  const int64_t each = std::max<int64_t>(1, (queries + count - 1) / count);
  return (each + width - 1) / width * width;
}

ChunkRules chunk_rules(const AttentionSpec& spec, bool row_sums, bool shared_sums) {
  const bool dot =
      std::holds_alternative<Dot>(spec.score) || std::holds_alternative<Cosine>(spec.score);
  const bool softmax = std::holds_alternative<Softmax>(spec.normalizer);
  ChunkRules rules;
  rules.panels = softmax && dot && !row_sums && !shared_sums;
  rules.parts = !softmax && dot && !shared_sums;
  return rules;
}

// Queries from which on partial sums of whole chunks would be too large.
constexpr int64_t kLongQueries = 8192;

int64_t most_chunks(const ChunkRules& rules, int64_t queries) {
  if (rules.panels || queries <= kLongQueries) return kMostChunks;
  if (rules.parts) return 1;
  // Fewer chunks keep the partial sums small against K and V themselves.
  return queries <= 32768 ? 4 : 2;
}

int64_t panel_keys(const ChunkRules& rules, int64_t chunks, int64_t keys, int64_t row) {
  const int64_t per_key = (chunks - 1) * row;
  if (!rules.panels || per_key * keys <= kHeadPartial) return std::max<int64_t>(keys, 1);
  return std::max<int64_t>(1, kHeadPartial / per_key / kernels::kBackwardBlock) *
         kernels::kBackwardBlock;
}

void Chunks::cut(const std::vector<Sequence>& sequences, int64_t kv_heads, int64_t width,
                 const ChunkRules& rules, int64_t row, bool direct) {
  for (size_t q = 0; q < sequences.size(); ++q) {
    const Sequence& s = sequences[q];
    if (s.queries == 0) continue;
    const int64_t step = queries_per_chunk(s.queries, width, most_chunks(rules, s.queries));
    const int64_t count = (s.queries + step - 1) / step;
    const int64_t panel = std::min(s.keys, panel_keys(rules, count, s.keys, row));
    const bool leaves_parts = rules.parts && s.queries > kLongQueries;
    for (int64_t hk = 0; hk < kv_heads; ++hk) {
      const int64_t floats = (count - (direct ? 1 : 0)) * panel * row;
      if (waves.empty() || panel < s.keys || leaves_parts || waves.back().parts ||
          waves.back().panel < waves.back().keys || waves.back().partial + floats > kWavePartial ||
          waves.back().end - waves.back().begin + count > rules.wave) {
        const auto at = static_cast<int64_t>(list.size());
        waves.push_back({at, at, 0, 0, 0, leaves_parts});
        parts = parts || leaves_parts;
      }
      Wave& wave = waves.back();
      wave.panel = std::max(wave.panel, panel);
      wave.keys = std::max(wave.keys, s.keys);
      for (int64_t at = 0; at < s.queries; at += step) {
        const bool first = at == 0;
        Chunk c{static_cast<int32_t>(q),
                static_cast<int32_t>(hk),
                at,
                std::min(at + step, s.queries),
                first,
                -1,
                0};
        if (!(first && direct)) {
          c.partial_at = wave.partial;
          wave.partial += panel * row;
        }
        list.push_back(c);
      }
      wave.end = static_cast<int64_t>(list.size());
      most_partial = std::max(most_partial, wave.partial);
    }
  }
}

int64_t partial_floats(const ChunkRules& rules, int64_t groups, int64_t queries, int64_t keys,
                       int64_t width, int64_t row) {
  const int64_t step = queries_per_chunk(queries, width, most_chunks(rules, queries));
  const int64_t count = (queries + step - 1) / step;
  const int64_t group = count * std::min(keys, panel_keys(rules, count, keys, row)) * row;
  return std::min(groups * group, std::max(group, kWavePartial));
}

int64_t least_parts() {
  return std::max<int64_t>(4, num_threads());
}

int64_t part_floats(int64_t count, int64_t width, int64_t row) {
  // Its pieces one after another; rows of Q and dY may need a line's rest each.
  return whole_lines(count) + 2 * whole_lines(count * width) + whole_lines(width * row) + 16;
}

}  // namespace foci::fused
