// The parts of the unfused implementation. Private to plain_*.cc and their tests.
//
// A call is cut into pieces, one a segment (or one a batch where there are none): the queries and
// keys of a piece are gathered into dense float32 rows, so that everything after that works on
// ranges in the piece's own numbers. A piece's queries are cut into blocks of kBlockRows, each of
// which holds its scores for keys [lo, hi) as one dense matrix.
//
// Bits. dnnl_sgemm gives every element as one chain of multiply-adds over the inner dimension, but
// only away from its tails: measured on oneDNN 2.6 for AVX2 and AVX-512, row counts that are
// multiples of 12 (or 16 itself), columns in multiples of 16 and an inner dimension up to 256 are
// safe. So all matrices are padded to that with zeros, and longer sums are cut at multiples of
// kInner from the piece's start. A row's result then depends neither on its position, nor on what
// else is in the batch.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "foci/attention/problem.h"
#include "foci/kernels/attention.h"
#include "foci/kernels/rows.h"

namespace foci::plain {

constexpr int64_t kBlockRows = 96;  // a multiple of 12, and an inner dimension in the backward
constexpr int64_t kKeyStep = 48;    // keys are output rows (12) as well as columns (16)
constexpr int64_t kColumnStep = 16;
constexpr int64_t kInner = 256;
constexpr int64_t kLanes = kernels::kRowLanes;

constexpr int64_t round_up(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}
constexpr int64_t padded_rows(int64_t n) {
  return n <= 16 ? 16 : round_up(n, 12);
}
constexpr int64_t padded_columns(int64_t n) {
  return round_up(n, kColumnStep);
}

// ---- GEMM (plain_gemm.cc) -----------------------------------------------------------------
// Sizes as promised above; every leading dimension is the padded row length.

// While one lives, oneDNN uses only this thread.
class OneThread {
 public:
  OneThread();
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_ = 0;
};

struct View {
  const float* data;
  int64_t ld;
};

// out [rows, columns] = A [rows, inner] · B [columns, inner]ᵀ
void gemm_nt(int64_t rows, int64_t columns, int64_t inner, View a, View b, float* out, int64_t ld);
// out [rows, columns] += A [rows, inner] · B [inner, columns]
void gemm_nn(int64_t rows, int64_t columns, int64_t inner, View a, View b, float* out, int64_t ld);
// out [rows, columns] += A [inner, rows]ᵀ · B [inner, columns]
void gemm_tn(int64_t rows, int64_t columns, int64_t inner, View a, View b, float* out, int64_t ld);

// ---- cutting (plain_layout.cc) ------------------------------------------------------------

struct Piece {
  int64_t batch;
  int64_t q0, q1;   // its entries in Layout::query
  int64_t k0, k1;   // its entries in Layout::key
  int64_t packed;   // its first row among the packed keys of its batch
  bool neighbours;  // its keys are key[k0], key[k0] + 1, …
};

struct Block {
  int64_t piece;
  int64_t q0, q1;  // entries of Layout::query
  int64_t lo, hi;  // keys in the piece's numbers: multiples of kInner and kKeyStep; may be empty
};

struct Layout {
  std::vector<int64_t> query, key;  // original index of each entry, piece after piece
  std::vector<int64_t> begin, end;  // keys that each query entry may see, piece's numbers
  std::vector<Piece> pieces;
  std::vector<Block> blocks;          // in the order of pieces
  std::vector<int64_t> batch_pieces;  // [B+1]: where each batch's pieces start
  std::vector<int64_t> batch_blocks;  // [B+1]: where each batch's blocks start
  std::vector<int64_t> packed_rows;   // [B]: rows of its packed keys
  int64_t max_width = 0;              // the largest hi − lo
};

Layout cut(const Problem& problem);

// Dense float32 rows. Rows that hold NaN or infinity are zero in `data` and kept beside it, since a
// product with a zero weight must stay zero.
struct Rows {
  Tensor data;  // [count, ld], at least
  int64_t count = 0;
  int64_t ld = 0;               // padded_columns of the row length
  std::vector<int64_t> odd;     // ascending
  std::vector<float> odd_data;  // [odd.size(), ld]
  float* row(int64_t r) const { return data.data<float>() + r * ld; }
  bool has_odd() const { return !odd.empty(); }
  bool is_odd(int64_t r) const { return true_row(r) != row(r); }
  View view(int64_t first) const { return {data.data<float>() + first * ld, ld}; }
  // The row with its non-finite values.
  const float* true_row(int64_t r) const;
};

// Whether a pair of the additive score takes tanh itself: e^{2x} may overflow, or, where both are
// small, tanh would lose its digits to the 1.
inline bool takes_tanh(kernels::RowSize q, kernels::RowSize k) {
  using kernels::RowSize;
  return q == RowSize::wide || k == RowSize::wide || (q == RowSize::small && k == RowSize::small);
}

// What a score needs of q or k beside its rows.
struct Operand {
  Rows rows;                           // cosine: divided by their norm
  std::vector<double> inverse;         // cosine: 1/‖row‖, 0 for the zero vector
  Tensor exponential;                  // additive: e^{2x}, as rows.data
  std::vector<kernels::RowSize> size;  // additive: whether e^{2x} serves, see takes_tanh
};

// Makes `rows` zero rows; keeps the memory where it is large enough.
void reset_rows(int64_t rows, int64_t columns, Rows& out);
// Reads rows source[index[r]] of a strided [rows, columns] view into rows first + r of `out`.
void load_rows(const Tensor& source, std::span<const int64_t> index, int64_t first, Rows& out);
// Fills the rest of an operand from its rows, and normalises them for cosine.
void prepare_operand(const Score& score, int64_t columns, Operand& operand);

// K and V of one (batch, key/value head), piece after piece, each padded to kKeyStep.
struct PackedKeys {
  Operand k;
  Rows v;
};
// One for each b·Hk + g.
std::vector<PackedKeys> pack_keys(const Problem& problem, const Layout& layout);

// ---- scores (plain_scores.cc) ---------------------------------------------------------------

// Rows of one (batch, head), all of one piece, against the piece's keys [lo, hi).
struct Site {
  const Problem* problem;
  const Layout* layout;
  const Piece* piece;
  int64_t head;
  std::span<const int64_t> entries;  // of Layout::query
  int64_t lo, hi;
  int64_t width() const { return hi - lo; }
  int64_t query(int64_t r) const { return layout->query[entries[r]]; }
  int64_t key(int64_t j) const { return layout->key[piece->k0 + lo + j]; }
  int64_t packed(int64_t j) const { return piece->packed + lo + j; }
};

// Columns of a row: [begin, end) of the site, less those where seen is 0.
struct Sight {
  int64_t begin = 0, end = 0;
  const uint8_t* seen = nullptr;  // [width]; null: all of [begin, end)
  int64_t count = 0;
  template <class F>
  void for_each(F&& f) const {
    for (int64_t j = begin; j < end; ++j) {
      if (!seen || seen[j]) f(j);
    }
  }
};

// score(q, k) before scale, for all rows and columns of the site.
void raw_scores(const Site& site, const Operand& q, const Operand& k, float* raw, int64_t ld);

// Which keys row r sees; `seen` is room for width() bytes.
Sight look(const Site& site, int64_t r, uint8_t* seen);

// raw → scale → softcap → + biases on [sight.begin, sight.end), in place. `capped` (may be null)
// takes the scores before biases.
void finish_scores(const Site& site, int64_t r, const Sight& sight, float* row, float* capped);

// Partial gradients of one (batch, head), in double where many terms meet.
struct HeadGradients {
  double slope = 0, scale = 0, alpha = 0;
  std::vector<double> table1d, table2d, score_w;
};

// The way back: ds (in place, zero but where part) of final scores becomes that of raw scores.
// `raw` is needed for the scale's gradient, `capped` for softcap. dbias is null where not wanted,
// else double, a view of shape [B,H,N,M].
void finish_scores_backward(const Site& site, int64_t r, const Sight& part, const float* raw,
                            const float* capped, const AttentionWanted& wanted, float* ds,
                            HeadGradients& grads, const Tensor* dbias);

// ---- normalisers (plain_normalizers.cc) -----------------------------------------------------

struct RowStatistics {
  float row_stat = 0, entropy = 0, max_weight = 0, support = 0;
  int64_t max_column = -1;
  float max = 0;  // the largest score, under sparse maps
};

// Scratch of one row.
struct RowScratch {
  std::vector<float> values;
  std::vector<double> candidates, rest;
  // Whether entmax with α > 2 leaves ln p^(2−α) of the keys that take part in log_factors [width],
  // with more digits than float32 weights have: what backward goes by.
  bool wants_factors = false;
  std::vector<double> log_factors;
};

// Scores → weights before dropout, in place: [0, width) is zero but where seen. `part` (may be
// null) takes, for every column, whether its key takes part: seen, chosen (top-k), of non-zero
// weight (sparse maps). Statistics that are not wanted stay 0.
RowStatistics normalize(const kernels::RowKernels& kernels, const Normalizer& normalizer,
                        const Sight& sight, int64_t width, const Statistics& want, float* row,
                        uint8_t* part, RowScratch& scratch);

// g: in, the gradient of the weights, zero but where part; out, that of the scores, likewise.
// drow_stat, dentropy: upstream gradients of the row's statistics. log_factors: those that
// normalize left, or null: from p.
void normalize_backward(const kernels::RowKernels& kernels, const Normalizer& normalizer,
                        const Sight& part, float drow_stat, float dentropy, const float* p,
                        float* g, const double* log_factors = nullptr);

// Of the two, what is sparsemax (α = 2) and entmax (plain_sparse_maps.cc). `row` holds scores whose
// largest is `max`, and receives weights, where they are seen; `part` is marked where a weight is.
struct SparseRow {
  double tau = 0, largest = 0, entropy = 0;
  int64_t support = 0;
};
SparseRow sparse_map(double alpha, const Sight& sight, float max, bool wants_entropy, float* row,
                     uint8_t* part, RowScratch& scratch);
void sparse_backward(double alpha, const Sight& part, float drow_stat, const float* p,
                     const double* log_factors, float* g);

// The row's part of the gradient for entmax's α, from what normalize gave and normalize_backward is
// about to take; `max`: the row's largest score.
double alpha_gradient(double alpha, const Sight& part, float max, float drow_stat, float dentropy,
                      const float* p, const double* log_factors, const float* g);

// ---- what both directions use (plain_rows.cc) ----------------------------------------

// Buffers that tasks borrow one after another: as many as run at once.
struct Scratch {
  Tensor matrix[5];           // [rows, width] each, grown as needed
  Tensor out;                 // [rows, columns]
  std::vector<uint8_t> part;  // [rows, width]
  std::vector<uint8_t> seen;  // [width]
  std::vector<float> factor;  // [width]
  std::vector<int64_t> entries;
  RowScratch row;
  Operand q;
  Rows dy;
};
float* room(Tensor& buffer, int64_t count);

class ScratchPool {
 public:
  // Returns its buffers to the pool when it dies.
  class Loan {
   public:
    explicit Loan(ScratchPool& pool) : pool_(pool), scratch_(pool.take()) {}
    ~Loan() { pool_.give(std::move(scratch_)); }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    Scratch& operator*() { return *scratch_; }

