// JPEG through libjpeg. Its errors leave by longjmp, which must not skip a destructor: every
// function here that calls setjmp owns nothing, and its callers own everything.
#include <csetjmp>
#include <cstddef>
#include <cstdio>
// libjpeg's headers need <cstdio> first.
#include <jerror.h>
#include <jpeglib.h>

#include <array>
#include <utility>

#include "foci/io/image_codecs.h"

namespace foci::codec {
namespace {

// A progressive file may hold any number of passes over the whole picture, each a few bytes long.
// Real ones have about ten.
constexpr int kMaxPasses = 100;

struct Decoder {
  Decoder() = default;
  ~Decoder() {
    if (created) jpeg_destroy_decompress(&info);
  }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  jpeg_decompress_struct info{};
  jpeg_error_mgr errors{};
  jpeg_progress_mgr progress{};
  std::jmp_buf escape{};
  std::array<char, JMSG_LENGTH_MAX> message{};
  bool created = false;
};

[[noreturn]] void leave(j_common_ptr info) {
  auto* decoder = static_cast<Decoder*>(info->client_data);
  info->err->format_message(info, decoder->message.data());
  std::longjmp(decoder->escape, 1);
}

// libjpeg calls damage a warning and invents the missing pixels; here it is an error. Two things
// that real cameras write are harmless.
void on_message(j_common_ptr info, int level) {
  if (level >= 0) return;
  const int code = info->err->msg_code;
  if (code != JWRN_EXTRANEOUS_DATA && code != JWRN_JFIF_MAJOR) leave(info);
}

void on_progress(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number <= kMaxPasses) return;
  info->err->msg_code = JERR_BAD_PROGRESSION;
  leave(info);
}

bool read_head(Decoder& d, const unsigned char* bytes, size_t size) {
  d.info.err = jpeg_std_error(&d.errors);
  d.errors.error_exit = leave;
  d.errors.emit_message = on_message;
  d.info.client_data = &d;
  if (setjmp(d.escape) != 0) return false;
  jpeg_create_decompress(&d.info);
  d.created = true;
  d.progress.progress_monitor = on_progress;
  d.info.progress = &d.progress;
  jpeg_mem_src(&d.info, bytes, size);
  jpeg_save_markers(&d.info, JPEG_APP0 + 1, 0xffff);
  jpeg_read_header(&d.info, TRUE);
  return true;
}

bool read_pixels(Decoder& d, unsigned char* to, size_t row_bytes) {
  if (setjmp(d.escape) != 0) return false;
  jpeg_start_decompress(&d.info);
  while (d.info.output_scanline < d.info.output_height) {
    JSAMPROW row = to + d.info.output_scanline * row_bytes;
    jpeg_read_scanlines(&d.info, &row, 1);
  }
  jpeg_finish_decompress(&d.info);
  return true;
}

[[noreturn]] void fail(const Decoder& d, const std::string& name) {
  throw FormatError(fmt::format("{}: broken JPEG: {}", name, d.message.data()));
}

ImageHead read_checked_head(Decoder& d, std::string_view bytes, const std::string& name,
                            const ImageLimits& limits) {
  if (!read_head(d, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size())) {
    fail(d, name);
  }
  check_size(d.info.image_height, d.info.image_width, name, limits);
  const J_COLOR_SPACE space = d.info.jpeg_color_space;
  d.info.out_color_space = space == JCS_GRAYSCALE                   ? JCS_GRAYSCALE
                           : space == JCS_CMYK || space == JCS_YCCK ? JCS_CMYK
                                                                    : JCS_RGB;
  return {d.info.image_height, d.info.image_width, space == JCS_GRAYSCALE ? 1 : 3};
}

int orientation_of(const jpeg_decompress_struct& info) {
  for (jpeg_saved_marker_ptr m = info.marker_list; m != nullptr; m = m->next) {
    const std::string_view all(reinterpret_cast<const char*>(m->data), m->data_length);
    if (!all.starts_with(std::string_view("Exif\0\0", 6))) continue;
    const std::string_view tiff = all.substr(6);
    if (tiff.starts_with("II") || tiff.starts_with("MM")) return exif_orientation(tiff);
  }
  return 1;
}

}  // namespace

bool is_jpeg(std::string_view bytes) {
  return bytes.substr(0, 3) == "\xff\xd8\xff";
}

ImageHead jpeg_head(std::string_view bytes, const std::string& name, const ImageLimits& limits) {
  Decoder decoder;
  ImageHead head = read_checked_head(decoder, bytes, name, limits);
  if (is_turned(orientation_of(decoder.info))) std::swap(head.height, head.width);
  return head;
}

Image decode_jpeg(std::string_view bytes, const std::string& name, const ImageLimits& limits) {
  Decoder decoder;
  const ImageHead head = read_checked_head(decoder, bytes, name, limits);
  const int orientation = orientation_of(decoder.info);  // gone once decoding ends
  const bool cmyk = decoder.info.out_color_space == JCS_CMYK;
  const int64_t stored = cmyk ? 4 : head.channels;
  Tensor pixels = Tensor::empty({head.height, head.width, stored}, DType::u8);
  const auto row_bytes = static_cast<size_t>(head.width * stored);
  if (!read_pixels(decoder, pixels.data<uint8_t>(), row_bytes)) fail(decoder, name);
  if (cmyk) {
    // Adobe's files store the inks inverted.
    const bool inverted = decoder.info.saw_Adobe_marker != 0;
    const Tensor rgb = Tensor::empty({head.height, head.width, 3}, DType::u8);
    const uint8_t* from = pixels.data<uint8_t>();
    uint8_t* to = rgb.data<uint8_t>();
    for (int64_t i = 0; i < head.height * head.width; ++i) {
      const auto light = [&](int k) { return inverted ? from[4 * i + k] : 255 - from[4 * i + k]; };
      for (int k = 0; k < 3; ++k) {
        to[3 * i + k] = static_cast<uint8_t>((light(k) * light(3) + 127) / 255);
      }
    }
    pixels = rgb;
  }
  return {upright(pixels, orientation)};
}

}  // namespace foci::codec
