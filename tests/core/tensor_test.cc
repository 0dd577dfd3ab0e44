// Tensors: views share storage, copies do not, and what is wrong is refused with a clear line.
#include "foci/core/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace foci {
namespace {

Tensor counting(const Dims& shape) {
  Tensor t = Tensor::empty(shape);
  for (int64_t i = 0; i < t.numel(); ++i) t.data<float>()[i] = static_cast<float>(i);
  return t;
}

TEST(Tensor, StorageIsAlignedToCacheLines) {
  for (int64_t n : {1, 7, 63, 1000}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(Tensor::empty({n}, DType::u8).raw()) % 64, 0u);
  }
}

TEST(Tensor, ViewsShareStorage) {
  const Tensor t = counting({2, 3, 4});
  EXPECT_EQ(t.transpose(0, 2).at<float>(3, 1, 1), t.at<float>(1, 1, 3));
  EXPECT_EQ(t.slice(1, 1, 3).at<float>(1, 1, 2), t.at<float>(1, 2, 2));
  EXPECT_EQ(t.select(0, 1).shape(), (Dims{3, 4}));
  EXPECT_EQ(t.select(0, 1).at<float>(2, 3), 23);
  EXPECT_EQ(t.reshape({6, -1}).shape(), (Dims{6, 4}));
  t.transpose(1, 2).at<float>(0, 3, 2) = -1;
  EXPECT_EQ(t.at<float>(0, 2, 3), -1);
  EXPECT_TRUE(t.slice(0, 1, 2).shares_storage(t));
  EXPECT_FALSE(t.clone().shares_storage(t));
  EXPECT_EQ(t.unsqueeze(1).shape(), (Dims{2, 1, 3, 4}));
  const Tensor row = counting({4}).broadcast_to({5, 4});
  EXPECT_EQ(row.stride(0), 0);
  EXPECT_EQ(row.at<float>(4, 3), 3);
}

TEST(Tensor, CopiesOfStridedViewsKeepOrder) {
  const Tensor t = counting({3, 5});
  const Tensor c = t.transpose(0, 1).contiguous();
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 5; ++j) EXPECT_EQ(c.at<float>(j, i), t.at<float>(i, j));
  }
  const Tensor target = Tensor::zeros({5, 3}, DType::f64);
  target.transpose(0, 1).copy_from(t);
  EXPECT_EQ(target.at<double>(4, 2), 14);
  const Tensor both = Tensor::zeros({5, 3});
  both.transpose(0, 1).copy_from(t.slice(0, 0, 3));
  EXPECT_EQ(both.at<float>(1, 2), 11);
}

TEST(Tensor, EmptyDimensionsAreTensorsToo) {
  const Tensor t = Tensor::zeros({0, 4});
  EXPECT_TRUE(t.defined());
  EXPECT_EQ(t.numel(), 0);
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_EQ(t.clone().shape(), (Dims{0, 4}));
  EXPECT_EQ(t.slice(1, 1, 1).numel(), 0);
}

TEST(Tensor, RefusesWithWhatArrived) {
  const Tensor t = counting({2, 3});
  const auto message = [](auto&& f) -> std::string {
    try {
      f();
    } catch (const ArgumentError& e) {
      return e.what();
    }
    return "nothing thrown";
  };
  EXPECT_NE(message([&] { (void)t.data<double>(); }).find("float32, asked for as float64"),
            std::string::npos);
  EXPECT_NE(message([&] { (void)t.reshape({4, 2}); }).find("[2, 3]"), std::string::npos);
  EXPECT_NE(message([&] { (void)t.slice(0, 1, 3); }).find("[1, 3)"), std::string::npos);
  EXPECT_NE(message([&] { (void)t.transpose(0, 1).reshape({6}); }).find("not contiguous"),
            std::string::npos);
  EXPECT_NE(message([&] {
              (void)Tensor::empty({int64_t{1} << 40, int64_t{1} << 40});
            }).find("too many elements"),
            std::string::npos);
  EXPECT_NE(message([&] { (void)Tensor::empty({-1}); }).find("negative"), std::string::npos);
  EXPECT_NE(message([&] { (void)t.at<float>(2, 0); }).find("index 2"), std::string::npos);
}

TEST(Halves, Float16RoundTripsEveryValueAndRoundsToEven) {
  for (uint32_t b = 0; b < 65536; ++b) {
    f16 h;
    h.bits = static_cast<uint16_t>(b);
    const float x = static_cast<float>(h);
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(static_cast<float>(f16(x))));
    } else {
      ASSERT_EQ(f16(x).bits, h.bits) << b;
    }
  }
  EXPECT_EQ(f16(65519.99f).bits, 0x7bff);
  EXPECT_EQ(f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(f16(1.0f + 0x1.0p-11f).bits, 0x3c00);  // half way: to even
  EXPECT_EQ(f16(1.0f + 0x1.8p-10f).bits, 0x3c02);  // half way: to even
  EXPECT_EQ(f16(0x1.0p-25f).bits, 0);              // half the smallest subnormal
  EXPECT_EQ(f16(std::nextafter(0x1.0p-25f, 1.0f)).bits, 1);
}

