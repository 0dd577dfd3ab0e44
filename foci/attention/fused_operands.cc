// What the kernels read: Q, K and V as they want them, positions, and whether anything in them is
// out of the ordinary.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>

#include "foci/attention/fused.h"
#include "foci/core/threads.h"

namespace foci::fused {

namespace {

// Rows divided by their Euclidean norm (in double, where float squares could overflow); a zero row
// stays zero with inverse norm 0.
void normalise_rows(const Tensor& from, const Tensor& to, const Tensor& inverse) {
  const int64_t heads = from.dim(1), rows = from.dim(2), depth = from.dim(3);
  parallel_for(from.dim(0) * heads, [&](int64_t task) {
    const int64_t b = task / heads, h = task % heads;
    const float* x = from.data<float>() + b * from.stride(0) + h * from.stride(1);
    float* y = to.data<float>() + task * rows * depth;
    double* inv = inverse.data<double>() + task * rows;
    for (int64_t r = 0; r < rows; ++r, x += from.stride(2), y += depth) {
      double sum = 0;
      for (int64_t i = 0; i < depth; ++i) sum += double{x[i]} * x[i];
      const double scale = sum == 0 ? 0 : 1 / std::sqrt(sum);
      // An infinite row has no direction; its gradient is NaN, not the zero row's 0.
      inv[r] = std::isfinite(sum) ? scale : std::numeric_limits<double>::quiet_NaN();
      for (int64_t i = 0; i < depth; ++i) y[i] = static_cast<float>(x[i] * scale);
    }
  });
}

// Rows that one task looks through.
constexpr int64_t kLookRows = 256;

// Whether a number is NaN, infinite or beyond what products of two may be taken of.
bool any_beyond(const kernels::AttentionKernels& kernels, const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return false;
  std::atomic<bool> found = false;
  int64_t heads = t.dim(1), depth = t.dim(3);
  const int64_t rows = t.dim(2), row_stride = t.stride(2);
  // Heads side by side in a row of channels, as a projection leaves them, are read as one.
  if (t.stride(1) == depth && row_stride >= heads * depth) {
    depth *= heads;
    heads = 1;
  }
  const int64_t blocks = (rows + kLookRows - 1) / kLookRows;
  parallel_for(t.dim(0) * heads * blocks, [&](int64_t task) {
    const int64_t head = task / blocks, begin = task % blocks * kLookRows;
    const int64_t end = std::min(begin + kLookRows, rows);
    const float* x = t.data<float>() + head / heads * t.stride(0) + head % heads * t.stride(1);
    if (row_stride == depth) {
      if (kernels.any_beyond(x + begin * depth, (end - begin) * depth)) found = true;
      return;
    }
    for (int64_t r = begin; r < end && !found; ++r) {
      if (kernels.any_beyond(x + r * row_stride, depth)) found = true;
    }
  });
  return found;
}
// Of a small, contiguous table.
bool any_beyond_flat(const kernels::AttentionKernels& kernels, const Tensor& t) {
  return t.defined() && kernels.any_beyond(t.data<float>(), t.numel());
}

// e^(2x) of each row, contiguous, and how large the rows are.
Tensor exponentials(const kernels::AttentionKernels& kernels, const Tensor& t,
                    std::vector<kernels::RowSize>& sizes) {
  const int64_t heads = t.dim(1), rows = t.dim(2), depth = t.dim(3);
  Tensor to = Tensor::empty(t.shape());
  sizes.resize(t.dim(0) * heads * rows);
  parallel_for(t.dim(0) * heads, [&](int64_t task) {
    const float* x = t.data<float>() + task / heads * t.stride(0) + task % heads * t.stride(1);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = task * rows + r;
      sizes[at] = kernels.exponentials(x + r * t.stride(2), depth, to.data<float>() + at * depth);
    }
  });
  return to;
}

Tensor boxes_of(const kernels::AttentionKernels& kernels, const Tensor& k) {
  const int64_t heads = k.dim(1), rows = k.dim(2), depth = k.dim(3);
  const int64_t blocks = (rows + kernels::kBoxKeys - 1) / kernels::kBoxKeys;
  Tensor boxes = Tensor::empty({k.dim(0), heads, blocks, 2, depth});
  constexpr int64_t kStep = 16;  // blocks a task
  const int64_t steps = (blocks + kStep - 1) / kStep;
  parallel_for(k.dim(0) * heads * steps, [&](int64_t task) {
    const int64_t b = task / steps / heads, h = task / steps % heads;
    const float* from = k.data<float>() + b * k.stride(0) + h * k.stride(1);
    float* to = boxes.data<float>() + task / steps * blocks * 2 * depth;
    const int64_t begin = task % steps * kStep, end = std::min(begin + kStep, blocks);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kernels::kBoxKeys;
      kernels.box(from + first * k.stride(2), k.stride(2),
                  std::min(kernels::kBoxKeys, rows - first), depth, to + block * 2 * depth);
    }
  });
  return boxes;
}

