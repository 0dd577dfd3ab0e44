// Checks a case's metadata and sorts its tensors into what goes in and what must come out.
#include "foci/verify/case_file.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "foci/io/safetensors.h"

namespace foci::verify {
namespace {

using Tensors = std::map<std::string, Tensor, std::less<>>;

Tensor find(const Tensors& tensors, std::string_view name) {
  const auto it = tensors.find(name);
  return it == tensors.end() ? Tensor() : it->second;
}

void only(const Tensors& tensors, const std::vector<std::string_view>& known, const char* prefix) {
  for (const auto& [name, tensor] : tensors) {
    require<FormatError>(std::find(known.begin(), known.end(), name) != known.end(),
                         "{}.{}: no such tensor belongs to this op", prefix, shown(name));
  }
}

double read_tolerance(const std::string& text) {
  char* end = nullptr;
  const double x = std::strtod(text.c_str(), &end);
  require<FormatError>(!text.empty() && *end == '\0' && std::isfinite(x) && x >= 0,
                       "metadata tolerance: \"{}\" given, a number >= 0 is needed", shown(text));
  return x;
}

}  // namespace

Tensor CaseFile::input(std::string_view name) const {
  return find(in, name);
}
Tensor CaseFile::output(std::string_view name) const {
  return find(out, name);
}
void CaseFile::only_inputs(const std::vector<std::string_view>& known) const {
  only(in, known, "in");
}
void CaseFile::only_outputs(const std::vector<std::string_view>& known) const {
  only(out, known, "out");
}

std::string shown(std::string_view text) {
  constexpr size_t kLongest = 60;
  std::string line(text.substr(0, kLongest));
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text.size() > kLongest ? line + "..." : line;
}

CaseFile read_case(const std::filesystem::path& path) {
  Safetensors file = read_safetensors(path);
  CaseFile c;
  c.path = path;
  const auto text = [&](const char* key) -> const std::string* {
    const auto it = file.metadata.find(key);
    return it == file.metadata.end() ? nullptr : &it->second;
  };
  const std::string* op = text("op");
  require<FormatError>(op != nullptr, "metadata op: missing, so this is no case file");
  c.op = *op;
  const std::string* attributes = text("attributes");
  c.attributes = attributes && !attributes->empty() ? *attributes : "{}";
  if (const std::string* t = text("tolerance")) c.tolerance = read_tolerance(*t);
  if (const std::string* m = text("message_contains")) c.message_contains = *m;
  if (!file.unreadable.empty()) {
    const auto& [name, why] = *file.unreadable.begin();
    throw FormatError(fmt::format("tensor {}: {}", shown(name), why));
  }
  for (auto& [name, tensor] : file.tensors) {
    // A size may be as large as it likes where another is 0; this keeps sums of them in range.
    for (int64_t n : tensor.shape()) {
      require<FormatError>(n <= int64_t{1} << 40, "tensor {}: shape {} is too large", shown(name),
                           tensor.shape());
    }
    if (name.rfind("in.", 0) == 0) {
      c.in[name.substr(3)] = tensor;
    } else if (name.rfind("out.", 0) == 0) {
      c.out[name.substr(4)] = tensor;
    } else {
      throw FormatError(fmt::format("tensor {}: a case holds only in.* and out.*", shown(name)));
    }
  }
  return c;
}

}  // namespace foci::verify