   private:
    ScratchPool& pool_;
    std::unique_ptr<Scratch> scratch_;
  };

 private:
  std::unique_ptr<Scratch> take();
  void give(std::unique_ptr<Scratch> scratch);
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_;
};

// The site of a block for one head; `entries` is filled with the block's.
Site make_site(const Problem& problem, const Layout& layout, const Block& block, int64_t head,
               std::vector<int64_t>& entries);

// Loads and prepares the queries of a site: padded_rows(entries) rows.
void load_queries(const Site& site, Operand& q);

// dropout_bits of ascending keys of one row: eight neighbours share one call of Philox.
class DropoutBits {
 public:
  DropoutBits(const Site& site, int64_t r);
  uint16_t operator()(int64_t key);

 private:
  uint64_t seed_;
  uint32_t query_, head_, batch_;
  int64_t group_ = -1;
  std::array<uint32_t, 4> words_{};
};

// Dropout of weights: factor[j] is 0 or 1/(1−p) on the sight. False where the spec has none.
bool dropout_factors(const Site& site, int64_t r, const Sight& sight, std::vector<float>& factor);

// out [padded rows, width] = a · b[first …]ᵀ; rows with NaN or infinity give what they should.
void row_products(int64_t count, int64_t width, int64_t inner, const Rows& a, const Rows& b,
                  int64_t first, float* out);
// out [padded rows, rows.ld] += weights [count, width] · rows[first …]. Rows with NaN or infinity
// count only where part [count, width] is set (not at all where it is null) and the weight was not
// dropped (`dropped`: zero weights are; otherwise 0·NaN is NaN).
void weighted_rows(int64_t count, int64_t width, const float* weights, const uint8_t* part,
                   bool dropped, const Rows& rows, int64_t first, float* out);
// out [width, rows.ld] += weightsᵀ · rows[0 … count), likewise.
void weighted_columns(int64_t count, int64_t width, const float* weights, const uint8_t* part,
                      bool dropped, const Rows& rows, float* out);

// Writes a float row into row i of a strided [rows, columns] view of float32, float16 or bfloat16.
void store_row(const Tensor& to, int64_t i, const float* row);

size_t workspace_bytes(const AttentionSpec& spec, const AttentionShape& shape, SimdTarget target,
                       bool backward);

}  // namespace foci::plain
