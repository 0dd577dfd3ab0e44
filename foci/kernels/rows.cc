// Row operators of the unfused attention, compiled once a SIMD target.
#define HWY_TARGET_INCLUDE "foci/kernels/rows.cc"
#include "foci/core/highway_targets.h"
// After foci's choice of targets.
#include <hwy/foreach_target.h>

#include <limits>

#include "foci/kernels/rows.h"
#include "foci/kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace foci::kernels {
namespace HWY_NAMESPACE {
namespace {

using RowTag = hn::CappedTag<float, kRowLanes>;
using RowVector = hn::Vec<RowTag>;

// Below this e^x is no normal float; it counts as 0.
constexpr float kExpMin = -87.0f;

// e^x for x ≤ 0; NaN gives NaN. x = n·ln2 + r, a polynomial of degree 6 in r (Cephes' expf), about
// 1 ulp.
HWY_INLINE RowVector exp_of(RowVector x) {
  const RowTag d;
  const hn::RebindToSigned<RowTag> di;
  const auto low = hn::Set(d, kExpMin);
  const auto safe = hn::IfThenElse(hn::Lt(x, low), low, x);
  const auto n = hn::Round(hn::Mul(safe, hn::Set(d, 1.44269504f)));
  auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), safe);
  r = hn::MulAdd(n, hn::Set(d, 2.12194440e-4f), r);
  auto y = hn::Set(d, 1.9875691500e-4f);
  y = hn::MulAdd(y, r, hn::Set(d, 1.3981999507e-3f));
  y = hn::MulAdd(y, r, hn::Set(d, 8.3334519073e-3f));
  y = hn::MulAdd(y, r, hn::Set(d, 4.1665795894e-2f));
  y = hn::MulAdd(y, r, hn::Set(d, 1.6666665459e-1f));
  y = hn::MulAdd(y, r, hn::Set(d, 5.0000001201e-1f));
  y = hn::Add(hn::MulAdd(hn::Mul(y, r), r, r), hn::Set(d, 1.0f));
  // n lies in [−126, 0], so 2^n is normal.
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  return hn::IfThenZeroElse(hn::Lt(x, low), hn::Mul(y, hn::BitCast(d, exponent)));
}

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
  auto sum = hn::Zero(d);
  for (int64_t j = 0; j < n; j += step) {
    const auto e = exp_of(hn::Sub(hn::LoadU(d, x + j), m));
    sum = hn::Add(sum, e);
    hn::StoreU(e, d, x + j);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

float exponentials_and_products(int64_t n, float max, float* x, float* products) {
  const RowTag d;
  const auto m = hn::Set(d, max), low = hn::Set(d, kExpMin);
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d), product = hn::Zero(d);
  for (int64_t j = 0; j < n; j += step) {
    const auto shifted = hn::Sub(hn::LoadU(d, x + j), m);
    const auto e = exp_of(shifted);
    sum = hn::Add(sum, e);
    // Where e is 0, so is its product, not 0·inf.
    product = hn::MulAdd(e, hn::IfThenElse(hn::Lt(shifted, low), low, shifted), product);
    hn::StoreU(e, d, x + j);
  }
  *products = hn::GetLane(hn::SumOfLanes(d, product));
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

float dot(int64_t n, const float* x, const float* y) {
  const RowTag d;
  const auto step = static_cast<int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d);
  for (int64_t j = 0; j < n; j += step) {
    sum = hn::MulAdd(hn::LoadU(d, x + j), hn::LoadU(d, y + j), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
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
