// SHA-256 (FIPS 180-4), to name a model by its bytes in reports.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace foci::cli {

// 64 hexadecimal digits.
std::string sha256(std::string_view bytes);
// Of a file, read in pieces: what `sha256sum FILE` prints. Throws IoError.
std::string sha256_of_file(const std::filesystem::path& path);

}  // namespace foci::cli
