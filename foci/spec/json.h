// Specs as JSON text: the one place that knows the schema (docs/attention.md).
#pragma once

#include <string>
#include <string_view>

#include "foci/core/api.h"
#include "foci/spec/spec.h"

namespace foci {

// Reads a spec. Unknown keys, kinds and wrong types throw ArgumentError with the path of the
// offending value ("masks[1].left: …"), and so does text that is no JSON. The result has passed
// validate().
FOCI_API AttentionSpec spec_from_json_text(std::string_view text);

// Every key, defaults too: spec_from_json_text(spec_to_json_text(s)) == s.
FOCI_API std::string spec_to_json_text(const AttentionSpec& spec);

}  // namespace foci
