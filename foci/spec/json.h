// Specs as JSON: the one place that knows the schema (docs/attention.md).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "foci/core/api.h"
#include "foci/spec/spec.h"

namespace foci {

// Reads a spec. Unknown keys, kinds and wrong types throw ArgumentError with the path of the
// offending value ("masks[1].left: …"). The result has passed validate().
FOCI_API AttentionSpec spec_from_json(const nlohmann::json& json);
FOCI_API AttentionSpec
spec_from_json_text(std::string_view text);  // also refuses text that is no JSON

// Every key, defaults too: spec_from_json(spec_to_json(s)) == s.
FOCI_API nlohmann::json spec_to_json(const AttentionSpec& spec);
FOCI_API std::string spec_to_json_text(const AttentionSpec& spec);

}  // namespace foci
