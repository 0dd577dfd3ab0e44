// The fused attention kernels' plain-data interface: one strip of queries, or one tile of strips,
// at a time. attention/fused.cc cuts a problem into strips and owns every buffer.
//
// Scores are held transposed, "strips": [key][query lane], so that maximum, exponential and sum run
// down the keys of each lane and never across lanes. A lane's result depends on that lane's query
// and keys alone: never on its neighbours, its place in the strip, or how many strips there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "foci/core/dtype.h"
#include "foci/core/simd_target.h"

namespace foci::kernels {

// Bits of one lane mask; no target has more lanes than that in a strip.
inline constexpr int kMaxLanes = 32;

// Keys per online block: a multiple of every target's tile of keys (6 and 12), so that blocks leave
// no rows over. A block starts at a multiple of this from the sequence's first key, so that a row
// sees the same blocks wherever its strip begins. 528 keys × 32 lanes is 66 KB of strip.
inline constexpr int64_t kKeyBlock = 528;
// Backward holds two strips (weights and score gradients) for each of up to kMaxStrips.
inline constexpr int64_t kBackwardBlock = 144;
inline constexpr int kMaxStrips = 3;
// Neighbouring keys that share a box (boxes-inl.h), and the deepest keys that may have one.
inline constexpr int64_t kBoxKeys = 64;
inline constexpr int64_t kDeepestBox = 8192;
// Queries that forward_narrow takes at once.
inline constexpr int kNarrowRows = 8;

// e^(2x) of such an x squared is finite, and so is its reciprocal.
inline constexpr float kExpLimit = 21.0f;
// Below it tanh is far enough from 1 that 1 − 2/(1 + e^(2x)) loses digits that matter.
inline constexpr float kSmallLimit = 0.5f;
// How large the numbers of a query or key are: an entry beyond kExpLimit (or NaN), none beyond
// kSmallLimit, or neither.
enum class RowSize : uint8_t { usual, wide, small };

// Sums of products of two such numbers, a scale of up to 1e6 and any depth below 10⁴ stay finite.
inline constexpr float kProductLimit = 1e14f;

// A bias matrix as the caller stores it, at (first query of the strip, first key of the sequence);
// strides in elements, 0 where it is broadcast.
struct StripBias {
  const void* data = nullptr;  // null: none
  DType dtype = DType::f32;    // f32, f16 or bf16
  int64_t query_stride = 0;
  int64_t key_stride = 0;
};

// Dropout by core/rng.h's dropout_bits. Queries and keys count inside the batch entry.
struct StripDropout {
  uint32_t threshold = 0;  // drops where the bits lie below; 0: none
  uint64_t seed = 0;
  int64_t batch = 0, head = 0;
  int64_t query = 0;  // of the first lane
  int64_t key = 0;    // of the sequence's first key
};

// Which keys a strip's lanes may see. Keys count from the sequence's first key.
struct LaneMask {
  int lanes = 0;             // queries in the strip, ≤ width
  int64_t begin[kMaxLanes];  // [lanes] key range of each query
  int64_t end[kMaxLanes];
  // Boolean keep matrix at (first query, first key), or null. One byte an entry, 0 or 1.
  const uint8_t* keep = nullptr;
  int64_t keep_query_stride = 0;
  int64_t keep_key_stride = 0;
  // Scattered segments, or null: the key is seen iff its segment and local position fit.
  const int32_t* key_segment = nullptr;
  const int64_t* key_local = nullptr;
  const int32_t* query_segment = nullptr;  // [lanes]
  const int64_t* local_begin = nullptr;    // [lanes]
  const int64_t* local_end = nullptr;      // [lanes]
  StripBias bias;                          // one that has −inf somewhere, which masks
  StripDropout drop_key;                   // dropped keys are masked

  bool only_ranges() const {
    return keep == nullptr && key_segment == nullptr && bias.data == nullptr &&
           drop_key.threshold == 0;
  }
};

// bits[j] gets, for key `begin + j`, one bit a lane that may see it, but for drop_key. Unused lanes
// get 0.
void mask_bits(const LaneMask& mask, int64_t begin, int64_t end, uint32_t* bits) noexcept;

enum class RowNormalizer : uint8_t { softmax, sparsemax, entmax, top_k };

// A row's map from scores to weights, with its parameters.
struct RowMap {
  RowNormalizer kind = RowNormalizer::softmax;
  double alpha = 0;  // sparsemax: 2; entmax: > 1 and not 2
  int64_t k = 0;     // top_k: ≥ 1

