// What Plan and Bound hold, and the list that they pick an implementation from. Private to this
// floor and its tests.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/attention/problem.h"

namespace foci {

// One way to compute attention. Functions get checked arguments and allocated results.
struct ImplementationEntry {
  Implementation id;
  const char* name;
  // Why it does not serve this spec and shape; nullopt where it does.
  std::optional<std::string> (*refuses)(const AttentionSpec&, const AttentionShape&);
  size_t (*workspace_bytes)(const AttentionSpec&, const AttentionShape&, SimdTarget, bool backward);
  void (*forward)(const Problem&, AttentionOutputs&);
  void (*backward)(const Problem&, const AttentionOutputs& saved, const AttentionUpstream&,
                   const AttentionWanted&, AttentionGradients&);
  void (*weights)(const Problem&, const AttentionOutputs& saved, std::span<const int64_t> rows,
                  std::span<const int64_t> heads, Tensor& weights);
};

// Best first: the first that serves is picked.
std::span<const ImplementationEntry> implementations();

struct PlanState {
  AttentionSpec spec;
  AttentionShape shape;
  SimdTarget target = SimdTarget::baseline;
  const ImplementationEntry* picked = nullptr;
  std::string explanation;
};

struct BoundState {
  std::shared_ptr<const PlanState> plan;
  Problem problem;
};

// Throws ArgumentError unless the shape is possible and fits the spec (which is valid).
void check_shape(const AttentionSpec& spec, const AttentionShape& shape);

// Throws ArgumentError where a tensor of these sizes cannot be addressed.
void check_product(const char* what, const Dims& dims);

// What bind does: checks the tensors, then fills ranges, positions, scale and broadcast views.
Problem make_problem(const AttentionSpec& spec, const AttentionShape& shape, SimdTarget target,
                     const AttentionInputs& inputs);

// Fills problem.mask and problem.positions from the (checked) inputs. Memory is linear in N + M.
void fill_ranges(Problem& problem);

// "NAME: …" errors unless the tensor's last dimension is dense (stride 1, or a single element).
void require_dense_rows(const Tensor& t, const char* name);

}  // namespace foci
