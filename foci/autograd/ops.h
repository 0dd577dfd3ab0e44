// Operators on the tape. Each has its own file, ops/…cc, forward and backward side by side.
//
// All of them give equal rows equal bits wherever they stand, and do not depend on the number of
// threads. T is float or double. R stands for the product of all dimensions but the last.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "foci/autograd/tape.h"
#include "foci/core/api.h"
#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"

namespace foci::ops {

enum class Activation : uint8_t { none, relu, gelu };  // gelu: exact, x·Φ(x)

// y [..., O] = act(x [..., I] · wᵀ + bias) + residual, w [O, I]; bias [O] and residual [..., O] may
// be undefined. No residual with relu.
template <class T>
FOCI_API Var<T> linear(Tape<T>& tape, const Var<T>& x, const Var<T>& w, const Var<T>& bias,
                       Activation activation = Activation::none, const Var<T>& residual = {});

// linear(linear(x, w1, bias1, activation), w2, bias2, none, residual) as one step of the tape,
// which saves passes over what lies between. w1 [F, I], w2 [O, F].
template <class T>
FOCI_API Var<T> feed_forward(Tape<T>& tape, const Var<T>& x, const Var<T>& w1, const Var<T>& bias1,
                             Activation activation, const Var<T>& w2, const Var<T>& bias2,
                             const Var<T>& residual = {});

// (x − mean) / √(var + eps) ∘ gamma + beta over the last dimension; two-pass variance.
template <class T>
FOCI_API Var<T> layer_norm(Tape<T>& tape, const Var<T>& x, const Var<T>& gamma, const Var<T>& beta,
                           double eps);

// a + b, of equal shapes.
template <class T>
FOCI_API Var<T> add(Tape<T>& tape, const Var<T>& a, const Var<T>& b);
template <class T>
FOCI_API Var<T> scale(Tape<T>& tape, const Var<T>& x, double factor);

// Rows of a table [V, C] by index: [rows.size(), C]. Indices may repeat. Serves embeddings, class
// tokens, and any reordering of packed tokens.
template <class T>
FOCI_API Var<T> gather_rows(Tape<T>& tape, const Var<T>& table, std::vector<int64_t> rows);

// Sparse combinations of a table's rows: output row r is Σ weight[t] · table[row[t]] over the taps
// t in [begin[r], begin[r+1]). Serves interpolated positions and pooling.
struct RowMix {
  std::vector<int64_t> begin;  // rows + 1 entries, from 0, never falling
  std::vector<int64_t> row;
  std::vector<double> weight;
};
template <class T>
FOCI_API Var<T> mix_rows(Tape<T>& tape, const Var<T>& table, RowMix mix);

// Mean of x [R, C] over each packed segment [offsets[s], offsets[s+1]): [S, C]. An empty segment
// gives 0.
template <class T>
FOCI_API Var<T> segment_mean(Tape<T>& tape, const Var<T>& x, std::vector<int64_t> offsets);

// Keeps an element with probability 1 − p, scaled by 1/(1−p); p is quantised to 1/65536. The
// element's index, seed and stream alone decide, so that no tiling or thread count matters. Give
// each call of a step its own stream. p = 0 returns x itself.
template <class T>
FOCI_API Var<T> dropout(Tape<T>& tape, const Var<T>& x, double p, uint64_t seed, uint64_t stream);

// Mean over rows of the cross-entropy of softmax(logits [R, C]) with labels [R]; smoothing spreads
// that share of the target evenly over all classes. Gives [1]; each row's loss goes to `rows`.
template <class T>
FOCI_API Var<T> softmax_cross_entropy(Tape<T>& tape, const Var<T>& logits,
                                      std::vector<int64_t> labels, double smoothing,
                                      Tensor* rows = nullptr);

// Views: no copy, forward or backward. reshape copies where x is a strided view.
template <class T>
FOCI_API Var<T> slice(Tape<T>& tape, const Var<T>& x, int dim, int64_t begin, int64_t end);
template <class T>
FOCI_API Var<T> reshape(Tape<T>& tape, const Var<T>& x, const Dims& shape);
// Joins values that agree in all dimensions but `dim`.
template <class T>
FOCI_API Var<T> concat(Tape<T>& tape, const std::vector<Var<T>>& parts, int dim);

// A part of a model as a function of values alone: it puts its operators on the tape that it is
// given, and must do the same each time (dropout, too: seed and stream are its own).
template <class T>
using Block = std::function<Var<T>(Tape<T>&, const std::vector<Var<T>>&)>;
// block(inputs), of which nothing but the inputs is kept: backward computes it again. Less memory
// for a third more work; results and gradients have the same bits.
template <class T>
FOCI_API Var<T> checkpoint(Tape<T>& tape, const Block<T>& block, const std::vector<Var<T>>& inputs);

// ---- attention ------------------------------------------------------------------------------

// What attention takes beside q, k, v. Undefined what the spec does not read.
template <class T>
struct AttentionArguments {
  AttentionSpec spec;
  int64_t heads = 1;        // H
  int64_t kv_heads = 1;     // Hk; divides H
  int64_t value_heads = 0;  // Hk, or 1: one projection of values serves all heads; 0 means Hk
  AttentionInputs masks;    // key_lengths, past_lengths, segments, keep; q, k, v stay undefined
  Var<T> bias, slopes, table1d, table2d, score_w;  // learned, or constants
  Var<T> scale;  // [1] or [H]: takes the place of spec.scale and is learned
  Var<T> alpha;  // [1] or [H]: takes the place of entmax's alpha and is learned
};

template <class T>
struct AttentionResult {
  Var<T> y;                            // [B, N, H·Dv]
  Var<T> row_stat, entropy, coverage;  // [B,H,N], [B,H,N], [B,H,M]; take upstream gradients
  Var<T> max_weight;                   // [B,H,N]; its gradient goes to the weight at max_key
  Tensor max_key, support;             // [B,H,N] int64; [B,H,N]
  // Exact weights (before dropout) of chosen rows: [B, heads, rows, M], computed on demand.
  std::function<Tensor(std::span<const int64_t> rows, std::span<const int64_t> heads)> weights;
};

// q [B, N, H·D], k [B, M, Hk·D], v [B, M, Hk·Dv] (or value_heads·Dv), heads side by side in the
// last dimension; strided views will do. Entropy, coverage, max_weight and support are there where
// the spec asks for them. In float the engine of attention/ serves; in double a plain loop does.
template <class T>
FOCI_API AttentionResult<T> attention(Tape<T>& tape, const Var<T>& q, const Var<T>& k,
                                      const Var<T>& v, const AttentionArguments<T>& arguments);

}  // namespace foci::ops
