// DLPack's table of C functions, which a type of tensors may carry (DLPack 1.2, PyTorch from 2.10).
// A tensor described that way costs a tenth of what its method __dlpack__ does.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>

namespace foci::python {

namespace nb = nanobind;

// A tensor's memory, which `owner` keeps alive; its last handle must go while the GIL is held.
struct Exchanged {
  std::shared_ptr<void> owner;
  const nb::dlpack::dltensor* tensor = nullptr;  // null where the object's type has no such table
  bool writable = true;
};

// Looks at the type alone before anything is done; a subclass that has its own ways (a fake tensor
// of a compiler's, say) is left to them.
Exchanged exchanged(nb::handle object);

}  // namespace foci::python
