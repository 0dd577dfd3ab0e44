// The unfused backward: recomputes a block's weights, then
//   dV += P'ᵀ dY,  G = dY Vᵀ,  dS = normaliser'(G),  dQ = dS' K,  dK += dS'ᵀ Q
// with P' after dropout and dS' carried back through biases, softcap and scale. A task owns the
// gradients it adds to, and adds in the order of blocks.
#include <algorithm>
#include <cmath>

#include "foci/attention/plain.h"
#include "foci/core/threads.h"

namespace foci {
namespace plain {
namespace {

// What one (batch, key/value head) gathers.
struct KeyGradients {
  std::vector<float> dk, dv;  // [packed rows, ld]
};

struct Call {
  const Problem& problem;
  const AttentionUpstream& up;
  const AttentionWanted& wanted;
  AttentionGradients& grads;
  const Layout& layout;
  const std::vector<PackedKeys>& packed;
  const Tensor* dbias;                // double, [B,H,N,M], or null
  std::vector<HeadGradients>& heads;  // [B·H]
};

float row_value(const Tensor& t, int64_t at) {
  return t.defined() ? t.data<float>()[at] : 0.0f;
}

// Through w·tanh(q+k): pair by pair.
void additive_backward(const Site& site, const Operand& q, const Operand& k, const float* draw,
                       const uint8_t* part, const AttentionWanted& wanted, float* dq,
                       KeyGradients& keys, HeadGradients& head) {
  const Problem& p = *site.problem;
  const int64_t ld = k.rows.ld, width = site.width(), D = p.shape.D;
  const float* w = p.in.score_w.data<float>();
  std::vector<float> t(D), dw(D);
  for (size_t r = 0; r < site.entries.size(); ++r) {
    std::fill(dw.begin(), dw.end(), 0.0f);
    for (int64_t j = 0; j < width; ++j) {
      const float d = draw[r * width + j];
      if (!part[r * width + j]) continue;
      const int64_t at = site.packed(j);
      if (takes_tanh(q.size[r], k.size[at])) {
        const float *x = q.rows.true_row(r), *y = k.rows.true_row(at);
        for (int64_t c = 0; c < D; ++c) t[c] = std::tanh(x[c] + y[c]);
      } else {
        const float* x = q.exponential.data<float>() + r * ld;
        const float* y = k.exponential.data<float>() + at * ld;
        for (int64_t c = 0; c < D; ++c) t[c] = 1 - 2 / (1 + x[c] * y[c]);
      }
      float* to_q = dq + r * ld;
      float* to_k = keys.dk.data() + at * ld;
      for (int64_t c = 0; c < D; ++c) {
        const float u = d * w[c] * (1 - t[c] * t[c]);
        to_q[c] += u;
        to_k[c] += u;
        dw[c] += d * t[c];
      }
    }
    if (wanted.score_w) {
      for (int64_t c = 0; c < D; ++c) head.score_w[c] += dw[c];
    }
  }
}

// Through −γ‖q−k‖²: dq = 2γ Σ d·(k − q) and dk = 2γ Σ d·(q − k), pair by pair.
void l2_backward(const Site& site, const Operand& q, const Operand& k, const float* draw,
                 const uint8_t* part, float gamma, float* dq, KeyGradients& keys) {
  const int64_t width = site.width(), ld = k.rows.ld, first = site.packed(0);
  for (size_t r = 0; r < site.entries.size(); ++r) {
    const float* x = q.rows.true_row(static_cast<int64_t>(r));
    float* to_q = dq + r * ld;
    for (int64_t j = 0; j < width; ++j) {
      if (!part[r * width + j]) continue;
      const float d = 2 * gamma * draw[r * width + j];
      const float* y = k.rows.true_row(first + j);
      float* to_k = keys.dk.data() + (first + j) * ld;
      for (int64_t c = 0; c < ld; ++c) {
        const float u = d * (y[c] - x[c]);
        to_q[c] += u;
        to_k[c] -= u;
      }
    }
  }
}

// Gradients of raw scores → those of the (cosine: normalised) rows of q and k.
void score_backward(const Site& site, const Operand& q, const Operand& k, const float* draw,
                    const uint8_t* part, const AttentionWanted& wanted, float* dq,
                    KeyGradients& keys, HeadGradients& head) {
  const Problem& p = *site.problem;
  const int64_t count = static_cast<int64_t>(site.entries.size()), width = site.width();
  const int64_t ld = k.rows.ld, first = site.packed(0);
  if (std::holds_alternative<Additive>(p.spec.score)) {
    return additive_backward(site, q, k, draw, part, wanted, dq, keys, head);
  }
  if (!wanted.qkv) return;
  if (const auto* l2 = std::get_if<L2>(&p.spec.score)) {
    return l2_backward(site, q, k, draw, part, static_cast<float>(l2->gamma), dq, keys);
  }
  weighted_rows(count, width, draw, part, false, k.rows, first, dq);
  weighted_columns(count, width, draw, part, false, q.rows, keys.dk.data() + first * ld);
}

// Through x/‖x‖: d ← (d − (d·x̂) x̂)/‖x‖.
void normalised_backward(const float* unit, double inverse, int64_t D, float* d) {
  if (inverse == 0) {
    std::fill_n(d, D, 0.0f);
    return;
  }
  double along = 0;
  for (int64_t c = 0; c < D; ++c) along += double(d[c]) * unit[c];
  for (int64_t c = 0; c < D; ++c) d[c] = static_cast<float>((d[c] - along * unit[c]) * inverse);
}

void backward_block(const Call& call, const Site& site, const PackedKeys& packed, Scratch& scratch,
                    KeyGradients& keys, HeadGradients& head) {
  const Problem& p = call.problem;
  const AttentionShape& s = p.shape;
  const int64_t count = static_cast<int64_t>(site.entries.size()), width = site.width();
  const int64_t rows = padded_rows(count), b = site.piece->batch, h = site.head;
  const int64_t first = site.packed(0);
  const kernels::RowKernels& kernels = kernels::row_kernels(p.target);
  const Normalizer normalizer = normalizer_of(p.spec.normalizer, h);
  load_queries(site, scratch.q);
  const auto matrix = [&](int m) { return room(scratch.matrix[m], rows * width); };
  float* p_rows = matrix(0);
  float* g_rows = matrix(1);
  raw_scores(site, scratch.q, packed.k, p_rows, width);
  float* raw = nullptr;
  if (call.wanted.scale) {
    raw = matrix(2);
    std::copy_n(p_rows, count * width, raw);
  }
  float* capped = p.spec.softcap ? matrix(3) : nullptr;

  const bool has_dy = call.up.dy.defined();
  if (has_dy) {
    std::vector<int64_t> index(count);
    for (int64_t r = 0; r < count; ++r) index[r] = site.query(r);
    reset_rows(rows, s.Dv, scratch.dy);
    load_rows(call.up.dy.select(0, b).select(0, h), index, 0, scratch.dy);
    row_products(count, width, s.Dv, scratch.dy, packed.v, first, g_rows);
  } else {
    std::fill_n(g_rows, rows * width, 0.0f);
  }

  const bool drops = p.spec.dropout && p.spec.dropout->place == DropoutPlace::weights;
  float* kept = drops ? matrix(4) : p_rows;  // weights after dropout
  scratch.seen.resize(width);
  scratch.part.resize(count * width);
  const float* coverage =
      call.up.dcoverage.defined() ? call.up.dcoverage.data<float>() + (b * s.H + h) * s.M : nullptr;
  Statistics want;
  if (call.up.dmax_weight.defined()) want.add(Statistic::max_weight);
  std::vector<Sight> sights(count);
  const auto* entmax = std::get_if<Entmax>(&normalizer);
  scratch.row.wants_factors = entmax && entmax->alpha > 2;
  if (scratch.row.wants_factors) scratch.row.log_factors.resize(width);
  for (int64_t r = 0; r < count; ++r) {
    float* row = p_rows + r * width;
    float* g = g_rows + r * width;
    uint8_t* part = scratch.part.data() + r * width;
    const int64_t at = (b * s.H + h) * s.N + site.query(r);
    const Sight sight = look(site, r, scratch.seen.data());
    finish_scores(site, r, sight, row, capped ? capped + r * width : nullptr);
    const RowStatistics stats =
        normalize(kernels, normalizer, sight, width, want, row, part, scratch.row);
    Sight taking = sight;
    taking.seen = part;
    sights[r] = taking;
    if (drops) {
      dropout_factors(site, r, sight, scratch.factor);
      std::fill_n(kept + r * width, width, 0.0f);
      taking.for_each([&](int64_t j) {
        const float f = scratch.factor[j];
        kept[r * width + j] = f == 0 ? 0.0f : row[j] * f;
        g[j] = f == 0 ? 0.0f : g[j] * f;
      });
    }
    std::fill(g, g + taking.begin, 0.0f);
    for (int64_t j = taking.begin; j < taking.end; ++j) g[j] = part[j] ? g[j] : 0.0f;
    std::fill(g + taking.end, g + width, 0.0f);
    if (coverage) taking.for_each([&](int64_t j) { g[j] += coverage[site.key(j)]; });
    if (stats.max_column >= 0) g[stats.max_column] += row_value(call.up.dmax_weight, at);
    const float drow_stat = row_value(call.up.drow_stat, at);
    const float dentropy = row_value(call.up.dentropy, at);
    const double* log_factors =
        scratch.row.wants_factors ? scratch.row.log_factors.data() : nullptr;
    if (entmax && call.wanted.alpha) {
      head.alpha += alpha_gradient(entmax->alpha, taking, stats.max, drow_stat, dentropy, row,
                                   log_factors, g);
    }
    normalize_backward(kernels, normalizer, taking, drow_stat, dentropy, row, g, log_factors);
  }
  std::fill(kept + count * width, kept + rows * width, 0.0f);
  std::fill(g_rows + count * width, g_rows + rows * width, 0.0f);

  if (has_dy && call.wanted.qkv) {
    weighted_columns(count, width, kept, scratch.part.data(), drops, scratch.dy,
                     keys.dv.data() + first * packed.v.ld);
  }
  for (int64_t r = 0; r < count; ++r) {
    finish_scores_backward(site, r, sights[r], raw ? raw + r * width : nullptr,
                           capped ? capped + r * width : nullptr, call.wanted, g_rows + r * width,
                           head, call.dbias);
  }
  const int64_t ld = packed.k.rows.ld;
  float* dq = room(scratch.out, rows * ld);
  std::fill_n(dq, rows * ld, 0.0f);
  score_backward(site, scratch.q, packed.k, g_rows, scratch.part.data(), call.wanted, dq, keys,
                 head);
  if (!call.wanted.qkv) return;
  const Tensor to = call.grads.dq.select(0, b).select(0, h);
  for (int64_t r = 0; r < count; ++r) {
    if (std::holds_alternative<Cosine>(p.spec.score) && sights[r].count > 0) {
      normalised_backward(scratch.q.rows.true_row(r), scratch.q.inverse[r], s.D, dq + r * ld);
    }
    store_row(to, site.query(r), dq + r * ld);
  }
}

// Which keys got any gradient: an unseen key's NaN must not come back through its own norm.
bool all_zero(const float* x, int64_t n) {
  return std::all_of(x, x + n, [](float v) { return v == 0; });
}

void finish_keys(const Call& call, int64_t b, int64_t g, const PackedKeys& packed,
                 KeyGradients& keys) {
  const Problem& p = call.problem;
  const int64_t D = p.shape.D, ld = packed.k.rows.ld;
  const Tensor dk = call.grads.dk.select(0, b).select(0, g);
  const Tensor dv = call.grads.dv.select(0, b).select(0, g);
  for (int64_t n = call.layout.batch_pieces[b]; n < call.layout.batch_pieces[b + 1]; ++n) {
    const Piece& piece = call.layout.pieces[n];
    for (int64_t j = 0; j < piece.k1 - piece.k0; ++j) {
      const int64_t row = piece.packed + j, key = call.layout.key[piece.k0 + j];
      float* d = keys.dk.data() + row * ld;
      if (std::holds_alternative<Cosine>(p.spec.score) && !all_zero(d, D)) {
        normalised_backward(packed.k.rows.true_row(row), packed.k.inverse[row], D, d);
      }
      store_row(dk, key, d);
      store_row(dv, key, keys.dv.data() + row * packed.v.ld);
    }
  }
}

void backward_keys(const Call& call, int64_t b, int64_t g, ScratchPool& pool) {
  const Problem& p = call.problem;
  const AttentionShape& s = p.shape;
  const int64_t group = s.H / s.Hk;
  const PackedKeys& packed = call.packed[b * s.Hk + g];
  const OneThread one;
  ScratchPool::Loan scratch(pool);
  KeyGradients keys;
  const int64_t rows = call.layout.packed_rows[b];
  keys.dk.assign(rows * packed.k.rows.ld, 0.0f);
  keys.dv.assign(rows * packed.v.ld, 0.0f);
  for (int64_t h = g * group; h < (g + 1) * group; ++h) {
    HeadGradients& head = call.heads[b * s.H + h];
    if (const auto* r = find_bias<Relative1D>(p.spec)) {
      head.table1d.assign(2 * r->max_distance + 1, 0.0);
    }
    if (const auto* r = find_bias<Relative2D>(p.spec)) {
      head.table2d.assign((2 * r->height - 1) * (2 * r->width - 1), 0.0);
    }
    head.score_w.assign(std::holds_alternative<Additive>(p.spec.score) ? s.D : 0, 0.0);
    for (int64_t k = call.layout.batch_blocks[b]; k < call.layout.batch_blocks[b + 1]; ++k) {
      const Site site = make_site(p, call.layout, call.layout.blocks[k], h, (*scratch).entries);
      backward_block(call, site, packed, *scratch, keys, head);
    }
  }
  if (call.wanted.qkv) finish_keys(call, b, g, packed, keys);
}

// Sums over batches (and heads, where shared) in their order.
void reduce_heads(const Call& call) {
  const AttentionShape& s = call.problem.shape;
  AttentionGradients& g = call.grads;
  const auto add = [&](const Tensor& to, auto&& part) {
    if (!to.defined()) return;
    std::vector<double> sum(to.numel(), 0.0);
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t h = 0; h < s.H; ++h) {
        const std::span<const double> x = part(call.heads[b * s.H + h]);
        // One slice a head, or one for all.
        const int64_t size = static_cast<int64_t>(x.size());
        const int64_t at = to.numel() > size ? h * size : 0;
        for (int64_t n = 0; n < size; ++n) sum[at + n] += x[n];
      }
    }
    std::copy(sum.begin(), sum.end(), to.data<float>());
  };
  add(g.dslopes, [](const HeadGradients& x) { return std::span(&x.slope, 1); });
  add(g.dscale, [](const HeadGradients& x) { return std::span(&x.scale, 1); });
  add(g.dalpha, [](const HeadGradients& x) { return std::span(&x.alpha, 1); });
  add(g.dtable1d, [](const HeadGradients& x) { return std::span<const double>(x.table1d); });
  add(g.dtable2d, [](const HeadGradients& x) { return std::span<const double>(x.table2d); });
  add(g.dscore_w, [](const HeadGradients& x) { return std::span<const double>(x.score_w); });
}

}  // namespace
}  // namespace plain

