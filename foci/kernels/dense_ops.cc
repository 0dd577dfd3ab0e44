// Layer norm, cross-entropy, activations' derivatives, AdamW and vector arithmetic, compiled once a
// SIMD target. Tails run the same operations behind a mask, so an element's bits do not depend on
// where it stands.
#define HWY_TARGET_INCLUDE "foci/kernels/dense_ops.cc"
#include "foci/core/highway_targets.h"
// After foci's choice of targets.
#include <hwy/foreach_target.h>

#include <cassert>
#include <cmath>
#include <limits>

#include "foci/kernels/dense_ops.h"
#include "foci/kernels/long_sum-inl.h"
#include "foci/kernels/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {

// Calls f(index, load, store) for whole vectors and once more, masked, for the rest. load(p) reads
// lanes p[index…], zeros behind the end; store(v, p) writes them.
template <class F>
HWY_INLINE void for_lanes(int64_t n, F f) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    f([i](const float* p) HWY_ATTR { return hn::LoadU(FloatTag(), p + i); },
      [i](FloatVec v, float* p) HWY_ATTR { hn::StoreU(v, FloatTag(), p + i); });
  }
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    f([i, rest](const float* p) HWY_ATTR { return load_first(FloatTag(), rest, p + i); },
      [i, rest](FloatVec v, float* p) HWY_ATTR { store_first(v, FloatTag(), rest, p + i); });
  }
}

// Likewise for sums over [i, n): lanes behind the end must not count, so f also gets keep(v), which
// zeroes them.
template <class F>
HWY_INLINE void for_lanes_kept(int64_t i, int64_t n, F f) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; i + lanes <= n; i += lanes) {
    f([i](const float* p) HWY_ATTR { return hn::LoadU(FloatTag(), p + i); },
      [](FloatVec v) HWY_ATTR { return v; });
  }
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    const auto mask = hn::FirstN(d, rest);
    f([i, rest](const float* p) HWY_ATTR { return load_first(FloatTag(), rest, p + i); },
      [mask](FloatVec v) HWY_ATTR { return hn::IfThenElseZero(mask, v); });
  }
}

void activation_backward_task(Activation activation, int64_t n, const float* saved, const float* dy,
                              float* dpre) {
  switch (activation) {
    case Activation::none:
      for_lanes(n, [&](auto load, auto store) HWY_ATTR { store(load(dy), dpre); });
      break;
    case Activation::relu:
      for_lanes(n, [&](auto load, auto store) HWY_ATTR {
        const auto off = hn::Le(load(saved), hn::Zero(FloatTag()));
        store(hn::IfThenZeroElse(off, load(dy)), dpre);
      });
      break;
    case Activation::gelu:
      for_lanes(
          n, [&](auto load, auto store) HWY_ATTR { store(hn::Mul(load(dy), load(saved)), dpre); });
      break;
  }
}

void layer_norm_forward_task(int64_t rows, int64_t channels, const float* x, const float* gamma,
                             const float* beta, float eps, float* y, float* mean, float* rstd) {
  const FloatTag d;
  const float share = 1.0f / static_cast<float>(channels);
  for (int64_t r = 0; r < rows; ++r, x += channels, y += channels) {
    float sum;
    sum_in_blocks<1>(d, channels, &sum, [&](int64_t begin, int64_t end, FloatVec* s) HWY_ATTR {
      FloatVec own = hn::Zero(d);
      for_lanes_kept(begin, end, [&](auto load, auto) HWY_ATTR { own = hn::Add(own, load(x)); });
      s[0] = own;
    });
    mean[r] = sum * share;
    // The rounded mean may be off by more than the spread of the row (a constant row far from 0),
    // so what it is off by is measured and taken out as well.
    const FloatVec center = hn::Set(d, mean[r]);
    float around[2];  // the sum of x − center, and of its squares
    sum_in_blocks<2>(d, channels, around, [&](int64_t begin, int64_t end, FloatVec* s) HWY_ATTR {
      FloatVec off = hn::Zero(d), squares = hn::Zero(d);
      for_lanes_kept(begin, end, [&](auto load, auto keep) HWY_ATTR {
        const FloatVec v = keep(hn::Sub(load(x), center));
        off = hn::Add(off, v);
        squares = hn::MulAdd(v, v, squares);
      });
      s[0] = off;
      s[1] = squares;
    });
    const float mean_off = around[0] * share;
    float variance = around[1] * share - mean_off * mean_off;
    if (variance < 0) variance = 0;
    rstd[r] = 1.0f / std::sqrt(variance + eps);
    const FloatVec shift = hn::Set(d, mean_off), factor = hn::Set(d, rstd[r]);
    for_lanes(channels, [&](auto load, auto store) HWY_ATTR {
      const FloatVec xhat = hn::Mul(hn::Sub(hn::Sub(load(x), center), shift), factor);
      store(hn::MulAdd(xhat, load(gamma), load(beta)), y);
    });
  }
}

