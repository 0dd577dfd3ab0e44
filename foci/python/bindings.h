// What the files of this floor add to the module `foci._core`.
#pragma once

#include <nanobind/nanobind.h>

namespace foci::python {

void bind_runtime(nanobind::module_& m);    // threads, SIMD targets, errors
void bind_host_pool(nanobind::module_& m);  // whose threads calls run on
void bind_spec(nanobind::module_& m);       // Spec
void bind_attention(nanobind::module_& m);  // attention, attention_backward, Outputs
void bind_cache(nanobind::module_& m);      // Cache
void bind_rows(nanobind::module_& m);       // normalize, normalize_backward
void bind_files(nanobind::module_& m);      // safetensors, verify

}  // namespace foci::python
