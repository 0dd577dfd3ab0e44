// safetensors files, read as untrusted bytes and written atomically.
// Format: 8 bytes little-endian header length, JSON header, then the tensors' bytes, little-endian
// (as is every machine that foci runs on).
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "foci/core/api.h"
#include "foci/core/tensor.h"

namespace foci {

struct FOCI_API Safetensors {
  std::map<std::string, Tensor> tensors;  // views of the mapped file, where aligned
  // What a Tensor cannot hold, as 8-bit floats: name → why, as "dtype \"F8_E4M3\" is not one of …".
  // Only who needs one of these is stopped by it.
  std::map<std::string, std::string> unreadable;
  std::map<std::string, std::string> metadata;  // "__metadata__"
  std::string file;                             // for messages

  // One of `tensors`. Throws FormatError where it is among the unreadable, or not in the file.
  const Tensor& at(const std::string& name) const;
};

// Maps the file and checks every name, dtype, shape, offset and length before any tensor is made.
// Throws IoError if it cannot be read, FormatError (naming file and tensor) if it lies: header
// longer than the file or 100 MB, offsets outside the file, overlapping or with
// gaps, shape × size ≠ length, duplicate names or keys, unknown keys, booleans other than 0 and 1,
// more than 200,000 entries; and for a file of another kind, which it names. A tensor of a dtype
// that foci lacks, or of more than 8 dimensions, is listed as unreadable. Writing into the tensors
// does not change the file; see MappedFile.
FOCI_API Safetensors read_safetensors(const std::filesystem::path& path);
FOCI_API Safetensors parse_safetensors(std::string_view bytes,
                                       const std::string& name);  // copies tensors

// Writes to a temporary name beside `path`, syncs, then renames: a crash or a full disk leaves the
// old file as it was. Throws IoError; ArgumentError for an undefined tensor, a name given twice,
// the name "__metadata__", or one that is not UTF-8.
FOCI_API void write_safetensors(const std::filesystem::path& path,
                                const std::vector<std::pair<std::string, Tensor>>& tensors,
                                const std::map<std::string, std::string>& metadata = {});

}  // namespace foci
