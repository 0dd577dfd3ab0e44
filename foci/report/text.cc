// Escaping, encoding and formatting of text for pages.
#include "foci/report/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace foci::report {
namespace {

// Length of the well-formed UTF-8 sequence at the start of `s`, 0 where there is none
// (over-long forms, surrogates and values above U+10FFFF are not well formed).
size_t utf8_length(std::string_view s) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(s[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  size_t length = 0;
  uint8_t low = 0x80, high = 0xBF;  // range of the second byte
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  }
  if (length == 0 || s.size() < length || byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < length; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xBF) return 0;
  }
  return length;
}

bool continues(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) == 0x80;
}

// The byte at which character `n` begins.
size_t place_of(std::string_view text, size_t n) {
  size_t at = 0;
  for (; at < text.size(); ++at) {
    if (!continues(text[at]) && n-- == 0) break;
  }
  return at;
}

}  // namespace

std::string escape(std::string_view text) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  std::string out;
  out.reserve(text.size() + text.size() / 8);
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length != 1) {
      out += length == 0 ? kReplacement : text.substr(0, length);
      text.remove_prefix(length == 0 ? 1 : length);
      continue;
    }
    const char c = text.front();
    text.remove_prefix(1);
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        if ((static_cast<uint8_t>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7F) {
          out += kReplacement;
        } else {
          out += c;
        }
    }
  }
  return out;
}

std::string base64(std::string_view bytes) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t have = std::min<size_t>(3, bytes.size() - i);
    uint32_t word = 0;
    for (size_t j = 0; j < 3; ++j) {
      word = word << 8 | (j < have ? static_cast<uint8_t>(bytes[i + j]) : 0u);
    }
    for (size_t j = 0; j < 4; ++j) {
      out += j <= have ? kDigits[word >> (18 - 6 * j) & 63] : '=';
    }
  }
  return out;
}

std::string data_uri(std::string_view mime, std::string_view bytes) {
  return fmt::format("data:{};base64,{}", mime, base64(bytes));
}

std::string slug(std::string_view text) {
  std::string out;
  for (char c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    if ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9')) {
      out += c;
    } else if (!out.empty() && out.back() != '-') {
      out += '-';
    }
  }
  while (!out.empty() && out.back() == '-') out.pop_back();
  return out.empty() ? "picture" : out.substr(0, 80);
}

std::string number(double value, int digits) {
  if (std::isnan(value)) return "–";
  return fmt::format("{:.{}g}", value == 0 ? 0.0 : value, digits);
}

std::string percent(double share, int decimals) {
  if (std::isnan(share)) return "–";
  constexpr int kMore = 2;
  for (int d = decimals; d <= decimals + kMore; ++d) {
    const std::string text = fmt::format("{:.{}f}", 100 * share, d);
    const double shown = std::strtod(text.c_str(), nullptr);
    const bool hides = (shown <= 0 && share > 0) || (shown >= 100 && share < 1);
    if (!hides) return text + " %";
  }
  const double step = std::pow(10.0, -(decimals + kMore));
  return share < 0.5 ? fmt::format("< {:.{}f} %", step, decimals + kMore)
                     : fmt::format("> {:.{}f} %", 100 - step, decimals + kMore);
}

std::string duration(double seconds) {
  if (!std::isfinite(seconds)) return "–";
  seconds = std::clamp(seconds, 0.0, 3e9);
  if (seconds < 9.95) return fmt::format("{:.1f} s", seconds);
  const long long s = std::llround(seconds);
  if (s < 60) return fmt::format("{} s", s);
  if (s < 3600) return fmt::format("{} min {:02} s", s / 60, s % 60);
  const long long minutes = std::llround(seconds / 60);
  return fmt::format("{} h {:02} min", minutes / 60, minutes % 60);
}

std::string counted(long long n, const std::string& one, const std::string& many) {
  return grouped(n) + " " + (n == 1 ? one : many);
}

size_t characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return !continues(c); }));
}

std::string cut_end(const std::string& text, size_t limit) {
  if (characters(text) <= limit) return text;
  return text.substr(0, place_of(text, limit - 1)) + "…";
}

std::string cut_middle(const std::string& text, size_t limit) {
  const size_t all = characters(text);
  if (all <= limit) return text;
  const size_t front = (limit - 1) / 2, back = limit - 1 - front;
  return text.substr(0, place_of(text, front)) + "…" + text.substr(place_of(text, all - back));
}

std::string grouped(long long value) {
  const std::string digits = std::to_string(value < 0 ? -value : value);
  std::string out = value < 0 ? "-" : "";
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string csv_line(const std::vector<std::string>& fields) {
  std::string out;
  for (const std::string& field : fields) {
    if (&field != &fields.front()) out += ',';
    char* end = nullptr;
    std::strtod(field.c_str(), &end);
    const bool numeric = !field.empty() && end == field.c_str() + field.size();
    const bool formula = !numeric && !field.empty() &&
                         std::string_view("=+-@\t\r").find(field.front()) != std::string_view::npos;
    const std::string text = formula ? "'" + field : field;
    if (text.find_first_of(",\"\n\r") == std::string::npos) {
      out += text;
      continue;
    }
    out += '"';
    for (char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
    out += '"';
  }
  return out + "\r\n";
}

}  // namespace foci::report
