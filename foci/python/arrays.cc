// Arrays come in through the buffer protocol, DLPack's table of C functions, or nanobind's ndarray,
// which speaks the rest of DLPack.
#include "foci/python/arrays.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstring>
#include <limits>
#include <optional>

#include "foci/python/exchange.h"

namespace foci::python {
namespace {

using dlpack = nb::dlpack::dtype_code;

std::optional<DType> dtype_of_code(nb::dlpack::dtype t) {
  if (t.lanes != 1) return std::nullopt;
  const auto is = [&](dlpack code, int bits) {
    return t.code == static_cast<uint8_t>(code) && t.bits == bits;
  };
  if (is(dlpack::Float, 32)) return DType::f32;
  if (is(dlpack::Float, 64)) return DType::f64;
  if (is(dlpack::Float, 16)) return DType::f16;
  if (is(dlpack::Bfloat, 16)) return DType::bf16;
  if (is(dlpack::Int, 32)) return DType::i32;
  if (is(dlpack::Int, 64)) return DType::i64;
  if (is(dlpack::UInt, 8)) return DType::u8;
  if (is(dlpack::Bool, 8)) return DType::boolean;
  if (is(dlpack::Int, 8)) return DType::i8;
  if (is(dlpack::Int, 16)) return DType::i16;
  if (is(dlpack::UInt, 16)) return DType::u16;
  if (is(dlpack::UInt, 32)) return DType::u32;
  if (is(dlpack::UInt, 64)) return DType::u64;
  return std::nullopt;
}

nb::dlpack::dtype code_of(DType t) {
  const auto code = [](dlpack c, int bits) {
    return nb::dlpack::dtype{static_cast<uint8_t>(c), static_cast<uint8_t>(bits), 1};
  };
  switch (t) {
    case DType::f32:
      return code(dlpack::Float, 32);
    case DType::f64:
      return code(dlpack::Float, 64);
    case DType::f16:
      return code(dlpack::Float, 16);
    case DType::bf16:
      return code(dlpack::Bfloat, 16);
    case DType::i32:
      return code(dlpack::Int, 32);
    case DType::i64:
      return code(dlpack::Int, 64);
    case DType::u8:
      return code(dlpack::UInt, 8);
    case DType::boolean:
      return code(dlpack::Bool, 8);
    case DType::i8:
      return code(dlpack::Int, 8);
    case DType::i16:
      return code(dlpack::Int, 16);
    case DType::u16:
      return code(dlpack::UInt, 16);
    case DType::u32:
      return code(dlpack::UInt, 32);
    case DType::u64:
      return code(dlpack::UInt, 64);
  }
  return {};
}

// Copies what a Tensor cannot view: element by element, any strides.
Tensor copied(const std::byte* data, const Dims& shape,
              const std::array<int64_t, Dims::kMaxRank>& strides, DType dtype) {
  Tensor t = Tensor::empty(shape, dtype);
  const size_t size = size_of(dtype);
  auto* to = static_cast<std::byte*>(t.raw());
  std::array<int64_t, Dims::kMaxRank> index{};
  for (int64_t n = 0; n < t.numel(); ++n) {
    int64_t at = 0;
    for (int d = 0; d < shape.size(); ++d) {
      at += index[static_cast<size_t>(d)] * strides[static_cast<size_t>(d)];
    }
    std::memcpy(to + static_cast<size_t>(n) * size, data + at * static_cast<int64_t>(size), size);
    for (int d = shape.size() - 1; d >= 0; --d) {
      if (++index[static_cast<size_t>(d)] < shape[d]) break;
      index[static_cast<size_t>(d)] = 0;
    }
  }
  return t;
}

// Memory that Python described, whichever way.
struct Described {
  std::byte* data = nullptr;
  std::optional<DType> dtype;
  int bits = 0;  // of an element, for messages
  int rank = 0;
  Dims shape;
  std::array<int64_t, Dims::kMaxRank> strides{};  // in elements; may be negative
  bool whole = true;                              // strides are multiples of an element's size
  std::shared_ptr<void> owner;
};

// ---- what lies behind an object's memory ------------------------------------------------------

// Python's part: makes an ordinary array of an object whose memory alone does not tell its values,
// or raises what is wrong with it.
nb::object ordinary(const char* name, nb::handle object) {
  return nb::module_::import_("foci._arrays").attr("ordinary")(name, object);
}

// NumPy's own arrays, whose memory and format tell all; not what is derived from them.
bool is_plain_buffer(nb::handle object) {
  static PyTypeObject* const ndarray = reinterpret_cast<PyTypeObject*>(
      nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr());
  const PyTypeObject* type = Py_TYPE(object.ptr());
  return type == ndarray || type == &PyMemoryView_Type || type == &PyBytes_Type;
}

// Whether memory tells all about tensors of this type; not so of classes derived from PyTorch's.
// Asked once a type, under the GIL. A type that is remembered is kept, lest another take its
// address.
bool is_plain_type(PyTypeObject* type) {
  static std::array<PyTypeObject*, 8> known{};
  static size_t count = 0;
  for (size_t i = 0; i < count; ++i) {
    if (known[i] == type) return true;
  }
  const nb::handle object(reinterpret_cast<PyObject*>(type));
  if (!nb::cast<bool>(nb::module_::import_("foci._arrays").attr("is_plain")(object))) return false;
  if (count < known.size()) {
    Py_INCREF(object.ptr());
    known[count++] = type;
  }
  return true;
}

// Whether PyTorch has put off a change of sign, which the memory does not show.
bool is_negated(nb::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  const nb::object negated = nb::steal(PyObject_CallMethodNoArgs(tensor.ptr(), name));
  if (negated.is_valid()) return negated.ptr() == Py_True;
  PyErr_Clear();  // no tensor of PyTorch's
  return false;
}

[[noreturn]] void refuse_object(const char* name, nb::handle object, bool writable) {
  throw nb::type_error(
      fmt::format("{}: {} arrived, {}array in this computer's memory is right (NumPy, or what "
                  "speaks DLPack)",
                  name, kind_of(object), writable ? "a writable " : "an ")
          .c_str());
}

void check_rank(const char* name, int64_t rank) {
  if (rank <= Dims::kMaxRank) return;
  throw nb::value_error(
      fmt::format("{}: {} dimensions arrived, {} are the most", name, rank, Dims::kMaxRank)
          .c_str());
}

// One element type of the struct module, in native order.
std::optional<DType> dtype_of_format(const char* format, int64_t size) {
  if (format == nullptr) return DType::u8;
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  if (format[0] == '\0' || format[1] != '\0') return std::nullopt;
  switch (*format) {
    case 'f':
      return DType::f32;
    case 'd':
      return DType::f64;
    case 'e':
      return DType::f16;
    case 'i':
    case 'l':
    case 'q':
      return size == 4   ? std::optional(DType::i32)
             : size == 8 ? std::optional(DType::i64)
                         : std::nullopt;
    case 'b':
      return DType::i8;
    case 'B':
      return DType::u8;
    case 'h':
      return DType::i16;
    case 'H':
      return DType::u16;
    case 'I':
    case 'L':
    case 'Q':
      return size == 4   ? std::optional(DType::u32)
             : size == 8 ? std::optional(DType::u64)
                         : std::nullopt;
    case '?':
      return DType::boolean;
    default:
      return std::nullopt;
  }
}

// NumPy's way, which costs a fifth of DLPack's. False where the object does not speak it, or not
// for this use.
bool describe_buffer(const char* name, nb::handle object, bool writable, Described& to) {
  if (!PyObject_CheckBuffer(object.ptr())) return false;
  auto view = std::make_unique<Py_buffer>();
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), view.get(), flags) != 0) {
    PyErr_Clear();
    return false;
  }
  // The last handle goes while the GIL is held.
  const std::shared_ptr<Py_buffer> held(view.release(), [](Py_buffer* b) {
    PyBuffer_Release(b);
    delete b;
  });
  check_rank(name, held->ndim);
  to.data = static_cast<std::byte*>(held->buf);
  to.dtype = dtype_of_format(held->format, held->itemsize);
  to.bits = static_cast<int>(held->itemsize * 8);
  to.rank = held->ndim;
  const Py_ssize_t size = std::max<Py_ssize_t>(1, held->itemsize);  // there are items of no bytes
  for (int d = 0; d < held->ndim; ++d) {
    to.shape.push_back(held->shape[d]);
    to.whole = to.whole && held->strides[d] % size == 0;
    to.strides[static_cast<size_t>(d)] = held->strides[d] / size;
  }
  to.owner = held;
  return true;
}

