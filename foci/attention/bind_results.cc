// Bound: checks and makes what forward, backward and weights write, then calls the implementation.
#include <algorithm>
#include <limits>
#include <numeric>

#include "foci/attention/state.h"
#include "foci/core/threads.h"

namespace foci {
namespace {

constexpr const char* kRowLetters = "(B, H, N)";

void require_like(const Tensor& t, const char* name, const Dims& shape, const char* letters) {
  require(t.shape() == shape, "{}: shape {} arrived, {} {} is right", name, t.shape(), shape,
          letters);
}

// float32, or what q, k and v hold.
void require_result_dtype(const Tensor& t, const char* name, DType operands) {
  require(t.dtype() == DType::f32 || t.dtype() == operands, "{}: {} arrived, {} is right", name,
          name_of(t.dtype()),
          operands == DType::f32 ? std::string("float32")
                                 : fmt::format("float32 or {}", name_of(operands)));
}

// A row statistic: contiguous, of one dtype.
void require_statistic(const Tensor& t, const char* name, const Dims& shape, const char* letters,
                       DType dtype = DType::f32) {
  require(t.dtype() == dtype, "{}: {} arrived, {} is right", name, name_of(t.dtype()),
          name_of(dtype));
  require_like(t, name, shape, letters);
  require(t.is_contiguous(), "{}: a strided view arrived, it must be contiguous", name);
}

struct Bytes {
  const std::byte* begin;
  const std::byte* end;
};

// The bytes between a view's first and last element.
Bytes bytes_of(const Tensor& t) {
  const auto* p = static_cast<const std::byte*>(t.raw());
  if (t.numel() == 0) return {p, p};
  int64_t last = 0;
  for (int d = 0; d < t.rank(); ++d) last += (t.shape()[d] - 1) * t.strides()[d];
  return {p, p + (last + 1) * static_cast<int64_t>(size_of(t.dtype()))};
}

// Whether two views [B,H,N,D] are columns of one matrix, as q, k and v of a joint projection are,
// and no column belongs to both.
bool side_by_side(const Tensor& a, const Tensor& b) {
  if (a.rank() != 4 || b.rank() != 4 || a.dtype() != b.dtype()) return false;
  const int64_t row = a.stride(2);
  const auto columns = [](const Tensor& t) {
    return (t.dim(1) - 1) * t.stride(1) + (t.dim(3) - 1) * t.stride(3) + 1;
  };
  if (row <= 0 || b.stride(2) != row || a.stride(0) % row != 0 || b.stride(0) % row != 0 ||
      a.stride(1) < 0 || b.stride(1) < 0 || columns(a) > row || columns(b) > row) {
    return false;
  }
  const auto apart = reinterpret_cast<intptr_t>(b.raw()) - reinterpret_cast<intptr_t>(a.raw());
  const auto size = static_cast<int64_t>(size_of(a.dtype()));
  if (apart % size != 0) return false;
  const int64_t offset = (apart / size % row + row) % row;
  return offset >= columns(a) && offset + columns(b) <= row;
}

bool overlap(const Tensor& a, const Tensor& b) {
  const Bytes x = bytes_of(a), y = bytes_of(b);
  return x.begin < x.end && y.begin < y.end && x.begin < y.end && y.begin < x.end &&
         !side_by_side(a, b);
}

// A written tensor must hold each element in a place of its own.
void require_own_places(const Tensor& t, const char* name) {
  std::vector<int> by_stride(t.rank());
  std::iota(by_stride.begin(), by_stride.end(), 0);
  std::sort(by_stride.begin(), by_stride.end(),
            [&](int a, int b) { return t.strides()[a] < t.strides()[b]; });
  int64_t reach = 0;  // the largest offset of the dimensions so far
  for (int k = 0; k < t.rank(); ++k) {
    const int d = by_stride[k];
    if (t.shape()[d] <= 1 || t.numel() == 0) continue;
    require(t.strides()[d] > reach, "{}: the view's strides {} make elements share memory", name,
            t.strides());
    reach += (t.shape()[d] - 1) * t.strides()[d];
  }
}

struct Named {
  const char* name;
  const Tensor* tensor;
};

std::vector<Named> named_inputs(const AttentionInputs& in) {
  return {{"q", &in.q},
          {"k", &in.k},
          {"v", &in.v},
          {"key_lengths", &in.key_lengths},
          {"past_lengths", &in.past_lengths},
          {"q_segments", &in.q_segments},
          {"k_segments", &in.k_segments},
          {"keep", &in.keep},
          {"bias", &in.bias},
          {"slopes", &in.slopes},
          {"table1d", &in.table1d},
          {"table2d", &in.table2d},
          {"score_w", &in.score_w}};
}

void prepare_outputs(const Problem& p, AttentionOutputs& out) {
  const AttentionShape& s = p.shape;
  const Dims rows{s.B, s.H, s.N}, keys{s.B, s.H, s.M}, y{s.B, s.H, s.N, s.Dv};
  if (out.y.defined()) {
    require_result_dtype(out.y, "outputs.y", s.dtype);
    require_like(out.y, "outputs.y", y, "(B, H, N, Dv)");
    require_dense_rows(out.y, "outputs.y");
    require_own_places(out.y, "outputs.y");
  } else {
    out.y = Tensor::empty(y, s.dtype);
  }
  const auto statistic = [&](Tensor& t, const char* name, bool asked, const Dims& shape,
                             const char* letters, DType dtype = DType::f32) {
    if (!t.defined()) {
      if (asked) t = Tensor::empty(shape, dtype);
      return;
    }
    require(asked, "{}: a tensor arrived, but spec.statistics does not ask for it", name);
    require_statistic(t, name, shape, letters, dtype);
  };
  const Statistics& want = p.spec.statistics;
  statistic(out.row_stat, "outputs.row_stat", true, rows, kRowLetters);
  statistic(out.entropy, "outputs.entropy", want.has(Statistic::entropy), rows, kRowLetters);
  statistic(out.max_weight, "outputs.max_weight", want.has(Statistic::max_weight), rows,
            kRowLetters);
  statistic(out.max_key, "outputs.max_key", want.has(Statistic::max_weight), rows, kRowLetters,
            DType::i64);
  statistic(out.support, "outputs.support", want.has(Statistic::support), rows, kRowLetters);
  statistic(out.coverage, "outputs.coverage", want.has(Statistic::coverage), keys, "(B, H, M)");

  const std::vector<Named> results = {{"outputs.y", &out.y},
                                      {"outputs.row_stat", &out.row_stat},
                                      {"outputs.entropy", &out.entropy},
                                      {"outputs.max_weight", &out.max_weight},
                                      {"outputs.max_key", &out.max_key},
                                      {"outputs.support", &out.support},
                                      {"outputs.coverage", &out.coverage}};
  const std::vector<Named> inputs = named_inputs(p.in);
  for (size_t a = 0; a < results.size(); ++a) {
    const Named& r = results[a];
    if (!r.tensor->defined()) continue;
    for (const Named& i : inputs) {
      require(!i.tensor->defined() || !overlap(*r.tensor, *i.tensor),
              "{}: its memory overlaps that of the input {}", r.name, i.name);
    }
    for (size_t b = 0; b < a; ++b) {
      require(!results[b].tensor->defined() || !overlap(*r.tensor, *results[b].tensor),
              "{}: its memory overlaps that of {}", r.name, results[b].name);
    }
  }
}

void check_row_stat(const AttentionShape& s, const Tensor& row_stat) {
  require(row_stat.defined(), "saved.row_stat: no tensor was given; pass what forward gave");
  require_statistic(row_stat, "saved.row_stat", {s.B, s.H, s.N}, kRowLetters);
}

void check_saved(const Problem& p, const AttentionOutputs& saved, const AttentionUpstream& up) {
  const AttentionShape& s = p.shape;
  const Dims rows{s.B, s.H, s.N};
  require(saved.y.defined(), "saved.y: no tensor was given; pass what forward gave");
  require_result_dtype(saved.y, "saved.y", s.dtype);
  require_like(saved.y, "saved.y", {s.B, s.H, s.N, s.Dv}, "(B, H, N, Dv)");
  require_dense_rows(saved.y, "saved.y");
  check_row_stat(s, saved.row_stat);
  // A gradient for a statistic needs the statistic.
  if (up.dentropy.defined()) {
    require(saved.entropy.defined(),
            "saved.entropy: no tensor was given, but upstream.dentropy needs it; ask for it in "
            "spec.statistics");
    require_statistic(saved.entropy, "saved.entropy", rows, kRowLetters);
  }
  if (up.dmax_weight.defined()) {
    require(saved.max_key.defined() && saved.max_weight.defined(),
            "saved.max_key: no tensor was given, but upstream.dmax_weight needs it; ask for "
            "max_weight in spec.statistics");
    require_statistic(saved.max_weight, "saved.max_weight", rows, kRowLetters);
    require_statistic(saved.max_key, "saved.max_key", rows, kRowLetters, DType::i64);
  }
}

void check_upstream(const AttentionShape& s, const AttentionUpstream& up) {
  const Dims rows{s.B, s.H, s.N};
  if (up.dy.defined()) {
    require_result_dtype(up.dy, "upstream.dy", s.dtype);
    require_like(up.dy, "upstream.dy", {s.B, s.H, s.N, s.Dv}, "(B, H, N, Dv)");
    require_dense_rows(up.dy, "upstream.dy");
  }
  const auto statistic = [&](const Tensor& t, const char* name, const Dims& shape,
                             const char* letters) {
    if (t.defined()) require_statistic(t, name, shape, letters);
  };
  statistic(up.drow_stat, "upstream.drow_stat", rows, kRowLetters);
  statistic(up.dentropy, "upstream.dentropy", rows, kRowLetters);
  statistic(up.dmax_weight, "upstream.dmax_weight", rows, kRowLetters);
  statistic(up.dcoverage, "upstream.dcoverage", {s.B, s.H, s.M}, "(B, H, M)");
}

// Makes what is wanted and not there; what arrived must be as it would be made, with memory of its
// own.
void prepare_gradients(const Problem& p, const AttentionOutputs& saved, const AttentionUpstream& up,
                       const AttentionWanted& wanted, AttentionGradients& g) {
  const AttentionShape& s = p.shape;
  const AttentionInputs& in = p.in;
  std::vector<Named> others = named_inputs(in);
  const std::vector<Named> given = {{"saved.y", &saved.y},
                                    {"saved.row_stat", &saved.row_stat},
                                    {"saved.entropy", &saved.entropy},
                                    {"saved.max_weight", &saved.max_weight},
                                    {"saved.max_key", &saved.max_key},
                                    {"upstream.dy", &up.dy},
                                    {"upstream.drow_stat", &up.drow_stat},
                                    {"upstream.dentropy", &up.dentropy},
                                    {"upstream.dmax_weight", &up.dmax_weight},
                                    {"upstream.dcoverage", &up.dcoverage}};
  others.insert(others.end(), given.begin(), given.end());
  // Backward overwrites dq, dk and dv, which may be views, and adds to the others.
  const auto prepare = [&](Tensor& t, const char* name, bool asked, bool zero, const Dims& shape,
                           DType dtype) {
    if (!t.defined()) {
      if (asked) t = zero ? Tensor::zeros(shape, dtype) : Tensor::empty(shape, dtype);
      return;
    }
    require(asked, "{}: a tensor arrived, but it is not among the gradients that are wanted", name);
    require(t.dtype() == dtype, "{}: {} arrived, {} is right", name, name_of(t.dtype()),
            name_of(dtype));
    require(t.shape() == shape, "{}: shape {} arrived, {} is right", name, t.shape(), shape);
    if (zero) {
      require(t.is_contiguous(), "{}: a strided view arrived, it must be contiguous", name);
    } else {
      require_dense_rows(t, name);
      require_own_places(t, name);
    }
    for (const Named& o : others) {
      require(!o.tensor->defined() || !overlap(t, *o.tensor), "{}: its memory overlaps that of {}",
              name, o.name);
    }
    others.push_back({name, &t});
    if (zero) t.fill(0);
  };
  const AttentionWanted& w = wanted;
  prepare(g.dq, "gradients.dq", w.qkv, false, in.q.shape(), s.dtype);
  prepare(g.dk, "gradients.dk", w.qkv, false, in.k.shape(), s.dtype);
  prepare(g.dv, "gradients.dv", w.qkv, false, in.v.shape(), s.dtype);
  prepare(g.dbias, "gradients.dbias", w.bias && p.bias.defined(), true,
          p.bias.defined() ? in.bias.shape() : Dims{}, DType::f32);
  const auto shape_of = [](const Tensor& t) { return t.defined() ? t.shape() : Dims{}; };
  prepare(g.dslopes, "gradients.dslopes", w.slopes && find_bias<Alibi>(p.spec), true,
          shape_of(in.slopes), DType::f32);
  prepare(g.dtable1d, "gradients.dtable1d", w.tables && find_bias<Relative1D>(p.spec), true,
          shape_of(in.table1d), DType::f32);
  prepare(g.dtable2d, "gradients.dtable2d", w.tables && find_bias<Relative2D>(p.spec), true,
          shape_of(in.table2d), DType::f32);
  prepare(g.dscore_w, "gradients.dscore_w",
          w.score_w && std::holds_alternative<Additive>(p.spec.score), true, shape_of(in.score_w),
          DType::f32);
  const bool per_head = std::holds_alternative<std::vector<double>>(p.spec.scale);
  prepare(g.dscale, "gradients.dscale", w.scale, true, {per_head ? s.H : 1}, DType::f32);
  const auto* entmax = std::get_if<Entmax>(&p.spec.normalizer);
  prepare(g.dalpha, "gradients.dalpha", w.alpha && entmax, true,
          {entmax && !entmax->per_head.empty() ? s.H : 1}, DType::f32);
}

}  // namespace

AttentionOutputs Bound::forward() const {
  AttentionOutputs out;
  forward(out);
  return out;
}

void Bound::forward(AttentionOutputs& outputs) const {
  AttentionOutputs out = outputs;  // stays as it was if a check fails
  out.skipped_pairs = 0;
  out.ordinary = false;
  prepare_outputs(state_->problem, out);
  state_->plan->picked->forward(state_->problem, out);
  outputs = out;
}

AttentionGradients Bound::backward(const AttentionOutputs& saved, const AttentionUpstream& upstream,
                                   const AttentionWanted& wanted) const {
  AttentionGradients g;
  backward(saved, upstream, wanted, g);
  return g;
}

void Bound::backward(const AttentionOutputs& saved, const AttentionUpstream& upstream,
                     const AttentionWanted& wanted, AttentionGradients& gradients) const {
  const Problem& p = state_->problem;
  check_upstream(p.shape, upstream);
  check_saved(p, saved, upstream);
  AttentionGradients g = gradients;  // stays as it was if a check fails
  prepare_gradients(p, saved, upstream, wanted, g);
  state_->plan->picked->backward(p, saved, upstream, wanted, g);
  gradients = g;
}

Tensor Bound::weights(const AttentionOutputs& saved, std::span<const int64_t> rows,
                      std::span<const int64_t> heads) const {
  const Problem& p = state_->problem;
  const AttentionShape& s = p.shape;
  check_row_stat(s, saved.row_stat);
  for (int64_t i : rows) {
    require(i >= 0 && i < s.N, "rows: {} arrived, a query lies in [0, N = {})", i, s.N);
  }
  for (int64_t h : heads) {
    require(h >= 0 && h < s.H, "heads: {} arrived, a head lies in [0, H = {})", h, s.H);
  }
  Tensor w = Tensor::zeros(
      {s.B, static_cast<int64_t>(heads.size()), static_cast<int64_t>(rows.size()), s.M});
  state_->plan->picked->weights(p, saved, rows, heads, w);
  return w;
}

int64_t Bound::visible_pairs() const {
  const Problem& p = state_->problem;
  const AttentionShape& s = p.shape;
  const KeyMask& mask = p.mask;
  constexpr double kMinus = -std::numeric_limits<double>::infinity();
  bool masking = false;  // whether the bias hides anything
  if (p.bias.defined()) {
    const Tensor own = state_->problem.in.bias.to(DType::f64).contiguous();
    const auto values = own.span<double>();
    masking = std::find(values.begin(), values.end(), kMinus) != values.end();
  }
  const bool same_heads =
      (!mask.keep.defined() || mask.keep.stride(1) == 0) && (!masking || p.bias.stride(1) == 0);
  const int64_t heads = same_heads ? 1 : s.H;
  std::vector<int64_t> rows(s.B * s.N, 0);
  parallel_for(s.B * s.N, [&](int64_t row) {
    const int64_t begin = mask.begin[row], end = mask.end[row];
    if (mask.only_ranges() && !masking) {
      rows[row] = (end - begin) * heads;
      return;
    }
    const int64_t b = row / s.N, i = row % s.N;
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t j = begin; j < end; ++j) {
        if (!mask.allows(b, h, i, j)) continue;
        rows[row] += !masking || p.bias.item({b, h, i, j}) != kMinus;
      }
    }
  });
  return std::accumulate(rows.begin(), rows.end(), int64_t{0}) * (same_heads ? s.H : 1);
}

}  // namespace foci
