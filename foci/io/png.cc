// PNG through libpng's simplified interface, which keeps its longjmp to itself.
#include <png.h>
#include <zlib.h>

#include <cstring>
#include <utility>

#include "foci/io/file.h"
#include "foci/io/image_codecs.h"

namespace foci {
namespace codec {
namespace {

constexpr std::string_view kSignature("\x89PNG\r\n\x1a\n", 8);

uint32_t big_endian(std::string_view bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
  return value;
}

// Walks the chunks: libpng stops at the last row of pixels, and would not miss what was cut off
// behind it.
void check_chunks(std::string_view bytes, const std::string& name) {
  size_t at = kSignature.size();
  while (true) {
    require<FormatError>(bytes.size() - at >= 12, "{}: truncated PNG, {} bytes", name,
                         bytes.size());
    const uint64_t length = big_endian(bytes, at);
    const std::string_view type = bytes.substr(at + 4, 4);
    require<FormatError>(length <= bytes.size() - at - 12,
                         "{}: truncated PNG, chunk {} of {} bytes at byte {} of {}", name,
                         in_quotes(type), length, at, bytes.size());
    at += 12 + length;
    if (type == "IEND") return;
  }
}

// The orientation of the first eXIf chunk, which may stand before or behind the pixels; 1 where
// none does or it is broken (its checksum, as libpng would skip it then). PNG 3, section 11.3.4.
int orientation_of(std::string_view bytes) {
  size_t at = kSignature.size();
  while (bytes.size() - at >= 12) {
    const uint64_t length = big_endian(bytes, at);
    if (length > bytes.size() - at - 12) return 1;
    if (bytes.substr(at + 4, 4) == "eXIf") {
      const std::string_view checked = bytes.substr(at + 4, 4 + length);
      const auto sum = static_cast<uint32_t>(
          crc32(0, reinterpret_cast<const Bytef*>(checked.data()), static_cast<uInt>(length + 4)));
      if (sum != big_endian(bytes, at + 8 + length)) return 1;
      std::string_view tiff = checked.substr(4);
      constexpr std::string_view kOfJpeg("Exif\0\0", 6);  // some writers copy it from there
      if (tiff.starts_with(kOfJpeg)) tiff.remove_prefix(kOfJpeg.size());
      return exif_orientation(tiff);
    }
    at += 12 + length;
  }
  return 1;
}

struct Reading {
  png_image image{};
  ~Reading() { png_image_free(&image); }
};

[[noreturn]] void fail(const png_image& image, const std::string& name) {
  throw FormatError(fmt::format("{}: broken PNG: {}", name, image.message));
}

}  // namespace

bool is_png(std::string_view bytes) {
  return bytes.substr(0, 8) == kSignature;
}

ImageHead png_head(std::string_view bytes, const std::string& name, const ImageLimits& limits) {
  require<FormatError>(bytes.size() >= 33, "{}: truncated PNG, {} bytes", name, bytes.size());
  require<FormatError>(big_endian(bytes, 8) == 13 && bytes.substr(12, 4) == "IHDR",
                       "{}: broken PNG: it does not begin with a header", name);
  const uint32_t width = big_endian(bytes, 16);
  const uint32_t height = big_endian(bytes, 20);
  check_size(height, width, name, limits);
  const auto colour_type = static_cast<unsigned char>(bytes[25]);
  ImageHead head{height, width, (colour_type & PNG_COLOR_MASK_COLOR) != 0 ? 3 : 1};
  if (is_turned(orientation_of(bytes))) std::swap(head.height, head.width);
  return head;
}

Image decode_png(std::string_view bytes, const std::string& name, const ImageLimits& limits) {
  png_head(bytes, name, limits);
  check_chunks(bytes, name);
  Reading reading;
  png_image& image = reading.image;
  image.version = PNG_IMAGE_VERSION;
  if (png_image_begin_read_from_memory(&image, bytes.data(), bytes.size()) == 0) fail(image, name);
  check_size(image.height, image.width, name, limits);
  // 16-bit files that name no colour space would be taken for linear light, 8-bit ones are not.
  image.flags |= PNG_IMAGE_FLAG_16BIT_sRGB;
  const bool colour = (image.format & PNG_FORMAT_FLAG_COLOR) != 0;
  const bool alpha = (image.format & PNG_FORMAT_FLAG_ALPHA) != 0;
  image.format = (colour ? PNG_FORMAT_FLAG_COLOR : 0) | (alpha ? PNG_FORMAT_FLAG_ALPHA : 0);
  const int64_t c = colour ? 3 : 1;
  const int64_t stored = c + (alpha ? 1 : 0);
  const Tensor pixels = Tensor::empty({image.height, image.width, stored}, DType::u8);
  if (png_image_finish_read(&image, nullptr, pixels.raw(), 0, nullptr) == 0) fail(image, name);
  const int orientation = orientation_of(bytes);
  if (!alpha) return {upright(pixels, orientation)};
  const Tensor opaque = Tensor::empty({pixels.dim(0), pixels.dim(1), c}, DType::u8);
  const uint8_t* from = pixels.data<uint8_t>();
  uint8_t* to = opaque.data<uint8_t>();
  for (int64_t i = 0; i < pixels.dim(0) * pixels.dim(1); ++i) {
    const int a = from[i * stored + c];
    for (int64_t k = 0; k < c; ++k) {
      to[i * c + k] =
          static_cast<uint8_t>((from[i * stored + k] * a + 255 * (255 - a) + 127) / 255);
    }
  }
  return {upright(opaque, orientation)};
}

}  // namespace codec

std::string encode_png(const Tensor& pixels) {
  require(pixels.defined() && pixels.dtype() == DType::u8 && pixels.rank() == 3,
          "encode_png: pixels must be [height, width, channels] uint8");
  const int64_t h = pixels.dim(0), w = pixels.dim(1), c = pixels.dim(2);
  require(c == 1 || c == 3 || c == 4, "encode_png: {} channels, 1, 3 or 4 are right", c);
  constexpr int64_t kMaxSide = 1'000'000;  // libpng's own
  require(h >= 1 && w >= 1 && h <= kMaxSide && w <= kMaxSide, "encode_png: a picture of {}×{}", w,
          h);
  const Tensor source = pixels.contiguous();
  codec::Reading writing;
  png_image& image = writing.image;
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(w);
  image.height = static_cast<png_uint_32>(h);
  image.format = c == 1 ? PNG_FORMAT_GRAY : c == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_RGBA;
  require(static_cast<uint64_t>(h) * static_cast<uint64_t>(w * c) < 0x7fff'0000,
          "encode_png: a picture of {}×{} is too large", w, h);
  std::string bytes(PNG_IMAGE_PNG_SIZE_MAX(image), '\0');
  png_alloc_size_t size = bytes.size();
  require(png_image_write_to_memory(&image, bytes.data(), &size, 0, source.raw(), 0, nullptr) != 0,
          "encode_png: {}", std::string(image.message));
  bytes.resize(size);
  return bytes;
}

}  // namespace foci
