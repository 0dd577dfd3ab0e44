// Attention on the tape: heads are strided views of [B, N, H·D], so nothing is transposed or
// packed.
//
// Saved for backward: q, k, v, y and one row statistic (see attention/plan.h); weights are computed
// again.
#include "foci/attention/plan.h"
#include "foci/autograd/elementwise.h"
#include "foci/autograd/ops.h"
#include "foci/autograd/ops/attention_f64.h"
#include "foci/autograd/profile.h"

namespace foci::ops {
namespace {

// x [B, N, heads·size] as [B, heads, N, size], of the same memory. One head in x may be shown as
// `shown` equal ones.
Tensor split_heads(const Tensor& x, int64_t heads, int64_t shown) {
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
    return {Plan::make(spec, {.B = in.q.dim(0),
                              .H = in.q.dim(1),
                              .Hk = in.k.dim(1),
                              .N = in.q.dim(2),
                              .M = in.k.dim(2),
                              .D = in.q.dim(3),
                              .Dv = in.v.dim(3)})
                .bind(in)};
  }
  double visible_pairs() const { return static_cast<double>(bound.visible_pairs()); }
  void forward(AttentionOutputs& out) const { bound.forward(out); }
  AttentionGradients backward(const AttentionOutputs& saved, const AttentionUpstream& up,
                              const AttentionWanted& wanted) const {
    return bound.backward(saved, up, wanted);
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
  AttentionGradients backward(const AttentionOutputs& saved, const AttentionUpstream& up,
                              const AttentionWanted&) const {
    return attention_f64_backward(spec, in, saved, up);
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

// g [B, heads, N, size] to where [B, N, heads·size] collects.
template <class T>
void put_heads(const std::shared_ptr<detail::GradSlot<T>>& slot, const Tensor& g) {
  if (!slot) return;
  const int64_t heads = g.dim(1);
  if (!slot->awaits_first()) {
    add_into<T>(split_heads(slot->buffer(), heads, heads), g);
  } else {
    Tensor first = Tensor::empty(slot->shape, dtype_v<T>);
    copy_rows<T>(split_heads(first, heads, heads), g);
    slot->add(first, true);
  }
}

// Likewise of q, k and v at once, where they are parts of one value that lie side by side and make
// it up: then nothing needs to be cleared. Whether it did.
template <class T>
bool put_joint(const std::shared_ptr<detail::GradSlot<T>>& q,
               const std::shared_ptr<detail::GradSlot<T>>& k,
               const std::shared_ptr<detail::GradSlot<T>>& v, const AttentionGradients& g) {
  if (!q || !k || !v || !q->base || k->base != q->base || v->base != q->base) return false;
  const std::shared_ptr<detail::GradSlot<T>> base = q->base;
  if (!base->awaits_first() || g.dv.dim(1) * g.dv.dim(3) != v->shape[2]) return false;
  const Tensor all = Tensor::empty(base->shape, dtype_v<T>);
  const Tensor to_q = q->view(all), to_k = k->view(all), to_v = v->view(all);
  const int64_t width = base->shape.back();
  const auto lies = [&](const Tensor& t, int64_t at) {
    return t.raw() == all.data<T>() + at && t.stride(1) == width && t.stride(2) == 1;
  };
  const int64_t k_at = q->shape[2], v_at = k_at + k->shape[2];
  if (q->shape[0] * q->shape[1] * width != all.numel() || v_at + v->shape[2] != width ||
      !lies(to_q, 0) || !lies(to_k, k_at) || !lies(to_v, v_at)) {
    return false;
  }
  copy_rows<T>(split_heads(to_q, g.dq.dim(1), g.dq.dim(1)), g.dq);
  copy_rows<T>(split_heads(to_k, g.dk.dim(1), g.dk.dim(1)), g.dk);
  copy_rows<T>(split_heads(to_v, g.dv.dim(1), g.dv.dim(1)), g.dv);
  base->add(all, true);
  return true;
}

}  // namespace

template <class T>
AttentionResult<T> attention(Tape<T>& tape, const Var<T>& q, const Var<T>& k, const Var<T>& v,
                             const AttentionArguments<T>& a) {
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
          q.shape().str(), k.shape().str(), v.shape().str());
  require(q.dim(2) % H == 0 && k.dim(2) % Hk == 0 && v.dim(2) % value_heads == 0 &&
              q.dim(2) / H == k.dim(2) / Hk,
          "attention: q {} in {} heads and k {} in {} heads do not share a head size, or v {} does "
          "not divide into {}",
          q.shape().str(), H, k.shape().str(), Hk, v.shape().str(), value_heads);
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
  if (a.scale.defined()) {
    require(a.scale.shape() == Dims{1} || a.scale.shape() == Dims{H},
            "attention: a learned scale of shape {}; [1] or [{}] is right", a.scale.shape().str(),
            H);
    std::vector<double> scales;
    for (T s : a.scale.value().template span<T>()) scales.push_back(static_cast<double>(s));
    if (scales.size() == 1) {
      spec.scale = scales[0];
    } else {
      spec.scale = scales;
    }
  }

  ProfileScope timed(Operator::attention, Pass::forward);
  const Engine<T> engine = Engine<T>::make(spec, in);
  const double pairs = timed.on() ? engine.visible_pairs() : 0;
  const double D = static_cast<double>(q.dim(2) / H), Dv_ = static_cast<double>(Dv);
  timed.add_flops(2 * pairs * (D + Dv_));
  AttentionOutputs out;
  Tensor y = Tensor::empty({B, N, H * Dv}, dtype_v<T>);
  out.y = split_heads(y, H, H);
  engine.forward(out);

  bool needed = false;
  for (const Var<T>* x :
       {&q, &k, &v, &a.bias, &a.slopes, &a.table1d, &a.table2d, &a.score_w, &a.scale}) {
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
  tape.record({result.y, result.row_stat, result.entropy, result.coverage, result.max_weight},
              [engine, out, wanted, back_flops = 2 * pairs * (3 * D + 2 * Dv_), H, Hk, value_heads,
               y_slot = result.y.slot(), stat = result.row_stat.slot(),
               entropy = result.entropy.slot(), coverage = result.coverage.slot(),
               max_weight = result.max_weight.slot(), dq = q.slot(), dk = k.slot(), dv = v.slot(),
               dbias = a.bias.slot(), dslopes = a.slopes.slot(), dtable1d = a.table1d.slot(),
               dtable2d = a.table2d.slot(), dscore_w = a.score_w.slot(), dscale = a.scale.slot()] {
                const ProfileScope back(Operator::attention, Pass::backward, back_flops);
                AttentionUpstream up;
                if (y_slot->has()) up.dy = split_heads(y_slot->grad, H, H);
                up.drow_stat = stat->grad;
                if (entropy) up.dentropy = entropy->grad;
                if (coverage) up.dcoverage = coverage->grad;
                if (max_weight) up.dmax_weight = max_weight->grad;
                const AttentionGradients g = engine.backward(out, up, wanted);
                if (!put_joint<T>(dq, dk, dv, g)) {
                  put_heads<T>(dq, g.dq);
                  put_heads<T>(dk, g.dk);
                  if (value_heads == Hk) {
                    put_heads<T>(dv, g.dv);
                  } else {  // one projection for all heads: their gradients add up, in order
                    for (int64_t h = 0; h < Hk; ++h) put_heads<T>(dv, g.dv.slice(1, h, h + 1));
                  }
                }
                put<T>(dbias, g.dbias);
                put<T>(dslopes, g.dslopes);
                put<T>(dtable1d, g.dtable1d);
                put<T>(dtable2d, g.dtable2d);
                put<T>(dscore_w, g.dscore_w);
                put<T>(dscale, g.dscale);
              });
  return result;
}

template AttentionResult<float> attention(Tape<float>&, const Var<float>&, const Var<float>&,
                                          const Var<float>&, const AttentionArguments<float>&);
template AttentionResult<double> attention(Tape<double>&, const Var<double>&, const Var<double>&,
                                           const Var<double>&, const AttentionArguments<double>&);

}  // namespace foci::ops
