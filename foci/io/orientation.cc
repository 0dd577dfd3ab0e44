// The orientation that cameras note in EXIF blocks, whichever file they stand in.
#include <algorithm>

#include "foci/io/image_codecs.h"

namespace foci::codec {

int exif_orientation(std::string_view tiff) {
  const bool little = tiff.substr(0, 2) == "II";
  if (!little && tiff.substr(0, 2) != "MM") return 1;
  const auto number = [&](size_t at, size_t count) -> uint32_t {  // 0 beyond the end
    uint32_t value = 0;
    if (at > tiff.size() || tiff.size() - at < count) return 0;
    for (size_t i = 0; i < count; ++i) {
      const size_t from = little ? at + count - 1 - i : at + i;
      value = value << 8 | static_cast<unsigned char>(tiff[from]);
    }
    return value;
  };
  const size_t directory = number(4, 4);
  const uint32_t entries = number(directory, 2);
  for (uint32_t e = 0; e < entries; ++e) {
    const size_t at = directory + 2 + 12 * size_t{e};
    if (number(at, 2) != 0x0112) continue;
    const uint32_t value = number(at + 8, 2);
    return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

Tensor upright(const Tensor& stored, int orientation) {
  if (orientation == 1) return stored;
  const int64_t h = stored.dim(0), w = stored.dim(1), c = stored.dim(2);
  const bool swap = is_turned(orientation);
  const bool from_right =
      orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const bool from_bottom =
      orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  const Tensor result = Tensor::empty({swap ? w : h, swap ? h : w, c}, DType::u8);
  const uint8_t* from = stored.data<uint8_t>();
  uint8_t* to = result.data<uint8_t>();
  for (int64_t y = 0; y < result.dim(0); ++y) {
    for (int64_t x = 0; x < result.dim(1); ++x) {
      const int64_t a = swap ? x : y;  // row and column in the stored picture
      const int64_t b = swap ? y : x;
      const int64_t row = from_bottom ? h - 1 - a : a;
      const int64_t col = from_right ? w - 1 - b : b;
      std::copy_n(from + (row * w + col) * c, c, to);
      to += c;
    }
  }
  return result;
}

}  // namespace foci::codec
