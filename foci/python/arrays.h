// Arrays of Python (NumPy, PyTorch, whatever speaks DLPack or the buffer protocol) as Tensors of
// the same memory, and back.
#pragma once

#include <nanobind/nanobind.h>

#include "foci/core/tensor.h"

namespace foci::python {

namespace nb = nanobind;

// The array's memory as a Tensor, without a copy; undefined for None. Only what a Tensor cannot say
// (negative strides, an address that is no multiple of the element's size, bytes in another order,
// a sign that PyTorch has put off) is copied. `name` is the argument in messages. Throws
// nb::type_error for what is no array on the CPU or holds no number that foci knows,
// nb::value_error for more than 8 dimensions, and what foci._arrays raises.
//
// The Tensor keeps the array alive; the last handle must go while the GIL is held.
Tensor tensor_of(const char* name, nb::handle array);

// Likewise, with rows copied where their numbers do not lie side by side; a stride of 0, which a
// broadcast makes, stays.
Tensor dense_tensor_of(const char* name, nb::handle array);

// Raises where a tensor wants a gradient that results on NumPy's side would lose.
void refuse_gradient(const char* name, nb::handle array);

// As tensor_of for memory that is written: nothing is copied, what cannot be written is refused.
Tensor writable_tensor_of(const char* name, nb::handle array);

// A NumPy array of the Tensor's memory, which it keeps alive. None for an undefined Tensor.
// bfloat16, which NumPy lacks, is refused: give it an array of your own to be written.
nb::object array_of(const Tensor& tensor);

// Integers of any width as the one that foci reads. Throws nb::value_error where one does not fit.
Tensor integers(const char* name, const Tensor& given, DType wanted);

// Python's name of an object's type, for messages.
std::string kind_of(nb::handle object);

}  // namespace foci::python
