// Cutting a problem into sequences and strips.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>
#include <unordered_map>

#include "foci/attention/fused.h"
#include "foci/core/rng.h"
#include "foci/core/threads.h"

namespace foci::fused {

std::vector<Sequence> sequences_of(const Problem& p) {
  const int64_t B = p.shape.B, N = p.shape.N, M = p.shape.M;
  std::vector<Sequence> list;
  struct Keys {
    int64_t first, count;
  };
  std::unordered_map<int32_t, Keys> keys;
  const bool segmented = has_mask<Segments>(p.spec);
  for (int64_t b = 0; b < B; ++b) {
    // A batch entry's cuts depend on itself alone.
    if (!segmented || p.mask.scattered_batch[b]) {
      list.push_back({b, 0, N, 0, M});
      continue;
    }
    const Tensor q = p.in.q_segments.select(0, b).contiguous();
    const Tensor k = p.in.k_segments.select(0, b).contiguous();
    const auto qs = q.span<int32_t>(), ks = k.span<int32_t>();
    keys.clear();
    for (int64_t j = 0; j < M; ++j) ++keys.try_emplace(ks[j], Keys{j, 0}).first->second.count;
    for (int64_t i = 0; i < N;) {
      int64_t end = i + 1;
      while (end < N && qs[end] == qs[i]) ++end;
      const auto found = keys.find(qs[i]);
      const Keys own = found == keys.end() ? Keys{0, 0} : found->second;
      list.push_back({b, i, end - i, own.first, own.count});
      i = end;
    }
  }
  return list;
}

int64_t queries_per_chunk(int64_t queries, int64_t tile) {
  // A chunk costs a partial dK and dV; 256 queries repay that many times over. Fewer chunks for
  // long sequences keep the partial sums' memory small against K and V themselves.
  const int64_t most = queries <= 8192 ? 8 : (queries <= 32768 ? 4 : 2);
  const int64_t wanted = std::max<int64_t>(256, (queries + most - 1) / most);
  return (wanted + tile - 1) / tile * tile;
}

namespace {

// Rows divided by their Euclidean norm (in double, where float squares could overflow); a zero row
// stays zero with inverse norm 0.
void normalise_rows(const Tensor& from, const Tensor& to, const Tensor& inverse) {
  const int64_t heads = from.dim(1), rows = from.dim(2), depth = from.dim(3);
  parallel_for(from.dim(0) * heads, [&](int64_t task) {
    const int64_t b = task / heads, h = task % heads;
    const float* x = from.data<float>() + b * from.stride(0) + h * from.stride(1);
    float* y = to.data<float>() + task * rows * depth;
    float* inv = inverse.data<float>() + task * rows;
    for (int64_t r = 0; r < rows; ++r, x += from.stride(2), y += depth) {
      double sum = 0;
      for (int64_t i = 0; i < depth; ++i) sum += double{x[i]} * x[i];
      const double scale = sum == 0 ? 0 : 1 / std::sqrt(sum);
      // An infinite row has no direction; its gradient is NaN, not the zero row's 0.
      inv[r] =
          static_cast<float>(std::isfinite(sum) ? scale : std::numeric_limits<double>::quiet_NaN());
      for (int64_t i = 0; i < depth; ++i) y[i] = static_cast<float>(x[i] * scale);
    }
  });
}

// Whether a number is NaN, infinite or beyond what products of two may be taken of.
bool any_beyond(const kernels::AttentionKernels& kernels, const Tensor& t) {
  if (!t.defined() || t.numel() == 0) return false;
  std::atomic<bool> found = false;
  int64_t heads = t.dim(1), depth = t.dim(3);
  const int64_t rows = t.dim(2), row_stride = t.stride(2);
  // Heads side by side in a row of channels, as a projection leaves them, are read as one.
  if (t.stride(1) == depth && row_stride == heads * depth) {
    depth *= heads;
    heads = 1;
  }
  parallel_for(t.dim(0) * heads, [&](int64_t task) {
    const float* x = t.data<float>() + task / heads * t.stride(0) + task % heads * t.stride(1);
    if (row_stride == depth) {
      if (kernels.any_beyond(x, rows * depth)) found = true;
      return;
    }
    for (int64_t r = 0; r < rows && !found; ++r) {
      if (kernels.any_beyond(x + r * row_stride, depth)) found = true;
    }
  });
  return found;
}
// Of a small, contiguous table.
bool any_beyond_flat(const kernels::AttentionKernels& kernels, const Tensor& t) {
  return t.defined() && kernels.any_beyond(t.data<float>(), t.numel());
}

// e^(2x) of each row, contiguous, and which rows are too wide for it.
Tensor exponentials(const kernels::AttentionKernels& kernels, const Tensor& t,
                    std::vector<uint8_t>& wide) {
  const int64_t heads = t.dim(1), rows = t.dim(2), depth = t.dim(3);
  const Tensor to = Tensor::empty(t.shape());
  wide.resize(t.dim(0) * heads * rows);
  parallel_for(t.dim(0) * heads, [&](int64_t task) {
    const float* x = t.data<float>() + task / heads * t.stride(0) + task % heads * t.stride(1);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = task * rows + r;
      wide[at] = kernels.exponentials(x + r * t.stride(2), depth, to.data<float>() + at * depth);
    }
  });
  return to;
}

struct BiasFinds {
  bool masks = false;   // −inf
  bool beyond = false;  // NaN, +inf
};

// Reads each element that the bias tensor stores once, whatever it is broadcast to.
BiasFinds look_at_bias(const Tensor& bias) {
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
      for (int64_t j = 0; j < own[3]; ++j) {
        const T x = row[j * stride[3]];
        if constexpr (std::is_same_v<T, float>) {
          const bool is_minus = x == -std::numeric_limits<float>::infinity();
          minus |= is_minus;
          odd |= !is_minus && !(x - x == 0);
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

bool serves_narrow(const AttentionSpec& spec) {
  return std::holds_alternative<Softmax>(spec.normalizer) &&
         (std::holds_alternative<Dot>(spec.score) || std::holds_alternative<Cosine>(spec.score));
}

Operands operands_of(const Problem& p, const Tensor& dy, bool narrow) {
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(p.target);
  Operands o;
  o.v = p.in.v;
  float factor = 1;
  const auto as_given = [&] {
    o.q = p.in.q;
    o.k = p.in.k;
  };
  std::visit(overloaded{[&](const Dot&) { as_given(); },
                        [&](const Cosine&) {
                          o.q = Tensor::empty(p.in.q.shape());
                          o.k = Tensor::empty(p.in.k.shape());
                          o.q_inverse_norm = Tensor::empty({p.shape.B, p.shape.H, p.shape.N});
                          o.k_inverse_norm = Tensor::empty({p.shape.B, p.shape.Hk, p.shape.M});
                          normalise_rows(p.in.q, o.q, o.q_inverse_norm);
                          normalise_rows(p.in.k, o.k, o.k_inverse_norm);
                        },
                        [&](const L2& l2) {
                          as_given();
                          factor = static_cast<float>(l2.gamma);
                        },
                        [&](const Additive&) {
                          as_given();
                          o.q_exp = exponentials(kernels, o.q, o.q_wide);
                          o.k_exp = exponentials(kernels, o.k, o.k_wide);
                        }},
             p.spec.score);
  // Careful costs forward_narrow nothing, looking through K and V as much as reading them.
  narrow = narrow && p.shape.N <= kernels::kNarrowRows;
  o.careful = narrow || any_beyond(kernels, o.q) || any_beyond(kernels, o.k) ||
              any_beyond(kernels, o.v) || any_beyond(kernels, dy) ||
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
    const BiasFinds finds = look_at_bias(p.bias);
    o.bias_masks = finds.masks;
    o.careful = o.careful || finds.beyond;
  }
  o.query_position = in_32_bits(p.positions.q);
  o.key_position = in_32_bits(p.positions.k);
  if (const auto* grid = find_bias<Relative2D>(p.spec)) number_cells(p, *grid, o);
  return o;
}

kernels::RowMap row_map_of(const AttentionSpec& spec) {
  using kernels::RowMap;
  using kernels::RowNormalizer;
  return std::visit(
      overloaded{
          [](const Softmax&) { return RowMap{}; },
          [](const Sparsemax&) {
            return RowMap{RowNormalizer::sparsemax, 2};
          },
          [](const Entmax& e) {
            return RowMap{e.alpha == 2 ? RowNormalizer::sparsemax : RowNormalizer::entmax, e.alpha};
          },
          [](const TopK& t) {
            return RowMap{RowNormalizer::top_k, 0, t.k};
          }},
      spec.normalizer);
}

namespace {

kernels::StripBias strip_bias(const Problem& p, int64_t b, int64_t h, int64_t row, int64_t key) {
  const Dims& s = p.bias.strides();
  kernels::StripBias bias;
  bias.dtype = p.bias.dtype();
  bias.query_stride = s[2];
  bias.key_stride = s[3];
  bias.data =
      static_cast<const std::byte*>(p.bias.raw()) +
      (b * s[0] + h * s[1] + row * s[2] + key * s[3]) * static_cast<int64_t>(size_of(bias.dtype));
  return bias;
}

kernels::StripPositions strip_positions(const Problem& p, const Operands& o, const Sequence& s,
                                        int64_t h, int64_t row) {
  const int64_t b = s.batch, N = p.shape.N, M = p.shape.M;
  kernels::StripPositions x;
  if (!o.query_position.empty() || !o.key_position.empty()) {
    x.query = o.query_position.data() + b * N + row;
    x.key = o.key_position.data() + b * M + s.key_begin;
  }
  if (find_bias<Alibi>(p.spec)) {
    x.alibi = true;
    x.slope = p.in.slopes.data<float>()[h];
  }
  if (const auto* r = find_bias<Relative1D>(p.spec)) {
    x.table1d = p.in.table1d.data<float>() + h * p.in.table1d.stride(0);
    x.max_distance = static_cast<int32_t>(r->max_distance);
  }
  if (const auto* r = find_bias<Relative2D>(p.spec)) {
    x.table2d = p.in.table2d.data<float>() + h * p.in.table2d.stride(0);
    x.query_cell = o.query_cell.data() + b * N + row;
    x.key_cell = o.key_cell.data() + s.key_begin;
    x.centre = static_cast<int32_t>((r->height - 1) * (2 * r->width - 1) + r->width - 1);
  }
  return x;
}

}  // namespace

void make_strip(const Problem& p, const Operands& o, const Sequence& s, int64_t h, int64_t first,
                int64_t count, kernels::Strip& strip) {
  const int64_t N = p.shape.N, M = p.shape.M;
  const int64_t b = s.batch, hk = h / (p.shape.H / p.shape.Hk), row = s.query_begin + first;
  strip.D = p.shape.D;
  strip.Dv = p.shape.Dv;
  std::visit(overloaded{[&](const Dot&) { strip.score = kernels::ScoreKind::dot; },
                        [&](const Cosine&) { strip.score = kernels::ScoreKind::dot; },
                        [&](const L2& l2) {
                          strip.score = kernels::ScoreKind::l2;
                          strip.gamma = static_cast<float>(l2.gamma);
                        },
                        [&](const Additive&) {
                          strip.score = kernels::ScoreKind::additive;
                          strip.score_w = p.in.score_w.data<float>();
                          const int64_t D = p.shape.D, q = (b * p.shape.H + h) * N + row;
                          const int64_t k = (b * p.shape.Hk + hk) * M + s.key_begin;
                          strip.q_exp = o.q_exp.data<float>() + q * D;
                          strip.k_exp = o.k_exp.data<float>() + k * D;
                          strip.q_wide = o.q_wide.data() + q;
                          strip.k_wide = o.k_wide.data() + k;
                        }},
             p.spec.score);
  strip.scale = p.scale[h];
  strip.softcap = static_cast<float>(p.spec.softcap.value_or(0));
  strip.careful = o.careful;
  strip.q = o.q.data<float>() + b * o.q.stride(0) + h * o.q.stride(1) + row * o.q.stride(2);
  strip.q_stride = o.q.stride(2);
  strip.k =
      o.k.data<float>() + b * o.k.stride(0) + hk * o.k.stride(1) + s.key_begin * o.k.stride(2);
  strip.k_stride = o.k.stride(2);
  strip.v =
      o.v.data<float>() + b * o.v.stride(0) + hk * o.v.stride(1) + s.key_begin * o.v.stride(2);
  strip.v_stride = o.v.stride(2);
  kernels::LaneMask& mask = strip.mask;
  mask = {};
  mask.lanes = static_cast<int>(count);
  const int64_t at = b * N + row;
  for (int64_t lane = 0; lane < count; ++lane) {
    // An empty range may stand anywhere; at the sequence's start it stays inside.
    const bool empty = p.mask.begin[at + lane] >= p.mask.end[at + lane];
    mask.begin[lane] = empty ? 0 : p.mask.begin[at + lane] - s.key_begin;
    mask.end[lane] = empty ? 0 : p.mask.end[at + lane] - s.key_begin;
  }
  if (p.mask.keep.defined()) {
    const Dims& strides = p.mask.keep.strides();
    mask.keep = reinterpret_cast<const uint8_t*>(p.mask.keep.data<bool>()) + b * strides[0] +
                h * strides[1] + row * strides[2] + s.key_begin * strides[3];
    mask.keep_query_stride = strides[2];
    mask.keep_key_stride = strides[3];
  }
  if (p.mask.scattered && p.mask.scattered_batch[b]) {
    mask.key_segment = p.mask.k_segment.data() + b * M;
    mask.key_local = p.mask.k_local.data() + b * M;
    mask.query_segment = p.mask.q_segment.data() + at;
    mask.local_begin = p.mask.local_begin.data() + at;
    mask.local_end = p.mask.local_end.data() + at;
  }
  if (p.bias.defined()) {
    strip.bias = strip_bias(p, b, h, row, s.key_begin);
    if (o.bias_masks) mask.bias = strip.bias;
  }
  strip.positions = strip_positions(p, o, s, h, row);
  strip.dropout = {};
  if (p.spec.dropout) {
    kernels::StripDropout drop{.threshold = dropout_threshold(p.spec.dropout->p),
                               .seed = p.spec.dropout->seed,
                               .batch = b,
                               .head = h,
                               .query = row,
                               .key = s.key_begin};
    (p.spec.dropout->place == DropoutPlace::keys ? mask.drop_key : strip.dropout) = drop;
  }
}

}  // namespace foci::fused
