// Messages of the library in the words of Python's callers.
#pragma once

#include <string>

#include "foci/core/error.h"

namespace foci::python {

// A message that begins with the library's name of an argument, with Python's name for it.
std::string in_python_names(const std::string& message);

// work(), whose ArgumentErrors are told in Python's names.
template <class F>
auto with_python_names(const F& work) {
  try {
    return work();
  } catch (const ArgumentError& e) {
    throw ArgumentError(in_python_names(e.what()));
  }
}

}  // namespace foci::python
