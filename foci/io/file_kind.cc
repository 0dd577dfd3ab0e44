// Kinds of files by the marks at their beginning.
#include "foci/io/file_kind.h"

#include <algorithm>
#include <cctype>
#include <string>

namespace foci {
namespace {

using std::string_view_literals::operator""sv;

struct Mark {
  size_t at;
  std::string_view bytes;
  std::string_view kind;
};

// The first that fits counts, so longer marks stand before shorter ones.
constexpr Mark kMarks[] = {
    {0, "\x89PNG\r\n\x1a\n"sv, "a PNG picture"},
    {0, "\xff\xd8\xff"sv, "a JPEG picture"},
    {0, "GIF8"sv, "a GIF picture"},
    {8, "WEBP"sv, "a WebP picture"},
    {0, "II*\0"sv, "a TIFF picture"},
    {0, "MM\0*"sv, "a TIFF picture"},
    {4, "ftypavif"sv, "an AVIF picture"},
    {4, "ftyphei"sv, "a HEIC picture"},
    {4, "ftypmif1"sv, "a HEIC picture"},
    {4, "ftyp"sv, "an MP4 video"},
    {0, "\x93NUMPY"sv, "a NumPy array (.npy)"},
    {0, "\x89HDF\r\n\x1a\n"sv, "an HDF5 file"},
    {0, "GGUF"sv, "a GGUF model"},
    {0, "%PDF-"sv, "a PDF document"},
    {0, "version https://git-lfs"sv,
     "a pointer of Git LFS, which stands where the file itself was not downloaded"},
    {0, "\x1f\x8b"sv, "a gzip archive"},
    {0,
     "\xfd"
     "7zXZ"sv,
     "an xz archive"},
    {0, "7z\xbc\xaf"sv, "a 7z archive"},
    {0, "BZh"sv, "a bzip2 archive"},
    {0, "\x28\xb5\x2f\xfd"sv, "a zstd archive"},
    {257, "ustar"sv, "a tar archive"},
    {0,
     "\x7f"
     "ELF"sv,
     "a program"},
};

bool begins_with(std::string_view bytes, std::string_view word) {
  return bytes.size() >= word.size() &&
         std::equal(word.begin(), word.end(), bytes.begin(), [](char a, char b) {
           return a == static_cast<char>(std::tolower(static_cast<unsigned char>(b)));
         });
}

// The text kinds are told apart last, since their marks are weak.
std::string_view kind_of_text(std::string_view bytes) {
  const size_t first = bytes.find_first_not_of(" \t\r\n");
  if (first == std::string_view::npos) return bytes.empty() ? ""sv : "blank text"sv;
  const std::string_view rest = bytes.substr(first);
  if (begins_with(rest, "<!doctype html") || begins_with(rest, "<html")) {
    return "an HTML page, as a failed download leaves";
  }
  if (begins_with(rest, "<svg")) return "an SVG picture";
  if (begins_with(rest, "<?xml")) return "XML";
  const bool printable = std::all_of(bytes.begin(), bytes.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte >= 0x20 ? byte != 0x7f : c == '\n' || c == '\r' || c == '\t';
  });
  if (!printable) return {};
  return rest[0] == '{' || rest[0] == '[' ? "JSON"sv : "text"sv;
}

}  // namespace

std::string_view kind_of_bytes(std::string_view bytes) {
  constexpr size_t kLooked = 4096;
  bytes = bytes.substr(0, kLooked);
  for (const Mark& mark : kMarks) {
    if (bytes.size() > mark.at && bytes.substr(mark.at).starts_with(mark.bytes)) return mark.kind;
  }
  if (bytes.starts_with("BM"sv) && bytes.size() >= 10 && bytes.substr(6, 4) == "\0\0\0\0"sv) {
    return "a BMP picture";
  }
  if (bytes.starts_with("PK\x03\x04"sv)) {
    if (bytes.find("data.pkl"sv) != std::string_view::npos) {
      return "a checkpoint of PyTorch (.pt or .pth)";
    }
    if (bytes.find(".npy"sv) != std::string_view::npos) return "a NumPy archive (.npz)";
    return "a zip archive, as PyTorch's .pt files are";
  }
  // Protocols 2 to 5; older ones have no mark.
  if (bytes.size() >= 2 && bytes[0] == '\x80' && bytes[1] >= 2 && bytes[1] <= 5) {
    return "a pickle, as PyTorch's older .pt files are";
  }
  return kind_of_text(bytes);
}

}  // namespace foci
