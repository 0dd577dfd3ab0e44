// Rotary positions: arguments are checked here, rows are turned by kernels/rotary.cc.
#include "foci/attention/rotary.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "foci/attention/state.h"
#include "foci/core/threads.h"
#include "foci/kernels/attention.h"
#include "foci/kernels/rotary.h"

namespace foci {
namespace {

// Channels that one task turns, about 20 µs.
constexpr int64_t kTaskChannels = int64_t{1} << 15;

// Angles of row (b, n): cosine and sine at [b·batch_stride + at(b, n)] of contiguous float32 rows.
struct Angles {
  Tensor cosine, sine;        // [rows, half]
  std::vector<int64_t> rows;  // [B·N]: which row of them
  int64_t half = 0;
};

void check_rows(const Tensor& x, const char* name) {
  require(x.defined() && x.rank() == 4, "{}: shape {} arrived, [B, H, N, D] is right", name,
          x.defined() ? x.shape().str() : "none");
  require(x.dtype() == DType::f32 || x.dtype() == DType::f16 || x.dtype() == DType::bf16,
          "{}: {} arrived, float32, float16 or bfloat16 is right", name, name_of(x.dtype()));
  require_dense_rows(x, name);
}

void check_position(const char* name, int64_t b, int64_t n, int64_t position, int64_t count) {
  require(position >= 0 && position < count,
          "{}: row {} of batch {} stands at position {}, the table holds [0, {})", name, n, b,
          position, count);
}

std::vector<int64_t> positions_of(const RotaryAngles& a, int64_t B, int64_t N, int64_t count) {
  std::vector<int64_t> rows(B * N);
  const Tensor& ids = a.position_ids;
  if (ids.defined()) {
    require(ids.dtype() == DType::i64 && (ids.shape() == Dims({B, N}) || ids.shape() == Dims({N})),
            "position_ids: shape {} of {} arrived, int64 [{}, {}] (B, N) or [{}] (N) is right",
            ids.shape(), name_of(ids.dtype()), B, N, N);
    const Tensor each = ids.broadcast_to({B, N});
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t n = 0; n < N; ++n) {
        const int64_t position = each.at<int64_t>(b, n);
        check_position("position_ids", b, n, position, count);
        rows[b * N + n] = position;
      }
    }
    return rows;
  }
  const Tensor& offsets = a.offsets;
  require(!offsets.defined() || (offsets.dtype() == DType::i64 && offsets.shape() == Dims({B})),
          "offsets: shape {} of {} arrived, int64 [{}] (B) is right",
          offsets.defined() ? offsets.shape().str() : "", name_of(offsets.dtype()), B);
  for (int64_t b = 0; b < B; ++b) {
    const int64_t offset = offsets.defined() ? offsets.at<int64_t>(b) : 0;
    require(offset >= 0, "offsets[{}]: {} arrived, it must be >= 0", b, offset);
    require(N == 0 || offset <= count - N,
            "{}: {} rows from position {} on do not fit a table of {} positions",
            offsets.defined() ? fmt::format("offsets[{}]", b) : "cosine", N, offset, count);
    for (int64_t n = 0; n < N; ++n) rows[b * N + n] = offset + n;
  }
  return rows;
}

Angles angles_of(const Tensor& x, const RotaryAngles& a) {
  const int64_t B = x.dim(0), N = x.dim(2), D = x.dim(3);
  const Tensor &c = a.cosine, &s = a.sine;
  require(c.defined() && s.defined(), "{}: no tensor was given", c.defined() ? "sine" : "cosine");
  require(is_floating(c.dtype()) && is_floating(s.dtype()),
          "{}: {} arrived, a floating type is right", is_floating(c.dtype()) ? "sine" : "cosine",
          name_of(is_floating(c.dtype()) ? s.dtype() : c.dtype()));
  require(c.rank() == 2 || c.rank() == 3,
          "cosine: shape {} arrived, a table [P, R/2] or one row each, [B, N, R/2], is right",
          c.shape());
  require(s.shape() == c.shape(), "sine: shape {} arrived, {} is right, as for cosine", s.shape(),
          c.shape());
  Angles out;
  out.half = c.dim(-1);
  require(out.half <= D / 2, "cosine: {} angles arrived, {} channels hold at most {} pairs",
          out.half, D, D / 2);
  require(!a.position_ids.defined() || !a.offsets.defined(),
          "offsets: given beside position_ids; one of them says where rows stand");
  if (c.rank() == 2) {
    out.rows = positions_of(a, B, N, c.dim(0));
  } else {
    require(c.dim(0) == B && c.dim(1) == N,
            "cosine: shape {} arrived, [{}, {}, R/2] (B, N, R/2) is right", c.shape(), B, N);
    require(!a.position_ids.defined() && !a.offsets.defined(),
            "{}: given, but cosine [B, N, R/2] holds the angles of each row",
            a.offsets.defined() ? "offsets" : "position_ids");
    out.rows.resize(B * N);
    for (int64_t r = 0; r < B * N; ++r) out.rows[r] = r;
  }
  out.cosine = c.to(DType::f32).contiguous();
  out.sine = s.to(DType::f32).contiguous();
  return out;
}

