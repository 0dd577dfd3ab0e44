// AttentionSpec: a value that says what attention computes, and nothing about how.
//
//   s = scale · score(q, k) → softcap → + biases → masks → normaliser → dropout → Σ p · v
//
// Options are types: every place that must know them visits the variants exhaustively, so that a
// forgotten place does not compile. The meaning of each option, and of the corners where libraries
// disagree, stands beside it.
//
// Dimension letters, everywhere in foci: B batch, H query heads, Hk key/value heads, N queries,
// M keys, D head size of queries and keys, Dv head size of values. i is a query, j a key, p the
// position that a query has among the keys.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "foci/core/api.h"

namespace foci {

// ---- scores -------------------------------------------------------------------------------

struct Dot {  // q·k
  bool operator==(const Dot&) const = default;
};
struct Cosine {  // q·k / (‖q‖‖k‖); 0, with gradient 0, where either is the zero vector
  bool operator==(const Cosine&) const = default;
};
struct L2 {  // −γ‖q−k‖²
  double gamma = 1;
  bool operator==(const L2&) const = default;
};
struct Additive {  // w·tanh(q+k), w [D] given as score_w (Bahdanau et al. 2015)
  bool operator==(const Additive&) const = default;
};
using Score = std::variant<Dot, Cosine, L2, Additive>;

struct AutoScale {  // 1/√D for dot, 1 for the others
  bool operator==(const AutoScale&) const = default;
};
// One number for all, or one per query head (H of them). Any sign.
using Scale = std::variant<AutoScale, double, std::vector<double>>;

// ---- normalisers --------------------------------------------------------------------------

struct Softmax {
  bool operator==(const Softmax&) const = default;
};
struct Sparsemax {  // Euclidean projection onto the simplex (Martins & Astudillo 2016)
  bool operator==(const Sparsemax&) const = default;
};
struct Entmax {  // p = [(α−1)s − τ]₊^(1/(α−1)), α > 1 (Peters, Niculae & Martins 2019)
  double alpha = 1.5;
  std::vector<double> per_head{};  // one α a query head (H of them) in the place of alpha; or empty
  bool operator==(const Entmax&) const = default;
};
struct TopK {  // softmax over the k best scores; ties go to the lowest key, −0 ties +0
  int64_t k = 1;
  bool operator==(const TopK&) const = default;
};
using Normalizer = std::variant<Softmax, Sparsemax, Entmax, TopK>;
// What the rows of query head h go through: the same, with that head's α alone.
FOCI_API Normalizer normalizer_of(const Normalizer& normalizer, int64_t h);

// ---- masks: a key is seen if every one of them allows it ----------------------------------

// Where a query stands among the keys. PyTorch's `is_causal` is top_left; caches want
// bottom_right or past.
enum class Align : uint8_t {
  bottom_right,  // p = i + M − N
  top_left,      // p = i
  past           // p = i + past_lengths[b], the cached keys before the first query
};

struct Causal {  // j ≤ p
  Align align = Align::bottom_right;
  bool operator==(const Causal&) const = default;
};
struct Window {  // p − left ≤ j ≤ p + right, own position included; nullopt is unbounded
  std::optional<int64_t> left{};
  std::optional<int64_t> right{};
  Align align = Align::bottom_right;
  bool operator==(const Window&) const = default;
};
struct KeyLengths {  // j < key_lengths[b]; hides keys, moves no diagonal
  bool operator==(const KeyLengths&) const = default;
};
// Packed sequences: a query sees only keys of its own segment, and N, M, i, j of the other masks
// and of positional biases count inside the segment.
struct Segments {
  bool operator==(const Segments&) const = default;
};
struct Keep {  // boolean tensor, true attends; broadcast right-aligned to [B, H, N, M]
  bool operator==(const Keep&) const = default;
};
using Mask = std::variant<Causal, Window, KeyLengths, Segments, Keep>;

// ---- biases: their sum is added to the scores ----------------------------------------------

// A tensor that broadcasts right-aligned to [B, H, N, M]. −inf is a mask entry (gradient 0); any
// other value, the lowest finite float too, is a score.
struct TensorBias {
  bool operator==(const TensorBias&) const = default;
};
struct Alibi {  // −slopes[h]·|p − j| (Press et al. 2022, symmetric form)
  bool operator==(const Alibi&) const = default;
};
struct Relative1D {  // table[h][clip(j − p, ±max_distance) + max_distance]
  int64_t max_distance = 16;
  bool operator==(const Relative1D&) const = default;
};
// table[h][yj − yi + height − 1][xj − xi + width − 1]; position x is (x div width, x mod width).
struct Relative2D {
  int64_t height = 1;
  int64_t width = 1;
  bool operator==(const Relative2D&) const = default;
};
using Bias = std::variant<TensorBias, Alibi, Relative1D, Relative2D>;

// ---- dropout -------------------------------------------------------------------------------

enum class DropoutPlace : uint8_t {
  weights,  // after the normaliser; kept weights are scaled by 1/(1−p)
  keys      // before it: a dropped key is masked for that query (DropKey, Li et al. 2022)
};
// Keyed by (seed, batch, head, query, key) alone: equal in any tiling and thread count. Give it in
// training only. p is quantised to 1/65536.
struct Dropout {
  double p = 0.1;
  uint64_t seed = 0;
  DropoutPlace place = DropoutPlace::weights;
  bool operator==(const Dropout&) const = default;
};

// ---- statistics beside the output ----------------------------------------------------------

enum class Statistic : uint8_t {
  entropy,     // [B,H,N] in nats, of the weights before dropout
  max_weight,  // [B,H,N], and the lowest key that has it (max_key, int64; −1 in an empty row)
  support,     // [B,H,N] number of keys: allowed (softmax), min(k, allowed) (top-k), p > 0 (sparse)
  coverage     // [B,H,M] column sums of the weights before dropout
};

// A set of statistics.
class FOCI_API Statistics {
 public:
  constexpr Statistics() = default;
  constexpr Statistics(std::initializer_list<Statistic> list) {
    for (Statistic s : list) add(s);
  }
  constexpr void add(Statistic s) { bits_ |= uint8_t(1u << static_cast<unsigned>(s)); }
  constexpr bool has(Statistic s) const { return bits_ >> static_cast<unsigned>(s) & 1u; }
  constexpr bool empty() const { return bits_ == 0; }
  static constexpr Statistics all() {
    return {Statistic::entropy, Statistic::max_weight, Statistic::support, Statistic::coverage};
  }
  bool operator==(const Statistics&) const = default;

