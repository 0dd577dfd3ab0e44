// What a call costs beside the work: Plan::make, bind, and attention so small that nothing else is
// left. Plain single timings, by Google Benchmark, whose options it takes.
#include <benchmark/benchmark.h>

#include "foci/attention/plan.h"
#include "foci/measure/attention.h"

namespace foci::bench {
namespace {

AttentionSpec keep_spec() {
  AttentionSpec spec;
  spec.masks = {Keep{}};
  return spec;
}

AttentionSpec segments_spec() {
  AttentionSpec spec;
  spec.masks = {Segments{}};
  return spec;
}

AttentionSpec bias_spec() {
  AttentionSpec spec;
  spec.biases = {TensorBias{}};
  return spec;
}

constexpr AttentionShape kShape = {4, 8, 8, 197, 197, 64, 64};
constexpr AttentionShape kOne = {1, 1, 1, 1, 1, 64, 64};

void plan(benchmark::State& state, const AttentionSpec& spec) {
  for (auto _ : state) benchmark::DoNotOptimize(Plan::make(spec, kShape));
}

void bind(benchmark::State& state, const AttentionSpec& spec) {
  const AttentionInputs in = measure::random_inputs(spec, kShape, 1);
  const Plan made = Plan::make(spec, kShape);
  for (auto _ : state) benchmark::DoNotOptimize(made.bind(in));
}

void forward(benchmark::State& state) {
  const Bound bound = Plan::make({}, kOne).bind(measure::random_inputs({}, kOne, 1));
  AttentionOutputs out = bound.forward();
  for (auto _ : state) bound.forward(out);
}

void backward(benchmark::State& state) {
  const Bound bound = Plan::make({}, kOne).bind(measure::random_inputs({}, kOne, 1));
  const AttentionOutputs out = bound.forward();
  for (auto _ : state) benchmark::DoNotOptimize(bound.backward(out, {.dy = out.y}));
}

BENCHMARK_CAPTURE(plan, B4_H8_N197_D64, AttentionSpec{});
BENCHMARK_CAPTURE(bind, no_mask, AttentionSpec{});
BENCHMARK_CAPTURE(bind, keep_bits, keep_spec());
BENCHMARK_CAPTURE(bind, segments, segments_spec());
BENCHMARK_CAPTURE(bind, tensor_bias, bias_spec());
BENCHMARK(forward)->Name("forward, one query and key");
BENCHMARK(backward)->Name("backward, one query and key");

}  // namespace
}  // namespace foci::bench

BENCHMARK_MAIN();
