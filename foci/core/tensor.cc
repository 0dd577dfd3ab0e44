// Storage, views and copies of tensors, whatever their element type.
#include "foci/core/tensor.h"

#include "foci/core/memory.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

namespace foci {
namespace {

// Calls f with a null pointer of the element type.
template <class F>
decltype(auto) with_type(DType t, F&& f) {
  switch (t) {
    case DType::f32:
      return f(static_cast<float*>(nullptr));
    case DType::f64:
      return f(static_cast<double*>(nullptr));
    case DType::f16:
      return f(static_cast<f16*>(nullptr));
    case DType::bf16:
      return f(static_cast<bf16*>(nullptr));
    case DType::i32:
      return f(static_cast<int32_t*>(nullptr));
    case DType::i64:
      return f(static_cast<int64_t*>(nullptr));
    case DType::u8:
      return f(static_cast<uint8_t*>(nullptr));
    case DType::boolean:
      return f(static_cast<bool*>(nullptr));
    case DType::i8:
      return f(static_cast<int8_t*>(nullptr));
    case DType::i16:
      return f(static_cast<int16_t*>(nullptr));
    case DType::u16:
      return f(static_cast<uint16_t*>(nullptr));
    case DType::u32:
      return f(static_cast<uint32_t*>(nullptr));
    case DType::u64:
      return f(static_cast<uint64_t*>(nullptr));
  }
  throw ArgumentError("unknown dtype");
}

template <class To, class From>
To convert(From x) {
  constexpr bool half_from = std::is_same_v<From, f16> || std::is_same_v<From, bf16>;
  constexpr bool half_to = std::is_same_v<To, f16> || std::is_same_v<To, bf16>;
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (half_from) {
    return convert<To>(static_cast<float>(x));
  } else if constexpr (half_to) {
    return To(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, bool>) {
    return x != From{};
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    // A cast of what does not fit is undefined. 2^digits, unlike the largest To, is a From.
    const From beyond = std::ldexp(From{1}, std::numeric_limits<To>::digits);
    if (std::isnan(x)) return To{0};
    if (x >= beyond) return std::numeric_limits<To>::max();
    if (x <= static_cast<From>(std::numeric_limits<To>::min())) {
      return std::numeric_limits<To>::min();
    }
    return static_cast<To>(x);
  } else if constexpr (std::is_integral_v<To> && std::is_integral_v<From> &&
                       !std::is_same_v<From, bool>) {
    return static_cast<To>(
        std::clamp<int64_t>(x, std::numeric_limits<To>::min(), std::numeric_limits<To>::max()));
  } else {
    return static_cast<To>(x);
  }
}

// Visits every element of a strided view in row-major order as (index in order, offset).
template <class F>
void for_each_offset(const Dims& shape, const Dims& strides, F&& f) {
  const int rank = shape.size();
  int64_t count = 1;
  for (int64_t n : shape) count *= n;
  if (count == 0) return;
  if (rank == 0) {
    f(int64_t{0}, int64_t{0});
    return;
  }
  std::array<int64_t, Dims::kMaxRank> index{};
  int64_t offset = 0;
  const int64_t inner = shape[rank - 1];
  const int64_t step = strides[rank - 1];
  for (int64_t i = 0; i < count; i += inner) {
    for (int64_t j = 0; j < inner; ++j) f(i + j, offset + j * step);
    for (int d = rank - 2; d >= 0; --d) {
      offset += strides[d];
      if (++index[d] < shape[d]) break;
      offset -= strides[d] * shape[d];
      index[d] = 0;
    }
  }
}

int normalise(int dim, int rank, const char* what) {
  const int d = dim < 0 ? dim + rank : dim;
  require(d >= 0 && d < rank, "{}: dimension {} of a tensor of rank {}", what, dim, rank);
  return d;
}

}  // namespace

Dims::Dims(std::span<const int64_t> values) {
  require(values.size() <= kMaxRank, "a tensor has at most {} dimensions, got {}", kMaxRank,
          values.size());
  std::copy(values.begin(), values.end(), values_.begin());
  size_ = static_cast<int>(values.size());
}

void Dims::push_back(int64_t value) {
  require(size_ < kMaxRank, "a tensor has at most {} dimensions", kMaxRank);
  values_[size_++] = value;
}

bool Dims::operator==(const Dims& other) const {
  return size_ == other.size_ && std::equal(begin(), end(), other.begin());
}

int64_t Dims::product() const {
  int64_t result = 1;
  bool any_zero = false;
  for (int64_t n : *this) {
    require(n >= 0, "shape {} has a negative size", *this);
    any_zero = any_zero || n == 0;
  }
  if (any_zero) return 0;
  for (int64_t n : *this) {
    require(!__builtin_mul_overflow(result, n, &result), "shape {} has too many elements", *this);
  }
  return result;
}

std::string Dims::str() const {
  std::string s = "[";
  for (int i = 0; i < size_; ++i) s += (i ? ", " : "") + std::to_string(values_[i]);
  return s + "]";
}

Dims contiguous_strides(const Dims& shape) {
  Dims strides = shape;
  // Unsigned, so that a shape too large to exist wraps instead of being undefined; whoever makes a
  // tensor of it has product() refuse it.
  uint64_t step = 1;
  for (int i = shape.size() - 1; i >= 0; --i) {
    strides[i] = static_cast<int64_t>(step);
    step *= static_cast<uint64_t>(std::max<int64_t>(shape[i], 1));
  }
  return strides;
}

Dims broadcast_shapes(const Dims& a, const Dims& b, const char* what) {
  const int rank = std::max(a.size(), b.size());
  Dims out;
  for (int i = 0; i < rank; ++i) {
    const int ia = i - (rank - a.size());
    const int ib = i - (rank - b.size());
    const int64_t x = ia < 0 ? 1 : a[ia];
    const int64_t y = ib < 0 ? 1 : b[ib];
    require(x == y || x == 1 || y == 1, "{}: shapes {} and {} do not broadcast", what, a, b);
    out.push_back(x == 1 ? y : x);
  }
  return out;
}

Tensor Tensor::empty(const Dims& shape, DType dtype) {
  Tensor t;
  t.shape_ = shape;
  t.strides_ = contiguous_strides(shape);
  t.numel_ = shape.product();
  t.dtype_ = dtype;
  int64_t bytes = 0;
  require(!__builtin_mul_overflow(t.numel_, static_cast<int64_t>(size_of(dtype)), &bytes) &&
              bytes < std::numeric_limits<int64_t>::max() - 4096,
          "a tensor of shape {} has too many elements", shape);
  t.storage_ = allocate_storage(static_cast<size_t>(bytes));
  t.data_ = static_cast<std::byte*>(t.storage_.get());
  return t;
}

Tensor Tensor::zeros(const Dims& shape, DType dtype) {
  Tensor t = empty(shape, dtype);
  std::memset(t.data_, 0, t.nbytes());
  return t;
}

Tensor Tensor::full(const Dims& shape, double value, DType dtype) {
  Tensor t = empty(shape, dtype);
  t.fill(value);
  return t;
}

Tensor Tensor::wrap(void* data, const Dims& shape, const Dims& strides, DType dtype,
                    std::shared_ptr<void> owner) {
  require(data != nullptr, "Tensor::wrap: data is null");
  require(shape.size() == strides.size(), "Tensor::wrap: shape {} with strides {}", shape, strides);
  for (int64_t s : strides) require(s >= 0, "Tensor::wrap: negative stride in {}", strides);
  Tensor t;
  t.shape_ = shape;
  t.strides_ = strides;
  t.numel_ = shape.product();
  t.dtype_ = dtype;
  int64_t end = 1;  // elements from the first to the last
  for (int d = 0; t.numel_ > 0 && d < shape.size(); ++d) {
    int64_t reach = 0;
    require(!__builtin_mul_overflow(shape[d] - 1, strides[d], &reach) &&
                !__builtin_add_overflow(end, reach, &end) &&
                end <= std::numeric_limits<int64_t>::max() / 8,
            "Tensor::wrap: shape {} with strides {} reaches further than memory can", shape,
            strides);
  }
  t.storage_ = std::move(owner);
  t.data_ = static_cast<std::byte*>(data);
  return t;
}

int64_t Tensor::dim(int i) const {
  return shape_[normalise(i, rank(), "Tensor::dim")];
}
int64_t Tensor::stride(int i) const {
  return strides_[normalise(i, rank(), "Tensor::stride")];
}

bool Tensor::is_contiguous() const {
  if (numel_ == 0) return true;  // and its other sizes may be too large to multiply
  int64_t step = 1;
  for (int i = rank() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != step) return false;
    step *= shape_[i];
  }
  return true;
}

void Tensor::check_defined(const char* what) const {
  require(defined(), "{} of an undefined tensor", what);
}

void Tensor::check_dtype(DType wanted) const {
  require(defined(), "the tensor is undefined");
  require(dtype_ == wanted, "the tensor holds {}, asked for as {}", name_of(dtype_),
          name_of(wanted));
}

int64_t Tensor::offset_of(std::initializer_list<int64_t> index) const {
  require(static_cast<int>(index.size()) == rank(), "{} indices for a tensor of rank {}",
          index.size(), rank());
  int64_t offset = 0;
  int d = 0;
  for (int64_t i : index) {
    if (i < 0 || i >= shape_[d]) [[unlikely]] {  // the message is costly, so only then
      require(false, "index {} in dimension {} of shape {}", i, d, shape_);
    }
    offset += i * strides_[d++];
  }
  return offset;
}

double Tensor::item(const Dims& index) const {
  check_defined("item");
  require(index.size() == rank(), "{} indices for a tensor of rank {}", index.size(), rank());
  int64_t offset = 0;
  for (int d = 0; d < rank(); ++d) {
    if (index[d] < 0 || index[d] >= shape_[d]) [[unlikely]] {
      require(false, "index {} outside shape {}", index, shape_);
    }
    offset += index[d] * strides_[d];
  }
  return with_type(dtype_, [&]<class T>(T*) {
    return convert<double>(reinterpret_cast<const T*>(data_)[offset]);
  });
}

double Tensor::item() const {
  check_defined("item");
  require(numel_ == 1, "item() of a tensor of shape {}", shape_);
  Dims zero = shape_;
  for (int i = 0; i < zero.size(); ++i) zero[i] = 0;
  return item(zero);
}

Tensor Tensor::reshape(const Dims& shape) const {
  check_defined("reshape");
  require(is_contiguous(), "reshape: the view of shape {} is not contiguous", shape_);
  Dims wanted = shape;
  int64_t known = 1;
  int open = -1;
  for (int i = 0; i < wanted.size(); ++i) {
    if (wanted[i] == -1) {
      require(open < 0, "reshape: two open sizes in {}", shape);
      open = i;
    } else {
      require(!__builtin_mul_overflow(known, wanted[i], &known), "reshape: {} does not fit {}",
              shape_, shape);
    }
  }
  if (open >= 0) {
    require(known > 0 && numel_ % known == 0, "reshape: {} does not fit {}", shape_, shape);
    wanted[open] = numel_ / known;
  }
  require(wanted.product() == numel_, "reshape: {} does not fit {}", shape_, shape);
  Tensor t = *this;
  t.shape_ = wanted;
  t.strides_ = contiguous_strides(wanted);
  return t;
}

Tensor Tensor::transpose(int a, int b) const {
  check_defined("transpose");
  a = normalise(a, rank(), "transpose");
  b = normalise(b, rank(), "transpose");
  Tensor t = *this;
  std::swap(t.shape_[a], t.shape_[b]);
  std::swap(t.strides_[a], t.strides_[b]);
  return t;
}

Tensor Tensor::slice(int dim, int64_t begin, int64_t end) const {
  check_defined("slice");
  dim = normalise(dim, rank(), "slice");
  require(0 <= begin && begin <= end && end <= shape_[dim],
          "slice: [{}, {}) of dimension {} of shape {}", begin, end, dim, shape_);
  Tensor t = *this;
  t.shape_[dim] = end - begin;
  t.numel_ = t.shape_.product();
  if (t.numel_ > 0) t.data_ += begin * strides_[dim] * static_cast<int64_t>(size_of(dtype_));
  return t;
}

Tensor Tensor::select(int dim, int64_t index) const {
  check_defined("select");
  dim = normalise(dim, rank(), "select");
  require(index >= 0 && index < shape_[dim], "select: {} of dimension {} of shape {}", index, dim,
          shape_);
  const Tensor s = slice(dim, index, index + 1);
  Tensor t = s;
  t.shape_ = Dims();
  t.strides_ = Dims();
  for (int i = 0; i < rank(); ++i) {
    if (i == dim) continue;
    t.shape_.push_back(s.shape_[i]);
    t.strides_.push_back(s.strides_[i]);
  }
  return t;
}

Tensor Tensor::unsqueeze(int dim) const {
  check_defined("unsqueeze");
  if (dim < 0) dim += rank() + 1;
  require(dim >= 0 && dim <= rank(), "unsqueeze: dimension {} of rank {}", dim, rank());
  Tensor t = *this;
  t.shape_ = Dims();
  t.strides_ = Dims();
  for (int i = 0; i <= rank(); ++i) {
    if (i == dim) {
      t.shape_.push_back(1);
      t.strides_.push_back(i < rank() ? shape_[i] * strides_[i] : 1);
    }
    if (i < rank()) {
      t.shape_.push_back(shape_[i]);
      t.strides_.push_back(strides_[i]);
    }
  }
  return t;
}

Tensor Tensor::broadcast_to(const Dims& shape) const {
  check_defined("broadcast_to");
  require(rank() <= shape.size(), "broadcast_to: {} does not broadcast to {}", shape_, shape);
  Tensor t = *this;
  t.shape_ = shape;
  t.strides_ = shape;
  const int lead = shape.size() - rank();
  for (int i = 0; i < shape.size(); ++i) {
    if (i < lead) {
      t.strides_[i] = 0;
      continue;
    }
    const int64_t own = shape_[i - lead];
    require(own == shape[i] || own == 1, "broadcast_to: {} does not broadcast to {}", shape_,
            shape);
    t.strides_[i] = own == shape[i] ? strides_[i - lead] : 0;
  }
  t.numel_ = shape.product();
  return t;
}

Tensor Tensor::contiguous() const {
  check_defined("contiguous");
  return is_contiguous() ? *this : clone();
}

Tensor Tensor::clone() const {
  check_defined("clone");
  Tensor t = empty(shape_, dtype_);
  t.copy_from(*this);
  return t;
}

Tensor Tensor::to(DType dtype) const {
  check_defined("to");
  if (dtype == dtype_) return *this;
  Tensor t = empty(shape_, dtype);
  t.copy_from(*this);
  return t;
}

void Tensor::copy_from(const Tensor& source) const {
  check_defined("copy_from");
  source.check_defined("copy_from");
  require(shape_ == source.shape_, "copy_from: shape {} into {}", source.shape_, shape_);
  if (numel_ == 0) return;
  for (int d = 0; d < rank(); ++d) {
    require(shape_[d] == 1 || strides_[d] != 0,
            "copy_from: into a broadcast of shape {} whose elements share memory", shape_);
  }
  if (dtype_ == source.dtype_ && is_contiguous() && source.is_contiguous()) {
    std::memmove(data_, source.data_, nbytes());
    return;
  }
  // A contiguous side needs no offsets of its own; a doubly strided copy goes through one.
  if (!is_contiguous() && !source.is_contiguous()) {
    copy_from(source.clone());
    return;
  }
  with_type(dtype_, [&]<class To>(To*) {
    with_type(source.dtype_, [&]<class From>(From*) {
      To* to = reinterpret_cast<To*>(data_);
      const From* from = reinterpret_cast<const From*>(source.data_);
      if (is_contiguous()) {
        for_each_offset(source.shape_, source.strides_,
                        [&](int64_t i, int64_t at) { to[i] = convert<To>(from[at]); });
      } else {
        for_each_offset(shape_, strides_,
                        [&](int64_t i, int64_t at) { to[at] = convert<To>(from[i]); });
      }
    });
  });
}

void Tensor::fill(double value) const {
  check_defined("fill");
  if (numel_ == 0) return;
  with_type(dtype_, [&]<class T>(T*) {
    T* to = reinterpret_cast<T*>(data_);
    const T v = convert<T>(value);
    if (is_contiguous()) {
      std::fill_n(to, numel_, v);
      return;
    }
    for_each_offset(shape_, strides_, [&](int64_t, int64_t at) { to[at] = v; });
  });
}

}  // namespace foci