 private:
  uint8_t bits_ = 0;
};

// ---- the whole ------------------------------------------------------------------------------

struct AttentionSpec {
  Score score = Dot{};
  Scale scale = AutoScale{};
  std::optional<double> softcap{};  // cap · tanh(s / cap), > 0
  Normalizer normalizer = Softmax{};
  std::vector<Mask> masks{};
  std::vector<Bias> biases{};
  std::optional<Dropout> dropout{};
  Statistics statistics{};  // beside the row statistic (log-sum-exp or τ), which is always given

  bool operator==(const AttentionSpec&) const = default;
};

// Throws ArgumentError naming the option unless every number in the spec is one it may hold
// (alpha > 1, k ≥ 1, softcap > 0, p in [0, 1), window sides ≥ 0 …). Shapes are checked by Plan.
FOCI_API void validate(const AttentionSpec& spec);

template <class T>
bool has_mask(const AttentionSpec& spec) {
  for (const Mask& m : spec.masks) {
    if (std::holds_alternative<T>(m)) return true;
  }
  return false;
}
template <class T>
const T* find_bias(const AttentionSpec& spec) {
  for (const Bias& b : spec.biases) {
    if (const T* t = std::get_if<T>(&b)) return t;
  }
  return nullptr;
}

// The alignment that positional biases use: past if any mask is aligned to it, else bottom_right.
FOCI_API Align bias_align(const AttentionSpec& spec);

// Visitor from lambdas: std::visit(overloaded{[](Dot) {…}, [](Cosine) {…}, …}, score).
template <class... F>
struct overloaded : F... {
  using F::operator()...;
};
template <class... F>
overloaded(F...) -> overloaded<F...>;

}  // namespace foci
