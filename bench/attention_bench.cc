// Attention: fused against plain (unfused GEMM and row operators) against the multiply-add peak, in
// one run on the same inputs and threads, interleaved.
//
//   attention_bench [--quick] [--json]
//
// Each row is a shape; GF/s count 4·N·M·D multiply-adds and additions forward and 2.5 times that
// backward, of keys that the mask lets through.
#include <fmt/format.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "foci/attention/plan.h"
#include "foci/core/rng.h"
#include "foci/core/threads.h"
#include "foci/measure/fma_peak.h"
#include "foci/measure/interleaved.h"

namespace foci::bench {
namespace {

using measure::Candidate;
using measure::Timing;

struct Row {
  std::string name;
  AttentionShape shape;
  AttentionSpec spec;
  double useful = 1;  // share of N·M that the mask lets through
};

std::vector<Row> rows(bool quick) {
  const auto shape = [](int64_t B, int64_t H, int64_t N, int64_t D) {
    return AttentionShape{B, H, H, N, N, D, D};
  };
  AttentionSpec causal, window, sparsemax, cosine;
  causal.masks = {Causal{}};
  window.masks = {Window{128, 127}};
  sparsemax.normalizer = Sparsemax{};
  cosine.score = Cosine{};
  std::vector<Row> list = {{"B8 H12 N128 D32", shape(8, 12, 128, 32), {}},
                           {"B4 H8 N197 D64", shape(4, 8, 197, 64), {}},
                           {"H8 N512 D64", shape(1, 8, 512, 64), {}},
                           {"N1024 D64", shape(1, 1, 1024, 64), {}},
                           {"N1024 D64 sparsemax", shape(1, 1, 1024, 64), sparsemax},
                           {"N1024 D64 cosine", shape(1, 1, 1024, 64), cosine}};
  if (quick) return list;
  const std::vector<Row> more = {
      {"N1024 D128", shape(1, 1, 1024, 128), {}},
      {"N4096 D64", shape(1, 1, 4096, 64), {}},
      {"N4096 D64 sparsemax", shape(1, 1, 4096, 64), sparsemax},
      {"N4096 D64 causal", shape(1, 1, 4096, 64), causal, 0.5 * 4097 / 4096},
      {"N4096 D64 window 256", shape(1, 1, 4096, 64), window, 255.0 / 4096},
      {"B4 H8 N128 D64 causal", shape(4, 8, 128, 64), causal, 0.5 * 129 / 128}};
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

Tensor random(Rng& rng, const Dims& shape) {
  Tensor t = Tensor::empty(shape);
  for (float& x : t.span<float>()) x = static_cast<float>(rng.normal());
  return t;
}

struct Measured {
  std::string name;
  bool backward;
  double fused_gflops, plain_gflops, share, speedup, low, high;
};

Measured measured(const Row& row, bool backward, double peak, double seconds) {
  const AttentionShape& s = row.shape;
  Rng rng(1);
  AttentionInputs in;
  in.q = random(rng, {s.B, s.H, s.N, s.D});
  in.k = random(rng, {s.B, s.Hk, s.M, s.D});
  in.v = random(rng, {s.B, s.Hk, s.M, s.Dv});
  AttentionUpstream up;
  up.dy = random(rng, {s.B, s.H, s.N, s.Dv});
  std::vector<Candidate> candidates;
  for (Implementation id : {Implementation::plain, Implementation::fused}) {
    const Bound bound = Plan::make(row.spec, s, {id, std::nullopt}).bind(in);
    AttentionOutputs saved = bound.forward();
    const char* name = id == Implementation::plain ? "plain" : "fused";
    if (backward) {
      candidates.push_back({name, [=] { bound.backward(saved, up); }});
    } else {
      candidates.push_back({name, [bound, out = saved]() mutable { bound.forward(out); }});
    }
  }
  const std::vector<Timing> t = measure::interleaved(candidates, {.seconds = seconds});
  const double flops = 4e-9 * static_cast<double>(s.B * s.H * s.N * s.M) *
                       static_cast<double>(s.D + s.Dv) / 2 * row.useful * (backward ? 2.5 : 1);
  return {row.name,
          backward,
          flops / t[1].seconds,
          flops / t[0].seconds,
          flops / t[1].seconds / peak,
          t[1].speedup,
          t[1].speedup_low,
          t[1].speedup_high};
}

}  // namespace
}  // namespace foci::bench

int main(int argc, char** argv) {
  using namespace foci;
  using namespace foci::bench;
  bool quick = false, json = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else if (std::strcmp(argv[i], "--json") == 0) {
      json = true;
    } else {
      fmt::print(stderr, "attention_bench: unknown option '{}'; there are --quick and --json\n",
                 argv[i]);
      return 2;
    }
  }
  const SimdTarget target = current_target();
  const double peak = measure::fma_peak_gflops(target, num_threads());
  if (!json) {
    fmt::print("SIMD target {}, {} threads, multiply-add peak {:.0f} GF/s\n", name_of(target),
               num_threads(), peak);
    fmt::print("{:<24}{:<10}{:>11}{:>11}{:>9}   {}\n", "shape", "pass", "fused GF/s", "plain GF/s",
               "of peak", "fused : plain (quartiles)");
  }
  nlohmann::json out = {{"target", name_of(target)},
                        {"threads", num_threads()},
                        {"peak_gflops", peak},
                        {"rows", nlohmann::json::array()}};
  int slower = 0;
  for (const Row& row : rows(quick)) {
    for (bool backward : {false, true}) {
      const Measured m = measured(row, backward, peak, quick ? 0.3 : 0.8);
      slower += m.speedup < 1;
      if (json) {
        out["rows"].push_back({{"shape", m.name},
                               {"pass", backward ? "backward" : "forward"},
                               {"fused_gflops", m.fused_gflops},
                               {"plain_gflops", m.plain_gflops},
                               {"share_of_peak", m.share},
                               {"speedup", m.speedup},
                               {"speedup_quartiles", {m.low, m.high}}});
      } else {
        fmt::print("{:<24}{:<10}{:>11.1f}{:>11.1f}{:>8.0f}%   {:.2f} ({:.2f}-{:.2f})\n", m.name,
                   backward ? "backward" : "forward", m.fused_gflops, m.plain_gflops, 100 * m.share,
                   m.speedup, m.low, m.high);
        std::fflush(stdout);
      }
    }
  }
  if (json) {
    fmt::print("{}\n", out.dump(2));
  } else {
    fmt::print("fused is slower than plain in {} rows\n", slower);
  }
  return 0;
}