// PyTorch's way.
bool describe_exchanged(const char* name, nb::handle object, bool writable, Described& to) {
  constexpr int kCpu = 1;
  const Exchanged got = exchanged(object);
  if (got.tensor == nullptr || (writable && !got.writable)) return false;
  const nb::dlpack::dltensor& t = *got.tensor;
  if (t.device.device_type != kCpu) return false;
  check_rank(name, t.ndim);
  to.data = static_cast<std::byte*>(t.data) + t.byte_offset;
  to.dtype = dtype_of_code(t.dtype);
  to.bits = t.dtype.bits;
  to.rank = t.ndim;
  int64_t dense = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    to.strides[static_cast<size_t>(d)] = t.strides != nullptr ? t.strides[d] : dense;
    dense *= t.shape[d];
  }
  for (int d = 0; d < t.ndim; ++d) to.shape.push_back(t.shape[d]);
  if (t.data == nullptr && to.shape.product() > 0) return false;  // a tensor without memory
  to.owner = got.owner;
  return true;
}

template <class Array>
bool describe_dlpack(const char* name, nb::handle object, Described& to) {
  auto array = std::make_shared<Array>();
  if (!nb::try_cast(object, *array)) {
    PyErr_Clear();
    return false;
  }
  check_rank(name, static_cast<int64_t>(array->ndim()));
  to.data =
      static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(array->data_handle()))) +
      array->byte_offset();
  to.dtype = dtype_of_code(array->dtype());
  to.bits = array->dtype().bits;
  to.rank = static_cast<int>(array->ndim());
  for (size_t d = 0; d < array->ndim(); ++d) {
    to.shape.push_back(static_cast<int64_t>(array->shape(d)));
    to.strides[d] = array->stride(d);
  }
  if (array->data_handle() == nullptr && to.shape.product() > 0) return false;
  to.owner = array;
  return true;
}

