// Element types of tensors, and the two 16-bit floating types that C++20 lacks.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "foci/core/api.h"

namespace foci {

// The integers behind `boolean` are storage only: files hold them and Tensor::to converts them, but
// no operator computes with them.
enum class DType : uint8_t { f32, f64, f16, bf16, i32, i64, u8, boolean, i8, i16, u16, u32, u64 };

// Bytes of one element.
constexpr size_t size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
    case DType::u64:
      return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
    case DType::u16:
      return 2;
    case DType::u8:
    case DType::boolean:
    case DType::i8:
      return 1;
  }
  return 0;
}

constexpr bool is_floating(DType t) {
  return t == DType::f32 || t == DType::f64 || t == DType::f16 || t == DType::bf16;
}

// "float32", "bool" …: the names that messages use.
FOCI_API std::string_view name_of(DType t);

// IEEE binary16. Storage only: arithmetic happens in float.
struct FOCI_API f16 {
  uint16_t bits = 0;
  f16() = default;
  explicit f16(float x);  // rounds to nearest even
  explicit operator float() const;
  bool operator==(const f16&) const = default;  // of bits
};

// bfloat16. Storage only.
struct FOCI_API bf16 {
  uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float x);  // rounds to nearest even
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
  bool operator==(const bf16&) const = default;  // of bits
};

// The DType of a C++ element type.
template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_of<uint8_t> {
  static constexpr DType value = DType::u8;
};
template <>
struct dtype_of<bool> {
  static constexpr DType value = DType::boolean;
};
template <>
struct dtype_of<int8_t> {
  static constexpr DType value = DType::i8;
};
template <>
struct dtype_of<int16_t> {
  static constexpr DType value = DType::i16;
};
template <>
struct dtype_of<uint16_t> {
  static constexpr DType value = DType::u16;
};
template <>
struct dtype_of<uint32_t> {
  static constexpr DType value = DType::u32;
};
template <>
struct dtype_of<uint64_t> {
  static constexpr DType value = DType::u64;
};
template <class T>
inline constexpr DType dtype_v = dtype_of<T>::value;

}  // namespace foci
