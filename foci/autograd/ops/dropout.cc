// y = x ∘ kept / (1 − p). Backward multiplies dy by the same factors, drawn again, not stored.
#include "foci/autograd/ops.h"
#include "foci/autograd/profile.h"

#include <algorithm>
#include "foci/core/rng.h"
#include "foci/core/threads.h"

namespace foci::ops {
namespace {

constexpr int64_t kPerCounter = 8;  // 16 bits an element
constexpr int64_t kPerTask = 1 << 13;

template <class T>
Tensor dropped(const Tensor& x, uint32_t threshold, uint64_t seed, uint64_t stream) {
  const Tensor in = x.contiguous();
  Tensor y = Tensor::empty(x.shape(), dtype_v<T>);
  const T* const from = in.data<T>();
  T* const to = y.data<T>();
  const int64_t n = y.numel();
  const T keep = static_cast<T>(65536.0 / (65536.0 - threshold));
  parallel_for((n + kPerTask - 1) / kPerTask, [&](int64_t task) {
    const int64_t end = std::min(n, (task + 1) * kPerTask);
    for (int64_t i = task * kPerTask; i < end; i += kPerCounter) {
      const auto counter = static_cast<uint64_t>(i / kPerCounter);
      const auto words =
          philox(seed, {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                        static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)});
      for (int64_t j = 0; j < std::min(kPerCounter, end - i); ++j) {
        const uint32_t bits = words[j / 2] >> (16 * (j % 2)) & 0xffffu;
        to[i + j] = bits < threshold ? T{0} : from[i + j] * keep;
      }
    }
  });
  return y;
}

}  // namespace

template <class T>
Var<T> dropout(Tape<T>& tape, const Var<T>& x, double p, uint64_t seed, uint64_t stream) {
  tape.check(x, "dropout: x");
  const uint32_t threshold = dropout_threshold(p);
  if (threshold == 0) return x;
  const ProfileScope timed(Operator::dropout, Pass::forward);
  Var<T> out = tape.result(dropped<T>(x.value(), threshold, seed, stream), {&x});
  if (!out.needs_grad()) return out;
  tape.record({out}, [threshold, seed, stream, dx = x.slot(), self = out.slot()] {
    const ProfileScope back(Operator::dropout, Pass::backward);
    dx->add(dropped<T>(self->grad, threshold, seed, stream), true);
  });
  return out;
}

template Var<float> dropout(Tape<float>&, const Var<float>&, double, uint64_t, uint64_t);
template Var<double> dropout(Tape<double>&, const Var<double>&, double, uint64_t, uint64_t);

}  // namespace foci::ops
