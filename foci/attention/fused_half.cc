// Float16 and bfloat16 storage: widened to float32 on the way in, narrowed on the way out. The
// copies grow with N + M.
#include <algorithm>

#include "foci/attention/fused.h"
#include "foci/core/threads.h"

namespace foci {
namespace {

bool is_half(const Problem& p) {
  return p.shape.dtype != DType::f32;
}

// A contiguous float32 copy of [B,H,N,D]; itself where it is float32.
Tensor widened(const Tensor& t, SimdTarget target) {
  if (!t.defined() || t.dtype() == DType::f32) return t;
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(target);
  const int64_t heads = t.dim(1), rows = t.dim(2), depth = t.dim(3);
  Tensor wide = Tensor::empty(t.shape());
  const auto* from = static_cast<const uint16_t*>(t.raw());
  // Rows of about 64 KB a task.
  const int64_t step = std::max<int64_t>(1, (int64_t{1} << 14) / std::max<int64_t>(depth, 1));
  const int64_t blocks = (rows + step - 1) / step;
  parallel_for(t.dim(0) * heads * blocks, [&](int64_t task) {
    const int64_t b = task / blocks / heads, h = task / blocks % heads;
    const int64_t begin = task % blocks * step, end = std::min(rows, begin + step);
    for (int64_t i = begin; i < end; ++i) {
      kernels.widen(t.dtype(), from + b * t.stride(0) + h * t.stride(1) + i * t.stride(2), depth,
                    wide.data<float>() + ((b * heads + h) * rows + i) * depth);
    }
  });
  return wide;
}

Problem widened(const Problem& p) {
  Problem wide = p;
  wide.shape.dtype = DType::f32;
  wide.in.q = widened(p.in.q, p.target);
  wide.in.k = widened(p.in.k, p.target);
  wide.in.v = widened(p.in.v, p.target);
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
  out.skipped_pairs = wide.skipped_pairs;
  out.ordinary = wide.ordinary;
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
    again.y = widened(saved.y, p.target);
  }
  AttentionUpstream wide_up = up;
  wide_up.dy = widened(up.dy, p.target);
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
