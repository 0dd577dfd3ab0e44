// Random inputs for any spec, and whether they fit in memory.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "foci/core/rng.h"
#include "foci/measure/attention.h"

namespace foci::measure {
namespace {

constexpr int64_t kSegments = 4;

Tensor normal(Rng& rng, const Dims& shape, double spread = 1) {
  Tensor t = Tensor::empty(shape);
  for (float& x : t.span<float>()) x = static_cast<float>(spread * rng.normal());
  return t;
}

// Beyond one a row, groups have no members.
int64_t used_clusters(int64_t clusters, int64_t queries, int64_t keys) {
  return std::min(clusters, std::max({queries, keys, int64_t{1}}));
}

Tensor key_lengths(Rng& rng, const AttentionShape& s) {
  Tensor t = Tensor::empty({s.B}, DType::i64);
  for (int64_t& n : t.span<int64_t>()) n = s.M - rng.below(s.M / 2 + 1);
  return t;
}

// Rows of both sides cut at the same shares of their lengths.
void segments(Rng& rng, const AttentionShape& s, AttentionInputs& in) {
  in.q_segments = Tensor::zeros({s.B, s.N}, DType::i32);
  in.k_segments = Tensor::zeros({s.B, s.M}, DType::i32);
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t cut = 1; cut < kSegments; ++cut) {
      const double at = rng.uniform();
      for (const Tensor* t : {&in.q_segments, &in.k_segments}) {
        const auto first = static_cast<int64_t>(at * static_cast<double>(t->dim(1)));
        for (int64_t i = first; i < t->dim(1); ++i) ++t->at<int32_t>(b, i);
      }
    }
  }
}

double elements(const Dims& shape) {
  double n = 1;
  for (int64_t size : shape) n *= static_cast<double>(size);
  return n;
}

}  // namespace

AttentionInputs random_inputs(const AttentionSpec& spec, const AttentionShape& s, uint64_t seed) {
  Rng rng(seed);
  AttentionInputs in;
  in.q = normal(rng, {s.B, s.H, s.N, s.D}).to(s.dtype);
  in.k = normal(rng, {s.B, s.Hk, s.M, s.D}).to(s.dtype);
  in.v = normal(rng, {s.B, s.Hk, s.M, s.Dv}).to(s.dtype);
  if (std::holds_alternative<Additive>(spec.score)) {
    in.score_w = normal(rng, {s.D}, 1 / std::sqrt(std::max(1.0, double(s.D))));
  }
  if (bias_align(spec) == Align::past) {
    in.past_lengths = Tensor::full({s.B}, double(std::max<int64_t>(0, s.M - s.N)), DType::i64);
  }
  for (const Mask& mask : spec.masks) {
    std::visit(overloaded{[](const Causal&) {}, [](const Window&) {},
                          [&](const KeyLengths&) { in.key_lengths = key_lengths(rng, s); },
                          [&](const Segments&) { segments(rng, s, in); },
                          [&](const Keep&) {
                            in.keep = Tensor::empty({s.N, s.M}, DType::boolean);
                            for (bool& k : in.keep.span<bool>()) k = rng.next_u32() >> 30 != 0;
                          }},
               mask);
  }
  for (const Bias& bias : spec.biases) {
    std::visit(overloaded{[&](const TensorBias&) {
                            in.bias = normal(rng, {s.N, s.M});
                          },
                          [&](const Alibi&) {
                            in.slopes = Tensor::empty({s.H});
                            for (int64_t h = 0; h < s.H; ++h) {
                              in.slopes.at<float>(h) =
                                  static_cast<float>(std::exp2(-8 * double(h + 1) / double(s.H)));
                            }
                          },
                          [&](const Relative1D& r) {
                            in.table1d = normal(rng, {s.H, 2 * r.max_distance + 1});
                          },
                          [&](const Relative2D& r) {
                            in.table2d = normal(rng, {s.H, 2 * r.height - 1, 2 * r.width - 1});
                          }},
               bias);
  }
  return in;
}

void cluster_rows(AttentionInputs& in, int64_t clusters, uint64_t seed) {
  Rng rng(seed, 2);
  clusters = used_clusters(clusters, in.q.dim(2), in.k.dim(2));
  const int64_t kv_heads = in.k.dim(1), depth = in.k.dim(3);
  const Tensor centre = normal(rng, {in.k.dim(0), kv_heads, clusters, depth});
  for (Tensor* t : {&in.q, &in.k}) {
    Tensor rows = t->to(DType::f32);
    const int64_t heads = rows.dim(1), n = rows.dim(2), group = heads / kv_heads;
    float* x = rows.data<float>();
    for (int64_t r = 0; r < rows.dim(0) * heads * n; ++r, x += depth) {
      const int64_t head = r / n / group;  // of all batch entries: heads come in whole groups
      const float* c = centre.data<float>() + (head * clusters + r % n * clusters / n) * depth;
      for (int64_t i = 0; i < depth; ++i) x[i] = c[i] + 0.1f * x[i];
    }
    *t = rows.to(t->dtype());
  }
}

double bytes_needed(const AttentionJob& job) {
  const AttentionShape& s = job.shape;
  size_t workspace = 0;
  for (Implementation id : {Implementation::plain, Implementation::fused}) {
    const Plan plan = id == Implementation::plain ? Plan::make(job.spec, s, {.implementation = id})
                                                  : Plan::make(job.spec, s);
    for (bool backward : {false, true}) {
      workspace = std::max(workspace, plan.workspace_bytes(backward));
    }
  }
  const double rows = elements({s.B, s.H, s.N, s.D}), keys = elements({s.B, s.Hk, s.M, s.D}),
               values = elements({s.B, s.Hk, s.M, s.Dv}), y = elements({s.B, s.H, s.N, s.Dv});
  const double pairs = elements({s.N, s.M});
  // Inputs are drawn in float32; each of them, y and dy has a gradient of its size.
  double bytes = 4 * (2 * (rows + keys + values) + 4 * y);
  bytes += 4 * elements({s.B, s.Hk, used_clusters(job.clusters, s.N, s.M), s.D});
  if (has_mask<Keep>(job.spec)) bytes += pairs;
  if (find_bias<TensorBias>(job.spec)) bytes += pairs * (job.all_gradients ? 16 : 12);
  return bytes + static_cast<double>(workspace);
}

double bytes_available() {
  double bytes =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  std::ifstream group("/sys/fs/cgroup/memory.max");
  double limit = 0;
  if (group >> limit && limit > 0) bytes = std::min(bytes, limit);  // "max" is no number
  return bytes;
}

}  // namespace foci::measure
