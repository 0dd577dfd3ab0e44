// Cutting a call into pieces and blocks, and gathering rows into dense float32.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "foci/attention/plain.h"
#include "foci/core/threads.h"

namespace foci::plain {
namespace {

void append_pieces(const Problem& problem, int64_t b, Layout& layout) {
  const int64_t N = problem.shape.N, M = problem.shape.M;
  std::vector<int64_t> queries(N), keys(M);
  std::iota(queries.begin(), queries.end(), int64_t{0});
  std::iota(keys.begin(), keys.end(), int64_t{0});
  const int64_t q_base = static_cast<int64_t>(layout.query.size());
  const int64_t k_base = static_cast<int64_t>(layout.key.size());
  const auto append = [&](int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
    bool neighbours = true;
    for (int64_t j = k0 + 1; j < k1; ++j) neighbours = neighbours && keys[j] == keys[j - 1] + 1;
    layout.pieces.push_back({.batch = b,
                             .q0 = q_base + q0,
                             .q1 = q_base + q1,
                             .k0 = k_base + k0,
                             .k1 = k_base + k1,
                             .packed = layout.packed_rows[b],
                             .neighbours = neighbours});
    layout.packed_rows[b] += round_up(k1 - k0, kKeyStep);
  };
  if (!has_mask<Segments>(problem.spec)) {
    append(0, N, 0, M);
  } else {
    const AttentionInputs& in = problem.in;
    const int32_t* qs = in.q_segments.data<int32_t>() + b * in.q_segments.stride(0);
    const int32_t* ks = in.k_segments.data<int32_t>() + b * in.k_segments.stride(0);
    std::stable_sort(queries.begin(), queries.end(),
                     [&](int64_t x, int64_t y) { return qs[x] < qs[y]; });
    std::stable_sort(keys.begin(), keys.end(), [&](int64_t x, int64_t y) { return ks[x] < ks[y]; });
    int64_t k = 0;
    for (int64_t q = 0; q < N;) {
      const int32_t id = qs[queries[q]];
      int64_t q_end = q;
      while (q_end < N && qs[queries[q_end]] == id) ++q_end;
      while (k < M && ks[keys[k]] < id) ++k;
      int64_t k_end = k;
      while (k_end < M && ks[keys[k_end]] == id) ++k_end;
      append(q, q_end, k, k_end);
      q = q_end;
      k = k_end;
    }
  }
  layout.query.insert(layout.query.end(), queries.begin(), queries.end());
  layout.key.insert(layout.key.end(), keys.begin(), keys.end());
}

void append_blocks(const Problem& problem, int64_t piece_index, Layout& layout) {
  const Piece& piece = layout.pieces[piece_index];
  const auto first = layout.key.begin() + piece.k0, last = layout.key.begin() + piece.k1;
  for (int64_t q0 = piece.q0; q0 < piece.q1; q0 += kBlockRows) {
    Block block{.piece = piece_index,
                .q0 = q0,
                .q1 = std::min(q0 + kBlockRows, piece.q1),
                .lo = std::numeric_limits<int64_t>::max(),
                .hi = 0};
    for (int64_t q = block.q0; q < block.q1; ++q) {
      // A mask's range, exact in the piece's own numbers even where its keys do not lie together.
      const int64_t row = piece.batch * problem.shape.N + layout.query[q];
      const int64_t begin = std::lower_bound(first, last, problem.mask.begin[row]) - first;
      const int64_t end = std::lower_bound(first, last, problem.mask.end[row]) - first;
      if (begin >= end) continue;
      layout.begin[q] = begin;
      layout.end[q] = end;
      block.lo = std::min(block.lo, begin);
      block.hi = std::max(block.hi, end);
    }
    if (block.lo >= block.hi) block.lo = block.hi = 0;
    block.lo = block.lo / kInner * kInner;
    block.hi = round_up(block.hi, kKeyStep);
    layout.max_width = std::max(layout.max_width, block.hi - block.lo);
    layout.blocks.push_back(block);
  }
}

template <class T>
void load_row(const T* from, int64_t columns, float* to) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(to, from, columns * sizeof(float));
  } else {
    for (int64_t d = 0; d < columns; ++d) to[d] = static_cast<float>(from[d]);
  }
}

bool is_finite(const float* x, int64_t n) {
  uint32_t odd = 0;
  for (int64_t d = 0; d < n; ++d) {
    odd |= (std::bit_cast<uint32_t>(x[d]) & 0x7f800000u) == 0x7f800000u;
  }
  return odd == 0;
}

}  // namespace

Layout cut(const Problem& problem) {
  Layout layout;
  const int64_t B = problem.shape.B;
  layout.packed_rows.assign(B, 0);
  layout.batch_pieces = {0};
  for (int64_t b = 0; b < B; ++b) {
    append_pieces(problem, b, layout);
    layout.batch_pieces.push_back(static_cast<int64_t>(layout.pieces.size()));
  }
  layout.begin.assign(layout.query.size(), 0);
  layout.end.assign(layout.query.size(), 0);
  layout.batch_blocks = {0};
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t p = layout.batch_pieces[b]; p < layout.batch_pieces[b + 1]; ++p) {
      append_blocks(problem, p, layout);
    }
    layout.batch_blocks.push_back(static_cast<int64_t>(layout.blocks.size()));
  }
  return layout;
}

