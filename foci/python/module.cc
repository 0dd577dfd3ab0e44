// The module foci._core: what the Python package in python/foci is made of.
#include <nanobind/nanobind.h>

#include "foci/python/bindings.h"

NB_MODULE(_core, m) {
  // Specs that Python caches hold outlive the module; nanobind would report them at exit.
  nanobind::set_leak_warnings(false);
  m.doc() = "foci's engine. Use the package foci, which checks and explains.";
  foci::python::bind_runtime(m);
  foci::python::bind_host_pool(m);
  foci::python::bind_spec(m);
  foci::python::bind_attention(m);
  foci::python::bind_cache(m);
  foci::python::bind_rows(m);
  foci::python::bind_files(m);
}
