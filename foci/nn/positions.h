// Positions: how a model knows where a token stands. Tables of fixed sines, and learned tables.
#pragma once

#include <cstdint>
#include <vector>

#include "foci/core/api.h"
#include "foci/nn/layers.h"

namespace foci::nn {

// Columns 2c and 2c+1 of row p hold sin and cos of p / base^(2c/width); an odd width ends with a
// sine (Vaswani et al. 2017, section 3.5). [length, width] float32.
FOCI_API Tensor sinusoidal_table(int64_t length, int64_t width, double base = 10000);

// Row and column of each token: the first ⌈width/2⌉ columns tell the row, the others the column,
// each like sinusoidal_table. [rows·cols, width] float32, row by row.
FOCI_API Tensor sinusoidal_grid(int64_t rows, int64_t cols, int64_t width, double base = 10000);

// A learned row for each position below `length`.
template <class T>
class FOCI_API LearnedPositions : public Module<T> {
 public:
  LearnedPositions(int64_t length, int64_t channels);
  Var<T> forward(Context<T>& context, std::vector<int64_t> positions);

  Embedding<T> table;
};

// How a grid of rows × cols reads a table of native_rows × native_cols, bilinearly, by the centres
// of cells, edges clamped (PyTorch's interpolate, align_corners = false). The identity where sizes
// agree. Appends to `mix`.
FOCI_API void append_grid_mix(int64_t rows, int64_t cols, int64_t native_rows, int64_t native_cols,
                              ops::RowMix& mix);

// A learned table over a native grid, interpolated to any other grid.
template <class T>
class FOCI_API GridPositions : public Module<T> {
 public:
  GridPositions(int64_t native_rows, int64_t native_cols, int64_t channels);
  // Grids (rows, cols) one after the other, packed: [Σ rows·cols, channels].
  Var<T> forward(Context<T>& context, const std::vector<std::pair<int64_t, int64_t>>& grids);

 private:
  int64_t rows_, cols_;

 public:
  Embedding<T> table;  // [native_rows · native_cols, channels]
};

}  // namespace foci::nn
