// Pixels resized and made grey; formats told apart by their first bytes.
#include "foci/io/image.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "foci/io/file.h"
#include "foci/io/file_kind.h"
#include "foci/io/image_codecs.h"

namespace foci {
namespace {

void check_pixels(const Tensor& pixels, const char* what) {
  require(pixels.defined() && pixels.dtype() == DType::u8 && pixels.rank() == 3,
          "{}: pixels must be [height, width, channels] uint8", what);
}

[[noreturn]] void refuse_unknown(std::string_view bytes, const std::string& name) {
  require<FormatError>(!bytes.empty(), "{}: the file is empty", name);
  const std::string_view kind = kind_of_bytes(bytes);
  throw FormatError(kind.empty()
                        ? fmt::format("{}: neither PNG nor JPEG", name)
                        : fmt::format("{}: neither PNG nor JPEG, it looks like {}", name, kind));
}

// Which source pixels make one pixel of the result, and how much each counts (they add up to 1).
struct Taps {
  int64_t first = 0;
  std::vector<float> weights;
};

std::vector<Taps> taps_of(int64_t from, int64_t to) {
  std::vector<Taps> all(static_cast<size_t>(to));
  const double step = static_cast<double>(from) / static_cast<double>(to);
  for (int64_t i = 0; i < to; ++i) {
    Taps& taps = all[static_cast<size_t>(i)];
    if (to < from) {  // the part of each source pixel that lies under the new one
      const double begin = static_cast<double>(i) * step;
      const double end = std::min(begin + step, static_cast<double>(from));
      taps.first = static_cast<int64_t>(begin);
      for (int64_t s = taps.first; s < from && static_cast<double>(s) < end; ++s) {
        const double low = std::max(begin, static_cast<double>(s));
        const double high = std::min(end, static_cast<double>(s + 1));
        taps.weights.push_back(static_cast<float>((high - low) / step));
      }
    } else {  // between the centres of two neighbours
      const double centre = (static_cast<double>(i) + 0.5) * step - 0.5;
      const double at = std::clamp(centre, 0.0, static_cast<double>(from - 1));
      taps.first = std::min(static_cast<int64_t>(at), std::max<int64_t>(from - 2, 0));
      const auto part = static_cast<float>(at - static_cast<double>(taps.first));
      taps.weights = {1 - part};
      if (from > 1) taps.weights.push_back(part);
    }
  }
  return all;
}

}  // namespace

namespace codec {

void check_size(uint64_t height, uint64_t width, const std::string& name,
                const ImageLimits& limits) {
  require<FormatError>(height > 0 && width > 0, "{}: a picture of {}×{} pixels", name, width,
                       height);
  // Neither format stores a side of 2^32 or more, so the product cannot overflow.
  require<FormatError>(height * width <= static_cast<uint64_t>(limits.max_pixels),
                       "{}: {}×{} pixels, at most {} million are allowed", name, width, height,
                       limits.max_pixels >> 20);
}

}  // namespace codec

Image read_image(const std::filesystem::path& path, const ImageLimits& limits) {
  return decode_image(read_file(path, limits.max_bytes), shown(path), limits);
}

Image decode_image(std::string_view bytes, const std::string& name, const ImageLimits& limits) {
  if (codec::is_png(bytes)) return codec::decode_png(bytes, name, limits);
  if (codec::is_jpeg(bytes)) return codec::decode_jpeg(bytes, name, limits);
  refuse_unknown(bytes, name);
}

ImageHead decode_image_head(std::string_view bytes, const std::string& name,
                            const ImageLimits& limits) {
  if (codec::is_png(bytes)) return codec::png_head(bytes, name, limits);
  if (codec::is_jpeg(bytes)) return codec::jpeg_head(bytes, name, limits);
  refuse_unknown(bytes, name);
}

Tensor resize(const Tensor& pixels, int64_t height, int64_t width) {
  check_pixels(pixels, "resize");
  require(height >= 1 && width >= 1, "resize: to {}×{} pixels", width, height);
  const int64_t old_height = pixels.dim(0), old_width = pixels.dim(1), c = pixels.dim(2);
  require(old_height >= 1 && old_width >= 1, "resize: the picture has no pixels");
  const Tensor source = pixels.contiguous();
  Tensor result = Tensor::empty({height, width, c}, DType::u8);
  const std::vector<Taps> down = taps_of(old_height, height);
  const std::vector<Taps> across = taps_of(old_width, width);
  const int64_t old_row = old_width * c;
  std::vector<float> row(static_cast<size_t>(old_row));  // one new row, still of the old width
  for (int64_t y = 0; y < height; ++y) {
    const Taps& v = down[static_cast<size_t>(y)];
    std::fill(row.begin(), row.end(), 0.0f);
    for (size_t t = 0; t < v.weights.size(); ++t) {
      const uint8_t* from = source.data<uint8_t>() + (v.first + static_cast<int64_t>(t)) * old_row;
      for (int64_t i = 0; i < old_row; ++i) row[static_cast<size_t>(i)] += v.weights[t] * from[i];
    }
    uint8_t* to = result.data<uint8_t>() + y * width * c;
    for (int64_t x = 0; x < width; ++x) {
      const Taps& h = across[static_cast<size_t>(x)];
      for (int64_t k = 0; k < c; ++k) {
        float sum = 0;
        for (size_t t = 0; t < h.weights.size(); ++t) {
          sum +=
              h.weights[t] * row[static_cast<size_t>((h.first + static_cast<int64_t>(t)) * c + k)];
        }
        to[x * c + k] = static_cast<uint8_t>(std::clamp(sum + 0.5f, 0.0f, 255.0f));
      }
    }
  }
  return result;
}

Tensor to_grey(const Tensor& pixels) {
  check_pixels(pixels, "to_grey");
  require(pixels.dim(2) == 1 || pixels.dim(2) == 3, "to_grey: {} channels, 1 or 3 are right",
          pixels.dim(2));
  if (pixels.dim(2) == 1) return pixels;
  const Tensor source = pixels.contiguous();
  Tensor grey = Tensor::empty({pixels.dim(0), pixels.dim(1), 1}, DType::u8);
  const uint8_t* rgb = source.data<uint8_t>();
  uint8_t* to = grey.data<uint8_t>();
  for (int64_t i = 0; i < grey.numel(); ++i) {
    to[i] = static_cast<uint8_t>(
        (299 * rgb[3 * i] + 587 * rgb[3 * i + 1] + 114 * rgb[3 * i + 2] + 500) / 1000);
  }
  return grey;
}

}  // namespace foci
