// Dense operators, written plainly.
#include "foci/kernels/dense.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <vector>

#include "foci/core/threads.h"

namespace foci::kernels {
namespace {

constexpr int64_t kRowsPerTask = 64;
constexpr int64_t kElementsPerTask = 16384;
constexpr float kSqrtHalf = 0.70710678f;
constexpr float kInvSqrtTwoPi = 0.39894228f;

// Runs f(begin, end) over [0, n) in blocks.
template <class F>
void blocks(int64_t n, int64_t block, const F& f) {
  parallel_for((n + block - 1) / block,
               [&](int64_t i) { f(i * block, std::min(n, (i + 1) * block)); });
}

float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::relu:
      return x <= 0 ? 0.0f : x;
    case Activation::gelu:
      return x * (0.5f * (1.0f + std::erf(x * kSqrtHalf)));
  }
  return x;
}

}  // namespace

void gemm(SimdTarget, const Gemm& g) {
  blocks(g.m, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(g.n));
    for (int64_t i = begin; i < end; ++i) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (int64_t k = 0; k < g.k; ++k) {
        const float a = g.layout == GemmLayout::tn ? g.a[k * g.lda + i] : g.a[i * g.lda + k];
        for (int64_t j = 0; j < g.n; ++j) {
          const float b = g.layout == GemmLayout::nt ? g.b[j * g.ldb + k] : g.b[k * g.ldb + j];
          sum[j] += a * b;
        }
      }
      float* c = g.c + i * g.ldc;
      for (int64_t j = 0; j < g.n; ++j) c[j] = g.accumulate ? c[j] + sum[j] : sum[j];
    }
  });
}

void linear_forward(SimdTarget target, const LinearForward& a) {
  gemm(target, {.layout = GemmLayout::nt,
                .m = a.rows,
                .n = a.outputs,
                .k = a.inputs,
                .a = a.x,
                .lda = a.ldx,
                .b = a.w,
                .ldb = a.inputs,
                .c = a.y,
                .ldc = a.ldy});
  blocks(a.rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t o = 0; o < a.outputs; ++o) {
        float& y = a.y[r * a.ldy + o];
        if (a.bias) y += a.bias[o];
        if (a.pre) a.pre[r * a.outputs + o] = y;
        y = activate(a.activation, y);
      }
    }
  });
}

void linear_backward_input(SimdTarget target, int64_t rows, int64_t inputs, int64_t outputs,
                           const float* dy, int64_t lddy, const float* w, float* dx, int64_t lddx,
                           bool accumulate) {
  gemm(target, {.layout = GemmLayout::nn,
                .m = rows,
                .n = inputs,
                .k = outputs,
                .a = dy,
                .lda = lddy,
                .b = w,
                .ldb = inputs,
                .c = dx,
                .ldc = lddx,
                .accumulate = accumulate});
}

void linear_backward_weight(SimdTarget target, int64_t rows, int64_t inputs, int64_t outputs,
                            const float* dy, int64_t lddy, const float* x, int64_t ldx, float* dw,
                            float* dbias, bool accumulate) {
  gemm(target, {.layout = GemmLayout::tn,
                .m = outputs,
                .n = inputs,
                .k = rows,
                .a = dy,
                .lda = lddy,
                .b = x,
                .ldb = ldx,
                .c = dw,
                .ldc = inputs,
                .accumulate = accumulate});
  if (!dbias) return;
  for (int64_t o = 0; o < outputs; ++o) {
    float sum = 0;
    for (int64_t r = 0; r < rows; ++r) sum += dy[r * lddy + o];
    dbias[o] = accumulate ? dbias[o] + sum : sum;
  }
}

void activation_backward(SimdTarget, Activation activation, int64_t n, const float* pre,
                         const float* dy, float* dpre) {
  blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float x = pre[i];
      float d = 1;
      if (activation == Activation::relu) d = x <= 0 ? 0.0f : 1.0f;
      if (activation == Activation::gelu) {
        d = 0.5f * (1.0f + std::erf(x * kSqrtHalf)) + x * kInvSqrtTwoPi * std::exp(-0.5f * x * x);
      }
      dpre[i] = dy[i] * d;
    }
  });
}

