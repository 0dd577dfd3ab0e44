// Case files written by tests.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "foci/io/safetensors.h"
#include "foci/verify/verify.h"
#include "io/damage.h"

namespace foci::testing {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// Leaves undefined tensors out.
inline void write_case(const std::filesystem::path& path, const std::string& op,
                       const std::string& attributes, const NamedTensors& tensors,
                       std::map<std::string, std::string> more = {}) {
  NamedTensors defined;
  for (const auto& [name, t] : tensors) {
    if (t.defined()) defined.emplace_back(name, t);
  }
  more["op"] = op;
  more["attributes"] = attributes;
  write_safetensors(path, defined, more);
}

// One case through the oracle, as a line: "passed", "failed: …" or "unreadable: …".
inline std::string verdict(const std::filesystem::path& path,
                           VerifyOptions options = {.reference = true}) {
  const VerifyReport r = verify_paths({path}, options);
  if (!r.unreadable.empty()) return "unreadable: " + r.unreadable[0].message;
  if (!r.failures.empty()) return "failed: " + r.failures[0].message;
  return r.passed == 1 ? "passed" : "nothing";
}

}  // namespace foci::testing
