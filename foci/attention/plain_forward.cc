// The unfused forward: scores of a block of rows against all keys they may see, row operators, and
// a product with the values.
#include <algorithm>
#include <unordered_map>

#include "foci/attention/plain.h"
#include "foci/core/threads.h"

namespace foci {
namespace plain {
namespace {

// Weights before dropout of a site's rows into matrix[0]; part only where `want_part`.
// each(r, sight, statistics, row) is called when a row is done.
template <class F>
void site_weights(const Site& site, const PackedKeys& keys, const Statistics& want, bool want_part,
                  Scratch& scratch, F&& each) {
  const Problem& p = *site.problem;
  const int64_t count = static_cast<int64_t>(site.entries.size()), width = site.width();
  const kernels::RowKernels& kernels = kernels::row_kernels(p.target);
  const Normalizer normalizer = normalizer_of(p.spec.normalizer, site.head);
  load_queries(site, scratch.q);
  float* weights = room(scratch.matrix[0], padded_rows(count) * width);
  raw_scores(site, scratch.q, keys.k, weights, width);
  scratch.seen.resize(width);
  if (want_part) scratch.part.resize(count * width);
  for (int64_t r = 0; r < count; ++r) {
    float* row = weights + r * width;
    const Sight sight = look(site, r, scratch.seen.data());
    finish_scores(site, r, sight, row, nullptr);
    const RowStatistics s =
        normalize(kernels, normalizer, sight, width, want, row,
                  want_part ? scratch.part.data() + r * width : nullptr, scratch.row);
    each(r, sight, s, row);
  }
  std::fill(weights + count * width, weights + padded_rows(count) * width, 0.0f);
}

void store_statistics(const Site& site, int64_t r, const RowStatistics& s, AttentionOutputs& out) {
  const AttentionShape& shape = site.problem->shape;
  const int64_t at = (site.piece->batch * shape.H + site.head) * shape.N + site.query(r);
  out.row_stat.data<float>()[at] = s.row_stat;
  if (out.entropy.defined()) out.entropy.data<float>()[at] = s.entropy;
  if (out.max_weight.defined()) out.max_weight.data<float>()[at] = s.max_weight;
  if (out.max_key.defined()) {
    out.max_key.data<int64_t>()[at] = s.max_column < 0 ? -1 : site.key(s.max_column);
  }
  if (out.support.defined()) out.support.data<float>()[at] = s.support;
}

void forward_block(const Site& site, const PackedKeys& keys, Scratch& scratch,
                   AttentionOutputs& out, const Tensor& y) {
  const Problem& p = *site.problem;
  const int64_t count = static_cast<int64_t>(site.entries.size()), width = site.width();
  const AttentionShape& shape = p.shape;
  const bool want_part = keys.v.has_odd();
  std::vector<float> coverage(out.coverage.defined() ? width : 0, 0.0f);
  bool dropped = false;
  site_weights(site, keys, p.spec.statistics, want_part, scratch,
               [&](int64_t r, const Sight& sight, const RowStatistics& s, float* row) {
                 store_statistics(site, r, s, out);
                 if (!coverage.empty()) {
                   for (int64_t j = sight.begin; j < sight.end; ++j) coverage[j] += row[j];
                 }
                 if (!dropout_factors(site, r, sight, scratch.factor)) return;
                 dropped = true;
                 for (int64_t j = sight.begin; j < sight.end; ++j) {
                   // Not a product: a dropped NaN is dropped.
                   row[j] = scratch.factor[j] == 0 ? 0.0f : row[j] * scratch.factor[j];
                 }
               });
  if (!coverage.empty()) {
    float* to = out.coverage.data<float>() + (site.piece->batch * shape.H + site.head) * shape.M;
    const int64_t real = std::min(site.hi, site.piece->k1 - site.piece->k0) - site.lo;
    for (int64_t j = 0; j < real; ++j) to[site.key(j)] += coverage[j];
  }
  const int64_t ld = keys.v.ld;
  float* rows = room(scratch.out, padded_rows(count) * ld);
  std::fill_n(rows, padded_rows(count) * ld, 0.0f);
  weighted_rows(count, width, scratch.matrix[0].data<float>(), scratch.part.data(), dropped, keys.v,
                site.packed(0), rows);
  for (int64_t r = 0; r < count; ++r) store_row(y, site.query(r), rows + r * ld);
}

}  // namespace
}  // namespace plain

void plain_forward(const Problem& problem, AttentionOutputs& out) {
  using namespace plain;
  const AttentionShape& shape = problem.shape;
  if (out.coverage.defined()) out.coverage.fill(0);
  const Layout layout = cut(problem);
  const std::vector<PackedKeys> packed = pack_keys(problem, layout);
  ScratchPool pool;
  const auto run = [&](int64_t first, int64_t last, int64_t h) {
    const OneThread one;
    ScratchPool::Loan scratch(pool);
    for (int64_t k = first; k < last; ++k) {
      const Block& block = layout.blocks[k];
      const int64_t b = layout.pieces[block.piece].batch;
      const Site site = make_site(problem, layout, block, h, (*scratch).entries);
      forward_block(site, packed[b * shape.Hk + h / (shape.H / shape.Hk)], *scratch, out,
                    out.y.select(0, b).select(0, h));
    }
  };
  if (out.coverage.defined()) {
    // Blocks of one head add to the same keys, so they take turns.
    parallel_for(shape.B * shape.H, [&](int64_t task) {
      const int64_t b = task / shape.H;
      run(layout.batch_blocks[b], layout.batch_blocks[b + 1], task % shape.H);
    });
  } else {
    const int64_t blocks = static_cast<int64_t>(layout.blocks.size());
    parallel_for(blocks * shape.H, [&](int64_t task) {
      const int64_t k = task / shape.H;
      run(k, k + 1, task % shape.H);
    });
  }
}

void plain_weights(const Problem& problem, const AttentionOutputs&, std::span<const int64_t> rows,
                   std::span<const int64_t> heads, Tensor& weights) {
  using namespace plain;
  const AttentionShape& shape = problem.shape;
  const Layout layout = cut(problem);
  const std::vector<PackedKeys> packed = pack_keys(problem, layout);
  const int64_t row_count = static_cast<int64_t>(rows.size());
  const int64_t head_count = static_cast<int64_t>(heads.size());
  ScratchPool pool;
  parallel_for(shape.B * head_count, [&](int64_t task) {
    const int64_t b = task / head_count, h = heads[task % head_count];
    const OneThread one;
    ScratchPool::Loan loan(pool);
    Scratch& scratch = *loan;
    float* to = weights.data<float>() + task * row_count * shape.M;
    std::unordered_multimap<int64_t, int64_t> wanted;  // query → where in `rows`
    for (int64_t n = 0; n < row_count; ++n) wanted.emplace(rows[n], n);
    std::vector<int64_t> entries;
    for (int64_t k = layout.batch_blocks[b]; k < layout.batch_blocks[b + 1]; ++k) {
      const Block& block = layout.blocks[k];
      entries.clear();
      for (int64_t q = block.q0; q < block.q1; ++q) {
        if (wanted.contains(layout.query[q])) entries.push_back(q);
      }
      if (entries.empty()) continue;
      Site site = make_site(problem, layout, block, h, scratch.entries);
      site.entries = entries;
      const int64_t real = std::min(site.hi, site.piece->k1 - site.piece->k0) - site.lo;
      site_weights(site, packed[b * shape.Hk + h / (shape.H / shape.Hk)], {}, false, scratch,
                   [&](int64_t r, const Sight&, const RowStatistics&, const float* row) {
                     const auto [first, last] = wanted.equal_range(site.query(r));
                     for (auto it = first; it != last; ++it) {
                       float* target = to + it->second * shape.M;
                       for (int64_t j = 0; j < real; ++j) target[site.key(j)] = row[j];
                     }
                   });
    }
  });
}

}  // namespace foci
