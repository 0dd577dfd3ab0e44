// The readers of untrusted bytes as fuzz targets and tests call them: each either accepts the
// bytes, and then whatever it returns can be read to its last byte, or throws the errors named
// here.
#pragma once

#include <string_view>

namespace foci::fuzz {

void safetensors(std::string_view bytes);  // FormatError
void image(std::string_view bytes);        // FormatError; PNG and JPEG
void gzip(std::string_view bytes);         // FormatError
void digits(std::string_view bytes);       // FormatError; the lines, since a checksum stops fuzzers
void vit_config(std::string_view bytes);   // FormatError; a model's config.json
void spec_json(std::string_view bytes);    // ArgumentError, as for any other wrong spec

}  // namespace foci::fuzz
