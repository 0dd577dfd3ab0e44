// Tensor: an n-dimensional array with shared, 64-byte aligned storage and strided views.
//
// Copying a Tensor copies the handle; two handles of one storage see each other's writes. Views
// (slice, select, transpose, reshape of contiguous data, broadcast) never copy. Strides count
// elements, may be 0 (broadcast), and are never negative.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "foci/core/api.h"
#include "foci/core/dtype.h"
#include "foci/core/error.h"

namespace foci {

// A short list of sizes or strides, held in place.
class FOCI_API Dims {
 public:
  static constexpr int kMaxRank = 8;

  Dims() = default;
  Dims(std::initializer_list<int64_t> values) : Dims(std::span(values.begin(), values.size())) {}
  explicit Dims(std::span<const int64_t> values);

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t operator[](int i) const { return values_[i]; }
  int64_t& operator[](int i) { return values_[i]; }
  int64_t back() const {
    require(size_ > 0, "Dims::back: there are no dimensions");
    return values_[size_ - 1];
  }
  const int64_t* begin() const { return values_.data(); }
  const int64_t* end() const { return values_.data() + size_; }
  void push_back(int64_t value);
  bool operator==(const Dims& other) const;
  // Product of all values; throws ArgumentError where it would overflow or a value is negative.
  int64_t product() const;
  std::string str() const;  // "[2, 3]"

 private:
  std::array<int64_t, kMaxRank> values_{};
  int size_ = 0;
};

}  // namespace foci

// So that messages take Dims as they are, and write them out only where there is a message.
template <>
struct fmt::formatter<foci::Dims> : fmt::formatter<std::string> {
  template <class Context>
  auto format(const foci::Dims& dims, Context& context) const {
    return fmt::formatter<std::string>::format(dims.str(), context);
  }
};

namespace foci {

class FOCI_API Tensor {
 public:
  // An undefined tensor: no storage, defined() is false. Stands for "not given".
  Tensor() = default;
  Tensor(const Tensor&) = default;
  Tensor& operator=(const Tensor&) = default;
  // What was moved from is undefined.
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    if (this == &other) return *this;
    storage_ = std::move(other.storage_);
    data_ = std::exchange(other.data_, nullptr);
    shape_ = std::exchange(other.shape_, Dims());
    strides_ = std::exchange(other.strides_, Dims());
    numel_ = std::exchange(other.numel_, 0);
    dtype_ = std::exchange(other.dtype_, DType::f32);
    return *this;
  }
  ~Tensor() = default;

  static Tensor empty(const Dims& shape, DType dtype = DType::f32);
  static Tensor zeros(const Dims& shape, DType dtype = DType::f32);
  static Tensor full(const Dims& shape, double value, DType dtype = DType::f32);
  // Copies row-major values; their count must equal the shape's product.
  template <class T>
  static Tensor from(std::span<const T> values, const Dims& shape) {
    Tensor t = empty(shape, dtype_v<T>);
    require(static_cast<int64_t>(values.size()) == t.numel(),
            "Tensor::from: {} values for shape {}", values.size(), shape);
    std::copy(values.begin(), values.end(), t.data<T>());
    return t;
  }
  template <class T>
  static Tensor from(std::initializer_list<T> values, const Dims& shape) {
    return from(std::span<const T>(values.begin(), values.size()), shape);
  }
  template <class T>
  static Tensor from(const std::vector<T>& values, const Dims& shape) {
    return from(std::span<const T>(values), shape);
  }
  // Wraps memory that somebody else owns (`owner` keeps it alive; may be null). Throws where data
  // is null, a size or a stride negative, or the last element's place overflows.
  static Tensor wrap(void* data, const Dims& shape, const Dims& strides, DType dtype,
                     std::shared_ptr<void> owner = nullptr);

  bool defined() const { return data_ != nullptr; }
  DType dtype() const { return dtype_; }
  int rank() const { return shape_.size(); }
  const Dims& shape() const { return shape_; }
  const Dims& strides() const { return strides_; }
  int64_t dim(int i) const;     // negative counts from the back; throws out of range
  int64_t stride(int i) const;  // likewise
  int64_t numel() const { return numel_; }
  size_t nbytes() const { return static_cast<size_t>(numel_) * size_of(dtype_); }
  bool is_contiguous() const;
  bool shares_storage(const Tensor& other) const { return storage_ && storage_ == other.storage_; }

  // First element; throws ArgumentError if T is not the dtype.
  template <class T>
  T* data() const {
    check_dtype(dtype_v<T>);
    return reinterpret_cast<T*>(data_);
  }
  void* raw() const { return data_; }
  // All elements of a contiguous tensor; throws otherwise.
  template <class T>
  std::span<T> span() const {
    require(is_contiguous(), "Tensor::span: the view of shape {} is not contiguous", shape_);
    return {data<T>(), static_cast<size_t>(numel_)};
  }
  // One element, indices checked. For tests and small loops.
  template <class T, class... I>
  T& at(I... index) const {
    return data<T>()[offset_of({static_cast<int64_t>(index)...})];
  }
  // One element as a double, whatever the dtype. For tests, printing, small loops.
  double item(const Dims& index) const;
  double item() const;  // of a tensor with one element

  // Views (no copy). These and the copies below throw ArgumentError for an undefined tensor.
  Tensor reshape(const Dims& shape) const;  // one size may be -1; throws if not contiguous
  Tensor transpose(int a, int b) const;
  Tensor slice(int dim, int64_t begin, int64_t end) const;
  Tensor select(int dim, int64_t index) const;  // drops the dimension
  Tensor unsqueeze(int dim) const;
  Tensor broadcast_to(const Dims& shape) const;  // right-aligned; throws if it does not fit

  // Copies.
  Tensor contiguous() const;  // itself where it already is
  Tensor clone() const;       // always a fresh, contiguous copy
  // Whole numbers out of range become the nearest that fits; NaN becomes 0.
  Tensor to(DType dtype) const;
  // Writes into this tensor's elements; shapes must be equal, dtypes may differ. Throws where two
  // of them share memory (a broadcast).
  void copy_from(const Tensor& source) const;
  void fill(double value) const;

 private:
  void check_dtype(DType wanted) const;
  void check_defined(const char* what) const;
  int64_t offset_of(std::initializer_list<int64_t> index) const;

  std::shared_ptr<void> storage_;
  std::byte* data_ = nullptr;
  Dims shape_;
  Dims strides_;
  int64_t numel_ = 0;
  DType dtype_ = DType::f32;
};

// Row-major strides of a shape.
FOCI_API Dims contiguous_strides(const Dims& shape);
// The shape both broadcast to, right-aligned; throws ArgumentError naming `what` where they do not
// fit.
FOCI_API Dims broadcast_shapes(const Dims& a, const Dims& b, const char* what);

}  // namespace foci
