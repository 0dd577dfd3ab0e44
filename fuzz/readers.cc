// Each reader called, and what it returns read through.
#include "readers.h"

#include <numeric>

#include "foci/io/gzip.h"
#include "foci/io/image.h"
#include "foci/io/safetensors.h"
#include "foci/models/vit/config.h"
#include "foci/spec/json.h"
#include "foci/vision/digits.h"

namespace foci::fuzz {
namespace {

// Breaks the law that readers keep. Not an Error, so nobody takes it for a refusal.
struct Broken {};

void expect(bool ok) {
  if (!ok) throw Broken{};
}

volatile unsigned sink;  // keeps reads alive

void touch(const Tensor& tensor) {
  expect(tensor.defined() && tensor.is_contiguous());
  const auto* bytes = static_cast<const unsigned char*>(tensor.raw());
  sink = std::accumulate(bytes, bytes + tensor.nbytes(), 0u);
}

}  // namespace

void safetensors(std::string_view bytes) {
  const Safetensors file = parse_safetensors(bytes, "f");
  for (const auto& [name, tensor] : file.tensors) {
    touch(tensor);
    expect(tensor.nbytes() <= bytes.size());
    expect(file.unreadable.count(name) == 0);
  }
}

void image(std::string_view bytes) {
  // A megapixel is enough to reach every line, and keeps tries short.
  const ImageLimits limits{.max_pixels = 1 << 20};
  const Image picture = decode_image(bytes, "f", limits);
  touch(picture.pixels);
  expect(picture.pixels.rank() == 3 && (picture.channels() == 1 || picture.channels() == 3));
  expect(picture.height() * picture.width() <= limits.max_pixels);
  const ImageHead head = decode_image_head(bytes, "f", limits);
  expect(head.height == picture.height() && head.width == picture.width());
  expect(head.channels >= 1 && head.channels <= 3);
}

void gzip(std::string_view bytes) {
  expect(gunzip(bytes, "f", 1 << 20).size() <= 1 << 20);
}

void digits(std::string_view bytes) {
  for (const vision::Digit& digit : vision::parse_digit_lines(bytes, "f")) {
    expect(digit.label >= 0 && digit.label <= 9);
    for (const uint8_t ink : digit.ink) expect(ink <= 16);
  }
}

void vit_config(std::string_view bytes) {
  const VitConfig config = vit_config_from_json(bytes, "f");
  expect(vit_config_from_json(vit_config_to_json(config), "f") == config);
}

void spec_json(std::string_view bytes) {
  // What is read can be written, and means the same again.
  const std::string text = spec_to_json_text(spec_from_json_text(bytes));
  expect(spec_to_json_text(spec_from_json_text(text)) == text);
}

}  // namespace foci::fuzz
