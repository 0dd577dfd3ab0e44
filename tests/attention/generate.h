// Random attention problems for whatever implementation is to be compared with the oracle: the
// reference's sweep over all specs, at any sizes, and with strided tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/core/rng.h"
#include "reference/sweep.h"

namespace foci::testing {

// Takes about one upstream gradient of four away.
void thin_upstream(SweepCase& c, uint64_t seed);

// Case n. Undefined upstream gradients are among them.
SweepCase attention_case(uint64_t n, DType dtype = DType::f32, const SweepLimits& limits = {});

// The same values behind other strides: q, k, v, dy as views of a packed [B, N, H, D + gap] buffer,
// broadcast tensors with spare columns.
AttentionInputs strided(const AttentionInputs& in);
Tensor strided_heads(const Tensor& t);

// One of each path through the kernels.
std::vector<Normalizer> every_normalizer();
std::string text_of(const Normalizer& normalizer);

Tensor random_normal(Rng& rng, const Dims& shape, double scale = 1);

}  // namespace foci::testing
