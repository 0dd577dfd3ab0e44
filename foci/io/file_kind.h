// What bytes look like, for messages: people hand over files of other kinds.
#pragma once

#include <string_view>

#include "foci/core/api.h"

namespace foci {

// "a PNG picture", "a zip archive, as PyTorch's .pt files are" …, by the first bytes of a file
// (some hundred are enough); empty where they tell nothing.
FOCI_API std::string_view kind_of_bytes(std::string_view bytes);

}  // namespace foci