void layer_norm_forward(SimdTarget, int64_t rows, int64_t channels, const float* x,
                        const float* gamma, const float* beta, float eps, float* y, float* mean,
                        float* rstd) {
  blocks(rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* xr = x + r * channels;
      double sum = 0, squares = 0;
      for (int64_t c = 0; c < channels; ++c) sum += xr[c];
      const double m = sum / static_cast<double>(channels);
      for (int64_t c = 0; c < channels; ++c) squares += (xr[c] - m) * (xr[c] - m);
      const double s = 1 / std::sqrt(squares / static_cast<double>(channels) + eps);
      mean[r] = static_cast<float>(m);
      rstd[r] = static_cast<float>(s);
      for (int64_t c = 0; c < channels; ++c) {
        y[r * channels + c] = static_cast<float>((xr[c] - m) * s) * gamma[c] + beta[c];
      }
    }
  });
}

void layer_norm_backward(SimdTarget, int64_t rows, int64_t channels, const float* x,
                         const float* gamma, const float* mean, const float* rstd, const float* dy,
                         float* dx, float* dgamma, float* dbeta) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* xr = x + r * channels;
    const float* dr = dy + r * channels;
    double sum = 0, dot = 0;
    for (int64_t c = 0; c < channels; ++c) {
      const float xhat = (xr[c] - mean[r]) * rstd[r];
      dgamma[c] += dr[c] * xhat;
      dbeta[c] += dr[c];
      sum += dr[c] * gamma[c];
      dot += dr[c] * gamma[c] * xhat;
    }
    sum /= static_cast<double>(channels);
    dot /= static_cast<double>(channels);
    for (int64_t c = 0; c < channels; ++c) {
      const float xhat = (xr[c] - mean[r]) * rstd[r];
      dx[r * channels + c] = static_cast<float>(rstd[r] * (dr[c] * gamma[c] - sum - xhat * dot));
    }
  }
}

void softmax_cross_entropy(SimdTarget, int64_t rows, int64_t classes, const float* logits,
                           const int64_t* labels, float smoothing, float* loss, float* dlogits) {
  blocks(rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      assert(labels[r] >= 0 && labels[r] < classes);
      const float* z = logits + r * classes;
      double top = -INFINITY, sum = 0, total = 0;
      for (int64_t c = 0; c < classes; ++c) top = std::max<double>(top, z[c]);
      for (int64_t c = 0; c < classes; ++c) {
        sum += std::exp(z[c] - top);
        total += z[c];
      }
      const double lse = top + std::log(sum);
      const double share = smoothing / static_cast<double>(classes);
      double expected = (1 - smoothing) * z[labels[r]];
      if (smoothing > 0) expected += share * total;
      loss[r] = static_cast<float>(lse - expected);
      for (int64_t c = 0; c < classes; ++c) {
        const double q = share + (c == labels[r] ? 1 - smoothing : 0);
        dlogits[r * classes + c] =
            static_cast<float>((std::exp(z[c] - lse) - q) / static_cast<double>(rows));
      }
    }
  });
}

void add(SimdTarget, int64_t n, const float* a, const float* b, float* y) {
  blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) y[i] = a[i] + b[i];
  });
}

void axpy(SimdTarget, int64_t n, float scale, const float* x, float* y) {
  blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) y[i] += scale * x[i];
  });
}

void scale(SimdTarget, int64_t n, float scale, float* x) {
  blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x[i] *= scale;
  });
}

double sum_of_squares(SimdTarget, int64_t n, const float* x) {
  std::vector<double> sums(static_cast<size_t>((n + kElementsPerTask - 1) / kElementsPerTask));
  blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t i = begin; i < end; ++i) sum += static_cast<double>(x[i]) * x[i];
    sums[static_cast<size_t>(begin / kElementsPerTask)] = sum;
  });
  double total = 0;
  for (double s : sums) total += s;
  return total;
}

void adamw_step(SimdTarget, int64_t n, const AdamW& a, const float* grad, float* param, float* m,
                float* v) {
  blocks(n, kElementsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float g = grad[i] * a.grad_scale;
      m[i] = a.beta1 * m[i] + (1 - a.beta1) * g;
      v[i] = a.beta2 * v[i] + (1 - a.beta2) * g * g;
      const float step = m[i] / a.correction1 / (std::sqrt(v[i] / a.correction2) + a.eps);
      param[i] -= a.learning_rate * (step + a.weight_decay * param[i]);
    }
  });
}

}  // namespace foci::kernels
