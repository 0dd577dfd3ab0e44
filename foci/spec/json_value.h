// Specs as values of nlohmann-json, for files that hold them beside other things. Private to the
// library: what is installed names no library that its users would have to have.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "foci/spec/json.h"

namespace foci {

// As spec_from_json_text and spec_to_json_text.
FOCI_API AttentionSpec spec_from_json(const nlohmann::json& json);
FOCI_API nlohmann::json spec_to_json(const AttentionSpec& spec);

}  // namespace foci
