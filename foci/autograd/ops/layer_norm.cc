// y = x̂ ∘ gamma + beta, x̂ = (x − mean) · rstd
//
// Backward, with h = dy ∘ gamma over a row of C: dx = rstd · (h − mean(h) − x̂ · mean(h ∘ x̂));
// dgamma = Σ_rows dy ∘ x̂; dbeta = Σ_rows dy. The variance takes a second pass over x − mean: Σx²
// would lose everything where the mean is large. dx is added to what a residual branch has sent.
#include <cmath>

#include "foci/autograd/ops.h"
#include "foci/autograd/profile.h"
#include "foci/autograd/rows.h"
#include "foci/core/simd_target.h"
#include "foci/kernels/dense.h"

namespace foci::ops {
namespace {

void forward(int64_t rows, int64_t c, const float* x, const float* gamma, const float* beta,
             double eps, float* y, float* mean, float* rstd) {
  kernels::layer_norm_forward(current_target(), rows, c, x, gamma, beta, static_cast<float>(eps), y,
                              mean, rstd);
}
void forward(int64_t rows, int64_t c, const double* x, const double* gamma, const double* beta,
             double eps, double* y, double* mean, double* rstd) {
  for (int64_t r = 0; r < rows; ++r, x += c, y += c) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < c; ++i) sum += x[i];
    mean[r] = sum / static_cast<double>(c);
    for (int64_t i = 0; i < c; ++i) squares += (x[i] - mean[r]) * (x[i] - mean[r]);
    rstd[r] = 1 / std::sqrt(squares / static_cast<double>(c) + eps);
    for (int64_t i = 0; i < c; ++i) y[i] = (x[i] - mean[r]) * rstd[r] * gamma[i] + beta[i];
  }
}

void backward(int64_t rows, int64_t c, const float* x, const float* gamma, const float* mean,
              const float* rstd, const float* dy, const float* add, float* dx, float* dgamma,
              float* dbeta) {
  kernels::layer_norm_backward(current_target(), rows, c, x, gamma, mean, rstd, dy, add, dx, dgamma,
                               dbeta);
}
void backward(int64_t rows, int64_t c, const double* x, const double* gamma, const double* mean,
              const double* rstd, const double* dy, const double* add, double* dx, double* dgamma,
              double* dbeta) {
  const auto n = static_cast<double>(c);
  for (int64_t r = 0; r < rows; ++r, x += c, dy += c, dx += c) {
    double sum_h = 0, sum_hx = 0;
    for (int64_t i = 0; i < c; ++i) {
      const double normed = (x[i] - mean[r]) * rstd[r];
      sum_h += dy[i] * gamma[i];
      sum_hx += dy[i] * gamma[i] * normed;
      dgamma[i] += dy[i] * normed;
      dbeta[i] += dy[i];
    }
    for (int64_t i = 0; i < c; ++i) {
      const double normed = (x[i] - mean[r]) * rstd[r];
      const double own = rstd[r] * (dy[i] * gamma[i] - sum_h / n - normed * sum_hx / n);
      dx[i] = add ? add[i] + own : own;
    }
    if (add) add += c;
  }
}

}  // namespace

template <class T>
Var<T> layer_norm(Tape<T>& tape, const Var<T>& x, const Var<T>& gamma, const Var<T>& beta,
                  double eps) {
  const ProfileScope timed(Operator::layer_norm, Pass::forward);
  tape.check(x, "layer_norm: x");
  tape.check(gamma, "layer_norm: gamma");
  tape.check(beta, "layer_norm: beta");
  require(x.rank() >= 1, "layer_norm: a value of rank 0 has no rows");
  require(std::isfinite(static_cast<T>(eps)) && eps >= 0,
          "layer_norm: eps {} given, a finite number >= 0 is right", eps);
  const Tensor in = x.value().contiguous();
  const int64_t c = in.dim(-1);
  require(c > 0 && gamma.shape() == Dims{c} && beta.shape() == Dims{c},
          "layer_norm: input of shape {} with gamma {} and beta {}", in.shape(), gamma.shape(),
          beta.shape());
  const int64_t rows = in.numel() / c;
  Tensor y = Tensor::empty(in.shape(), dtype_v<T>);
  Tensor mean = Tensor::empty({rows}, dtype_v<T>), rstd = Tensor::empty({rows}, dtype_v<T>);
  const Tensor g = gamma.value().contiguous(), b = beta.value().contiguous();
  forward(rows, c, in.data<T>(), g.data<T>(), b.data<T>(), eps, y.data<T>(), mean.data<T>(),
          rstd.data<T>());
  Var<T> out = tape.result(y, {&x, &gamma, &beta});
  if (!out.needs_grad()) return out;
  tape.record({out}, [in, mean, rstd, rows, c, g, dx_slot = x.slot(), dgamma = gamma.slot(),
                      dbeta = beta.slot(), self = out.slot()] {
    const ProfileScope back(Operator::layer_norm, Pass::backward);
    const auto onto = [c](const auto& slot, const std::function<void(T*)>& add_to) {
      if (slot) return slot->add_onto(add_to);
      const Tensor unread = Tensor::zeros({c}, dtype_v<T>);
      add_to(unread.data<T>());
    };
    onto(dgamma, [&](T* dg) {
      onto(dbeta, [&](T* db) {
        const auto write = [&](const T* so_far, T* sum) {
          backward(rows, c, in.data<T>(), g.data<T>(), mean.data<T>(), rstd.data<T>(),
                   self->grad.template data<T>(), so_far, sum, dg, db);
        };
        if (dx_slot) return dx_slot->add_by(write);
        const Tensor unread = Tensor::empty(in.shape(), dtype_v<T>);
        write(nullptr, unread.data<T>());
      });
    });
  });
  return out;
}

template Var<float> layer_norm(Tape<float>&, const Var<float>&, const Var<float>&,
                               const Var<float>&, double);
template Var<double> layer_norm(Tape<double>&, const Var<double>&, const Var<double>&,
                                const Var<double>&, double);

}  // namespace foci::ops
