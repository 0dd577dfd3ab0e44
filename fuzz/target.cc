// One libFuzzer target; FOCI_READER names its reader in readers.h.
#include <cstddef>
#include <cstdint>

#include "foci/core/error.h"
#include "readers.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    foci::fuzz::FOCI_READER({reinterpret_cast<const char*>(data), size});
  } catch (const foci::Error& e) {
    for (const char* c = e.what(); *c != '\0'; ++c) {  // a message is one clean line
      if (static_cast<unsigned char>(*c) < 0x20) __builtin_trap();
    }
  }
  return 0;
}