// Queries of a head of keys that repay reading K once more, and keys that are worth leaving out.
constexpr int64_t kBoxQueries = 128;
constexpr int64_t kBoxedKeys = 4 * kernels::kBoxKeys;

struct BiasFinds {
  bool masks = false;   // −inf
  bool beyond = false;  // NaN, +inf
};

// Reads each element that the bias tensor stores once, whatever it is broadcast to.
BiasFinds look_at_bias(const kernels::AttentionKernels& kernels, const Tensor& bias) {
  std::atomic<bool> masks = false, beyond = false;
  const Dims& stride = bias.strides();
  int64_t own[4];
  for (int d = 0; d < 4; ++d)
    own[d] = stride[d] == 0 ? std::min<int64_t>(1, bias.dim(d)) : bias.dim(d);
  const auto look = [&]<class T>(const T* data) {
    parallel_for(own[0] * own[1] * own[2], [&](int64_t task) {
      const int64_t i = task % own[2], h = task / own[2] % own[1], b = task / own[2] / own[1];
      const T* row = data + b * stride[0] + h * stride[1] + i * stride[2];
      bool minus = false, odd = false;
      // Most rows hold nothing of the kind, which is seen at once.
      if constexpr (std::is_same_v<T, float>) {
        if ((stride[3] == 1 || own[3] <= 1) && !kernels.any_beyond(row, own[3])) return;
      }
      for (int64_t j = 0; j < own[3]; ++j) {
        const T x = row[j * stride[3]];
        if constexpr (std::is_same_v<T, float>) {
          const bool is_minus = x == -std::numeric_limits<float>::infinity();
          minus |= is_minus;
          odd |= !is_minus && !std::isfinite(x);
        } else {
          constexpr bool half = std::is_same_v<T, f16>;
          constexpr uint16_t exponent = half ? 0x7C00 : 0x7F80;
          const bool is_minus = x.bits == (exponent | 0x8000);
          minus |= is_minus;
          odd |= !is_minus && (x.bits & exponent) == exponent;
        }
      }
      if (minus) masks = true;
      if (odd) beyond = true;
    });
  };
  switch (bias.dtype()) {
    case DType::f16:
      look(bias.data<f16>());
      break;
    case DType::bf16:
      look(bias.data<bf16>());
      break;
    default:
      look(bias.data<float>());
  }
  return {masks, beyond};
}

std::vector<int32_t> in_32_bits(const std::vector<int64_t>& x) {
  return {x.begin(), x.end()};
}

// Cells of the relative 2-D grid, numbered so that a difference of two is a place in the table.
void number_cells(const Problem& p, const Relative2D& r, Operands& o) {
  const auto cell = [&](int64_t x) {
    return static_cast<int32_t>(x / r.width * (2 * r.width - 1) + x % r.width);
  };
  const bool past = bias_align(p.spec) == Align::past;
  o.query_cell.resize(p.shape.B * p.shape.N);
  o.key_cell.resize(p.shape.M);
  for (int64_t b = 0; b < p.shape.B; ++b) {
    const int64_t start = past ? p.in.past_lengths.at<int64_t>(b) : p.shape.M - p.shape.N;
    for (int64_t i = 0; i < p.shape.N; ++i) o.query_cell[b * p.shape.N + i] = cell(start + i);
  }
  for (int64_t j = 0; j < p.shape.M; ++j) o.key_cell[j] = cell(j);
}

// The float that stands in for a spec's number; beyond this factor products may overflow.
constexpr float kLargestFactor = 1e6f;

}  // namespace

