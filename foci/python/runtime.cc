// Threads, SIMD targets, and foci's errors as Python's.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "foci/cli/verb.h"
#include "foci/core/error.h"
#include "foci/core/simd_target.h"
#include "foci/core/threads.h"
#include "foci/python/arrays.h"
#include "foci/python/bindings.h"

namespace foci::python {

namespace nb = nanobind;

namespace {

int count_of(nb::handle n) {
  const nb::object index = nb::steal(PyNumber_Index(n.ptr()));
  if (!index.is_valid() || PyBool_Check(n.ptr())) {
    PyErr_Clear();
    throw nb::type_error(fmt::format("n: {} arrived, an integer is right", kind_of(n)).c_str());
  }
  constexpr long kMost = 1 << 20;
  const long count = PyLong_AsLong(index.ptr());
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  require(count >= 1 && count <= kMost, "n: {} arrived, a number from 1 to {} is right",
          nb::cast<std::string>(nb::str(index)), kMost);
  return static_cast<int>(count);
}

// Messages name files, and names need not be UTF-8.
void set_error(PyObject* kind, const char* message) {
  const nb::object text = nb::steal(
      PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::strlen(message)), "replace"));
  if (text.is_valid()) PyErr_SetObject(kind, text.ptr());
}

}  // namespace

void bind_runtime(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const ArgumentError& e) {
      set_error(PyExc_ValueError, e.what());
    } catch (const FormatError& e) {
      set_error(PyExc_ValueError, e.what());
    } catch (const cli::FileError& e) {
      set_error(PyExc_OSError, e.what());
    } catch (const cli::UsageError& e) {
      set_error(PyExc_ValueError, e.what());
    } catch (const IoError& e) {
      set_error(PyExc_OSError, e.what());
    } catch (const Error& e) {
      set_error(PyExc_RuntimeError, e.what());
    }
  });

  m.def("num_threads", &num_threads, "Threads that a call may use.");
  m.def(
      "set_num_threads", [](nb::handle n) { set_num_threads(count_of(n)); }, nb::arg("n").none(),
      nb::sig("def set_num_threads(n: int) -> None"),
      "Sets how many threads a call may use, 1 or more. Results do not depend on it.");
  m.def(
      "target", [] { return std::string(name_of(current_target())); },
      "The SIMD target in use: 'baseline', 'avx2' or 'avx512'.");
  m.def(
      "set_target",
      [](nb::handle name) {
        if (!nb::isinstance<nb::str>(name)) {
          throw nb::type_error(
              fmt::format("name: {} arrived, str is right", kind_of(name)).c_str());
        }
        set_target(parse_target(nb::cast<std::string>(name)));
      },
      nb::arg("name").none(), nb::sig("def set_target(name: str) -> None"),
      "Forces a SIMD target that this machine has.");
  m.def(
      "supported_targets",
      [] {
        std::vector<std::string> names;
        for (const SimdTarget t : supported_targets()) names.emplace_back(name_of(t));
        return names;
      },
      "The SIMD targets that this machine has.");
}

}  // namespace foci::python
