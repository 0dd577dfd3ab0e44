// Private to io: the two decoders behind decode_image.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "foci/io/image.h"

namespace foci::codec {

bool is_png(std::string_view bytes);
bool is_jpeg(std::string_view bytes);

ImageHead png_head(std::string_view bytes, const std::string& name, const ImageLimits& limits);
ImageHead jpeg_head(std::string_view bytes, const std::string& name, const ImageLimits& limits);
Image decode_png(std::string_view bytes, const std::string& name, const ImageLimits& limits);
Image decode_jpeg(std::string_view bytes, const std::string& name, const ImageLimits& limits);

// Throws FormatError for an empty picture and for one of more than limits.max_pixels.
void check_size(uint64_t height, uint64_t width, const std::string& name,
                const ImageLimits& limits);

}  // namespace foci::codec
