// Each pair of channels turned, one at a time.
#include "foci/reference/rotary.h"

namespace foci::reference {

Tensor rotary(const Tensor& x, const Tensor& cosine, const Tensor& sine, RotaryPairs pairs) {
  require(x.rank() == 4 && is_floating(x.dtype()),
          "x: shape {} of {} given, a floating [B, H, N, D] is needed", x.shape(),
          name_of(x.dtype()));
  const int64_t B = x.dim(0), H = x.dim(1), N = x.dim(2), D = x.dim(3);
  require(is_floating(cosine.dtype()) && is_floating(sine.dtype()),
          "cos, sin: {} and {} given, floating types are needed", name_of(cosine.dtype()),
          name_of(sine.dtype()));
  require(cosine.rank() == 3 && cosine.dim(0) == B && cosine.dim(1) == N && cosine.dim(2) <= D / 2,
          "cos: shape {} given, [{}, {}, R/2] with R <= {} is needed", cosine.shape(), B, N, D);
  require(sine.shape() == cosine.shape(), "sin: shape {} given, {} is needed as for cos",
          sine.shape(), cosine.shape());
  const int64_t half = cosine.dim(2);
  const Tensor c = cosine.to(DType::f64), s = sine.to(DType::f64);
  const Tensor in = x.to(DType::f64);
  Tensor out = in.clone();
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t n = 0; n < N; ++n) {
        for (int64_t r = 0; r < half; ++r) {
          const int64_t first = pairs == RotaryPairs::interleaved ? 2 * r : r;
          const int64_t second = pairs == RotaryPairs::interleaved ? 2 * r + 1 : r + half;
          const double u = in.at<double>(b, h, n, first), v = in.at<double>(b, h, n, second);
          const double cos = c.at<double>(b, n, r), sin = s.at<double>(b, n, r);
          out.at<double>(b, h, n, first) = u * cos - v * sin;
          out.at<double>(b, h, n, second) = u * sin + v * cos;
        }
      }
    }
  }
  return out;
}

}  // namespace foci::reference
