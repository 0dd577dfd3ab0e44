// Position tables: sines, and learned grids read bilinearly.
#include "foci/nn/positions.h"

#include <algorithm>
#include <cmath>

namespace foci::nn {
namespace {

void write_sines(double position, int64_t width, double base, float* row) {
  for (int64_t c = 0; c < width; ++c) {
    const double rate =
        std::pow(base, -static_cast<double>(c - c % 2) / static_cast<double>(width));
    row[c] = static_cast<float>(c % 2 == 0 ? std::sin(position * rate) : std::cos(position * rate));
  }
}

// The two cells between which the centre of cell i of n falls, in a row of `native` cells.
struct Between {
  int64_t low, high;
  double share;  // of the high one
};
Between between(int64_t i, int64_t n, int64_t native) {
  const double x = std::clamp(
      (static_cast<double>(i) + 0.5) * static_cast<double>(native) / static_cast<double>(n) - 0.5,
      0.0, static_cast<double>(native - 1));
  const auto low = static_cast<int64_t>(x);
  const int64_t high = std::min(low + 1, native - 1);
  return {low, high, x - static_cast<double>(low)};
}

}  // namespace

Tensor sinusoidal_table(int64_t length, int64_t width, double base) {
  require(length >= 0 && width >= 0 && base > 0 && std::isfinite(base),
          "sinusoidal_table: length {}, width {}, base {}", length, width, base);
  Tensor t = Tensor::empty({length, width});
  for (int64_t p = 0; p < length; ++p) {
    write_sines(static_cast<double>(p), width, base, t.data<float>() + p * width);
  }
  return t;
}

Tensor sinusoidal_grid(int64_t rows, int64_t cols, int64_t width, double base) {
  require(rows >= 0 && cols >= 0 && width >= 0 && base > 0 && std::isfinite(base),
          "sinusoidal_grid: {} × {} cells, width {}, base {}", rows, cols, width, base);
  Tensor t = Tensor::empty({Dims{rows, cols}.product(), width});
  const int64_t half = (width + 1) / 2;
  float* row = t.data<float>();
  for (int64_t y = 0; y < rows; ++y) {
    for (int64_t x = 0; x < cols; ++x, row += width) {
      write_sines(static_cast<double>(y), half, base, row);
      write_sines(static_cast<double>(x), width - half, base, row + half);
    }
  }
  return t;
}

template <class T>
LearnedPositions<T>::LearnedPositions(int64_t length, int64_t channels) : table(length, channels) {
  this->add_module("position_embeddings", table);
}

template <class T>
Var<T> LearnedPositions<T>::forward(Context<T>& context, std::vector<int64_t> positions) {
  return table.forward(context, std::move(positions));
}

void append_grid_mix(int64_t rows, int64_t cols, int64_t native_rows, int64_t native_cols,
                     ops::RowMix& mix) {
  (void)Dims{rows, cols}.product();  // refuses what overflows
  require(rows >= 0 && cols >= 0 && native_rows >= 1 && native_cols >= 1,
          "positions: a grid of {} × {} from a table of {} × {}", rows, cols, native_rows,
          native_cols);
  if (mix.begin.empty()) mix.begin.push_back(0);
  const auto tap = [&](int64_t row, double weight) {
    if (weight == 0) return;
    mix.row.push_back(row);
    mix.weight.push_back(weight);
  };
  for (int64_t y = 0; y < rows; ++y) {
    const Between v = between(y, rows, native_rows);
    for (int64_t x = 0; x < cols; ++x) {
      const Between h = between(x, cols, native_cols);
      tap(v.low * native_cols + h.low, (1 - v.share) * (1 - h.share));
      tap(v.low * native_cols + h.high, (1 - v.share) * h.share);
      tap(v.high * native_cols + h.low, v.share * (1 - h.share));
      tap(v.high * native_cols + h.high, v.share * h.share);
      mix.begin.push_back(static_cast<int64_t>(mix.row.size()));
    }
  }
}

template <class T>
GridPositions<T>::GridPositions(int64_t native_rows, int64_t native_cols, int64_t channels)
    : rows_(native_rows),
      cols_(native_cols),
      table(Dims{native_rows, native_cols}.product(), channels) {
  this->add_module("position_embeddings", table);
}

template <class T>
Var<T> GridPositions<T>::forward(Context<T>& context,
                                 const std::vector<std::pair<int64_t, int64_t>>& grids) {
  ops::RowMix mix;
  mix.begin.push_back(0);
  for (const auto& [rows, cols] : grids) append_grid_mix(rows, cols, rows_, cols_, mix);
  return ops::mix_rows(context.tape, context.use(table.weight), std::move(mix));
}

template class LearnedPositions<float>;
template class LearnedPositions<double>;
template class GridPositions<float>;
template class GridPositions<double>;

}  // namespace foci::nn