// With x̂ = (x − mean)·rstd and g = dy∘gamma:  dx = rstd·(g − Σg/C − x̂·Σ(g∘x̂)/C)
void layer_norm_backward_task(int64_t rows, int64_t channels, const float* x, const float* gamma,
                              const float* mean, const float* rstd, const float* dy,
                              const float* add, float* dx, float* dgamma, float* dbeta) {
  const FloatTag d;
  const float share = 1.0f / static_cast<float>(channels);
  for_lanes(channels, [&](auto, auto store) HWY_ATTR {
    store(hn::Zero(d), dgamma);
    store(hn::Zero(d), dbeta);
  });
  for (int64_t r = 0; r < rows; ++r, x += channels, dy += channels, dx += channels) {
    const FloatVec center = hn::Set(d, mean[r]), factor = hn::Set(d, rstd[r]);
    float sums[3];  // of x − mean, of g, and of their products
    sum_in_blocks<3>(d, channels, sums, [&](int64_t begin, int64_t end, FloatVec* s) HWY_ATTR {
      FloatVec off = hn::Zero(d), sum = hn::Zero(d), dot = hn::Zero(d);
      for_lanes_kept(begin, end, [&](auto load, auto keep) HWY_ATTR {
        const FloatVec v = keep(hn::Sub(load(x), center));
        const FloatVec g = hn::Mul(load(dy), load(gamma));
        off = hn::Add(off, v);
        sum = hn::Add(sum, g);
        dot = hn::MulAdd(g, v, dot);
      });
      s[0] = off;
      s[1] = sum;
      s[2] = dot;
    });
    // The same correction of the mean as in forward.
    const float mean_off = sums[0] * share;
    const float g_sum = sums[1];
    const FloatVec g_mean = hn::Set(d, g_sum * share);
    const FloatVec g_dot = hn::Set(d, (sums[2] - mean_off * g_sum) * rstd[r] * share);
    const FloatVec shift = hn::Set(d, mean_off);
    for_lanes(channels, [&](auto load, auto store) HWY_ATTR {
      const FloatVec xhat = hn::Mul(hn::Sub(hn::Sub(load(x), center), shift), factor);
      const FloatVec up = load(dy);
      const FloatVec g = hn::Sub(hn::Mul(up, load(gamma)), g_mean);
      const FloatVec own = hn::Mul(factor, hn::NegMulAdd(xhat, g_dot, g));
      store(add ? hn::Add(load(add), own) : own, dx);
    });
    // In a loop of its own: three streams of stores beside four of loads take twice the time.
    for_lanes(channels, [&](auto load, auto store) HWY_ATTR {
      const FloatVec xhat = hn::Mul(hn::Sub(hn::Sub(load(x), center), shift), factor);
      const FloatVec up = load(dy);
      store(hn::MulAdd(up, xhat, load(dgamma)), dgamma);
      store(hn::Add(load(dbeta), up), dbeta);
    });
    if (add) add += channels;
  }
}

// Target q = (1 − smoothing) at the label + smoothing/C everywhere:
//   loss = log Σe^(z−top) − Σ q·(z − top),  dlogits = (softmax(z) − q)·grad_scale
void softmax_cross_entropy_task(int64_t rows, int64_t classes, const float* logits,
                                const int64_t* labels, float smoothing, float grad_scale,
                                float* loss, float* dlogits) {
  const FloatTag d;
  const float uniform = smoothing / static_cast<float>(classes);
  for (int64_t r = 0; r < rows; ++r, logits += classes, dlogits += classes) {
    assert(labels[r] >= 0 && labels[r] < classes);
    float top = -std::numeric_limits<float>::infinity();
    FloatVec most = hn::Set(d, top);
    int64_t c = 0;
    for (const auto lanes = static_cast<int64_t>(hn::Lanes(d)); c + lanes <= classes; c += lanes) {
      const FloatVec z = hn::LoadU(d, logits + c);
      most = hn::IfThenElse(hn::Gt(z, most), z, most);
    }
    HWY_ALIGN float lane_most[hn::MaxLanes(d)];
    hn::Store(most, d, lane_most);
    for (size_t i = 0; i < hn::Lanes(d); ++i) top = lane_most[i] > top ? lane_most[i] : top;
    for (; c < classes; ++c) top = logits[c] > top ? logits[c] : top;
    const FloatVec top_v = hn::Set(d, top);
    float totals[2];  // of the exponentials, and of what they are taken of
    sum_in_blocks<2>(d, classes, totals, [&](int64_t begin, int64_t end, FloatVec* s) HWY_ATTR {
      FloatVec sum_v = hn::Zero(d), total_v = hn::Zero(d);
      for_lanes_kept(begin, end, [&](auto load, auto keep) HWY_ATTR {
        const FloatVec z = hn::Sub(load(logits), top_v);
        sum_v = hn::Add(sum_v, keep(exp_nonpositive(FloatTag(), z)));
        total_v = hn::Add(total_v, keep(z));
      });
      s[0] = sum_v;
      s[1] = total_v;
    });
    const float sum = totals[0];
    loss[r] = std::log(sum) - (1 - smoothing) * (logits[labels[r]] - top);
    if (smoothing > 0) loss[r] -= uniform * totals[1];
    const FloatVec factor = hn::Set(d, grad_scale / sum);
    const FloatVec away = hn::Set(d, uniform * grad_scale);
    for_lanes(classes, [&](auto load, auto store) HWY_ATTR {
      const FloatVec e = exp_nonpositive(FloatTag(), hn::Sub(load(logits), top_v));
      store(hn::MulSub(e, factor, away), dlogits);
    });
    dlogits[labels[r]] -= (1 - smoothing) * grad_scale;
  }
}

