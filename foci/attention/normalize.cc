// Rows through the row operators of the unfused attention.
#include "foci/attention/normalize.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "foci/attention/plain.h"
#include "foci/core/threads.h"
#include "foci/kernels/scratch.h"

namespace foci {
namespace {

using plain::kLanes;

constexpr float kInf = std::numeric_limits<float>::infinity();
// Rows of a task have so many numbers together.
constexpr int64_t kTaskNumbers = 1 << 14;

void check_normalizer(const Normalizer& normalizer) {
  AttentionSpec spec;
  spec.normalizer = normalizer;
  validate(spec);
  const auto* e = std::get_if<Entmax>(&normalizer);
  require(e == nullptr || e->per_head.empty(),
          "normalizer.alpha: {} numbers given, rows of scores alone have no heads: one is right",
          e ? e->per_head.size() : 0);
}

void check_rows(const char* name, const Tensor& t) {
  require(t.defined(), "{}: nothing given, a tensor [..., M] is needed", name);
  require(t.rank() > 0, "{}: shape [] given, at least one dimension [..., M] is needed", name);
  require(is_floating(t.dtype()) && t.dtype() != DType::f64,
          "{}: {} given, float32, float16 or bfloat16 is needed", name, name_of(t.dtype()));
}

// The rows of a tensor [..., M], by number in row-major order.
class Rows {
 public:
  explicit Rows(const Tensor& t) : tensor_(t), columns_(t.dim(-1)), stride_(t.stride(-1)) {}

  void load(int64_t row, float* to) const {
    visit([&](const auto* from) {
      from += offset(row);
      for (int64_t j = 0; j < columns_; ++j) to[j] = static_cast<float>(from[j * stride_]);
    });
  }
  void store(int64_t row, const float* from) const {
    visit([&]<class T>(T* to) {
      to += offset(row);
      for (int64_t j = 0; j < columns_; ++j) to[j * stride_] = static_cast<T>(from[j]);
    });
  }

 private:
  template <class F>
  void visit(F&& f) const {
    switch (tensor_.dtype()) {
      case DType::f16:
        return f(tensor_.data<f16>());
      case DType::bf16:
        return f(tensor_.data<bf16>());
      default:
        return f(tensor_.data<float>());
    }
  }
  int64_t offset(int64_t row) const {
    int64_t at = 0;
    for (int d = tensor_.rank() - 2; d >= 0; --d) {
      at += row % tensor_.dim(d) * tensor_.stride(d);
      row /= tensor_.dim(d);
    }
    return at;
  }

  const Tensor& tensor_;
  int64_t columns_, stride_;
};

struct Buffers {
  explicit Buffers(int64_t width) : first(width), second(width), seen(width) {}
  kernels::Scratch first, second;
  std::vector<uint8_t> seen;
  plain::RowScratch row;
};

// f(row, buffers) for each row of a tensor.
template <class F>
void for_each_row(const Tensor& t, int64_t width, F&& f) {
  const int64_t columns = t.dim(-1);
  if (t.numel() == 0) return;
  const int64_t rows = t.numel() / columns;
  const int64_t step = std::max<int64_t>(kTaskNumbers / width, 1);
  parallel_for((rows + step - 1) / step, [&](int64_t task) {
    Buffers buffers(width);
    for (int64_t r = task * step; r < std::min(rows, (task + 1) * step); ++r) f(r, buffers);
  });
}

// The columns for which take(j).
template <class F>
plain::Sight sight_of(int64_t columns, std::vector<uint8_t>& seen, F&& take) {
  plain::Sight sight{.begin = 0, .end = columns, .seen = seen.data(), .count = 0};
  for (int64_t j = 0; j < columns; ++j) sight.count += seen[j] = take(j);
  if (sight.count == columns) sight.seen = nullptr;
  return sight;
}

}  // namespace

Tensor normalize(const Normalizer& normalizer, const Tensor& scores) {
  check_normalizer(normalizer);
  check_rows("scores", scores);
  Tensor weights = Tensor::empty(scores.shape(), scores.dtype());
  const Rows from(scores), to(weights);
  const int64_t columns = scores.dim(-1), width = plain::round_up(columns, kLanes);
  const kernels::RowKernels& kernels = kernels::row_kernels(current_target());
  for_each_row(scores, width, [&](int64_t r, Buffers& b) {
    float* const row = b.first.get();
    from.load(r, row);
    const plain::Sight sight =
        sight_of(columns, b.seen, [&](int64_t j) { return row[j] != -kInf; });
    plain::normalize(kernels, normalizer, sight, width, {}, row, nullptr, b.row);
    to.store(r, row);
  });
  return weights;
}

Tensor normalize_backward(const Normalizer& normalizer, const Tensor& weights,
                          const Tensor& dweights, const Tensor& scores, double* dalpha) {
  check_normalizer(normalizer);
  check_rows("weights", weights);
  check_rows("dweights", dweights);
  require(dweights.shape() == weights.shape(),
          "dweights: shape {} given, {} as of weights is right", dweights.shape(), weights.shape());
  require(dweights.dtype() == weights.dtype(), "dweights: {} given, {} as of weights is right",
          name_of(dweights.dtype()), name_of(weights.dtype()));
  if (scores.defined()) {
    check_rows("scores", scores);
    require(scores.shape() == weights.shape(), "scores: shape {} given, {} as of weights is right",
            scores.shape(), weights.shape());
    require(scores.dtype() == weights.dtype(), "scores: {} given, {} as of weights is right",
            name_of(scores.dtype()), name_of(weights.dtype()));
  }
  const auto* entmax = std::get_if<Entmax>(&normalizer);
  require(!dalpha || entmax, "dalpha: asked for, but this normalizer has no alpha");
  const bool again = scores.defined() && entmax && entmax->alpha > 2;
  Tensor dscores = Tensor::empty(weights.shape(), weights.dtype());
  const Rows from(again ? scores : weights), upstream(dweights), to(dscores);
  const int64_t columns = weights.dim(-1), width = plain::round_up(columns, kLanes);
  const kernels::RowKernels& kernels = kernels::row_kernels(current_target());
  std::vector<double> alphas(dalpha && columns > 0 ? weights.numel() / columns : 0);  // of each row
  for_each_row(weights, width, [&](int64_t r, Buffers& b) {
    float *const p = b.first.get(), *const g = b.second.get();
    from.load(r, p);
    upstream.load(r, g);
    std::fill(p + columns, p + width, 0.0f);
    std::fill(g + columns, g + width, 0.0f);
    if (again) {
      b.row.wants_factors = true;
      b.row.log_factors.resize(width);
      const plain::Sight sight =
          sight_of(columns, b.seen, [&](int64_t j) { return p[j] != -kInf; });
      plain::normalize(kernels, normalizer, sight, width, {}, p, nullptr, b.row);
    }
    const plain::Sight part = sight_of(columns, b.seen, [&](int64_t j) { return p[j] != 0; });
    if (part.seen) {
      for (int64_t j = 0; j < columns; ++j) {
        if (!part.seen[j]) g[j] = 0;
      }
    }
    const double* factors = again ? b.row.log_factors.data() : nullptr;
    if (dalpha) alphas[r] = plain::alpha_gradient(entmax->alpha, part, 0, 0, 0, p, factors, g);
    plain::normalize_backward(kernels, normalizer, part, 0, 0, p, g, factors);
    to.store(r, g);
  });
  if (dalpha) *dalpha = std::accumulate(alphas.begin(), alphas.end(), 0.0);
  return dscores;
}

}  // namespace foci
