// loss_r = −Σ_c target_rc · log softmax(logits_r)_c,  target = (1 − s)·onehot + s/C
//
// Backward: dlogits = (softmax − target) / R, computed with the loss and kept.
#include <algorithm>
#include <cmath>

#include "foci/autograd/elementwise.h"
#include "foci/autograd/ops.h"
#include "foci/autograd/profile.h"
#include "foci/core/simd_target.h"
#include "foci/kernels/dense.h"

namespace foci::ops {
namespace {

void cross_entropy(int64_t rows, int64_t classes, const float* logits, const int64_t* labels,
                   double smoothing, float* loss, float* dlogits) {
  kernels::softmax_cross_entropy(current_target(), rows, classes, logits, labels,
                                 static_cast<float>(smoothing), loss, dlogits);
}
void cross_entropy(int64_t rows, int64_t classes, const double* logits, const int64_t* labels,
                   double smoothing, double* loss, double* dlogits) {
  for (int64_t r = 0; r < rows; ++r, logits += classes, dlogits += classes) {
    double top = logits[0], sum = 0;
    for (int64_t c = 1; c < classes; ++c) top = std::max(top, logits[c]);
    for (int64_t c = 0; c < classes; ++c) sum += std::exp(logits[c] - top);
    loss[r] = 0;
    for (int64_t c = 0; c < classes; ++c) {
      const double log_p = logits[c] - top - std::log(sum);
      const double target =
          (c == labels[r] ? 1 - smoothing : 0) + smoothing / static_cast<double>(classes);
      loss[r] -= target * log_p;
      dlogits[c] = (std::exp(log_p) - target) / static_cast<double>(rows);
    }
  }
}

}  // namespace

template <class T>
Var<T> softmax_cross_entropy(Tape<T>& tape, const Var<T>& logits, std::vector<int64_t> labels,
                             double smoothing, Tensor* row_losses) {
  tape.check(logits, "softmax_cross_entropy: logits");
  require(logits.rank() == 2 && logits.dim(1) > 0 &&
              logits.dim(0) == static_cast<int64_t>(labels.size()),
          "softmax_cross_entropy: logits of shape {} with {} labels; [rows, classes] is right",
          logits.shape(), labels.size());
  require(smoothing >= 0 && smoothing <= 1, "label smoothing: {} given, it lies in [0, 1]",
          smoothing);
  const ProfileScope timed(Operator::loss, Pass::forward);
  const int64_t rows = logits.dim(0), classes = logits.dim(1);
  require(rows > 0, "softmax_cross_entropy: no rows, so no mean loss");
  for (int64_t label : labels) {
    require(label >= 0 && label < classes, "label {} with {} classes", label, classes);
  }
  const Tensor in = logits.value().contiguous();
  Tensor losses = Tensor::empty({rows}, dtype_v<T>);
  Tensor dlogits = Tensor::empty({rows, classes}, dtype_v<T>);
  cross_entropy(rows, classes, in.data<T>(), labels.data(), smoothing, losses.data<T>(),
                dlogits.data<T>());
  double sum = 0;
  for (T l : losses.span<T>()) sum += static_cast<double>(l);
  if (row_losses) *row_losses = losses;
  Var<T> out =
      tape.result(Tensor::full({1}, sum / static_cast<double>(rows), dtype_v<T>), {&logits});
  if (!out.needs_grad()) return out;
  tape.record({out}, [dlogits, dx = logits.slot(), self = out.slot()] {
    const ProfileScope back(Operator::loss, Pass::backward);
    const T up = self->grad.template data<T>()[0];
    if (up == T{1}) {
      dx->add(dlogits, true);
      return;
    }
    Tensor g = Tensor::zeros(dlogits.shape(), dtype_v<T>);
    axpy<T>(g.numel(), up, dlogits.data<T>(), g.data<T>());
    dx->add(g, true);
  });
  return out;
}

template Var<float> softmax_cross_entropy(Tape<float>&, const Var<float>&, std::vector<int64_t>,
                                          double, Tensor*);
template Var<double> softmax_cross_entropy(Tape<double>&, const Var<double>&, std::vector<int64_t>,
                                           double, Tensor*);

}  // namespace foci::ops
