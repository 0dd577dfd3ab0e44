// Row operators of the unfused attention, compiled once a SIMD target.
#define HWY_TARGET_INCLUDE "foci/kernels/rows.cc"
#include "foci/core/highway_targets.h"
// After foci's choice of targets.
#include <hwy/foreach_target.h>

#include <limits>

#include "foci/kernels/long_sum-inl.h"
#include "foci/kernels/math-inl.h"
#include "foci/kernels/rows.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {
namespace {

using RowTag = hn::CappedTag<float, kRowLanes>;

// Below this exp_nonpositive is 0.
constexpr float kExpMin = -87.3f;

void scale(int64_t n, float factor, float* x) {
  const RowTag d;
  const auto f = hn::Set(d, factor);
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t j = 0; j < n; j += step) hn::StoreU(hn::Mul(hn::LoadU(d, x + j), f), d, x + j);
}

float largest(int64_t n, const float* x) {
  const RowTag d;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  auto best = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t j = 0; j < n; j += step) best = hn::Max(hn::LoadU(d, x + j), best);
  return hn::GetLane(hn::MaxOfLanes(d, best));
}

float exponentials(int64_t n, float max, float* x) {
  const RowTag d;
  const auto m = hn::Set(d, max);
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  float total;
  sum_in_blocks<1>(d, n, &total, [&](int64_t j, int64_t end, hn::Vec<RowTag>* out) HWY_ATTR {
    auto sum = hn::Zero(d);
    for (; j < end; j += step) {
      const auto e = exp_nonpositive(d, hn::Sub(hn::LoadU(d, x + j), m));
      sum = hn::Add(sum, e);
      hn::StoreU(e, d, x + j);
    }
    out[0] = sum;
  });
  return total;
}

float exponentials_and_products(int64_t n, float max, float* x, float* products) {
  const RowTag d;
  const auto m = hn::Set(d, max), low = hn::Set(d, kExpMin);
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  float totals[2];
  sum_in_blocks<2>(d, n, totals, [&](int64_t j, int64_t end, hn::Vec<RowTag>* out) HWY_ATTR {
    auto sum = hn::Zero(d), product = hn::Zero(d);
    for (; j < end; j += step) {
      const auto shifted = hn::Sub(hn::LoadU(d, x + j), m);
      const auto e = exp_nonpositive(d, shifted);
      sum = hn::Add(sum, e);
      // Where e is 0, so is its product, not 0·inf.
      product = hn::MulAdd(e, hn::IfThenElse(hn::Lt(shifted, low), low, shifted), product);
      hn::StoreU(e, d, x + j);
    }
    out[0] = sum;
    out[1] = product;
  });
  *products = totals[1];
  return totals[0];
}

float dot(int64_t n, const float* x, const float* y) {
  const RowTag d;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  float total;
  sum_in_blocks<1>(d, n, &total, [&](int64_t j, int64_t end, hn::Vec<RowTag>* out) HWY_ATTR {
    auto sum = hn::Zero(d);
    for (; j < end; j += step) {
      sum = hn::MulAdd(hn::LoadU(d, x + j), hn::LoadU(d, y + j), sum);
    }
    out[0] = sum;
  });
  return total;
}

void weighted_shift(int64_t n, float shift, const float* p, float* g) {
  const RowTag d;
  const auto s = hn::Set(d, shift);
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t j = 0; j < n; j += step) {
    hn::StoreU(hn::Mul(hn::LoadU(d, p + j), hn::Add(hn::LoadU(d, g + j), s)), d, g + j);
  }
}

void add_to(int64_t n, const float* x, float* y) {
  const RowTag d;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t j = 0; j < n; j += step) {
    hn::StoreU(hn::Add(hn::LoadU(d, y + j), hn::LoadU(d, x + j)), d, y + j);
  }
}

}  // namespace

const RowKernels* row_table() {
  static constexpr RowKernels table{.scale = scale,
                                    .largest = largest,
                                    .exponentials = exponentials,
                                    .exponentials_and_products = exponentials_and_products,
                                    .dot = dot,
                                    .weighted_shift = weighted_shift,
                                    .add = add_to};
  return &table;
}

}  // namespace HWY_NAMESPACE
}  // namespace foci::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace foci::kernels {
FOCI_KERNEL_TABLE(RowKernels, row_table, row_kernels)
}  // namespace foci::kernels
#endif
