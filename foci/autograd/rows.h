// Rows: how an operator over the last dimension sees its input. Private to autograd/.
#pragma once

#include "foci/core/tensor.h"

namespace foci::ops {

// x as R rows of C contiguous elements, `stride` apart. `hold` keeps the memory: x itself, or a
// contiguous copy where x's leading dimensions do not lie evenly.
struct Rows {
  Tensor hold;
  int64_t count = 0, width = 0, stride = 0;
};

inline Rows rows_of(const Tensor& x, const char* what) {
  require(x.rank() >= 1, "{}: a tensor of rank 0 has no rows", what);
  Rows r;
  r.width = x.dim(-1);
  r.count = 1;
  for (int d = 0; d + 1 < x.rank(); ++d) r.count *= x.dim(d);
  bool even = r.width <= 1 || x.stride(-1) == 1;
  // Each leading dimension must step over exactly what lies below it.
  int64_t step = 0;
  for (int d = x.rank() - 2; d >= 0 && even; --d) {
    if (x.dim(d) == 1) continue;
    if (step == 0) {
      r.stride = x.stride(d);
      even = r.stride >= r.width;
    } else {
      even = x.stride(d) == step;
    }
    step = x.stride(d) * x.dim(d);
  }
  if (r.stride == 0) r.stride = r.width;
  r.hold = x;
  if (!even) {
    r.hold = x.clone();
    r.stride = r.width;
  }
  return r;
}

// x's shape with another last dimension.
inline Dims with_last(const Dims& shape, int64_t last) {
  Dims d = shape;
  d[d.size() - 1] = last;
  return d;
}

}  // namespace foci::ops
