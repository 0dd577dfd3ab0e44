// Writers of PNG and JPEG in the forms that foci reads but never writes: for tests of the readers.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdio>
// libjpeg's headers need <cstdio> first.
#include <jpeglib.h>
#include <png.h>

#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace foci::testing {

struct PngForm {
  uint32_t width = 0;
  uint32_t height = 0;
  int depth = 8;
  int colour_type = PNG_COLOR_TYPE_GRAY;
  bool interlaced = false;
  std::vector<png_color> palette = {};
  std::vector<png_byte> palette_alpha = {};
  bool transparent_grey = false;  // a tRNS chunk for the grey `transparent`
  uint16_t transparent = 0;
};

// `rows` holds the raw samples, packed and big-endian as PNG stores them, row after row.
inline std::string write_png(const PngForm& form, const std::string& rows) {
  std::string out;
  png_structp png = png_create_write_struct(
      PNG_LIBPNG_VER_STRING, nullptr,
      [](png_structp, png_const_charp text) { throw std::runtime_error(text); }, nullptr);
  png_infop info = png_create_info_struct(png);
  png_set_check_for_invalid_index(png, 0);  // tests write indices beyond the palette on purpose
  png_set_write_fn(
      png, &out,
      [](png_structp p, png_bytep data, size_t n) {
        static_cast<std::string*>(png_get_io_ptr(p))->append(reinterpret_cast<char*>(data), n);
      },
      nullptr);
  png_set_IHDR(png, info, form.width, form.height, form.depth, form.colour_type,
               form.interlaced ? PNG_INTERLACE_ADAM7 : PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_BASE, PNG_FILTER_TYPE_BASE);
  if (!form.palette.empty()) {
    png_set_PLTE(png, info, form.palette.data(), static_cast<int>(form.palette.size()));
  }
  if (!form.palette_alpha.empty()) {
    png_set_tRNS(png, info, form.palette_alpha.data(), static_cast<int>(form.palette_alpha.size()),
                 nullptr);
  }
  if (form.transparent_grey) {
    png_color_16 value{};
    value.gray = form.transparent;
    png_set_tRNS(png, info, nullptr, 0, &value);
  }
  png_write_info(png, info);
  const size_t row_bytes = png_get_rowbytes(png, info);
  if (rows.size() != row_bytes * form.height) throw std::runtime_error("write_png: wrong size");
  std::vector<png_bytep> pointers;
  for (uint32_t y = 0; y < form.height; ++y) {
    pointers.push_back(reinterpret_cast<png_bytep>(const_cast<char*>(rows.data())) + y * row_bytes);
  }
  png_write_image(png, pointers.data());
  png_write_end(png, nullptr);
  png_destroy_write_struct(&png, &info);
  return out;
}

struct JpegForm {
  uint32_t width = 0;
  uint32_t height = 0;
  J_COLOR_SPACE space = JCS_RGB;  // of `samples`
  int channels = 3;
  bool progressive = false;
  int quality = 95;
  std::string exif = {};  // payload of an APP1 marker
};

inline std::string write_jpeg(const JpegForm& form, const std::vector<uint8_t>& samples) {
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);  // a mistake here ends the test program, as it should
  jpeg_create_compress(&info);
  unsigned char* buffer = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &buffer, &size);
  info.image_width = form.width;
  info.image_height = form.height;
  info.input_components = form.channels;
  info.in_color_space = form.space;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, form.quality, TRUE);
  for (int c = 0; c < info.num_components; ++c) {  // full resolution in every channel
    info.comp_info[c].h_samp_factor = 1;
    info.comp_info[c].v_samp_factor = 1;
  }
  if (form.progressive) jpeg_simple_progression(&info);
  jpeg_start_compress(&info, TRUE);
  if (!form.exif.empty()) {
    jpeg_write_marker(&info, JPEG_APP0 + 1, reinterpret_cast<const JOCTET*>(form.exif.data()),
                      static_cast<unsigned int>(form.exif.size()));
  }
  while (info.next_scanline < info.image_height) {
    JSAMPROW row = const_cast<uint8_t*>(samples.data()) +
                   size_t{info.next_scanline} * form.width * static_cast<size_t>(form.channels);
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  std::string out(reinterpret_cast<char*>(buffer), size);
  jpeg_destroy_compress(&info);
  std::free(buffer);
  return out;
}

// A PNG with one more chunk: before the pixels, or behind them. zlib's crc32 is passed in, so that
// not every user of this header needs zlib.
inline std::string with_chunk(const std::string& png, const std::string& type,
                              const std::string& payload, bool behind,
                              const std::function<uint32_t(const std::string&)>& crc) {
  const auto number = [](uint32_t v) {
    return std::string{static_cast<char>(v >> 24), static_cast<char>(v >> 16),
                       static_cast<char>(v >> 8), static_cast<char>(v)};
  };
  const std::string chunk =
      number(static_cast<uint32_t>(payload.size())) + type + payload + number(crc(type + payload));
  std::string out = png;
  return out.insert(behind ? out.size() - 12 : 33, chunk);
}

// An EXIF block that says nothing but the orientation.
inline std::string exif_orientation(int orientation, bool little) {
  std::string out("Exif\0\0", 6);
  const auto number = [&](uint32_t value, int count) {
    for (int i = 0; i < count; ++i) {
      const int shift = 8 * (little ? i : count - 1 - i);
      out += static_cast<char>(value >> shift);
    }
  };
  out += little ? "II" : "MM";
  number(42, 2);
  number(8, 4);       // where the directory begins
  number(1, 2);       // its entries
  number(0x0112, 2);  // orientation
  number(3, 2);       // a 16-bit number
  number(1, 4);
  number(static_cast<uint32_t>(orientation), 2);
  number(0, 2);
  number(0, 4);
  return out;
}

}  // namespace foci::testing
