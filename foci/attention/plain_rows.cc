// What the unfused forward and backward share: scratch, queries, dropout, products that keep
// NaN and infinity where they may be seen.
#include <algorithm>
#include <cmath>
#include <mutex>

#include "foci/attention/plain.h"
#include "foci/core/rng.h"
#include "foci/core/threads.h"

namespace foci::plain {

float* room(Tensor& buffer, int64_t count) {
  if (!buffer.defined() || buffer.numel() < count) buffer = Tensor::empty({count});
  return buffer.data<float>();
}

std::unique_ptr<Scratch> ScratchPool::take() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return std::make_unique<Scratch>();
  std::unique_ptr<Scratch> scratch = std::move(free_.back());
  free_.pop_back();
  return scratch;
}

void ScratchPool::give(std::unique_ptr<Scratch> scratch) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(scratch));
}

Site make_site(const Problem& problem, const Layout& layout, const Block& block, int64_t head,
               std::vector<int64_t>& entries) {
  entries.resize(block.q1 - block.q0);
  for (int64_t q = block.q0; q < block.q1; ++q) entries[q - block.q0] = q;
  return {.problem = &problem,
          .layout = &layout,
          .piece = &layout.pieces[block.piece],
          .head = head,
          .entries = entries,
          .lo = block.lo,
          .hi = block.hi};
}

void load_queries(const Site& site, Operand& q) {
  const Problem& p = *site.problem;
  const int64_t count = static_cast<int64_t>(site.entries.size());
  std::vector<int64_t> index(count);
  for (int64_t r = 0; r < count; ++r) index[r] = site.query(r);
  reset_rows(padded_rows(count), p.shape.D, q.rows);
  load_rows(p.in.q.select(0, site.piece->batch).select(0, site.head), index, 0, q.rows);
  prepare_operand(p.spec.score, p.shape.D, q);
}

DropoutBits::DropoutBits(const Site& site, int64_t r)
    : seed_(site.problem->spec.dropout->seed),
      query_(static_cast<uint32_t>(site.query(r))),
      head_(static_cast<uint32_t>(site.head)),
      batch_(static_cast<uint32_t>(site.piece->batch)) {}

uint16_t DropoutBits::operator()(int64_t key) {
  if (key / 8 != group_) {
    group_ = key / 8;
    words_ = philox(seed_, {static_cast<uint32_t>(group_), query_, head_, batch_});
  }
  return static_cast<uint16_t>(words_[(key % 8) / 2] >> (16 * (key % 2)));
}

bool dropout_factors(const Site& site, int64_t r, const Sight& sight, std::vector<float>& factor) {
  const auto& dropout = site.problem->spec.dropout;
  if (!dropout || dropout->place != DropoutPlace::weights) return false;
  const uint32_t threshold = dropout_threshold(dropout->p);
  const float kept = static_cast<float>(1 / (1 - threshold / 65536.0));
  factor.resize(site.width());
  DropoutBits bits(site, r);
  for (int64_t j = sight.begin; j < sight.end; ++j) {
    factor[j] = bits(site.key(j)) < threshold ? 0.0f : kept;
  }
  return true;
}

void row_products(int64_t count, int64_t width, int64_t inner, const Rows& a, const Rows& b,
                  int64_t first, float* out) {
  gemm_nt(padded_rows(count), width, inner, a.view(0), b.view(first), out, width);
  const auto product = [&](const float* x, const float* y) {
    float sum = 0;
    for (int64_t d = 0; d < inner; ++d) sum += x[d] * y[d];
    return sum;
  };
  for (int64_t r : a.odd) {
    if (r >= count) continue;
    for (int64_t j = 0; j < width; ++j) {
      out[r * width + j] = product(a.true_row(r), b.true_row(first + j));
    }
  }
  for (int64_t row : b.odd) {
    if (row < first || row >= first + width) continue;
    for (int64_t r = 0; r < count; ++r) {
      out[r * width + row - first] = product(a.true_row(r), b.true_row(row));
    }
  }
}

void weighted_rows(int64_t count, int64_t width, const float* weights, const uint8_t* part,
                   bool dropped, const Rows& rows, int64_t first, float* out) {
  const int64_t ld = rows.ld;
  gemm_nn(padded_rows(count), ld, width, {weights, width}, rows.view(first), out, ld);
  if (!part) return;
  for (int64_t row : rows.odd) {
    const int64_t j = row - first;
    if (j < 0 || j >= width) continue;
    const float* x = rows.true_row(row);
    for (int64_t r = 0; r < count; ++r) {
      const float w = weights[r * width + j];
      if (!part[r * width + j] || (dropped && w == 0)) continue;
      for (int64_t d = 0; d < ld; ++d) out[r * ld + d] += w * x[d];
    }
  }
}

void weighted_columns(int64_t count, int64_t width, const float* weights, const uint8_t* part,
                      bool dropped, const Rows& rows, float* out) {
  const int64_t ld = rows.ld;
  gemm_tn(width, ld, padded_rows(count), {weights, width}, rows.view(0), out, ld);
  if (!part) return;
  for (int64_t r : rows.odd) {
    if (r >= count) continue;
    const float* x = rows.true_row(r);
    for (int64_t j = 0; j < width; ++j) {
      const float w = weights[r * width + j];
      if (!part[r * width + j] || (dropped && w == 0)) continue;
      for (int64_t d = 0; d < ld; ++d) out[j * ld + d] += w * x[d];
    }
  }
}

void store_row(const Tensor& to, int64_t i, const float* row) {
  const int64_t columns = to.dim(1), at = i * to.stride(0);
  const auto store = [&]<class T>(T* base) {
    T* target = base + at;
    for (int64_t d = 0; d < columns; ++d) target[d] = static_cast<T>(row[d]);
  };
  switch (to.dtype()) {
    case DType::f32:
      return store(to.data<float>());
    case DType::f16:
      return store(to.data<f16>());
    case DType::bf16:
      return store(to.data<bf16>());
    default:
      throw Error("store_row: not float32, float16 or bfloat16");
  }
}

size_t workspace_bytes(const AttentionSpec& spec, const AttentionShape& s, SimdTarget,
                       bool backward) {
  const int64_t width = round_up(s.M, kKeyStep);
  const int64_t qk = padded_columns(s.D), values = padded_columns(s.Dv);
  const bool additive = std::holds_alternative<Additive>(spec.score);
  // Packed K and V; the backward adds their gradients, of one task at a time.
  const int64_t packed = s.B * s.Hk * width * (qk * (additive ? 2 : 1) + values);
  const int64_t task_keys = backward ? width * (qk + values) : 0;
  const int64_t matrices = backward ? (spec.softcap ? 4 : 3) : 1;
  const int64_t task =
      kBlockRows * (matrices * width + width / 4 + (additive ? 2 : 1) * qk + 2 * values);
  return sizeof(float) * static_cast<size_t>(packed + num_threads() * (task + task_keys));
}

}  // namespace foci::plain
