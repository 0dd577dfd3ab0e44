// Plan → bind → forward / backward: how a spec becomes work.
//
//   Plan plan = Plan::make(spec, {.B = 2, .H = 8, .Hk = 8, .N = 128, .M = 128, .D = 64, .Dv = 64});
//   AttentionOutputs out = plan.bind({.q = q, .k = k, .v = v}).forward();
//
// A Plan depends on the spec and the shapes alone, so it can be kept and reused. Results do not
// depend on the number of threads, nor on where a row stands in its batch, bit for bit.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "foci/core/api.h"
#include "foci/core/simd_target.h"
#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"

namespace foci {

struct AttentionShape {
  int64_t B = 1, H = 1, Hk = 1, N = 0, M = 0, D = 0, Dv = 0;
  DType dtype = DType::f32;
  bool operator==(const AttentionShape&) const = default;
};

// The shape that q, k and v say, of four dimensions each; q's dtype.
FOCI_API AttentionShape shape_of(const AttentionInputs& inputs);

enum class Implementation : uint8_t {
  plain,  // unfused: GEMM and row operators over an N×M score matrix; covers every option
  fused   // Highway kernels, memory linear in N + M
};

struct PlanOptions {
  std::optional<Implementation> implementation{};  // nullopt: the first of the list that serves
  std::optional<SimdTarget> target{};              // nullopt: current_target()
};

struct PlanState;
class Bound;

class FOCI_API Plan {
 public:
  // Copies share what they hold. There is no move, which would leave a Plan that cannot be used.
  Plan(const Plan&) = default;
  Plan& operator=(const Plan&) = default;

  // Validates spec and shape; throws ArgumentError with what arrived and what would be right, also
  // where a demanded implementation does not serve the spec.
  static Plan make(const AttentionSpec& spec, const AttentionShape& shape,
                   const PlanOptions& options = {});

  // Which implementation was picked, on which SIMD target, and why the ones before it were refused;
  // for top-k also whether bounds may spare scores, or why not.
  std::string explain() const;
  Implementation implementation() const;
  SimdTarget target() const;
  const AttentionSpec& spec() const;
  const AttentionShape& shape() const;
  // The most bytes that bind and a forward (backward) call need at once beside inputs, outputs and
  // gradients, with every gradient wanted, on all threads. (A float64 bias is copied besides.)
  size_t workspace_bytes(bool backward) const;

  // Checks the tensors against the plan and what only data can tell (lengths, segments), and turns
  // the masks into key ranges and keep bits. The Bound keeps handles of the tensors.
  // What masks, biases and tables read is taken here: after changing it, bind again.
  Bound bind(const AttentionInputs& inputs) const;

 private:
  Plan() = default;
  std::shared_ptr<const PlanState> state_;
};

struct BoundState;
enum class ScoreStage : uint8_t;  // raw_scores.h

// May be used by several threads at once, as a Plan may.
class FOCI_API Bound {
 public:
  Bound(const Bound&) = default;
  Bound& operator=(const Bound&) = default;

  AttentionOutputs forward() const;
  // Writes into the given tensors (shapes as in AttentionOutputs; undefined ones are made).
  void forward(AttentionOutputs& outputs) const;

  // `saved` is what forward gave: y and row_stat are needed. Undefined upstream gradients are zero.
  AttentionGradients backward(const AttentionOutputs& saved, const AttentionUpstream& upstream,
                              const AttentionWanted& wanted = {}) const;
  // Writes into the given tensors (shapes as in AttentionGradients; undefined ones are made). dq,
  // dk and dv may be views whose rows are dense, as parts of one tensor, the others are contiguous.
  void backward(const AttentionOutputs& saved, const AttentionUpstream& upstream,
                const AttentionWanted& wanted, AttentionGradients& gradients) const;

  // Exact weights (before dropout) of chosen query rows: [B, heads.size(), rows.size(), M] float32.
  Tensor weights(const AttentionOutputs& saved, std::span<const int64_t> rows,
                 std::span<const int64_t> heads) const;

  // How many pairs (batch, head, query, key) the masks let through, −inf in a tensor bias being one
  // (DropKey is not). Constant time a row, unless keep bits, such a bias, or segments that do not
  // lie together must be looked through.
  int64_t visible_pairs() const;

 private:
  friend class Plan;
  friend FOCI_API Tensor raw_scores(const Bound& bound, ScoreStage stage);
  explicit Bound(std::shared_ptr<const BoundState> state) : state_(std::move(state)) {}
  std::shared_ptr<const BoundState> state_;
};

}  // namespace foci
