// The fused implementation: how a problem is cut into strips for kernels/attention.h.
//
// Memory beside inputs and outputs grows with N + M: strips hold one block of keys (or one row's
// keys, for sparse normalisers and coverage), never an N×M matrix.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "foci/attention/problem.h"
#include "foci/kernels/attention.h"

namespace foci {

// Why fused does not serve this spec; nullopt where it does.
std::optional<std::string> fused_refuses(const AttentionSpec& spec, const AttentionShape& shape);
size_t fused_workspace_bytes(const AttentionSpec& spec, const AttentionShape& shape,
                             SimdTarget target, bool backward);
// Half-precision storage is widened on the way in and narrowed on the way out (fused_half.cc).
void fused_forward(const Problem& problem, AttentionOutputs& out);
void fused_backward(const Problem& problem, const AttentionOutputs& saved,
                    const AttentionUpstream& up, const AttentionWanted& wanted,
                    AttentionGradients& grads);
void fused_weights(const Problem& problem, const AttentionOutputs& saved,
                   std::span<const int64_t> rows, std::span<const int64_t> heads, Tensor& weights);

// ---- shared by fused_*.cc ---------------------------------------------------------------------

namespace fused {

// Queries and keys that belong together: a batch entry, or one packed segment of it. Cutting
// starts anew in each, so that a packed segment gives the bits that it gives alone.
struct Sequence {
  int64_t batch, query_begin, queries, key_begin, keys;
};
std::vector<Sequence> sequences_of(const Problem& problem);

// ---- backward's cut (fused_chunks.cc) ----------------------------------------------------------

// Queries of one sequence that share partial sums (dK, dV, coverage): whole strips of `width`, at
// most `most` such groups. Their number depends on the sequence alone.
int64_t queries_per_chunk(int64_t queries, int64_t width, int64_t most = 8);

// One task: queries [begin, end) of a sequence, every query head of one key/value head. The first
// chunk of a head may add to dK and dV themselves; the others add to partial sums.
struct Chunk {
  int32_t sequence;
  int32_t kv_head;
  int64_t begin, end;
  bool first;          // of its head
  bool opens;          // its partial sums are no earlier chunk's
  int64_t partial_at;  // dK's [panel, D], then dV's [panel, Dv], padded; −1: dK and dV themselves
  int64_t keys_at;     // sums over queries
};

// Chunks that are taken together: all those of some heads. Where panel < keys it is one head, whose
// keys are taken panel by panel.
struct Wave {
  int64_t begin = 0, end = 0;   // of the chunks
  int64_t panel = 0, keys = 0;  // keys of a panel and of a sequence, at most
  int64_t partial = 0;          // floats
  int64_t at_once = 0;          // chunks whose partial sums are held at once
  bool parts = false;           // one chunk, whose strips store what they add to dK and dV
  bool joins = false;  // one head of many queries: groups of `at_once` chunks, joined one by one
};

struct ChunkRules {
  int64_t group = 1;    // query heads of a key/value head
  bool panels = false;  // whether keys may be taken panel by panel
  bool parts = false;   // whether strips may leave parts
  int64_t wave = 1024;  // chunks of one wave at most, unless one head has more
};
// `row_sums`: gradients that are sums over a row's keys are wanted (scale, slopes); `shared_sums`:
// such that are added to (tables, and the bias in its matrix or by keys).
ChunkRules chunk_rules(const AttentionSpec& spec, int64_t group, bool row_sums, bool shared_sums);

// How one key/value head's queries are cut.
struct HeadCut {
  int64_t step, chunks;  // queries of a chunk
  int64_t at_once;       // chunks whose partial sums are held at once
  int64_t panel;         // keys of a panel
  bool parts, joins;     // as in Wave
};
HeadCut cut_head(const ChunkRules& rules, int64_t queries, int64_t keys, int64_t width,
                 int64_t row);

struct Chunks {
  std::vector<Chunk> list;  // in order of (sequence, kv head, begin)
  std::vector<Wave> waves;
  int64_t most_partial = 0;  // floats of the largest wave
  int64_t most_joined = 0;   // floats of a panel whose chunks are joined
  // `row` floats of dK's and dV's padded rows together. `direct`: first chunks need no partial
  // sums.
  void cut(const std::vector<Sequence>& sequences, int64_t kv_heads, int64_t width,
           const ChunkRules& rules, int64_t row, bool direct);
};
// Floats of partial sums that a wave of several heads holds at most: 48 MB. One head may need more.
inline constexpr int64_t kWavePartial = int64_t{12} << 20;
// Upper bound of the partial sums of `groups` equal heads and of what their joins need.
int64_t partial_floats(const ChunkRules& rules, int64_t groups, int64_t queries, int64_t keys,
                       int64_t width, int64_t row);

// Parts (kernels::SparsePart) held at once: what 16 MB hold, but so many in any case that threads
// have work.
inline constexpr int64_t kPartFloats = int64_t{4} << 20;
int64_t least_parts();
// Floats rounded up to whole cache lines, as the pieces of a part lie.
inline int64_t whole_lines(int64_t floats) {
  return (floats + 15) / 16 * 16;
}
// One part's floats: `count` keys, strips of `width` queries, padded rows of `row` floats.
int64_t part_floats(int64_t count, int64_t width, int64_t row);

// ---- operands
// ------------------------------------------------------------------------------------

// Q, K, V and positions as the kernels read them: for cosine, rows divided by their norm in buffers
// of our own.
struct Operands {
  Tensor q, k, v;                                // [B,H,N,D], [B,Hk,M,D], [B,Hk,M,Dv] float32
  Tensor q_inverse_norm, k_inverse_norm;         // [B,H,N], [B,Hk,M], for cosine only
  Tensor q_exp, k_exp;                           // e^(2x) [B,H,N,D], [B,Hk,M,D], for additive only
  std::vector<kernels::RowSize> q_size, k_size;  // [B,H,N], [B,Hk,M], likewise
  // A number somewhere that is NaN or infinite, or so large that products may be: 0 · x is not 0.
  bool careful = false;
  bool bias_masks = false;                            // the bias tensor holds a −inf
  std::vector<int32_t> query_position, key_position;  // [B,N], [B,M], for ALiBi and relative 1-D
  std::vector<int32_t> query_cell, key_cell;          // [B,N], [M], for relative 2-D
  Tensor boxes;  // [B,Hk,⌈M/kBoxKeys⌉,2,D] around blocks of keys, for top-k where it pays
};
// `dy` may be undefined. `narrow`: forward only, and few queries go through forward_narrow, which
// steps over masked entries in any case: K and V need not be looked through for them. `ordinary`:
// what forward saw (AttentionOutputs), so that only dY is looked through.
Operands operands_of(const Problem& problem, const Tensor& dy = {}, bool narrow = false,
                     bool ordinary = false);
// Why top-k scores every key of this spec and shape; nullopt where boxes may leave keys out, or
// where the normaliser is another.
std::optional<std::string> top_k_scores_all(const AttentionSpec& spec, const AttentionShape& shape);
// Whether forward_narrow takes this spec where queries are few.
bool serves_narrow(const AttentionSpec& spec);

// Of one query head, and of that head which needs the most scratch.
kernels::RowMap row_map_of(const AttentionSpec& spec, int64_t head);
kernels::RowMap largest_row_map(const AttentionSpec& spec);

// float32 problems only.
void forward_f32(const Problem& problem, AttentionOutputs& out);
void backward_f32(const Problem& problem, const AttentionOutputs& saved,
                  const AttentionUpstream& up, const AttentionWanted& wanted,
                  AttentionGradients& grads);
void weights_f32(const Problem& problem, std::span<const int64_t> rows,
                 std::span<const int64_t> heads, Tensor& weights);

// How a bias tensor's gradient is gathered from its broadcast shape.
enum class BiasGradient : uint8_t {
  none,
  matrix,  // an entry of its own for every score
  shared,  // a matrix that several heads or batch entries add to: a pass of its own
  keys,    // queries are summed over
  rows     // keys are summed over
};
BiasGradient bias_gradient_of(const Problem& problem, const AttentionWanted& wanted);

// Everything that backward passes on for a tile of one head: up to kMaxStrips strips from query
// `first` of the sequence. The pointers for Q, K, V and bias gradients are left to the caller.
struct TileContext {
  const Problem& problem;
  const Operands& operands;
  const AttentionOutputs& saved;
  const AttentionUpstream& up;
};
class Tile {
 public:
  Tile();
  // Strips and upstream gradients of queries [first, first + count), count ≤ kMaxStrips · width.
  void load(const TileContext& context, const Sequence& sequence, int64_t head, int64_t first,
            int64_t count);
  void run(const kernels::AttentionKernels& kernels, const kernels::RowMap& map,
           std::byte* scratch);
  kernels::TileGradients gradients;

 private:
  std::vector<kernels::Strip> strips_;
  std::vector<int64_t> max_key_;
  int count_ = 0;
};

// Adds the gradient of a bias matrix that several (batch, head) share.
void add_shared_bias_gradient(const TileContext& context, const std::vector<Sequence>& sequences,
                              const Tensor& dbias);

// The strip of queries [first, first + count) of a sequence, for query head h. Lives as long as
// problem and operands.
void make_strip(const Problem& problem, const Operands& operands, const Sequence& sequence,
                int64_t h, int64_t first, int64_t count, kernels::Strip& strip);

}  // namespace fused
}  // namespace foci
