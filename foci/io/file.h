// Whole files: read with a size limit, written to a temporary name and renamed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace foci {

// Throws IoError if it cannot be opened or read, FormatError where it is longer than `limit` bytes.
std::string read_file(const std::filesystem::path& path, uint64_t limit = uint64_t{1} << 30);

// All or nothing: write to PATH.tmp-PID, fsync, rename. On any failure (a full disk) the temporary
// file is removed, the old file stays, and IoError says what happened.
void write_file(const std::filesystem::path& path, std::string_view bytes);

}  // namespace foci