void add_task(int64_t n, const float* a, const float* b, float* y) {
  for_lanes(n, [&](auto load, auto store) HWY_ATTR { store(hn::Add(load(a), load(b)), y); });
}

void axpy_task(int64_t n, float scale, const float* x, float* y) {
  const FloatVec s = hn::Set(FloatTag(), scale);
  for_lanes(n, [&](auto load, auto store) HWY_ATTR { store(hn::MulAdd(s, load(x), load(y)), y); });
}

void scale_task(int64_t n, float scale, float* x) {
  const FloatVec s = hn::Set(FloatTag(), scale);
  for_lanes(n, [&](auto load, auto store) HWY_ATTR { store(hn::Mul(s, load(x)), x); });
}

double sum_of_squares_task(int64_t n, const float* x) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> d_float;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const auto v0 = hn::PromoteTo(d, hn::LoadU(d_float, x + i));
    const auto v1 = hn::PromoteTo(d, hn::LoadU(d_float, x + i + lanes));
    const auto v2 = hn::PromoteTo(d, hn::LoadU(d_float, x + i + 2 * lanes));
    const auto v3 = hn::PromoteTo(d, hn::LoadU(d_float, x + i + 3 * lanes));
    sum0 = hn::MulAdd(v0, v0, sum0);
    sum1 = hn::MulAdd(v1, v1, sum1);
    sum2 = hn::MulAdd(v2, v2, sum2);
    sum3 = hn::MulAdd(v3, v3, sum3);
  }
  const auto all = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  double sum = hn::GetLane(hn::SumOfLanes(d, all));
  for (; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return sum;
}

void adamw_step_task(int64_t n, const AdamW& a, float* grad, float* param, float* m, float* v) {
  const FloatTag d;
  const FloatVec clip = hn::Set(d, a.grad_scale), beta1 = hn::Set(d, a.beta1),
                 beta2 = hn::Set(d, a.beta2), rest1 = hn::Set(d, 1 - a.beta1),
                 rest2 = hn::Set(d, 1 - a.beta2), eps = hn::Set(d, a.eps),
                 lr = hn::Set(d, a.learning_rate), decay = hn::Set(d, a.weight_decay),
                 correct1 = hn::Set(d, 1 / a.correction1), correct2 = hn::Set(d, 1 / a.correction2);
  for_lanes(n, [&](auto load, auto store) HWY_ATTR {
    const FloatVec g = hn::Mul(load(grad), clip);
    store(hn::Zero(d), grad);
    const FloatVec m_new = hn::MulAdd(beta1, load(m), hn::Mul(rest1, g));
    const FloatVec v_new = hn::MulAdd(beta2, load(v), hn::Mul(rest2, hn::Mul(g, g)));
    store(m_new, m);
    store(v_new, v);
    const FloatVec root = hn::Add(hn::Sqrt(hn::Mul(v_new, correct2)), eps);
    const FloatVec p = load(param);
    const FloatVec step = hn::MulAdd(decay, p, hn::Div(hn::Mul(m_new, correct1), root));
    store(hn::NegMulAdd(lr, step, p), param);
  });
}

const DenseOps* ops_table() {
  static constexpr DenseOps t{activation_backward_task,
                              layer_norm_forward_task,
                              layer_norm_backward_task,
                              softmax_cross_entropy_task,
                              add_task,
                              axpy_task,
                              scale_task,
                              sum_of_squares_task,
                              adamw_step_task};
  return &t;
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foci::kernels {
FOCI_KERNEL_TABLE(DenseOps, ops_table, dense_ops)
}
#endif
