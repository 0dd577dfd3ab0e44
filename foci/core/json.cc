// The limits are checked event by event, while the parser runs.
#include "foci/core/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "foci/core/error.h"

namespace foci {
namespace {

using nlohmann::json;

// "line 3, column 7" of the byte that ended the reading, which is counted from 1.
std::string place(std::string_view text, size_t byte) {
  const std::string_view before = text.substr(0, std::min(text.size(), byte > 0 ? byte - 1 : 0));
  const auto lines = std::count(before.begin(), before.end(), '\n');
  const size_t last = before.rfind('\n');
  return fmt::format("line {}, column {}", lines + 1,
                     before.size() - (last == std::string_view::npos ? 0 : last + 1) + 1);
}

}  // namespace

std::string shown_json(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "an array";
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

std::string shown_key(const std::string& key) {
  const std::string text = shown_json(json(key));
  const size_t quoted = text.back() == '"' ? 2 : 1;  // a long one has lost its second quote
  return text.substr(1, text.size() - quoted);
}

json parse_json(std::string_view text, const std::string& name, const JsonLimits& limits) {
  require<FormatError>(text.size() <= limits.bytes, "{}: {} bytes of JSON, at most {} are read",
                       name, text.size(), limits.bytes);
  // The parser would take a zero byte for the end, and skip a byte order mark.
  require<FormatError>(text.find('\0') == std::string_view::npos,
                       "{}: the text is not JSON: it holds a zero byte", name);
  require<FormatError>(text.substr(0, 3) != "\xef\xbb\xbf",
                       "{}: the text is not JSON: it begins with a byte order mark", name);
  require<FormatError>(text.find_first_not_of(" \t\r\n") != std::string_view::npos,
                       "{}: the text is not JSON: it is empty", name);
  std::vector<std::set<std::string>> keys;  // of each open object; a list has none
  size_t values = 0;
  const auto opened = [&] {
    keys.emplace_back();
    require<FormatError>(keys.size() <= static_cast<size_t>(limits.depth),
                         "{}: more than {} lists and objects inside one another", name,
                         limits.depth);
  };
  const auto watch = [&](int, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        opened();
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end:
        keys.pop_back();
        return true;
      case json::parse_event_t::key:
        // nlohmann-json would keep the last of two.
        require<FormatError>(keys.back().insert(parsed.get_ref<const std::string&>()).second,
                             "{}: the key {} stands twice in one object", name,
                             shown_key(parsed.get_ref<const std::string&>()));
        return true;
      case json::parse_event_t::value:
        break;
    }
    require<FormatError>(++values <= limits.values, "{}: more than {} values", name, limits.values);
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (const json::parse_error& e) {
    throw FormatError(
        fmt::format("{}: the text is not JSON: wrong at {}", name, place(text, e.byte)));
  } catch (const json::exception&) {  // nothing else is left that it could mind
    throw FormatError(fmt::format("{}: it holds a number beyond the range of doubles", name));
  }
}

}  // namespace foci
