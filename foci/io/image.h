// Images: PNG and JPEG in, PNG out. Bytes are untrusted: sizes are checked before memory is taken.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "foci/core/tensor.h"

namespace foci {

// 8-bit pixels, interleaved. Grey has 1 channel, colour 3 (alpha is blended onto white, palettes
// and 16-bit samples are expanded or reduced to 8 bits).
struct Image {
  Tensor pixels;  // [height, width, channels] uint8
  int64_t height() const { return pixels.dim(0); }
  int64_t width() const { return pixels.dim(1); }
  int64_t channels() const { return pixels.dim(2); }
};

struct ImageLimits {
  int64_t max_pixels = 64 << 20;  // 64 megapixels: far above any input here, far below memory
};

// Throws IoError, or FormatError naming the file: not an image, truncated, lying, too large.
Image read_image(const std::filesystem::path& path, const ImageLimits& limits = {});
Image decode_image(std::string_view bytes, const std::string& name, const ImageLimits& limits = {});

// PNG bytes of [h, w, 1] or [h, w, 3] or [h, w, 4] (RGBA) uint8.
std::string encode_png(const Tensor& pixels);

// Area-averaged when shrinking, bilinear when growing; [h, w, c] uint8 → [height, width, c] uint8.
Tensor resize(const Tensor& pixels, int64_t height, int64_t width);
Tensor to_grey(const Tensor& pixels);  // Rec. 601 luma, [h, w, 1]

}  // namespace foci