void plain_backward(const Problem& problem, const AttentionOutputs&, const AttentionUpstream& up,
                    const AttentionWanted& wanted, AttentionGradients& grads) {
  using namespace plain;
  const AttentionShape& s = problem.shape;
  if (wanted.qkv) {
    // Keys of segments without queries belong to no piece.
    grads.dq.fill(0);
    grads.dk.fill(0);
    grads.dv.fill(0);
  }
  const Layout layout = cut(problem);
  const std::vector<PackedKeys> packed = pack_keys(problem, layout);
  Tensor sums, dbias;
  bool shared_batches = false, shared_heads = false;
  if (grads.dbias.defined()) {
    sums = Tensor::zeros(grads.dbias.shape(), DType::f64);
    dbias = sums.broadcast_to({s.B, s.H, s.N, s.M});
    shared_batches = s.B > 1 && dbias.stride(0) == 0;
    shared_heads = s.H > 1 && dbias.stride(1) == 0;
  }
  std::vector<HeadGradients> heads(s.B * s.H);
  const Call call{problem, up, wanted, grads, layout, packed, dbias.defined() ? &dbias : nullptr,
                  heads};
  ScratchPool pool;
  // Tasks that would add to the same part of dbias are one task.
  const int64_t outer = shared_batches ? 1 : s.B, inner = shared_heads ? 1 : s.Hk;
  parallel_for(outer * inner, [&](int64_t task) {
    const int64_t b = task / inner, g = task % inner;
    for (int64_t bb = shared_batches ? 0 : b; bb < (shared_batches ? s.B : b + 1); ++bb) {
      for (int64_t gg = shared_heads ? 0 : g; gg < (shared_heads ? s.Hk : g + 1); ++gg) {
        backward_keys(call, bb, gg, pool);
      }
    }
  });
  reduce_heads(call);
  if (grads.dbias.defined()) grads.dbias.copy_from(sums);
}

}  // namespace foci
