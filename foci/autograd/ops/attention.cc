// Attention on the tape: heads are strided views of [B, N, H·D], so nothing is transposed or
// packed.
//
// Saved for backward: q, k, v, y and one row statistic (see attention/plan.h); weights are computed
// again.
#include <array>

#include "foci/attention/plan.h"
#include "foci/autograd/ops.h"
#include "foci/autograd/ops/attention_f64.h"
#include "foci/autograd/profile.h"

namespace foci::ops {
namespace {

// x [B, N, heads·size] as [B, heads, N, size], of the same memory. One head in x may be shown as
// `shown` equal ones.
Tensor split_heads(const Tensor& given, int64_t heads, int64_t shown) {
  const Tensor x = given.stride(2) == 1 || given.dim(2) <= 1 ? given : given.clone();
  const int64_t size = x.dim(2) / heads;
  const int64_t head_stride = heads == 1 ? 0 : size;
  return Tensor::wrap(x.raw(), {x.dim(0), shown, x.dim(1), size},
                      {x.stride(0), head_stride, x.stride(1), 1}, x.dtype(),
                      std::make_shared<Tensor>(x));
}

// The two engines behind one face.
struct FloatEngine {
  Bound bound;
  static FloatEngine make(const AttentionSpec& spec, const AttentionInputs& in) {
    return {Plan::make(spec, shape_of(in)).bind(in)};
  }
  double visible_pairs() const { return static_cast<double>(bound.visible_pairs()); }
  void forward(AttentionOutputs& out) const { bound.forward(out); }
  // Writes dq, dk and dv into those that are given.
  void backward(const AttentionOutputs& saved, const AttentionUpstream& up,
                const AttentionWanted& wanted, AttentionGradients& g) const {
    bound.backward(saved, up, wanted, g);
  }
  Tensor weights(const AttentionOutputs& saved, std::span<const int64_t> rows,
                 std::span<const int64_t> heads) const {
    return bound.weights(saved, rows, heads);
  }
};

struct DoubleEngine {
  AttentionSpec spec;
  AttentionInputs in;
  static DoubleEngine make(const AttentionSpec& spec, const AttentionInputs& in) {
    validate(spec);
    return {spec, in};
  }
  double visible_pairs() const { return 0; }  // nobody measures the plain loop
  void forward(AttentionOutputs& out) const { attention_f64_forward(spec, in, out); }
  void backward(const AttentionOutputs& saved, const AttentionUpstream& up, const AttentionWanted&,
                AttentionGradients& g) const {
    const AttentionGradients given = g;
    g = attention_f64_backward(spec, in, saved, up);
    const auto place = [](const Tensor& to, Tensor& made) {
      if (!to.defined()) return;
      if (made.defined()) to.copy_from(made);
      made = to;
    };
    place(given.dq, g.dq);
    place(given.dk, g.dk);
    place(given.dv, g.dv);
  }
  Tensor weights(const AttentionOutputs&, std::span<const int64_t> rows,
                 std::span<const int64_t> heads) const {
    return attention_f64_weights(spec, in, rows, heads);
  }
};

template <class T>
using Engine = std::conditional_t<std::is_same_v<T, float>, FloatEngine, DoubleEngine>;

template <class T>
void put(const std::shared_ptr<detail::GradSlot<T>>& slot, const Tensor& g) {
  if (slot && g.defined()) slot->add(g.to(dtype_v<T>).reshape(slot->shape), false);
}

template <class T>
using Slot = std::shared_ptr<detail::GradSlot<T>>;

// Where backward writes the gradients of q, k and v: tensors of the values' own shapes [B, N,
// heads·size], so that nothing is copied afterwards.
template <class T>
class Places {
 public:
  Places(const Slot<T>& q, const Slot<T>& k, const Slot<T>& v) : slots_{q, k, v} {
    if (share_one()) return;
    for (int i = 0; i < 3; ++i) {
      if (slots_[i]) own_[i] = Tensor::empty(slots_[i]->shape, dtype_v<T>);
    }
  }
  const Tensor& q() const { return own_[0]; }
  const Tensor& k() const { return own_[1]; }
  const Tensor& v() const { return own_[2]; }

  // Gives them to the values.
  void give() const {
    if (all_.defined()) {
      slots_[0]->base->add(all_, true);
      return;
    }
    for (int i = 0; i < 3; ++i) {
      if (slots_[i]) slots_[i]->add(own_[i], true);
    }
  }

