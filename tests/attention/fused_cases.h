// Random problems of the family that fused serves, for the sweeps of fused_test.cc.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/core/rng.h"
#include "foci/spec/json.h"

namespace foci::testing {

inline Tensor random_normal(Rng& rng, const Dims& shape, double scale = 1) {
  Tensor t = Tensor::empty(shape);
  for (float& x : t.span<float>()) x = static_cast<float>(rng.normal() * scale);
  return t;
}

struct FusedCase {
  AttentionShape shape;
  AttentionSpec spec;
  AttentionInputs in;
  AttentionUpstream up;
  bool poisoned = false;  // some key holds NaN or infinity
  std::string name;
};

// Sizes around every tile edge: strips of 8, 16 and 32 lanes, tiles of three strips, row blocks.
inline constexpr int64_t kEdgeSizes[] = {0,  1,  2,  3,  5,  7,  8,  9,  15, 16, 17, 31, 32,
                                         33, 47, 48, 49, 63, 64, 65, 70, 95, 96, 97, 130};

// One of each path through the kernels.
inline std::vector<Normalizer> fused_normalizers() {
  return {Softmax{}, Sparsemax{}, Entmax{1.5}, Entmax{1.2}, Entmax{3}, TopK{5}};
}

inline std::string text_of(const Normalizer& normalizer) {
  std::string text = spec_to_json_text({.normalizer = normalizer});
  const size_t from = text.find("\"normalizer\""), to = text.find('}', from);
  return text.substr(from, to - from);
}

inline Normalizer random_fused_normalizer(Rng& rng, int64_t M) {
  switch (rng.below(7)) {
    case 0:
      return Sparsemax{};
    case 1:
      return Entmax{1.5};
    case 2: {
      const double alphas[] = {1.05, 1.2, 2, 3, 1 + 2 * rng.uniform()};
      return Entmax{alphas[rng.below(std::size(alphas))]};
    }
    case 3:
    case 4: {
      const int64_t k[] = {1, 2, 5, 17, 64, M + 1, int64_t{1} << 62};
      return TopK{k[rng.below(std::size(k))]};
    }
    default:
      return Softmax{};
  }
}

// Equal scores, in float32 as in double: keys that repeat, or numbers and a scale so coarse that
// every score is exact (and zeros of both signs occur).
inline void make_ties(Rng& rng, FusedCase& c) {
  const int64_t kind = rng.below(3);
  if (kind == 0 && std::holds_alternative<Dot>(c.spec.score)) {
    c.spec.scale = rng.below(2) ? 0.5 : -0.5;
    for (const Tensor& t : {c.in.q, c.in.k}) {
      Tensor coarse = t.contiguous();
      for (float& x : coarse.span<float>()) x = static_cast<float>(rng.below(3) - 1);
      Tensor view = t;
      view.copy_from(coarse);
    }
  } else if (kind == 1 && c.shape.M > 1) {
    for (int64_t n = 0; n < c.shape.M; ++n) {
      const int64_t from = rng.below(c.shape.M), to = rng.below(c.shape.M);
      c.in.k.slice(2, to, to + 1).copy_from(c.in.k.slice(2, from, from + 1));
    }
  }
}

inline FusedCase random_fused_case(uint64_t index) {
  Rng rng(20240, index);
  const auto size = [&] { return kEdgeSizes[rng.below(std::size(kEdgeSizes))]; };
  const auto align = [&] { return rng.below(2) ? Align::top_left : Align::bottom_right; };
  FusedCase c;
  AttentionShape& s = c.shape;
  s.B = 1 + rng.below(2);
  s.Hk = 1 + rng.below(2);
  s.H = s.Hk * (1 + rng.below(3));
  s.N = size();
  s.M = size();
  s.D = 1 + rng.below(70);
  s.Dv = 1 + rng.below(70);
  if (index % 40 == 39) {  // past one block of keys
    s.B = 1;
    s.N = 40;
    s.M = 600 + rng.below(600);
  }
  AttentionSpec& spec = c.spec;
  if (rng.below(3) == 0) spec.score = Cosine{};
  spec.normalizer = random_fused_normalizer(rng, s.M);
  switch (rng.below(3)) {
    case 0:
      spec.scale = rng.normal();
      break;
    case 1: {
      std::vector<double> per_head(s.H);
      for (double& x : per_head) x = rng.normal();
      spec.scale = per_head;
      break;
    }
    default:
      break;
  }
  if (rng.below(3) == 0) spec.masks.push_back(Causal{align()});
  if (rng.below(3) == 0) {
    Window w;
    if (rng.below(3)) w.left = rng.below(40);
    if (rng.below(3)) w.right = rng.below(40);
    w.align = align();
    spec.masks.push_back(w);
  }
  if (rng.below(4) == 0) {
    spec.masks.push_back(KeyLengths{});
    std::vector<int64_t> lengths(s.B);
    for (int64_t& n : lengths) n = rng.below(s.M + 1);
    c.in.key_lengths = Tensor::from(lengths, {s.B});
  }
  if (rng.below(4) == 0) {
    spec.masks.push_back(Segments{});
    const bool scattered = rng.below(3) == 0;
    const auto segments = [&](int64_t n) {
      std::vector<int32_t> ids;
      for (int64_t b = 0; b < s.B; ++b) {
        int32_t id = 0;
        for (int64_t i = 0; i < n; ++i) {
          id += rng.below(12) == 0;
          ids.push_back(scattered ? static_cast<int32_t>(rng.below(3)) : id);
        }
      }
      return Tensor::from(ids, {s.B, n});
    };
    c.in.q_segments = segments(s.N);
    c.in.k_segments = s.N == s.M && rng.below(2) ? c.in.q_segments : segments(s.M);
  }
  if (rng.below(4) == 0) {
    spec.masks.push_back(Keep{});
    const Dims full{s.B, s.H, s.N, s.M};
    Dims shape;
    for (int i = static_cast<int>(rng.below(5)); i < 4; ++i) {
      shape.push_back(rng.below(3) ? full[i] : 1);
    }
    c.in.keep = Tensor::empty(shape, DType::boolean);
    for (bool& x : c.in.keep.span<bool>()) x = rng.below(4) != 0;
  }
  if (rng.below(2)) spec.statistics = Statistics::all();

  const auto operand = [&](int64_t heads, int64_t rows, int64_t depth, bool strided) {
    return strided ? random_normal(rng, {s.B, rows, heads, depth}).transpose(1, 2)
                   : random_normal(rng, {s.B, heads, rows, depth});
  };
  const bool strided = rng.below(2) != 0;
  c.in.q = operand(s.H, s.N, s.D, strided);
  c.in.k = operand(s.Hk, s.M, s.D, strided);
  c.in.v = operand(s.Hk, s.M, s.Dv, strided);
  if (std::holds_alternative<TopK>(spec.normalizer)) make_ties(rng, c);
  c.poisoned = rng.below(6) == 0 && s.M > 0;
  if (c.poisoned) {
    const int64_t b = rng.below(s.B), h = rng.below(s.Hk), j = rng.below(s.M);
    const double value = rng.below(2) ? std::numeric_limits<double>::quiet_NaN()
                                      : std::numeric_limits<double>::infinity();
    if (rng.below(2)) c.in.k.select(0, b).select(0, h).select(0, j).fill(value - value);
    c.in.v.select(0, b).select(0, h).select(0, j).fill(value);
  }
  c.up.dy = operand(s.H, s.N, s.Dv, strided);
  if (rng.below(2)) c.up.drow_stat = random_normal(rng, {s.B, s.H, s.N});
  if (!spec.statistics.empty()) {
    if (rng.below(2)) c.up.dentropy = random_normal(rng, {s.B, s.H, s.N});
    if (rng.below(2)) c.up.dmax_weight = random_normal(rng, {s.B, s.H, s.N});
    if (rng.below(2)) c.up.dcoverage = random_normal(rng, {s.B, s.H, s.M});
  }
  c.name = fmt::format("case {}: B{} H{} Hk{} N{} M{} D{} Dv{}{}{} {}", index, s.B, s.H, s.Hk, s.N,
                       s.M, s.D, s.Dv, strided ? " strided" : "", c.poisoned ? " poisoned" : "",
                       spec_to_json_text(spec));
  return c;
}

}  // namespace foci::testing
