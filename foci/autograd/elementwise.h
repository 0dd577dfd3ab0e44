// Element-wise arithmetic that several operators share: float on the kernels, double in loops.
#pragma once

#include <cstdint>

#include "foci/core/tensor.h"

namespace foci {

template <class T>
void add(int64_t n, const T* a, const T* b, T* y);  // y = a + b
template <class T>
void axpy(int64_t n, T scale, const T* x, T* y);  // y += scale · x
// into += g, of equal shapes, any strides
template <class T>
void add_into(const Tensor& into, const Tensor& g);

}  // namespace foci
