// Random attention problems for whatever implementation is to be compared with the oracle: the
// reference's sweep over all specs, at any sizes, and with strided tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/reference/attention.h"
#include "reference/sweep.h"

namespace foci::testing {

// Case n. Undefined upstream gradients are as likely as given ones.
SweepCase attention_case(uint64_t n, DType dtype = DType::f32, const SweepLimits& limits = {});

// The same values behind other strides: q, k, v, dy as views of a packed [B, N, H, D + gap] buffer,
// broadcast tensors with spare columns.
AttentionInputs strided(const AttentionInputs& in);
Tensor strided_heads(const Tensor& t);

AttentionShape shape_of(const AttentionInputs& in);

// Rows that double decides by less than float32's rounding (see Margins): their outputs are not
// compared, and their upstream gradients taken away.
struct Fairness {
  std::vector<uint8_t> unfair;  // [B·H·N]
  int64_t count = 0;            // of unfair rows
};
// Changes the case's upstream gradients, and dcoverage where any row is unfair.
Fairness make_fair(SweepCase& c, const reference::Forward& expected);
// Copies the expected values of unfair rows (and coverage) over the actual ones.
void excuse(const Fairness& fairness, const AttentionOutputs& expected, AttentionOutputs& actual);

}  // namespace foci::testing
