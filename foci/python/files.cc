// safetensors files, trained models and pictures, and case files against the engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>

#include "foci/cli/pictures.h"
#include "foci/cli/verb.h"
#include "foci/core/error.h"
#include "foci/io/safetensors.h"
#include "foci/python/arrays.h"
#include "foci/python/bindings.h"
#include "foci/python/interrupt.h"
#include "foci/report/report.h"
#include "foci/verify/verify.h"

namespace foci::python {
namespace {

using Arrays = nb::typed<nb::dict, nb::str, nb::object>;
using Metadata = nb::typed<nb::dict, nb::str, nb::str>;

// A path as the system has it: its bytes need not be UTF-8.
std::string native(const nb::bytes& path) {
  return {path.c_str(), path.size()};
}

nb::object python_path(const std::filesystem::path& path) {
  const std::string& bytes = path.native();
  return nb::steal(
      PyUnicode_DecodeFSDefaultAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
}

// Arrays, metadata, and for names that cannot be read the reason.
nb::typed<nb::tuple, Arrays, Metadata, Metadata> load(const nb::bytes& given) {
  const std::string path = native(given);
  Safetensors file;
  {
    const nb::gil_scoped_release free;
    file = read_safetensors(path);
  }
  nb::dict tensors;
  for (const auto& [name, tensor] : file.tensors) {
    // NumPy has no bfloat16; float32 holds each of its numbers.
    const bool lacks = tensor.dtype() == DType::bf16;
    tensors[name.c_str()] = array_of(lacks ? tensor.to(DType::f32) : tensor);
  }
  return nb::typed<nb::tuple, Arrays, Metadata, Metadata>(
      nb::make_tuple(tensors, file.metadata, file.unreadable));
}

void save(const nb::bytes& given, const Arrays& tensors,
          const std::map<std::string, std::string>& metadata) {
  const std::string path = native(given);
  std::vector<std::pair<std::string, Tensor>> list;
  for (const auto& [key, value] : tensors) {
    if (!nb::isinstance<nb::str>(key)) {
      throw nb::type_error(
          fmt::format("tensors: a name that is {} arrived, str is right", kind_of(key)).c_str());
    }
    const auto name = nb::cast<std::string>(key);
    const std::string what = "tensors['" + name + "']";
    if (value.is_none()) {
      throw nb::type_error((what + ": None arrived, an array is right").c_str());
    }
    list.emplace_back(name, tensor_of(what.c_str(), value));
  }
  const nb::gil_scoped_release free;
  write_safetensors(path, list, metadata);
}

std::string inspect(const nb::bytes& folder, const std::vector<nb::bytes>& pictures_given,
                    const nb::bytes& page) {
  const std::string model = native(folder), report = native(page);
  std::vector<std::string> images;
  for (const nb::bytes& path : pictures_given) images.push_back(native(path));
  require(!images.empty(), "images: none arrived, at least one picture is right");
  std::string json;
  without_gil(kLong, [&] {
    if (!report.empty()) cli::check_writable("report", report);
    const cli::Pictures pictures = cli::look_at(model, images);
    if (!report.empty()) report::write_report(report, cli::report_of(pictures, model));
    json = cli::looks_json(pictures, report);
  });
  return json;
}

Arrays verify(const std::vector<nb::bytes>& given, bool reference,
              const std::vector<std::string>& targets,
              const std::optional<std::string>& implementation) {
  std::vector<std::filesystem::path> paths;
  for (const nb::bytes& path : given) paths.emplace_back(native(path));
  VerifyOptions options;
  options.reference = reference;
  for (const std::string& name : targets) options.targets.push_back(parse_target(name));
  if (implementation) {
    if (*implementation != "plain" && *implementation != "fused") {
      throw nb::value_error(
          fmt::format("implementation: '{}' arrived, 'plain' or 'fused' is right", *implementation)
              .c_str());
    }
    options.implementation =
        *implementation == "plain" ? Implementation::plain : Implementation::fused;
  }
  VerifyReport report;
  without_gil(kLong, [&] { report = verify_paths(paths, options); });
  nb::list failures, unreadable;
  for (const VerifyFailure& f : report.failures) {
    nb::dict one;
    one["path"] = python_path(f.path);
    one["op"] = f.op;
    one["engine"] = f.engine;
    one["tensor"] = f.tensor;
    one["error"] = f.error;
    one["allowed"] = f.allowed;
    one["wrong"] = f.wrong;
    one["elements"] = f.elements;
    one["message"] = f.message;
    failures.append(one);
  }
  for (const VerifyUnreadable& u : report.unreadable) {
    unreadable.append(nb::make_tuple(python_path(u.path), u.message));
  }
  Arrays result;
  result["passed"] = report.passed;
  result["failed"] = report.failed;
  result["skipped"] = report.skipped;
  result["runs"] = report.runs;
  result["failures"] = failures;
  result["unreadable"] = unreadable;
  return result;
}

}  // namespace

void bind_files(nb::module_& m) {
  m.def("load", &load, nb::arg("path"));
  m.def("save", &save, nb::arg("path"), nb::arg("tensors"), nb::arg("metadata"));
  m.def("inspect", &inspect, nb::arg("model"), nb::arg("images"), nb::arg("report"));
  m.def("verify", &verify, nb::arg("paths"), nb::arg("reference"), nb::arg("targets"),
        nb::arg("implementation").none());
}

}  // namespace foci::python
