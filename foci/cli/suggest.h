// Nearest names, for whoever mistyped one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace foci::cli {

// Edits (insert, delete, replace, swap neighbours) that turn one word into the other.
int edit_distance(std::string_view a, std::string_view b);

// The nearest candidate where it is near enough to be meant, else empty: "tran" → "train".
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

// "; did you mean NEAREST?" or empty.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace foci::cli
