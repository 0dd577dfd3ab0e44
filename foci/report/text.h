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

// "87.5 %"; NaN is "–". What is not all is never shown as 100 %, and what is not none never as 0 %:
// up to two more decimals are given ("99.96 %"), then "> 99.99 %" or "< 0.01 %".
std::string percent(double share, int decimals = 1);

// A span of time: "0.4 s", "9 s", "1 min 09 s", "2 h 05 min".
std::string duration(double seconds);

// "1 scene", "1,234 scenes"
std::string counted(long long n, const std::string& one, const std::string& many);

// At most `limit` characters of UTF-8, with "…" in the place of what was cut: at the end, or in the
// middle, where names of files tell alike things apart by their ends.
std::string cut_end(const std::string& text, size_t limit);
std::string cut_middle(const std::string& text, size_t limit);
// Its characters: bytes that continue none.
size_t characters(std::string_view text);

// 1234567 → "1,234,567"
std::string grouped(long long value);

// One CSV line (RFC 4180), fields quoted where they need it, with the line end. A field that a
// spreadsheet would take for a formula is prefixed with an apostrophe.
std::string csv_line(const std::vector<std::string>& fields);

}  // namespace foci::report