TEST(Tensor, AnUndefinedOneIsRefusedByName) {
  const Tensor none, t = counting({2, 3});
  const auto text = [](auto f) -> std::string {
    try {
      f();
    } catch (const ArgumentError& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(text([&] { none.to(DType::f64); }), "to of an undefined tensor");
  EXPECT_EQ(text([&] { none.to(DType::f32); }), "to of an undefined tensor");
  EXPECT_EQ(text([&] { none.fill(1); }), "fill of an undefined tensor");
  EXPECT_EQ(text([&] { none.clone(); }), "clone of an undefined tensor");
  EXPECT_EQ(text([&] { none.contiguous(); }), "contiguous of an undefined tensor");
  EXPECT_EQ(text([&] { none.copy_from(none); }), "copy_from of an undefined tensor");
  EXPECT_EQ(text([&] { t.copy_from(none); }), "copy_from of an undefined tensor");
  EXPECT_EQ(text([&] { none.item(); }), "item of an undefined tensor");
  EXPECT_EQ(text([&] { none.item({}); }), "item of an undefined tensor");
  EXPECT_EQ(text([&] { none.reshape({0}); }), "reshape of an undefined tensor");
  EXPECT_EQ(text([&] { none.transpose(0, 1); }), "transpose of an undefined tensor");
  EXPECT_EQ(text([&] { none.slice(0, 0, 0); }), "slice of an undefined tensor");
  EXPECT_EQ(text([&] { none.select(0, 0); }), "select of an undefined tensor");
  EXPECT_EQ(text([&] { none.unsqueeze(0); }), "unsqueeze of an undefined tensor");
  EXPECT_EQ(text([&] { none.broadcast_to({2}); }), "broadcast_to of an undefined tensor");
  EXPECT_NE(text([&] { none.span<float>(); }), "");
  EXPECT_NE(text([&] { none.at<float>(); }), "");
  EXPECT_NE(text([&] { none.dim(0); }), "");
  EXPECT_NE(text([&] { (void)Dims().back(); }), "");
}

TEST(Tensor, WhatWasMovedFromIsUndefined) {
  Tensor a = counting({2, 3});
  const Tensor b = std::move(a);
  EXPECT_FALSE(a.defined());  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(a.numel(), 0);
  EXPECT_THROW(a.fill(1), ArgumentError);
  EXPECT_EQ(b.at<float>(1, 2), 5);
  a = b;
  Tensor& same = a;
  a = std::move(same);
  EXPECT_EQ(a.at<float>(1, 2), 5);
}

TEST(Tensor, SizesThatOverflowAreRefused) {
  constexpr int64_t kHuge = int64_t{1} << 40;
  float x = 0;
  EXPECT_THROW(Tensor::wrap(&x, {kHuge, 2}, {kHuge, 1}, DType::f32), ArgumentError);
  EXPECT_NO_THROW(Tensor::wrap(&x, {kHuge, 4}, {0, 0}, DType::f32).slice(0, 0, 1));
  EXPECT_THROW(counting({4}).reshape({kHuge, kHuge, -1}), ArgumentError);
  EXPECT_THROW(counting({4}).select(0, std::numeric_limits<int64_t>::max()), ArgumentError);
  EXPECT_THROW(Tensor::empty({-1}), ArgumentError);
}

TEST(Tensor, ABroadcastIsNotWrittenElementByElement) {
  const Tensor one = counting({1}), all = one.broadcast_to({3});
  EXPECT_THROW(all.copy_from(counting({3})), ArgumentError);
  all.fill(7);
  EXPECT_EQ(one.item(), 7);
}

TEST(Tensor, WholeNumbersOutOfRangeBecomeTheNearest) {
  const auto from = [](double x, DType to) {
    return Tensor::full({1}, x, DType::f64).to(to).item();
  };
  EXPECT_EQ(from(1e30, DType::i32), 2147483647.0);
  EXPECT_EQ(from(-1e30, DType::i32), -2147483648.0);
  EXPECT_EQ(from(INFINITY, DType::i64), 9223372036854775807.0);
  EXPECT_EQ(from(NAN, DType::i64), 0);
  EXPECT_EQ(from(-3, DType::u8), 0);
  EXPECT_EQ(from(300, DType::u8), 255);
  EXPECT_EQ(from(-2.9, DType::i32), -2);
  EXPECT_EQ(Tensor::full({1}, 5e9, DType::i64).to(DType::i32).item(), 2147483647.0);
}

TEST(Halves, BFloat16RoundsToEven) {
  EXPECT_EQ(bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(bf16(1.0f + 0x1.0p-8f).bits, 0x3f80);
  EXPECT_EQ(bf16(1.0f + 0x1.8p-7f).bits, 0x3f82);
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isinf(static_cast<float>(bf16(std::numeric_limits<float>::max()))));
}

}  // namespace
}  // namespace foci