const float* Rows::true_row(int64_t r) const {
  const auto at = std::lower_bound(odd.begin(), odd.end(), r);
  if (at == odd.end() || *at != r) return row(r);
  return odd_data.data() + (at - odd.begin()) * ld;
}

void reset_rows(int64_t rows, int64_t columns, Rows& out) {
  out.count = rows;
  out.ld = padded_columns(columns);
  const int64_t count = rows * out.ld;
  if (!out.data.defined() || out.data.numel() < count) out.data = Tensor::empty({count});
  std::fill_n(out.data.data<float>(), count, 0.0f);
  out.odd.clear();
  out.odd_data.clear();
}

void load_rows(const Tensor& source, std::span<const int64_t> index, int64_t first, Rows& out) {
  const int64_t columns = source.dim(1), stride = source.stride(0);
  const auto load = [&](const auto* from) {
    for (size_t r = 0; r < index.size(); ++r) {
      const int64_t at = first + static_cast<int64_t>(r);
      float* to = out.row(at);
      load_row(from + index[r] * stride, columns, to);
      if (is_finite(to, columns)) continue;
      out.odd.push_back(at);
      out.odd_data.insert(out.odd_data.end(), to, to + out.ld);
      std::fill_n(to, columns, 0.0f);
    }
  };
  switch (source.dtype()) {
    case DType::f32:
      return load(source.data<float>());
    case DType::f16:
      return load(source.data<f16>());
    case DType::bf16:
      return load(source.data<bf16>());
    default:
      throw Error("load_rows: not a floating tensor");
  }
}

void prepare_operand(const Score& score, int64_t columns, Operand& operand) {
  Rows& rows = operand.rows;
  const int64_t count = rows.count;
  const auto square = [&](int64_t r) {
    const float* x = rows.true_row(r);
    double sum = 0;
    for (int64_t d = 0; d < columns; ++d) sum += double(x[d]) * x[d];
    return sum;
  };
  std::visit(overloaded{[](const Dot&) {},
                        [&](const Cosine&) {
                          operand.inverse.assign(count, 0);
                          for (int64_t r = 0; r < count; ++r) {
                            const double norm = std::sqrt(square(r));
                            if (norm == 0) continue;
                            // A row with infinity has no direction; 0 would make it a zero vector.
                            operand.inverse[r] = std::isinf(norm) ? std::nan("") : 1 / norm;
                            // Either the row itself, or what stands beside its zeros.
                            float* x = const_cast<float*>(rows.true_row(r));
                            for (int64_t d = 0; d < columns; ++d)
                              x[d] = static_cast<float>(x[d] / norm);
                          }
                        },
                        [](const L2&) {},
                        [&](const Additive&) {
                          operand.size.resize(count);
                          float* e = room(operand.exponential, count * rows.ld);
                          for (int64_t r = 0; r < count; ++r, e += rows.ld) {
                            const float* x = rows.true_row(r);
                            bool narrow = true, small = true;
                            for (int64_t d = 0; d < columns; ++d) {
                              narrow = narrow && std::abs(x[d]) <= kernels::kExpLimit;
                              small = small && std::abs(x[d]) <= kernels::kSmallLimit;
                            }
                            operand.size[r] = !narrow ? kernels::RowSize::wide
                                              : small ? kernels::RowSize::small
                                                      : kernels::RowSize::usual;
                            for (int64_t d = 0; d < rows.ld; ++d)
                              e[d] = narrow ? std::exp(2 * x[d]) : 1;
                          }
                        }},
             score);
}

std::vector<PackedKeys> pack_keys(const Problem& problem, const Layout& layout) {
  const AttentionShape& s = problem.shape;
  std::vector<PackedKeys> packed(s.B * s.Hk);
  parallel_for(s.B * s.Hk, [&](int64_t task) {
    const int64_t b = task / s.Hk, g = task % s.Hk;
    PackedKeys& to = packed[task];
    reset_rows(layout.packed_rows[b], s.D, to.k.rows);
    reset_rows(layout.packed_rows[b], s.Dv, to.v);
    const Tensor k = problem.in.k.select(0, b).select(0, g);
    const Tensor v = problem.in.v.select(0, b).select(0, g);
    for (int64_t p = layout.batch_pieces[b]; p < layout.batch_pieces[b + 1]; ++p) {
      const Piece& piece = layout.pieces[p];
      const std::span index(layout.key.data() + piece.k0, piece.k1 - piece.k0);
      load_rows(k, index, piece.packed, to.k.rows);
      load_rows(v, index, piece.packed, to.v);
    }
    prepare_operand(problem.spec.score, s.D, to.k);
  });
  return packed;
}

}  // namespace foci::plain