 private:
  // Where q, k and v are parts of one value that lie side by side and make it up, one tensor serves
  // them all, and nothing needs to be cleared.
  bool share_one() {
    for (const Slot<T>& slot : slots_) {
      if (!slot || !slot->base || slot->base != slots_[0]->base) return false;
    }
    const Slot<T>& base = slots_[0]->base;
    if (!base->awaits_first()) return false;
    const Tensor all = Tensor::empty(base->shape, dtype_v<T>);
    const int64_t width = base->shape.back();
    int64_t at = 0;
    for (int i = 0; i < 3; ++i) {
      own_[i] = slots_[i]->view(all);
      if (own_[i].raw() != all.data<T>() + at || own_[i].stride(1) != width ||
          own_[i].stride(2) != 1) {
        return false;
      }
      at += own_[i].dim(2);
    }
    if (at != width || own_[0].dim(0) * own_[0].dim(1) * width != all.numel()) return false;
    all_ = all;
    return true;
  }

  std::array<Slot<T>, 3> slots_;
  std::array<Tensor, 3> own_;
  Tensor all_;
};

}  // namespace

template <class T>
AttentionResult<T> attention(Tape<T>& tape, const Var<T>& q, const Var<T>& k, const Var<T>& v,
                             const AttentionArguments<T>& a) {
  tape.check(q, "attention: q");
  tape.check(k, "attention: k");
  tape.check(v, "attention: v");
  tape.check_if_given(a.bias, "attention: bias");
  tape.check_if_given(a.slopes, "attention: slopes");
  tape.check_if_given(a.table1d, "attention: table1d");
  tape.check_if_given(a.table2d, "attention: table2d");
  tape.check_if_given(a.score_w, "attention: score_w");
  tape.check_if_given(a.scale, "attention: scale");
  tape.check_if_given(a.alpha, "attention: alpha");
  const int64_t H = a.heads, Hk = a.kv_heads, value_heads = a.value_heads ? a.value_heads : Hk;
  require(H >= 1 && Hk >= 1 && H % Hk == 0,
          "attention: {} query heads on {} key/value heads; the second must divide the first", H,
          Hk);
  require(value_heads == Hk || value_heads == 1,
          "attention: {} value heads for {} key heads; as "
          "many, or 1",
          value_heads, Hk);
  require(q.rank() == 3 && k.rank() == 3 && v.rank() == 3 && q.dim(0) == k.dim(0) &&
              q.dim(0) == v.dim(0) && k.dim(1) == v.dim(1),
          "attention: q {}, k {}, v {}; [batch, queries, channels] and [batch, keys, channels] are "
          "right",
          q.shape(), k.shape(), v.shape());
  require(q.dim(2) % H == 0 && k.dim(2) % Hk == 0 && v.dim(2) % value_heads == 0 &&
              q.dim(2) / H == k.dim(2) / Hk,
          "attention: q {} in {} heads and k {} in {} heads do not share a head size, or v {} does "
          "not divide into {}",
          q.shape(), H, k.shape(), Hk, v.shape(), value_heads);
  const int64_t B = q.dim(0), N = q.dim(1), Dv = v.dim(2) / value_heads;

  AttentionInputs in = a.masks;
  in.q = split_heads(q.value(), H, H);
  in.k = split_heads(k.value(), Hk, Hk);
  in.v = split_heads(v.value(), value_heads, Hk);
  in.bias = a.bias.value();
  in.slopes = a.slopes.value();
  in.table1d = a.table1d.value();
  in.table2d = a.table2d.value();
  in.score_w = a.score_w.value();
  AttentionSpec spec = a.spec;
  const auto doubles = [](const Tensor& t) {
    const Tensor dense = t.contiguous();
    const auto values = dense.span<T>();
    return std::vector<double>(values.begin(), values.end());
  };
  if (a.scale.defined()) {
    require(a.scale.shape() == Dims{1} || a.scale.shape() == Dims{H},
            "attention: a learned scale of shape {}; [1] or [{}] is right", a.scale.shape(), H);
    const std::vector<double> scales = doubles(a.scale.value());
    if (scales.size() == 1) {
      spec.scale = scales[0];
    } else {
      spec.scale = scales;
    }
  }
  if (a.alpha.defined()) {
    auto* entmax = std::get_if<Entmax>(&spec.normalizer);
    require(entmax != nullptr, "attention: a learned alpha, which only entmax reads");
    require(a.alpha.shape() == Dims{1} || a.alpha.shape() == Dims{H},
            "attention: a learned alpha of shape {}; [1] or [{}] is right", a.alpha.shape(), H);
    const std::vector<double> alphas = doubles(a.alpha.value());
    *entmax = alphas.size() == 1 ? Entmax{alphas[0]} : Entmax{.per_head = alphas};
  }

  ProfileScope timed(Operator::attention, Pass::forward);
  const Engine<T> engine = Engine<T>::make(spec, in);
  const double pairs = timed.on() ? engine.visible_pairs() : 0;
  const int64_t D = q.dim(2) / H;
  timed.add_flops(2 * pairs * static_cast<double>(D + Dv));
  AttentionOutputs out;
  Tensor y = Tensor::empty({B, N, H * Dv}, dtype_v<T>);
  out.y = split_heads(y, H, H);
  engine.forward(out);

  bool needed = false;
  for (const Var<T>* x :
       {&q, &k, &v, &a.bias, &a.slopes, &a.table1d, &a.table2d, &a.score_w, &a.scale, &a.alpha}) {
    needed = needed || x->needs_grad();
  }
  AttentionResult<T> result;
  result.y = tape.result(y, needed);
  result.row_stat = tape.result(out.row_stat, needed);
  if (out.entropy.defined()) result.entropy = tape.result(out.entropy, needed);
  if (out.coverage.defined()) result.coverage = tape.result(out.coverage, needed);
  if (out.max_weight.defined()) result.max_weight = tape.result(out.max_weight, needed);
  result.max_key = out.max_key;
  result.support = out.support;
  result.weights = [engine, out](std::span<const int64_t> rows, std::span<const int64_t> heads) {
    return engine.weights(out, rows, heads);
  };
  if (!result.y.needs_grad()) return result;

  AttentionWanted wanted;
  wanted.qkv = q.needs_grad() || k.needs_grad() || v.needs_grad();
  wanted.bias = a.bias.needs_grad();
  wanted.slopes = a.slopes.needs_grad();
  wanted.tables = a.table1d.needs_grad() || a.table2d.needs_grad();
  wanted.score_w = a.score_w.needs_grad();
  wanted.scale = a.scale.needs_grad();
  wanted.alpha = a.alpha.needs_grad();
  tape.record({result.y, result.row_stat, result.entropy, result.coverage, result.max_weight},
              [engine, out, wanted, back_flops = 2 * pairs * static_cast<double>(3 * D + 2 * Dv), H,
               Hk, value_heads, y_slot = result.y.slot(), stat = result.row_stat.slot(),
               entropy = result.entropy.slot(), coverage = result.coverage.slot(),
               max_weight = result.max_weight.slot(), dq = q.slot(), dk = k.slot(), dv = v.slot(),
               dbias = a.bias.slot(), dslopes = a.slopes.slot(), dtable1d = a.table1d.slot(),
               dtable2d = a.table2d.slot(), dscore_w = a.score_w.slot(), dscale = a.scale.slot(),
               dalpha = a.alpha.slot()] {
                const ProfileScope back(Operator::attention, Pass::backward, back_flops);
                AttentionUpstream up;
                if (y_slot->has()) up.dy = split_heads(y_slot->grad, H, H);
                up.drow_stat = stat->grad;
                if (entropy) up.dentropy = entropy->grad;
                if (coverage) up.dcoverage = coverage->grad;
                if (max_weight) up.dmax_weight = max_weight->grad;
                AttentionGradients g;
                const bool shared_values = value_heads != Hk;
                const Places<T> places(dq, dk, shared_values ? nullptr : dv);
                const auto shown = [](const Tensor& t, int64_t heads) {
                  return t.defined() ? split_heads(t, heads, heads) : Tensor();
                };
                if (wanted.qkv) {
                  g.dq = shown(places.q(), H);
                  g.dk = shown(places.k(), Hk);
                  g.dv = shown(places.v(), Hk);
                }
                engine.backward(out, up, wanted, g);
                places.give();
                // One projection for all heads: their gradients add up, in order.
                for (int64_t h = 0; shared_values && dv && h < Hk; ++h) {
                  dv->add(g.dv.select(1, h), false);
                }
                put<T>(dbias, g.dbias);
                put<T>(dslopes, g.dslopes);
                put<T>(dtable1d, g.dtable1d);
                put<T>(dtable2d, g.dtable2d);
                put<T>(dscore_w, g.dscore_w);
                put<T>(dscale, g.dscale);
                put<T>(dalpha, g.dalpha);
              });
  return result;
}

template AttentionResult<float> attention(Tape<float>&, const Var<float>&, const Var<float>&,
                                          const Var<float>&, const AttentionArguments<float>&);
template AttentionResult<double> attention(Tape<double>&, const Var<double>&, const Var<double>&,
                                           const Var<double>&, const AttentionArguments<double>&);

}  // namespace foci::ops