using Widen = decltype(kernels::AttentionKernels::widen);

template <class T>
void turn_row(const kernels::RotaryKernels& kernels, Widen widen, RotaryPairs pairs,
              const Angles& a, int64_t row, bool transposed, const T* x, T* y, int64_t D,
              float* buffer) {
  const float* c = a.cosine.data<float>() + row * a.half;
  const float* s = a.sine.data<float>() + row * a.half;
  const auto turn = pairs == RotaryPairs::half_split ? kernels.half_split : kernels.interleaved;
  const int64_t turned = 2 * a.half;
  if constexpr (std::is_same_v<T, float>) {
    turn(a.half, c, s, transposed, x, y);
  } else {
    widen(dtype_v<T>, &x->bits, turned, buffer);
    turn(a.half, c, s, transposed, buffer, buffer);
    for (int64_t d = 0; d < turned; ++d) y[d] = static_cast<T>(buffer[d]);
  }
  if (x != y) std::copy(x + turned, x + D, y + turned);
}

// y [B,H,N,D] = x turned; both of type T, y either x itself or apart.
template <class T>
void turn_all(const Tensor& x, const RotaryAngles& angles, bool transposed, const Tensor& y,
              SimdTarget target) {
  const int64_t B = x.dim(0), H = x.dim(1), N = x.dim(2), D = x.dim(3);
  const Angles a = angles_of(x, angles);
  const kernels::RotaryKernels& kernels = kernels::rotary_kernels(target);
  const Widen widen = kernels::attention_kernels(target).widen;
  const int64_t total = B * H * N;
  const int64_t step = std::max<int64_t>(1, kTaskChannels / std::max<int64_t>(D, 1));
  parallel_for((total + step - 1) / step, [&](int64_t task) {
    std::vector<float> buffer(std::is_same_v<T, float> ? 0 : D);
    for (int64_t r = task * step; r < std::min((task + 1) * step, total); ++r) {
      const int64_t b = r / (H * N), h = r / N % H, n = r % N;
      turn_row(kernels, widen, angles.pairs, a, a.rows[b * N + n], transposed,
               x.data<T>() + b * x.stride(0) + h * x.stride(1) + n * x.stride(2),
               y.data<T>() + b * y.stride(0) + h * y.stride(1) + n * y.stride(2), D, buffer.data());
    }
  });
}

void turn(const Tensor& x, const RotaryAngles& angles, bool transposed, const Tensor& y,
          std::optional<SimdTarget> target) {
  const SimdTarget t = target ? parse_target(name_of(*target)) : current_target();
  switch (x.dtype()) {
    case DType::f16:
      return turn_all<f16>(x, angles, transposed, y, t);
    case DType::bf16:
      return turn_all<bf16>(x, angles, transposed, y, t);
    default:
      return turn_all<float>(x, angles, transposed, y, t);
  }
}

}  // namespace

RotaryAngles rotary_table(int64_t positions, int64_t width, double base, double scaling) {
  require(positions >= 0, "positions: {} arrived, a size is >= 0", positions);
  require(width >= 0 && width % 2 == 0, "width: {} arrived, an even number of channels turns",
          width);
  require(base > 0 && std::isfinite(base), "base: {} arrived, a number > 0 is right", base);
  require(scaling > 0 && std::isfinite(scaling), "scaling: {} arrived, a number > 0 is right",
          scaling);
  const int64_t half = width / 2;
  RotaryAngles a;
  a.cosine = Tensor::empty({positions, half});
  a.sine = Tensor::empty({positions, half});
  if (positions == 0) return a;
  std::vector<double> rate(half);
  for (int64_t r = 0; r < half; ++r) {
    rate[r] = std::pow(base, -2 * static_cast<double>(r) / static_cast<double>(width));
  }
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t r = 0; r < half; ++r) {
      const double angle = static_cast<double>(p) / scaling * rate[r];
      a.cosine.data<float>()[p * half + r] = static_cast<float>(std::cos(angle));
      a.sine.data<float>()[p * half + r] = static_cast<float>(std::sin(angle));
    }
  }
  return a;
}

Tensor rotary(const Tensor& x, const RotaryAngles& angles, std::optional<SimdTarget> target) {
  check_rows(x, "x");
  Tensor y = Tensor::empty(x.shape(), x.dtype());
  turn(x, angles, false, y, target);
  return y;
}

void rotate(const Tensor& x, const RotaryAngles& angles, std::optional<SimdTarget> target) {
  check_rows(x, "x");
  for (int d = 0; d < 3; ++d) {
    require(x.dim(d) <= 1 || x.stride(d) > 0,
            "x: a view broadcast over dimension {} arrived, which cannot be written to", d);
  }
  turn(x, angles, false, x, target);
}

Tensor rotary_backward(const Tensor& dy, const RotaryAngles& angles,
                       std::optional<SimdTarget> target) {
  check_rows(dy, "dy");
  Tensor dx = Tensor::empty(dy.shape(), dy.dtype());
  turn(dy, angles, true, dx, target);
  return dx;
}

}  // namespace foci