// Whichever way an object describes its memory.
bool describe(const char* name, nb::handle object, bool writable, Described& to) {
  return describe_buffer(name, object, writable, to) ||
         describe_exchanged(name, object, writable, to) ||
         (writable ? describe_dlpack<nb::ndarray<nb::device::cpu>>(name, object, to)
                   : describe_dlpack<nb::ndarray<nb::ro, nb::device::cpu>>(name, object, to));
}

Described described(const char* name, nb::handle object, bool writable) {
  Described x;
  const bool found = describe(name, object, writable, x);
  if (writable) {
    if (!found) refuse_object(name, object, writable);
    return x;
  }
  const bool buffer = PyObject_CheckBuffer(object.ptr()) != 0;
  const bool plain = buffer ? is_plain_buffer(object)
                            : is_plain_type(Py_TYPE(object.ptr())) && !is_negated(object);
  if (found && x.dtype && plain) return x;
  const nb::object made = ordinary(name, object);
  if (made.ptr() != object.ptr() || !found) {
    x = {};
    if (!describe(name, made, false, x)) refuse_object(name, object, writable);
  }
  return x;
}

Tensor tensor_from(const char* name, nb::handle object, bool writable) {
  Described x = described(name, object, writable);
  if (!x.dtype) {
    throw nb::type_error(fmt::format("{}: elements of {} bits of a type that foci does not know "
                                     "arrived; float32 is right where numbers are meant",
                                     name, x.bits)
                             .c_str());
  }
  if (x.shape.product() == 0) return Tensor::empty(x.shape, *x.dtype);
  Dims strides;
  bool viewable = x.whole && reinterpret_cast<uintptr_t>(x.data) % size_of(*x.dtype) == 0;
  for (int d = 0; d < x.rank; ++d) {
    int64_t stride = x.strides[static_cast<size_t>(d)];
    if (x.shape[d] == 1) stride = std::max<int64_t>(stride, 0);  // moves nothing
    viewable = viewable && stride >= 0;
    strides.push_back(stride);
  }
  if (viewable) return Tensor::wrap(x.data, x.shape, strides, *x.dtype, std::move(x.owner));
  if (writable || !x.whole) {
    throw nb::value_error(fmt::format("{}: {} arrived, an ordinary array is right", name,
                                      x.whole ? "negative strides or an unaligned address"
                                              : "strides that are no multiples of an element")
                              .c_str());
  }
  return copied(x.data, x.shape, x.strides, *x.dtype);
}

}  // namespace

