// What the benchmarks feed attention with, drawn from a seed.
//
// "random": q, k and v normal, as measure::random_inputs draws them. Scores then have a standard
// deviation of 1 and no structure: softmax spreads over everything, sparse maps keep 1-2 %.
//
// "trained": scores as trained transformers have them, with a standard deviation of about 4. Each
// token has one of 16 topics of its head, in runs of 16 neighbours, and a quarter of the variance
// of q and k is the topic's direction; all queries share a direction along which the first key, the
// sink, stands out. So a row has a few dozen keys that matter, some far away, and the sink.
//
// "clustered": q and k are one of 64 unit centres of their head, times 16, plus noise of 0.25 a
// component, and lie in runs of 64: what pruning by blocks of keys can work with.
#pragma once

#include "rows.h"

namespace foci::bench {

AttentionInputs inputs(const Definition& definition, const AttentionShape& shape,
                       uint64_t seed = 1);

// dy and, for each statistic that the spec asks for, its upstream gradient, normal.
AttentionUpstream upstream(const AttentionSpec& spec, const AttentionShape& shape,
                           uint64_t seed = 2);

// The names of Definition::wanted; throws Error for others.
AttentionWanted wanted(const std::vector<std::string>& names);

// Normal numbers.
Tensor normal(const Dims& shape, uint64_t seed);

}  // namespace foci::bench
