// A case file, read: untrusted bytes become tensors by name.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "foci/core/tensor.h"

namespace foci::verify {

struct CaseFile {
  std::filesystem::path path;
  std::string op;
  std::string attributes;  // JSON, "{}" where none are given
  std::optional<double> tolerance;
  std::string message_contains;
  std::map<std::string, Tensor, std::less<>> in, out;  // without the prefixes

  // Undefined where the file has no such tensor.
  Tensor input(std::string_view name) const;
  Tensor output(std::string_view name) const;
  // Throw FormatError for tensors of other names: what nobody reads would go unchecked.
  void only_inputs(const std::vector<std::string_view>& known) const;
  void only_outputs(const std::vector<std::string_view>& known) const;
};

// Text from a file as it may stand in a message: one line, not long.
std::string shown(std::string_view text);

// Throws IoError, FormatError.
CaseFile read_case(const std::filesystem::path& path);

}  // namespace foci::verify