  bool sparse() const { return kind != RowNormalizer::softmax; }
};

enum class ScoreKind : uint8_t {
  dot,      // q·k; cosine is dot of unit rows
  l2,       // −γ‖q−k‖², summed from the differences, so that nothing cancels
  additive  // w·tanh(q+k)
};

// Biases that are functions of positions. Null pointers are absent.
struct StripPositions {
  const int32_t* query = nullptr;  // [lanes] positions, for ALiBi and relative 1-D
  const int32_t* key = nullptr;    // [keys of the sequence]
  bool alibi = false;
  float slope = 0;                 // −slope·|distance|
  const float* table1d = nullptr;  // [2·max_distance + 1]
  int32_t max_distance = 0;
  const float* table2d = nullptr;
  const int32_t* query_cell = nullptr;  // [lanes]: entry = key_cell − query_cell + centre
  const int32_t* key_cell = nullptr;    // [keys of the sequence]
  int32_t centre = 0;
};

// One strip's queries and its sequence's keys and values. Rows have unit inner stride.
struct Strip {
  LaneMask mask;
  int64_t D = 0, Dv = 0;
  const float* q = nullptr;  // [lanes, D]
  int64_t q_stride = 0;
  ScoreKind score = ScoreKind::dot;
  float scale = 1;
  float gamma = 1;                  // l2
  const float* score_w = nullptr;   // [D], additive, which also reads e^(2x) of Q and K:
  const float* q_exp = nullptr;     // [lanes, D]
  const float* k_exp = nullptr;     // [keys of the sequence, D]
  const RowSize* q_size = nullptr;  // [lanes]
  const RowSize* k_size = nullptr;  // [keys of the sequence]
  float softcap = 0;                // 0: none
  StripBias bias;
  StripPositions positions;
  StripDropout dropout;      // of weights
  const float* k = nullptr;  // key 0 of the sequence
  int64_t k_stride = 0;
  const float* v = nullptr;
  int64_t v_stride = 0;
  // Boxes around blocks of kBoxKeys keys (middle [D], half-width [D]), from the one that holds the
  // sequence's first key on, of which `box_skew` keys lie before that key. Top-k leaves blocks out
  // by them, without a change to any bit of its results. Null: there are none.
  const float* boxes = nullptr;
  int64_t box_skew = 0;
  // Something in Q, K, V (or dY) or the biases is NaN or infinite, or products may be, so that 0 ·
  // x is not 0: masked entries must be stepped over instead of multiplied by zero.
  bool careful = false;
};

// What forward gives a strip, per lane unless said. Null pointers are not wanted.
struct StripOutputs {
  float* y = nullptr;  // [lanes, Dv]
  int64_t y_stride = 0;
  float* row_stat = nullptr;
  float* entropy = nullptr;
  float* max_weight = nullptr;
  int64_t* max_key = nullptr;
  float* support = nullptr;
  double* coverage = nullptr;  // [keys of the sequence], added to
  // Of the whole strip: pairs that the masks (but for drop_key) let through, whose score was not
  // computed.
  int64_t* skipped_pairs = nullptr;
};

// One query of a strip, and its places in the outputs.
struct NarrowRow {
  const Strip* strip = nullptr;
  int lane = 0;
  StripOutputs out;
};

// What backward knows of a row before it goes through its keys: p = e^(s − m) · inverse and
// dS = p · (dP + … − shift).
struct RowConstants {
  float m, inverse, shift;
};

// What a strip of a sparse map adds to dK and dV, in the scratch that its backward ran in:
// dK[index[u]] += Σ_lanes dscores[u][lane] · q_rows[lane], and dV likewise of weights and dy_rows.
struct SparsePart {
  int64_t count = 0;               // keys with a weight in some lane
  const int32_t* index = nullptr;  // [count], ascending
  const float* dscores = nullptr;  // [count, width]
  const float* weights = nullptr;  // [count, width], what dropout leaves of them
  const float* q_rows = nullptr;   // [width, D rounded up to vectors], scaled
  const float* dy_rows = nullptr;  // [width, Dv rounded up to vectors], scaled; null: zero
  int lanes = 0;                   // queries
  uint32_t broken = 0;             // lanes whose rows are NaN: break_keys is to be called
};

// What backward reads and adds to for a tile of up to kMaxStrips strips of one head.
struct TileGradients {
  const float* dy = nullptr;  // [lanes, Dv] of the first strip's first lane; null: zero
  int64_t dy_stride = 0;
  const float* row_stat = nullptr;  // per query, from forward
  const float* y = nullptr;         // [lanes, Dv], from forward
  int64_t y_stride = 0;
  const float* drow_stat = nullptr;  // null: zero
  const float* dentropy = nullptr;   // null: zero; then entropy is read
  const float* entropy = nullptr;
  const float* dmax_weight = nullptr;  // null: zero; then max_weight and max_key are read
  const float* max_weight = nullptr;
  const int64_t* max_key = nullptr;  // counts from the sequence's first key
  const float* dcoverage = nullptr;  // [keys of the sequence], null: zero
  float* dq = nullptr;               // [lanes, D], overwritten; null with dk and dv: not wanted
  int64_t dq_stride = 0;
  // Rows from key_begin on, padded to whole vectors and aligned to them; added to.
  float* dk = nullptr;
  int64_t dk_stride = 0;
  float* dv = nullptr;
  int64_t dv_stride = 0;
  // Keys that this call goes through: all, or under softmax of dot scores, where nothing below is
  // wanted, a panel of them. The first panel's call fills `constants` [queries]; later ones read
  // them, and add to dq.
  int64_t key_begin = 0;
  int64_t key_end = std::numeric_limits<int64_t>::max();
  RowConstants* constants = nullptr;
  bool later_panel = false;
  bool many_queries = false;  // of thousands, over which dk and dv are summed: short chains
  // One strip of a sparse map of dot scores: what it would add to dk and dv is left here.
  SparsePart* part = nullptr;
  // The rest is not wanted where it is null. Gradient of the bias matrix, added to, at (first query
  // of the tile, first key of the sequence).
  float* dbias = nullptr;
  int64_t dbias_query_stride = 0;
  int64_t dbias_key_stride = 0;
  // [keys of the sequence] Σ_queries of the scores' gradients, added to.
  double* key_sums = nullptr;
  float* row_scale = nullptr;  // per query: its part of the scale's gradient
  float* row_slope = nullptr;  // per query: its part of the slope's gradient
  float* row_alpha = nullptr;  // per query: its part of alpha's gradient (sparsemax, entmax)
  double* dtable1d = nullptr;  // added to
  double* dtable2d = nullptr;  // added to
  double* dscore_w = nullptr;  // [D], added to
};

struct AttentionKernels {
  int width;  // queries per strip
  int lanes;  // floats per vector: row strides of dk, dv are multiples of it
  // Bytes of scratch for a strip over `keys` keys, or for a tile of such strips.
  size_t (*forward_scratch)(const RowMap&, int64_t keys, int64_t D, int64_t Dv, bool coverage);
  size_t (*backward_scratch)(const RowMap&, int64_t keys, int64_t D, int64_t Dv);
  size_t (*weights_scratch)(const RowMap&, int64_t keys, int64_t D, int64_t Dv);
  void (*forward)(const RowMap&, const Strip&, const StripOutputs&, std::byte* scratch);
  // Softmax of dot scores, without coverage, for up to kNarrowRows queries on the same K and V (of
  // any heads): the same bits as forward, for the work of so few.
  size_t (*narrow_scratch)(int64_t D, int64_t Dv);
  void (*forward_narrow)(const NarrowRow* rows, int count, std::byte* scratch);
  // `strips` follow one another in queries and share everything but mask and q.
  void (*backward)(const RowMap&, const Strip* strips, int count, const TileGradients&,
                   std::byte* scratch);
  // Adds a part's keys in [key_begin, key_end) to dk and dv (of key 0). What roundings leave of
  // them is kept beside, in rows of the same stride, so that thousands of parts add up.
  void (*add_part)(const SparsePart&, bool careful, int64_t key_begin, int64_t key_end, int64_t D,
                   int64_t Dv, float* dk, float* dv, int16_t* dk_low, int16_t* dv_low);
  // NaN in dK and dV of every key that a broken lane of a part sees; dk and dv are of key 0.
  void (*break_keys)(const Strip&, uint32_t broken, bool has_dy, float* dk, float* dv);
  // weights [lanes, keys] of a strip, row stride `stride`; 0 where masked.
  void (*weights)(const RowMap&, const Strip&, float* weights, int64_t stride, std::byte* scratch);
  // Whether any of n floats is NaN, infinite or beyond kProductLimit.
  bool (*any_beyond)(const float* x, int64_t n);
  // to[i] = e^(2·x[i]); something finite in the place of an x beyond kExpLimit.
  RowSize (*exponentials)(const float* x, int64_t n, float* to);
  // to [rows, depth] = or += from.
  void (*add_rows)(int64_t rows, int64_t depth, const float* from, int64_t from_stride, float* to,
                   int64_t to_stride, bool accumulate);
  // to + low [rows, depth] += from: low [rows, low_stride], padded to whole vectors, holds what
  // roundings of `to` left.
  void (*join_rows)(int64_t rows, int64_t depth, const float* from, int64_t from_stride, float* to,
                    int64_t to_stride, float* low, int64_t low_stride);
  // box [2D]: the box of `count` ≥ 1 rows of D ≤ kDeepestBox numbers, none beyond kProductLimit.
  void (*box)(const float* rows, int64_t stride, int64_t count, int64_t D, float* box);
  // n float16 or bfloat16 numbers as floats.
  void (*widen)(DType, const uint16_t* from, int64_t n, float* to);
};

const AttentionKernels& attention_kernels(SimdTarget target);

}  // namespace foci::kernels
