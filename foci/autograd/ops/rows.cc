// gather_rows, mix_rows, segment_mean: output rows are sums of input rows.
//
// Backward scatters: the gradient of a table row is the sum, in output order, of the gradients of
// the rows that it went into. Sums of many rows are taken in double, so that their error does not
// grow with their length.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "foci/autograd/ops.h"
#include "foci/autograd/profile.h"
#include "foci/core/threads.h"

namespace foci::ops {
namespace {

constexpr int64_t kRowsPerTask = 64;  // enough work to be worth handing to a thread
constexpr int64_t kChain = 64;        // rows that are added up in T; more go into double

void check_table(const Dims& shape, const char* what) {
  require(shape.size() == 2, "{}: the table is [rows, channels], got {}", what, shape);
}

void for_row_blocks(int64_t rows, const std::function<void(int64_t)>& row_task) {
  parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (int64_t r = task * kRowsPerTask; r < end; ++r) row_task(r);
  });
}

// Adds rows to rows of a table [rows, c] of any strides. How many will go to each is told first: to
// those that get many they are added in double, and to the table when all have come.
template <class T>
class Scatter {
 public:
  Scatter(const Tensor& into, const std::vector<int64_t>& targets)
      : into_(into), place_(static_cast<size_t>(into.dim(0)), 0) {
    for (int64_t row : targets) ++place_[static_cast<size_t>(row)];
    for (int64_t row = 0; row < into.dim(0); ++row) {
      int64_t& count = place_[static_cast<size_t>(row)];
      if (count > kChain) wide_rows_.push_back(row);
      count = count > kChain ? static_cast<int64_t>(wide_rows_.size()) - 1 : -1;
    }
    wide_.assign(wide_rows_.size() * static_cast<size_t>(into.dim(1)), 0.0);
  }

  // += weight · x [c]
  void add(int64_t row, T weight, const T* x) {
    const int64_t c = into_.dim(1), wide = place_[static_cast<size_t>(row)];
    if (wide >= 0) {
      double* const sum = wide_.data() + wide * c;
      for (int64_t i = 0; i < c; ++i) {
        sum[i] += static_cast<double>(weight) * static_cast<double>(x[i]);
      }
      return;
    }
    const int64_t step = into_.stride(1);
    T* const to = into_.data<T>() + row * into_.stride(0);
    for (int64_t i = 0; i < c; ++i) to[i * step] += weight * x[i];
  }

  void finish() {
    const int64_t c = into_.dim(1), step = into_.stride(1);
    for (size_t w = 0; w < wide_rows_.size(); ++w) {
      T* const to = into_.data<T>() + wide_rows_[w] * into_.stride(0);
      const double* const sum = wide_.data() + static_cast<int64_t>(w) * c;
      for (int64_t i = 0; i < c; ++i) {
        to[i * step] = static_cast<T>(static_cast<double>(to[i * step]) + sum[i]);
      }
    }
  }

 private:
  Tensor into_;
  std::vector<int64_t> place_;  // of a row's sum in double; -1: it has none
  std::vector<int64_t> wide_rows_;
  std::vector<double> wide_;
};

}  // namespace

template <class T>
Var<T> gather_rows(Tape<T>& tape, const Var<T>& table, std::vector<int64_t> rows) {
  const ProfileScope timed(Operator::rows, Pass::forward);
  tape.check(table, "gather_rows: table");
  check_table(table.shape(), "gather_rows");
  const int64_t have = table.dim(0), c = table.dim(1);
  for (int64_t r : rows) {
    require(r >= 0 && r < have, "gather_rows: row {} of a table of {} rows", r, have);
  }
  const auto n = static_cast<int64_t>(rows.size());
  const Tensor from = table.value().contiguous();
  Tensor y = Tensor::empty({n, c}, dtype_v<T>);
  const T* const in = from.data<T>();
  T* const to = y.data<T>();
  for_row_blocks(n, [&](int64_t r) {
    std::memcpy(to + r * c, in + rows[r] * c, static_cast<size_t>(c) * sizeof(T));
  });
  Var<T> out = tape.result(y, {&table});
  if (!out.needs_grad()) return out;
  tape.record({out}, [rows = std::move(rows), n, c, slot = table.slot(), self = out.slot()] {
    const ProfileScope back(Operator::rows, Pass::backward);
    Scatter<T> into(slot->buffer(), rows);
    const T* const dy = self->grad.template data<T>();
    for (int64_t r = 0; r < n; ++r) into.add(rows[r], T{1}, dy + r * c);
    into.finish();
  });
  return out;
}

