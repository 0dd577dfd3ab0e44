// Cutting a problem into sequences and strips.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <unordered_map>

#include "foci/attention/fused.h"
#include "foci/core/threads.h"

namespace foci::fused {

std::vector<Sequence> sequences_of(const Problem& p) {
  const int64_t B = p.shape.B, N = p.shape.N, M = p.shape.M;
  std::vector<Sequence> list;
  if (!has_mask<Segments>(p.spec) || p.mask.scattered) {
    for (int64_t b = 0; b < B; ++b) list.push_back({b, 0, N, 0, M});
    return list;
  }
  struct Keys {
    int64_t first, count;
  };
  std::unordered_map<int32_t, Keys> keys;
  for (int64_t b = 0; b < B; ++b) {
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
      inv[r] = static_cast<float>(scale);
      for (int64_t i = 0; i < depth; ++i) y[i] = static_cast<float>(x[i] * scale);
    }
  });
}

bool any_non_finite(const kernels::AttentionKernels& kernels, const Tensor& t) {
  if (t.numel() == 0) return false;
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
      if (kernels.any_non_finite(x, rows * depth)) found = true;
      return;
    }
    for (int64_t r = 0; r < rows && !found; ++r) {
      if (kernels.any_non_finite(x + r * row_stride, depth)) found = true;
    }
  });
  return found;
}

}  // namespace

Operands operands_of(const Problem& p, const Tensor* dy) {
  Operands o;
  o.v = p.in.v;
  std::visit(overloaded{[&](const Dot&) {
                          o.q = p.in.q;
                          o.k = p.in.k;
                        },
                        [&](const Cosine&) {
                          o.q = Tensor::empty(p.in.q.shape());
                          o.k = Tensor::empty(p.in.k.shape());
                          o.q_inverse_norm = Tensor::empty({p.shape.B, p.shape.H, p.shape.N});
                          o.k_inverse_norm = Tensor::empty({p.shape.B, p.shape.Hk, p.shape.M});
                          normalise_rows(p.in.q, o.q, o.q_inverse_norm);
                          normalise_rows(p.in.k, o.k, o.k_inverse_norm);
                        },
                        [](const L2&) { throw Error("fused: L2 was refused"); },
                        [](const Additive&) { throw Error("fused: additive was refused"); }},
             p.spec.score);
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(p.target);
  o.careful = any_non_finite(kernels, o.q) || any_non_finite(kernels, o.k) ||
              any_non_finite(kernels, o.v) || (dy != nullptr && any_non_finite(kernels, *dy));
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
          [](const TopK&) -> RowMap { throw Error("fused: top-k was refused"); }},
      spec.normalizer);
}

void make_strip(const Problem& p, const Operands& o, const Sequence& s, int64_t h, int64_t first,
                int64_t count, kernels::Strip& strip) {
  const int64_t N = p.shape.N, M = p.shape.M;
  const int64_t b = s.batch, hk = h / (p.shape.H / p.shape.Hk), row = s.query_begin + first;
  strip.D = p.shape.D;
  strip.Dv = p.shape.Dv;
  strip.scale = p.scale[h];
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
  if (p.mask.scattered) {
    mask.key_segment = p.mask.k_segment.data() + b * M;
    mask.key_local = p.mask.k_local.data() + b * M;
    mask.query_segment = p.mask.q_segment.data() + at;
    mask.local_begin = p.mask.local_begin.data() + at;
    mask.local_end = p.mask.local_end.data() + at;
  }
}

}  // namespace foci::fused
