// JSON as the program prints it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace foci::cli {

// Paths and labels are a person's and need not be UTF-8: what is not is replaced, since a result
// that took minutes must not be lost over a name.
inline std::string json_text(const nlohmann::ordered_json& value) {
  return value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace foci::cli