std::optional<std::string> top_k_scores_all(const AttentionSpec& spec, const AttentionShape& s) {
  const auto* top = std::get_if<TopK>(&spec.normalizer);
  if (top == nullptr) return std::nullopt;
  if (!std::holds_alternative<Dot>(spec.score) && !std::holds_alternative<Cosine>(spec.score)) {
    return "bounds are for dot and cosine scores";
  }
  if (!spec.biases.empty()) return "bounds do not know of biases";
  if (s.M < kBoxedKeys) return fmt::format("there are fewer than {} keys", kBoxedKeys);
  if (s.M / 2 <= top->k) return "k is half the keys or more";
  if (s.N * (s.H / s.Hk) < kBoxQueries) {
    return fmt::format("fewer than {} queries share a key", kBoxQueries);
  }
  if (s.D < 1 || s.D > kernels::kDeepestBox) {
    return fmt::format("bounds are for heads of 1 to {} numbers", kernels::kDeepestBox);
  }
  return std::nullopt;
}

bool serves_narrow(const AttentionSpec& spec) {
  return std::holds_alternative<Softmax>(spec.normalizer) &&
         (std::holds_alternative<Dot>(spec.score) || std::holds_alternative<Cosine>(spec.score));
}

Operands operands_of(const Problem& p, const Tensor& dy, bool narrow, bool ordinary) {
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(p.target);
  Operands o;
  o.v = p.in.v;
  float factor = 1;
  const auto as_given = [&] {
    o.q = p.in.q;
    o.k = p.in.k;
  };
  std::visit(
      overloaded{[&](const Dot&) { as_given(); },
                 [&](const Cosine&) {
                   o.q = Tensor::empty(p.in.q.shape());
                   o.k = Tensor::empty(p.in.k.shape());
                   o.q_inverse_norm = Tensor::empty({p.shape.B, p.shape.H, p.shape.N}, DType::f64);
                   o.k_inverse_norm = Tensor::empty({p.shape.B, p.shape.Hk, p.shape.M}, DType::f64);
                   normalise_rows(p.in.q, o.q, o.q_inverse_norm);
                   normalise_rows(p.in.k, o.k, o.k_inverse_norm);
                 },
                 [&](const L2& l2) {
                   as_given();
                   factor = static_cast<float>(l2.gamma);
                 },
                 [&](const Additive&) {
                   as_given();
                   o.q_exp = exponentials(kernels, o.q, o.q_size);
                   o.k_exp = exponentials(kernels, o.k, o.k_size);
                 }},
      p.spec.score);
  // Careful costs forward_narrow nothing, looking through K and V as much as reading them.
  narrow = narrow && p.shape.N <= kernels::kNarrowRows;
  o.careful = narrow || any_beyond(kernels, dy) ||
              (!ordinary && (any_beyond(kernels, o.q) || any_beyond(kernels, o.k) ||
                             any_beyond(kernels, o.v))) ||
              std::abs(factor) > kLargestFactor;
  // Of the small tables those that the spec reads, which bind made float32.
  const auto look_at = [&](bool read, const Tensor& table) {
    o.careful = o.careful || (read && any_beyond_flat(kernels, table));
  };
  look_at(std::holds_alternative<Additive>(p.spec.score), p.in.score_w);
  look_at(find_bias<Alibi>(p.spec) != nullptr, p.in.slopes);
  look_at(find_bias<Relative1D>(p.spec) != nullptr, p.in.table1d);
  look_at(find_bias<Relative2D>(p.spec) != nullptr, p.in.table2d);
  for (float scale : p.scale) o.careful = o.careful || !(std::abs(scale) <= kLargestFactor);
  if (p.bias.defined()) {
    const BiasFinds finds = look_at_bias(kernels, p.bias);
    o.bias_masks = finds.masks;
    o.careful = o.careful || finds.beyond;
  }
  o.query_position = in_32_bits(p.positions.q);
  o.key_position = in_32_bits(p.positions.k);
  if (const auto* grid = find_bias<Relative2D>(p.spec)) number_cells(p, *grid, o);
  if (std::holds_alternative<TopK>(p.spec.normalizer) && !o.careful && p.shape.B > 0 &&
      !top_k_scores_all(p.spec, p.shape)) {
    o.boxes = boxes_of(kernels, o.k);
  }
  return o;
}

}  // namespace foci::fused
