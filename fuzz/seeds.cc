// fuzz_seeds FOLDER: writes FOLDER/READER/* for every reader, small valid files of every form.
#include <cstdio>
#include <filesystem>

#include "foci/core/rng.h"
#include "foci/io/file.h"
#include "foci/io/image.h"
#include "foci/io/safetensors.h"
#include "foci/models/vit/config.h"
#include "io/encode.h"

namespace fs = std::filesystem;
using namespace foci;  // NOLINT: a small program

namespace {

void put(const fs::path& path, const std::string& bytes) {
  fs::create_directories(path.parent_path());
  write_file(path, bytes);
}

Tensor noise(const Dims& shape) {
  Tensor t = Tensor::empty(shape, DType::u8);
  Rng rng(1);
  for (uint8_t& v : t.span<uint8_t>()) v = static_cast<uint8_t>(rng.below(4) * 60);
  return t;
}

void images(const fs::path& folder) {
  for (const int64_t c : {1, 3, 4}) {
    put(folder / ("written" + std::to_string(c) + ".png"), encode_png(noise({6, 5, c})));
  }
  for (const int depth : {1, 2, 4, 8, 16}) {
    for (const bool interlaced : {false, true}) {
      const std::string name = std::to_string(depth) + (interlaced ? "i.png" : ".png");
      const testing::PngForm grey{8, 3, depth, PNG_COLOR_TYPE_GRAY, interlaced};
      put(folder / ("grey" + name), testing::write_png(grey, std::string(3 * depth, '\x1b')));
      if (depth > 8) continue;
      testing::PngForm palette{8, 3, depth, PNG_COLOR_TYPE_PALETTE, interlaced};
      palette.palette.resize(1 << depth);
      palette.palette_alpha = {0, 128};
      put(folder / ("palette" + name), testing::write_png(palette, std::string(3 * depth, '\x1b')));
    }
  }
  const std::vector<uint8_t> samples(4 * 17 * 9, 90);
  for (const bool progressive : {false, true}) {
    const std::string end = progressive ? "p.jpg" : ".jpg";
    put(folder / ("grey" + end),
        testing::write_jpeg({17, 9, JCS_GRAYSCALE, 1, progressive}, samples));
    put(folder / ("inks" + end), testing::write_jpeg({17, 9, JCS_CMYK, 4, progressive}, samples));
    testing::JpegForm colour{17, 9, JCS_RGB, 3, progressive};
    colour.exif = testing::exif_orientation(6, progressive);
    put(folder / ("colour" + end), testing::write_jpeg(colour, samples));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: fuzz_seeds FOLDER\n");
    return 2;
  }
  const fs::path root = argv[1];
  images(root / "image");
  fs::create_directories(root / "safetensors");
  write_safetensors(root / "safetensors/two",
                    {{"a", Tensor::full({2, 3}, 1)},
                     {"b", Tensor::zeros({3}, DType::boolean)},
                     {"c", Tensor::zeros({2}, DType::i16)}},
                    {{"op", "Attention"}});
  write_safetensors(root / "safetensors/none", {});
  write_safetensors(root / "safetensors/empty", {{"x", Tensor::zeros({0, 2}, DType::f64)}});
  // One digit: 64 zeros and the label 3.
  const std::string digit(
      "\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\x33\xd0\x31\x18\x50\x68\xcc\x05\x00\xc8\xd1\x5c\x98"
      "\x82\x00\x00\x00",
      27);
  put(root / "gzip/one", digit);
  put(root / "gzip/two", digit + digit);
  std::string line;
  for (int i = 0; i < 64; ++i) line += std::to_string(i % 17) + ",";
  put(root / "digits/one", line + "3\n");
  put(root / "digits/two", line + "9\n" + line + "0\n");
  put(root / "spec_json/all",
      R"({"score":{"kind":"l2","gamma":0.5},"scale":[1,2],"softcap":20,)"
      R"("normalizer":{"kind":"entmax","alpha":1.5},"masks":[{"kind":"causal","align":"past"},)"
      R"({"kind":"window","left":128,"right":null},{"kind":"segments"}],"biases":[)"
      R"({"kind":"relative2d","grid":[2,3]},{"kind":"relative1d","max_distance":16},)"
      R"({"kind":"alibi"}],"dropout":{"p":0.1,"seed":42,"place":"keys"}})");
  put(root / "spec_json/none", "{}");
  VitConfig config;
  config.classes = {"a", "ü"};
  put(root / "vit_config/small", vit_config_to_json(config));
  config.pooling = Pooling::attention;
  config.attention.normalizer = Entmax{1.5};
  put(root / "vit_config/entmax", vit_config_to_json(config));
}
