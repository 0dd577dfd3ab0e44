// Text that is safe to put into a page: escaping, data URIs, file names, numbers, CSV.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace foci::report {

// For HTML and SVG text and quoted attributes: & < > " ' become entities, control characters and
// bytes that are no UTF-8 become U+FFFD.
std::string escape(std::string_view text);

// RFC 4648 base64 with padding.
std::string base64(std::string_view bytes);

// "data:MIME;base64,…"
std::string data_uri(std::string_view mime, std::string_view bytes);

// Lower-case letters, digits and single dashes, never empty: "Scene 3 (7)" → "scene-3-7".
std::string slug(std::string_view text);

// Shortest form with at most `digits` significant digits: 0.0123, 12.3, 1e-05. NaN is "–".
std::string number(double value, int digits = 3);

// "87.5 %"; NaN is "–".
std::string percent(double share, int decimals = 1);

// 1234567 → "1,234,567"
std::string grouped(long long value);

// One CSV line (RFC 4180), fields quoted where they need it, with the line end. A field that a
// spreadsheet would take for a formula is prefixed with an apostrophe.
std::string csv_line(const std::vector<std::string>& fields);

}  // namespace foci::report
