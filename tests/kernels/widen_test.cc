// Every float16 and bfloat16 number as a float, infinities and NaN too, on every SIMD target.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "foci/core/dtype.h"
#include "foci/core/simd_target.h"
#include "foci/kernels/attention.h"

namespace foci::kernels {
namespace {

template <class T>
void expect_exact(DType dtype) {
  constexpr int64_t kAll = 65536;
  std::vector<uint16_t> bits(kAll);
  for (int64_t n = 0; n < kAll; ++n) bits[n] = static_cast<uint16_t>(n);
  for (SimdTarget target : supported_targets()) {
    for (int64_t skip : {0, 3}) {  // whole vectors and a rest
      std::vector<float> wide(kAll);
      attention_kernels(target).widen(dtype, bits.data() + skip, kAll - skip, wide.data() + skip);
      for (int64_t n = skip; n < kAll; ++n) {
        T narrow;
        std::memcpy(static_cast<void*>(&narrow), &bits[n], sizeof(narrow));
        const auto want = static_cast<float>(narrow);
        if (want != want) {
          ASSERT_NE(wide[n], wide[n]) << name_of(target) << " bits " << n;
        } else {
          ASSERT_EQ(wide[n], want) << name_of(target) << " bits " << n;
        }
      }
    }
  }
}

TEST(Widen, Float16) {
  expect_exact<f16>(DType::f16);
}
TEST(Widen, BFloat16) {
  expect_exact<bf16>(DType::bf16);
}

}  // namespace
}  // namespace foci::kernels