std::string kind_of(nb::handle object) {
  return nb::cast<std::string>(nb::str(object.type().attr("__name__")));
}

Tensor tensor_of(const char* name, nb::handle array) {
  if (array.is_none()) return {};
  return tensor_from(name, array, false);
}

Tensor dense_tensor_of(const char* name, nb::handle array) {
  Tensor t = tensor_of(name, array);
  return t.defined() && t.rank() > 0 && t.dim(-1) > 1 && t.stride(-1) > 1 ? t.contiguous() : t;
}

void refuse_gradient(const char* name, nb::handle array) {
  if (array.is_none() || PyObject_CheckBuffer(array.ptr()) != 0) return;
  nb::module_::import_("foci._arrays").attr("refuse_gradient")(name, array);
}

Tensor writable_tensor_of(const char* name, nb::handle array) {
  if (array.is_none()) return {};
  return tensor_from(name, array, true);
}

nb::object array_of(const Tensor& tensor) {
  if (!tensor.defined()) return nb::none();
  if (tensor.dtype() == DType::bf16) {
    throw nb::type_error(
        "bfloat16: NumPy has no such type; use foci.torch, or give float32 or float16");
  }
  auto held = std::make_unique<Tensor>(tensor);
  const nb::capsule owner(held.get(), [](void* p) noexcept { delete static_cast<Tensor*>(p); });
  const Tensor& t = *held.release();
  std::vector<size_t> shape(static_cast<size_t>(t.rank()));
  for (int d = 0; d < t.rank(); ++d) shape[static_cast<size_t>(d)] = static_cast<size_t>(t.dim(d));
  return nb::cast(nb::ndarray<nb::numpy>(t.raw(), shape.size(), shape.data(), owner,
                                         t.strides().begin(), code_of(t.dtype())),
                  nb::rv_policy::reference);
}

namespace {

// Throws where an integer of type T is more than `most`, or less than its negative.
template <class T>
void check_range(const char* name, const Tensor& given, int64_t most) {
  const Tensor dense = given.contiguous();
  for (const T x : dense.span<T>()) {
    const bool fits = std::is_unsigned_v<T>
                          ? static_cast<uint64_t>(x) <= static_cast<uint64_t>(most)
                          : static_cast<int64_t>(x) <= most && static_cast<int64_t>(x) >= -most - 1;
    if (!fits) {
      throw nb::value_error(fmt::format("{}: {} arrived, which is more than {} bits hold", name, x,
                                        most == std::numeric_limits<int64_t>::max() ? 64 : 32)
                                .c_str());
    }
  }
}

}  // namespace

Tensor integers(const char* name, const Tensor& given, DType wanted) {
  if (!given.defined() || given.dtype() == wanted) return given;
  const int64_t most = wanted == DType::i64 ? std::numeric_limits<int64_t>::max()
                                            : std::numeric_limits<int32_t>::max();
  switch (given.dtype()) {
    case DType::u8:
    case DType::i8:
    case DType::i16:
    case DType::u16:
    case DType::i32:
      break;
    case DType::i64:
      check_range<int64_t>(name, given, most);
      break;
    case DType::u32:
      check_range<uint32_t>(name, given, most);
      break;
    case DType::u64:
      check_range<uint64_t>(name, given, most);
      break;
    default:
      throw nb::type_error(
          fmt::format("{}: {} arrived, {} is right", name, name_of(given.dtype()), name_of(wanted))
              .c_str());
  }
  return given.to(wanted);
}

}  // namespace foci::python
