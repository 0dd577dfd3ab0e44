// Draws specs and tensors of the wanted family, lays them out with strides, and excuses ties.
#include "attention/generate.h"

#include "foci/spec/json.h"

namespace foci::testing {
namespace {

// The same values with spare elements after each row.
Tensor with_gap(const Tensor& t, int64_t gap) {
  Dims wide = t.shape();
  wide[wide.size() - 1] += gap;
  const Tensor room = Tensor::full(wide, 7, t.dtype());
  Tensor view = room.slice(-1, 0, t.shape().back());
  view.copy_from(t);
  return view;
}

}  // namespace

void thin_upstream(SweepCase& c, uint64_t seed) {
  Rng rng(seed, 78);
  for (Tensor* t :
       {&c.up.dy, &c.up.drow_stat, &c.up.dentropy, &c.up.dmax_weight, &c.up.dcoverage}) {
    if (rng.below(4) == 0) *t = Tensor();
  }
}

SweepCase attention_case(uint64_t n, DType dtype, const SweepLimits& limits) {
  SweepCase c = sweep_case(n, dtype, limits);
  thin_upstream(c, n);
  return c;
}

Tensor strided_heads(const Tensor& t) {
  if (!t.defined()) return t;
  const int64_t B = t.dim(0), H = t.dim(1), N = t.dim(2), D = t.dim(3);
  const Tensor room = Tensor::full({B, N, H + 1, D + 3}, 7, t.dtype());
  Tensor view = room.slice(2, 1, H + 1).slice(3, 0, D).transpose(1, 2);
  view.copy_from(t);
  return view;
}

AttentionInputs strided(const AttentionInputs& in) {
  AttentionInputs s = in;
  s.q = strided_heads(in.q);
  s.k = strided_heads(in.k);
  s.v = strided_heads(in.v);
  for (Tensor* t : {&s.keep, &s.bias, &s.q_segments, &s.k_segments, &s.table1d, &s.table2d}) {
    if (t->defined() && t->rank() > 0) *t = with_gap(*t, 2);
  }
  return s;
}

std::vector<Normalizer> every_normalizer() {
  return {Softmax{}, Sparsemax{}, Entmax{1.5}, Entmax{1.2}, Entmax{3}, TopK{5}};
}

std::string text_of(const Normalizer& normalizer) {
  const std::string text = spec_to_json_text({.normalizer = normalizer});
  const size_t from = text.find("\"normalizer\""), to = text.find('}', from);
  return text.substr(from, to - from);
}

Tensor random_normal(Rng& rng, const Dims& shape, double scale) {
  Tensor t = Tensor::empty(shape);
  for (float& x : t.span<float>()) x = static_cast<float>(rng.normal() * scale);
  return t;
}

}  // namespace foci::testing
