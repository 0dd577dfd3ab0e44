// Float16 and bfloat16 storage: widened to float32 on the way in, narrowed on the way out. The
// copies grow with N + M.
#include "foci/attention/fused.h"

namespace foci {
namespace {

bool is_half(const Problem& p) {
  return p.shape.dtype != DType::f32;
}

Problem widened(const Problem& p) {
  Problem wide = p;
  wide.shape.dtype = DType::f32;
  wide.in.q = p.in.q.to(DType::f32);
  wide.in.k = p.in.k.to(DType::f32);
  wide.in.v = p.in.v.to(DType::f32);
  return wide;
}

Tensor like(const Tensor& t) {
  return t.defined() ? Tensor::empty(t.shape()) : Tensor();
}

}  // namespace

void fused_forward(const Problem& p, AttentionOutputs& out) {
  if (!is_half(p)) return fused::forward_f32(p, out);
  AttentionOutputs wide = out;
  wide.y = like(out.y);
  fused::forward_f32(widened(p), wide);
  out.y.copy_from(wide.y);
}

void fused_backward(const Problem& p, const AttentionOutputs& saved, const AttentionUpstream& up,
                    const AttentionWanted& wanted, AttentionGradients& grads) {
  if (!is_half(p)) return fused::backward_f32(p, saved, up, wanted, grads);
  const Problem wide = widened(p);
  // Y as it was saved is too coarse for dY·Y, which must cancel against dP: it is made again.
  AttentionOutputs again = saved;
  if (saved.y.dtype() != DType::f32 && std::holds_alternative<Softmax>(p.spec.normalizer)) {
    AttentionOutputs scratch;
    scratch.y = like(saved.y);
    scratch.row_stat = Tensor::empty(saved.row_stat.shape());
    fused::forward_f32(wide, scratch);
    again.y = scratch.y;
  } else {
    again.y = saved.y.to(DType::f32);
  }
  AttentionUpstream wide_up = up;
  if (up.dy.defined()) wide_up.dy = up.dy.to(DType::f32);
  AttentionGradients g = grads;
  g.dq = like(grads.dq);
  g.dk = like(grads.dk);
  g.dv = like(grads.dv);
  fused::backward_f32(wide, again, wide_up, wanted, g);
  if (grads.dq.defined()) {
    grads.dq.copy_from(g.dq);
    grads.dk.copy_from(g.dk);
    grads.dv.copy_from(g.dv);
  }
}

void fused_weights(const Problem& p, const AttentionOutputs&, std::span<const int64_t> rows,
                   std::span<const int64_t> heads, Tensor& weights) {
  fused::weights_f32(is_half(p) ? widened(p) : p, rows, heads, weights);
}

}  // namespace foci
