// Images: PNG and JPEG in, PNG out. Bytes are untrusted: sizes are checked before memory is taken.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "foci/core/api.h"
#include "foci/core/tensor.h"

namespace foci {

// 8-bit pixels, interleaved. Grey has 1 channel, colour 3: alpha is blended onto white, palettes
// are expanded, 16-bit samples reduced to 8 bits, CMYK turned into RGB, and the orientation that a
// camera noted (EXIF, in JPEG and in PNG's eXIf) is applied. Colour profiles are not.
struct Image {
  Tensor pixels;  // [height, width, channels] uint8
  int64_t height() const { return pixels.dim(0); }
  int64_t width() const { return pixels.dim(1); }
  int64_t channels() const { return pixels.dim(2); }
};

struct ImageLimits {
  int64_t max_pixels = 64 << 20;  // 64 megapixels: far above any input here, far below memory
  uint64_t max_bytes = uint64_t{256} << 20;  // of a file
};

// Throws IoError, or FormatError naming the file: not an image, truncated, lying, too large.
FOCI_API Image read_image(const std::filesystem::path& path, const ImageLimits& limits = {});
FOCI_API Image decode_image(std::string_view bytes, const std::string& name,
                            const ImageLimits& limits = {});

// What the head of an image says, before any pixel is decoded; `bytes` may end after the head.
struct ImageHead {
  int64_t height = 0;
  int64_t width = 0;
  int64_t channels = 0;  // that decoding would give: 1 or 3
};
FOCI_API ImageHead decode_image_head(std::string_view bytes, const std::string& name,
                                     const ImageLimits& limits = {});

// PNG bytes of [h, w, 1] or [h, w, 3] or [h, w, 4] (RGBA) uint8. Throws ArgumentError for others.
FOCI_API std::string encode_png(const Tensor& pixels);

// Area-averaged when shrinking, bilinear when growing (each side by itself); [h, w, c] uint8 →
// [height, width, c] uint8. Throws ArgumentError for a side below 1.
FOCI_API Tensor resize(const Tensor& pixels, int64_t height, int64_t width);
FOCI_API Tensor to_grey(const Tensor& pixels);  // Rec. 601 luma of [h, w, 1 or 3], [h, w, 1]

}  // namespace foci
