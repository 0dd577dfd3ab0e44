// Every check of spec and tensors, and their conversion to double.
#include "foci/reference/problem.h"

#include <cmath>

namespace foci::reference {
namespace {

void require_given(const Tensor& t, const char* name) {
  require(t.defined(), "{}: not given, but the spec reads it", name);
}

Tensor doubles(const Tensor& t, const char* name) {
  require_given(t, name);
  require(is_floating(t.dtype()), "{}: {} given, a floating type is needed", name,
          name_of(t.dtype()));
  return t.to(DType::f64).contiguous();
}

Tensor shaped_doubles(const Tensor& t, const char* name, const Dims& shape) {
  Tensor d = doubles(t, name);
  require(d.shape() == shape, "{}: shape {} given, {} is needed", name, d.shape(), shape);
  return d;
}

Tensor integers(const Tensor& t, const char* name, DType dtype, const Dims& shape) {
  require_given(t, name);
  require(t.dtype() == dtype, "{}: {} given, {} is needed", name, name_of(t.dtype()),
          name_of(dtype));
  require(t.shape() == shape, "{}: shape {} given, {} is needed", name, t.shape(), shape);
  return t.contiguous();
}

Tensor lengths(const Tensor& t, const char* name, int64_t B, int64_t most) {
  Tensor l = integers(t, name, DType::i64, {B});
  for (int64_t b = 0; b < B; ++b) {
    const int64_t n = l.at<int64_t>(b);
    require(n >= 0 && n <= most, "{}[{}]: {} given, it must lie in [0, {}]", name, b, n, most);
  }
  return l;
}

Tensor broadcast(const Tensor& t, const char* name, const Dims& shape) {
  bool fits = t.rank() <= shape.size();
  for (int d = 1; fits && d <= t.rank(); ++d) {
    fits = t.dim(-d) == 1 || t.dim(-d) == shape[shape.size() - d];
  }
  require(fits, "{}: shape {} given, one that broadcasts right-aligned to {} is needed", name,
          t.shape(), shape);
  return t.broadcast_to(shape);
}

void read_operands(Problem& p, const AttentionInputs& in) {
  p.q = doubles(in.q, "q");
  p.k = doubles(in.k, "k");
  p.v = doubles(in.v, "v");
  require(p.q.rank() == 4, "q: shape {} given, [B, H, N, D] is needed", p.q.shape());
  require(p.k.rank() == 4, "k: shape {} given, [B, Hk, M, D] is needed", p.k.shape());
  require(p.v.rank() == 4, "v: shape {} given, [B, Hk, M, Dv] is needed", p.v.shape());
  p.B = p.q.dim(0), p.H = p.q.dim(1), p.N = p.q.dim(2), p.D = p.q.dim(3);
  p.Hk = p.k.dim(1), p.M = p.k.dim(2), p.Dv = p.v.dim(3);
  require((p.H == 0 && p.Hk == 0) || (p.H >= 1 && p.Hk >= 1 && p.H % p.Hk == 0),
          "k: {} key/value heads do not divide {} query heads", p.Hk, p.H);
  require(p.k.shape() == Dims({p.B, p.Hk, p.M, p.D}), "k: shape {} given, {} is needed to fit q",
          p.k.shape(), Dims({p.B, p.Hk, p.M, p.D}).str());
  require(p.v.shape() == Dims({p.B, p.Hk, p.M, p.Dv}), "v: shape {} given, {} is needed to fit k",
          p.v.shape(), Dims({p.B, p.Hk, p.M, p.Dv}).str());
}

void read_scores(Problem& p, const AttentionInputs& in) {
  const bool dot = std::holds_alternative<Dot>(p.spec.score);
  // With D = 0 every dot product is 0; 1/√0 must not turn that into NaN.
  const double own = dot && p.D > 0 ? 1 / std::sqrt(static_cast<double>(p.D)) : 1;
  std::visit(overloaded{[&](const AutoScale&) { p.scale.assign(p.H, own); },
                        [&](double s) { p.scale.assign(p.H, s); },
                        [&](const std::vector<double>& s) {
                          require(static_cast<int64_t>(s.size()) == p.H,
                                  "scale: {} numbers given for {} query heads", s.size(), p.H);
                          p.scale = s;
                        }},
             p.spec.scale);
  if (const auto* e = std::get_if<Entmax>(&p.spec.normalizer)) {
    require(e->per_head.empty() || static_cast<int64_t>(e->per_head.size()) == p.H,
            "normalizer.alpha: {} numbers given for {} query heads", e->per_head.size(), p.H);
  }
  if (std::holds_alternative<Additive>(p.spec.score)) {
    p.score_w = shaped_doubles(in.score_w, "score_w", {p.D});
  }
}

void read_masks(Problem& p, const AttentionInputs& in) {
  for (const Mask& mask : p.spec.masks) {
    std::visit(
        overloaded{[](const Causal&) {}, [](const Window&) {},
                   [&](const KeyLengths&) {
                     p.key_lengths = lengths(in.key_lengths, "key_lengths", p.B, p.M);
                   },
                   [&](const Segments&) {
                     p.q_segments = integers(in.q_segments, "q_segments", DType::i32, {p.B, p.N});
                     p.k_segments = integers(in.k_segments, "k_segments", DType::i32, {p.B, p.M});
                   },
                   [&](const Keep&) {
                     require_given(in.keep, "keep");
                     require(in.keep.dtype() == DType::boolean, "keep: {} given, bool is needed",
                             name_of(in.keep.dtype()));
                     p.keep = broadcast(in.keep, "keep", {p.B, p.H, p.N, p.M});
                   }},
        mask);
  }
  if (bias_align(p.spec) == Align::past) {
    // 2^48 is beyond any cache and far from overflow.
    p.past_lengths = lengths(in.past_lengths, "past_lengths", p.B, int64_t{1} << 48);
  }
}

void read_biases(Problem& p, const AttentionInputs& in) {
  const Dims all{p.B, p.H, p.N, p.M};
  for (const Bias& bias : p.spec.biases) {
    std::visit(
        overloaded{
            [&](const TensorBias&) { p.bias = broadcast(doubles(in.bias, "bias"), "bias", all); },
            [&](const Alibi&) { p.slopes = shaped_doubles(in.slopes, "slopes", {p.H}); },
            [&](const Relative1D& r) {
              p.table1d = shaped_doubles(in.table1d, "table1d", {p.H, 2 * r.max_distance + 1});
            },
            [&](const Relative2D& r) {
              p.table2d =
                  shaped_doubles(in.table2d, "table2d", {p.H, 2 * r.height - 1, 2 * r.width - 1});
              require(r.height * r.width == p.M,
                      "relative2d.grid: [{}, {}] given, it must hold M = {} keys", r.height,
                      r.width, p.M);
              const bool past = bias_align(p.spec) == Align::past;
              for (int64_t b = 0; b < p.B && p.N > 0; ++b) {
                const int64_t first = past ? p.past_lengths.at<int64_t>(b) : p.M - p.N;
                require(first >= 0 && first + p.N <= p.M,
                        "relative2d.grid: queries at {}…{} leave the grid of {} positions", first,
                        first + p.N - 1, p.M);
              }
            }},
        bias);
  }
}

}  // namespace

Problem make_problem(const AttentionSpec& spec, const AttentionInputs& in) {
  validate(spec);
  Problem p;
  p.spec = spec;
  read_operands(p, in);
  read_scores(p, in);
  read_masks(p, in);
  read_biases(p, in);
  return p;
}

Tensor upstream(const Tensor& t, const char* name, const Dims& shape) {
  return t.defined() ? shaped_doubles(t, name, shape) : Tensor();
}

}  // namespace foci::reference
