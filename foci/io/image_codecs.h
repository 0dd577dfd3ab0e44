// Private to io: the two decoders behind decode_image, and what they share.
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

// The EXIF orientation, 1 to 8, of tag 0x0112 in the first directory of `tiff` ("II" or "MM" and
// what follows); 1 where there is none or it makes no sense. EXIF 2.3, section 4.6.4.
int exif_orientation(std::string_view tiff);
// Whether the upright picture's rows are the stored one's columns.
constexpr bool is_turned(int orientation) {
  return orientation >= 5;
}
// Orientation o: the stored picture is the upright one mirrored or turned; undo it.
Tensor upright(const Tensor& stored, int orientation);

}  // namespace foci::codec
