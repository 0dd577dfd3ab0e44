// JSON that comes from outside, read strictly and within limits. Private to the library.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "foci/core/api.h"

namespace foci {

// What a document may hold. The parser stops at the first byte beyond a limit, so memory stays
// near the size of what the limits allow, whatever arrives. The defaults suit a file of settings.
struct JsonLimits {
  size_t bytes = 1 << 20;   // of the text
  int depth = 32;           // objects and lists inside one another
  size_t values = 100'000;  // objects, lists, numbers, texts …, all together
};

// Throws FormatError in one line, "NAME: …", for what is no JSON or more than one value, goes
// beyond a limit, holds a byte order mark or a zero byte, or a key twice in one object.
FOCI_API nlohmann::json parse_json(std::string_view text, const std::string& name,
                                   const JsonLimits& limits = {});

// For messages: "an object", "an array", or the value itself, in one line of at most 60 characters.
FOCI_API std::string shown_json(const nlohmann::json& value);
FOCI_API std::string shown_key(const std::string& key);  // without quotes

}  // namespace foci