template <class T>
Var<T> mix_rows(Tape<T>& tape, const Var<T>& table, RowMix mix) {
  const ProfileScope timed(Operator::rows, Pass::forward);
  tape.check(table, "mix_rows: table");
  check_table(table.shape(), "mix_rows");
  const int64_t have = table.dim(0), c = table.dim(1);
  const auto taps = static_cast<int64_t>(mix.row.size());
  require(!mix.begin.empty() && mix.begin.front() == 0 && mix.begin.back() == taps &&
              mix.weight.size() == mix.row.size(),
          "mix_rows: {} rows, {} weights, bounds from {} to {}", taps, mix.weight.size(),
          mix.begin.empty() ? -1 : mix.begin.front(), mix.begin.empty() ? -1 : mix.begin.back());
  for (int64_t r : mix.row) {
    require(r >= 0 && r < have, "mix_rows: row {} of a table of {} rows", r, have);
  }
  for (double w : mix.weight) {
    require(std::isfinite(w), "mix_rows: a weight of {} given, finite ones are right", w);
  }
  const auto n = static_cast<int64_t>(mix.begin.size()) - 1;
  for (int64_t r = 0; r < n; ++r) {
    require(mix.begin[r] <= mix.begin[r + 1], "mix_rows: bounds fall at row {}", r);
  }
  const Tensor from = table.value().contiguous();
  Tensor y = Tensor::zeros({n, c}, dtype_v<T>);
  const T* const in = from.data<T>();
  T* const to = y.data<T>();
  for_row_blocks(n, [&](int64_t r) {
    if (mix.begin[r + 1] - mix.begin[r] > kChain) {
      std::vector<double> sum(static_cast<size_t>(c), 0.0);
      for (int64_t t = mix.begin[r]; t < mix.begin[r + 1]; ++t) {
        const T* const row = in + mix.row[t] * c;
        for (int64_t i = 0; i < c; ++i) sum[i] += mix.weight[t] * static_cast<double>(row[i]);
      }
      for (int64_t i = 0; i < c; ++i) to[r * c + i] = static_cast<T>(sum[i]);
      return;
    }
    for (int64_t t = mix.begin[r]; t < mix.begin[r + 1]; ++t) {
      const auto weight = static_cast<T>(mix.weight[t]);
      const T* const row = in + mix.row[t] * c;
      for (int64_t i = 0; i < c; ++i) to[r * c + i] += weight * row[i];
    }
  });
  Var<T> out = tape.result(y, {&table});
  if (!out.needs_grad()) return out;
  tape.record({out}, [mix = std::move(mix), n, c, slot = table.slot(), self = out.slot()] {
    const ProfileScope back(Operator::rows, Pass::backward);
    Scatter<T> into(slot->buffer(), mix.row);
    const T* const dy = self->grad.template data<T>();
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t t = mix.begin[r]; t < mix.begin[r + 1]; ++t) {
        into.add(mix.row[t], static_cast<T>(mix.weight[t]), dy + r * c);
      }
    }
    into.finish();
  });
  return out;
}

template <class T>
Var<T> segment_mean(Tape<T>& tape, const Var<T>& x, std::vector<int64_t> offsets) {
  const ProfileScope timed(Operator::rows, Pass::forward);
  tape.check(x, "segment_mean: x");
  check_table(x.shape(), "segment_mean");
  require(!offsets.empty() && offsets.front() == 0 && offsets.back() == x.dim(0),
          "segment_mean: {} offsets for {} rows; they go from 0 to the number of rows",
          offsets.size(), x.dim(0));
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    require(offsets[s] <= offsets[s + 1], "segment_mean: offsets fall at segment {}", s);
  }
  const auto n = static_cast<int64_t>(offsets.size()) - 1;
  const int64_t c = x.dim(1);
  const Tensor from = x.value().contiguous();
  Tensor y = Tensor::zeros({n, c}, dtype_v<T>);
  const T* const in = from.data<T>();
  T* const to = y.data<T>();
  parallel_for(n, [&](int64_t s) {
    if (offsets[s] == offsets[s + 1]) return;
    std::vector<double> sum(static_cast<size_t>(c), 0.0);
    for (int64_t r = offsets[s]; r < offsets[s + 1]; ++r) {
      for (int64_t i = 0; i < c; ++i) sum[i] += static_cast<double>(in[r * c + i]);
    }
    const double share = 1 / static_cast<double>(offsets[s + 1] - offsets[s]);
    for (int64_t i = 0; i < c; ++i) to[s * c + i] = static_cast<T>(sum[i] * share);
  });
  Var<T> out = tape.result(y, {&x});
  if (!out.needs_grad()) return out;
  tape.record({out}, [offsets = std::move(offsets), n, c, slot = x.slot(), self = out.slot()] {
    const ProfileScope back(Operator::rows, Pass::backward);
    Tensor dx = Tensor::empty(slot->shape, dtype_v<T>);
    T* const into = dx.data<T>();
    const T* const dy = self->grad.template data<T>();
    parallel_for(n, [&](int64_t s) {
      const T share = T{1} / static_cast<T>(std::max<int64_t>(1, offsets[s + 1] - offsets[s]));
      for (int64_t r = offsets[s]; r < offsets[s + 1]; ++r) {
        for (int64_t i = 0; i < c; ++i) into[r * c + i] = share * dy[s * c + i];
      }
    });
    slot->add(dx, true);
  });
  return out;
}

#define FOCI_INSTANTIATE(T)                                                   \
  template Var<T> gather_rows(Tape<T>&, const Var<T>&, std::vector<int64_t>); \
  template Var<T> mix_rows(Tape<T>&, const Var<T>&, RowMix);                  \
  template Var<T> segment_mean(Tape<T>&, const Var<T>&, std::vector<int64_t>);
FOCI_INSTANTIATE(float)
FOCI_INSTANTIATE(double)
#undef FOCI_INSTANTIATE

}  // namespace foci::ops
