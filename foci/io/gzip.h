// gzip, unpacked with a limit.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "foci/core/api.h"

namespace foci {

// All members of a gzip file, one after the other. Throws FormatError naming `name`: not gzip,
// truncated, checksum wrong, bytes behind the end, or more than `limit` bytes unpacked.
FOCI_API std::string gunzip(std::string_view bytes, const std::string& name,
                            uint64_t limit = uint64_t{64} << 20);

}  // namespace foci
