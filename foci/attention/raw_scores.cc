// Raw scores, by the parts of the unfused forward.
#include "foci/attention/raw_scores.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "foci/attention/plain.h"
#include "foci/attention/state.h"
#include "foci/core/threads.h"

namespace foci {
namespace {

using namespace plain;

constexpr float kInf = std::numeric_limits<float>::infinity();

// The same call without whatever comes after the stage.
Problem up_to(const Problem& whole, ScoreStage stage) {
  Problem p = whole;
  if (stage == ScoreStage::masked) return p;
  p.spec.masks.clear();
  p.spec.biases.clear();
  p.spec.dropout.reset();
  if (stage == ScoreStage::scaled) p.spec.softcap.reset();
  p.bias = Tensor();
  p.mask = {};
  p.positions = {};
  fill_ranges(p);
  return p;
}

void block_scores(const Site& site, const PackedKeys& keys, Scratch& scratch, const Tensor& out) {
  const int64_t count = static_cast<int64_t>(site.entries.size()), width = site.width();
  load_queries(site, scratch.q);
  float* scores = room(scratch.matrix[0], padded_rows(count) * width);
  raw_scores(site, scratch.q, keys.k, scores, width);
  scratch.seen.resize(width);
  for (int64_t r = 0; r < count; ++r) {
    float* row = scores + r * width;
    const Sight sight = look(site, r, scratch.seen.data());
    finish_scores(site, r, sight, row, nullptr);
    float* to = out.data<float>() + site.query(r) * out.stride(0);
    sight.for_each([&](int64_t j) { to[site.key(j)] = row[j]; });
  }
}

Tensor weights_of_all(const Problem& p) {
  Tensor out = Tensor::zeros({p.shape.B, p.shape.H, p.shape.N, p.shape.M});
  std::vector<int64_t> rows(p.shape.N), heads(p.shape.H);
  std::iota(rows.begin(), rows.end(), int64_t{0});
  std::iota(heads.begin(), heads.end(), int64_t{0});
  plain_weights(p, {}, rows, heads, out);
  return out;
}

}  // namespace

Tensor raw_scores(const Bound& bound, ScoreStage stage) {
  const Problem& whole = bound.state_->problem;
  const AttentionShape& s = whole.shape;
  check_product("scores [B, H, N, M]", {s.B, s.H, s.N, s.M});
  if (stage == ScoreStage::weights) return weights_of_all(whole);
  const Problem problem = up_to(whole, stage);
  Tensor out = Tensor::full({s.B, s.H, s.N, s.M}, -kInf);
  const Layout layout = cut(problem);
  const std::vector<PackedKeys> packed = pack_keys(problem, layout);
  ScratchPool pool;
  parallel_for(static_cast<int64_t>(layout.blocks.size()) * s.H, [&](int64_t task) {
    const OneThread one;
    ScratchPool::Loan scratch(pool);
    const Block& block = layout.blocks[task / s.H];
    const int64_t h = task % s.H, b = layout.pieces[block.piece].batch;
    const Site site = make_site(problem, layout, block, h, (*scratch).entries);
    block_scores(site, packed[b * s.Hk + h / (s.H / s.Hk)], *scratch,
                 out.select(0, b).select(0, h));
  });
  return out;
}

}  // namespace foci
