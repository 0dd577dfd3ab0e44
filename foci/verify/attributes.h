// Attributes of an ONNX operator as JSON: strict, like everything that comes out of a file.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "foci/core/error.h"
#include "foci/core/json.h"
#include "foci/verify/case_file.h"

namespace foci::verify {

class Attributes {
 public:
  // Throws FormatError unless `text` is a JSON object with no other keys than these.
  Attributes(const std::string& text, const std::vector<std::string_view>& known)
      : json_(parse_json(text, "metadata attributes")) {
    require<FormatError>(json_.is_object(), "metadata attributes: no JSON object");
    for (const auto& item : json_.items()) {
      bool found = false;
      for (std::string_view k : known) found = found || k == item.key();
      require<FormatError>(found, "attribute {}: unknown", shown(item.key()));
    }
  }

  int64_t integer(const char* key, int64_t otherwise) const {
    if (!json_.contains(key)) return otherwise;
    const auto& value = json_.at(key);
    require<FormatError>(
        value.is_number_integer() && !(value.is_number_unsigned() && value.get<uint64_t>() >> 63),
        "attribute {}: an integer is needed", key);
    return value.get<int64_t>();
  }

  std::optional<double> number(const char* key) const {
    if (!json_.contains(key)) return std::nullopt;
    const auto& value = json_.at(key);
    require<FormatError>(value.is_number(), "attribute {}: a number is needed", key);
    return value.get<double>();
  }

 private:
  nlohmann::json json_;
};

}  // namespace foci::verify
