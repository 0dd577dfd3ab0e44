// bind: checks tensors against the plan and turns them into a Problem.
#include <algorithm>
#include <cmath>
#include <limits>

#include "foci/attention/state.h"

namespace foci {

void require_dense_rows(const Tensor& t, const char* name) {
  if (t.rank() == 0 || t.numel() == 0) return;
  require(t.shape().back() <= 1 || t.strides().back() == 1,
          "{}: stride {} in the last dimension arrived; only the other dimensions may be strided "
          "(call contiguous())",
          name, t.strides().back());
}

namespace {

void require_given(const Tensor& t, const char* name, const char* reader) {
  require(t.defined(), "{}: no tensor was given, but {} reads it", name, reader);
}

// Exactly this shape; `letters` explains it.
void require_shape(const Tensor& t, const char* name, const Dims& shape, const char* letters) {
  require(t.shape() == shape, "{}: shape {} arrived, {} {} is right", name, t.shape(), shape,
          letters);
  require_dense_rows(t, name);
}

void require_dtype(const Tensor& t, const char* name, DType dtype) {
  require(t.dtype() == dtype, "{}: {} arrived, {} is right", name, name_of(t.dtype()),
          name_of(dtype));
}

void require_floating(const Tensor& t, const char* name) {
  require(is_floating(t.dtype()), "{}: {} arrived, a floating type is right", name,
          name_of(t.dtype()));
}

// A small table in the form kernels read: contiguous float32.
Tensor table(const Tensor& t) {
  return t.to(DType::f32).contiguous();
}

// A double tensor as float32, where finite stays finite: only −inf is a mask.
Tensor narrowed(const Tensor& t) {
  const Tensor wide = t.contiguous();
  Tensor narrow = Tensor::empty(t.shape());
  constexpr double kMost = std::numeric_limits<float>::max();
  for (int64_t n = 0; n < wide.numel(); ++n) {
    const double x = wide.data<double>()[n];
    narrow.data<float>()[n] =
        static_cast<float>(std::isfinite(x) ? std::clamp(x, -kMost, kMost) : x);
  }
  return narrow;
}

// View of a tensor that broadcasts right-aligned to [B, H, N, M].
Tensor broadcast(const Tensor& t, const char* name, const AttentionShape& s) {
  const Dims target{s.B, s.H, s.N, s.M};
  bool fits = t.rank() <= 4;
  for (int d = 1; fits && d <= t.rank(); ++d) {
    const int64_t own = t.dim(-d);
    fits = own == 1 || own == target[4 - d];
  }
  require(fits, "{}: shape {} arrived, it must broadcast right-aligned to {} (B, H, N, M)", name,
          t.shape(), target);
  // Zero is a broadcast the caller made.
  if (t.rank() > 0 && t.shape().back() > 1 && t.strides().back() != 0) require_dense_rows(t, name);
  return t.broadcast_to(target);
}

void check_operands(const AttentionShape& s, const AttentionInputs& in) {
  require_given(in.q, "q", "attention");
  require_given(in.k, "k", "attention");
  require_given(in.v, "v", "attention");
  require_shape(in.q, "q", {s.B, s.H, s.N, s.D}, "(B, H, N, D)");
  require_shape(in.k, "k", {s.B, s.Hk, s.M, s.D}, "(B, Hk, M, D)");
  require_shape(in.v, "v", {s.B, s.Hk, s.M, s.Dv}, "(B, Hk, M, Dv)");
  require_dtype(in.q, "q", s.dtype);
  require_dtype(in.k, "k", s.dtype);
  require_dtype(in.v, "v", s.dtype);
}

void check_lengths(const Tensor& t, const char* name, const char* reader, int64_t B, int64_t limit,
                   const std::string& limit_text) {
  require_given(t, name, reader);
  require_dtype(t, name, DType::i64);
  require_shape(t, name, {B}, "(B)");
  for (int64_t b = 0; b < B; ++b) {
    const int64_t n = t.at<int64_t>(b);
    require(n >= 0 && n <= limit, "{}[{}]: {} arrived, it must lie in [0, {}]", name, b, n,
            limit_text);
  }
}

bool reads_past(const AttentionSpec& spec) {
  return bias_align(spec) == Align::past;
}

void bind_masks(Problem& p, const AttentionInputs& in) {
  const AttentionShape& s = p.shape;
  for (const Mask& mask : p.spec.masks) {
    std::visit(overloaded{[](const Causal&) {}, [](const Window&) {},
                          [&](const KeyLengths&) {
                            check_lengths(in.key_lengths, "key_lengths", "the mask key_lengths",
                                          s.B, s.M, fmt::format("M = {}", s.M));
                          },
                          [&](const Segments&) {
                            require_given(in.q_segments, "q_segments", "the mask segments");
                            require_given(in.k_segments, "k_segments", "the mask segments");
                            require_dtype(in.q_segments, "q_segments", DType::i32);
                            require_dtype(in.k_segments, "k_segments", DType::i32);
                            require_shape(in.q_segments, "q_segments", {s.B, s.N}, "(B, N)");
                            require_shape(in.k_segments, "k_segments", {s.B, s.M}, "(B, M)");
                          },
                          [&](const Keep&) {
                            require_given(in.keep, "keep", "the mask keep");
                            require(in.keep.dtype() == DType::boolean,
                                    "keep: {} arrived, bool is right (true attends)",
                                    name_of(in.keep.dtype()));
                            p.mask.keep = broadcast(in.keep, "keep", s);
                          }},
               mask);
  }
  if (reads_past(p.spec)) {
    // Far beyond any cache; with N and M below 2^30 too, distances stay below 2^31.
    check_lengths(in.past_lengths, "past_lengths", "a mask aligned to \"past\"", s.B,
                  int64_t{1} << 30, "2^30");
  }
}

void bind_biases(Problem& p, const AttentionInputs& in) {
  const AttentionShape& s = p.shape;
  for (const Bias& bias : p.spec.biases) {
    std::visit(
        overloaded{[&](const TensorBias&) {
                     require_given(in.bias, "bias", "the bias tensor");
                     require_floating(in.bias, "bias");
                     p.bias = broadcast(in.bias, "bias", s);
                     if (in.bias.dtype() == DType::f64) {
                       p.bias = broadcast(narrowed(in.bias), "bias", s);
                     }
                   },
                   [&](const Alibi&) {
                     require_given(in.slopes, "slopes", "the bias alibi");
                     require_floating(in.slopes, "slopes");
                     require_shape(in.slopes, "slopes", {s.H}, "(H)");
                     p.in.slopes = table(in.slopes);
                   },
                   [&](const Relative1D& r) {
                     require_given(in.table1d, "table1d", "the bias relative1d");
                     require_floating(in.table1d, "table1d");
                     require_shape(in.table1d, "table1d", {s.H, 2 * r.max_distance + 1},
                                   "(H, 2*max_distance+1)");
                     p.in.table1d = table(in.table1d);
                   },
                   [&](const Relative2D& r) {
                     require_given(in.table2d, "table2d", "the bias relative2d");
                     require_floating(in.table2d, "table2d");
                     require_shape(in.table2d, "table2d", {s.H, 2 * r.height - 1, 2 * r.width - 1},
                                   "(H, 2*height-1, 2*width-1)");
                     p.in.table2d = table(in.table2d);
                     // Without a cache, p = i + M − N ≤ M − 1 always.
                     for (int64_t b = 0; reads_past(p.spec) && b < s.B; ++b) {
                       const int64_t past = in.past_lengths.at<int64_t>(b);
                       require(s.N == 0 || past + s.N <= s.M,
                               "past_lengths[{}]: {} arrived, but {} queries after it leave the "
                               "relative2d grid of {} positions",
                               b, past, s.N, s.M);
                     }
                   }},
        bias);
  }
}

std::vector<float> resolve_scale(const AttentionSpec& spec, const AttentionShape& s) {
  return std::visit(
      overloaded{[&](const AutoScale&) {
                   const bool dot = std::holds_alternative<Dot>(spec.score);
                   // D = 0 makes every score 0; 1 keeps it from becoming 0·inf.
                   const double one = dot && s.D > 0 ? 1 / std::sqrt(double(s.D)) : 1;
                   return std::vector<float>(s.H, static_cast<float>(one));
                 },
                 [&](double one) { return std::vector<float>(s.H, static_cast<float>(one)); },
                 [&](const std::vector<double>& per_head) {
                   return std::vector<float>(per_head.begin(), per_head.end());
                 }},
      spec.scale);
}

}  // namespace

Problem make_problem(const AttentionSpec& spec, const AttentionShape& shape, SimdTarget target,
                     const AttentionInputs& inputs) {
  Problem p;
  p.spec = spec;
  p.shape = shape;
  p.target = target;
  p.in = inputs;
  check_operands(shape, inputs);
  bind_masks(p, inputs);
  bind_biases(p, inputs);
  if (std::holds_alternative<Additive>(spec.score)) {
    require_given(inputs.score_w, "score_w", "the score additive");
    require_floating(inputs.score_w, "score_w");
    require_shape(inputs.score_w, "score_w", {shape.D}, "(D)");
    p.in.score_w = table(inputs.score_w);
  }
  p.scale = resolve_scale(spec, shape);
  fill_ranges(p);
  return p;
}

}  // namespace foci
