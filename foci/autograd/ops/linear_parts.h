// What linear layers are made of, in float (the kernels) and double (plain loops). Private to ops/.
#pragma once

#include <cstdint>

#include "foci/autograd/ops.h"
#include "foci/autograd/rows.h"

namespace foci::ops {

// y [R, O] = act(x wᵀ + bias) + residual. bias [O], residual [R, O] and slope [R, O] may be null;
// slope takes gelu's derivative.
template <class T>
void linear_forward(const Rows& x, int64_t outputs, const T* w, const T* bias, Activation act, T* y,
                    T* slope, const T* residual);

// g = dy ∘ act', n elements; `saved` is y for relu, the slope for gelu. g may be dy.
template <class T>
void activation_backward(Activation act, int64_t n, const T* saved, const T* dy, T* g);

// dx [R, I] = (g [R, O] · w [O, I]) ∘ factor + add, where factor and add are not null; add may be
// dx where there is no factor.
template <class T>
void linear_backward_input(int64_t rows, int64_t inputs, int64_t outputs, const T* g, const T* w,
                           const T* factor, const T* add, T* dx);

// dw [O, I] += gᵀ x; db [O] += Σ_rows g, where not null.
template <class T>
void linear_backward_weight(const Rows& x, int64_t outputs, const T* g, T* dw, T* db);
// The same into the places of gradients, of which either may be null.
template <class T>
void add_weight_gradients(const Rows& x, int64_t outputs, const T* g,
                          const std::shared_ptr<detail::GradSlot<T>>& dw,
                          const std::shared_ptr<detail::GradSlot<T>>& db);

}  // namespace foci::ops
