// Images: every form of PNG and JPEG comes out as the same 8-bit pixels, and damaged or lying
// files are refused without harm.
#include "foci/io/image.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <array>
#include <cmath>
#include <cstring>

#include "foci/io/file.h"
#include "io/damage.h"
#include "io/encode.h"

namespace foci {
namespace {

using testing::exif_orientation;
using testing::JpegForm;
using testing::message_of;
using testing::PngForm;
using testing::TemporaryFolder;
using testing::write_jpeg;
using testing::write_png;

std::string refusal(std::string_view bytes, const ImageLimits& limits = {}) {
  const std::string message = message_of([&] { decode_image(bytes, "f", limits); });
  testing::expect_one_line(message);
  return message;
}
void expect_refused(std::string_view bytes, const std::string& text) {
  const std::string message = refusal(bytes);
  EXPECT_NE(message.find(text), std::string::npos) << message << "\nwanted: " << text;
}

Tensor noise(const Dims& shape) {
  Tensor t = Tensor::empty(shape, DType::u8);
  Rng rng(3);
  for (uint8_t& v : t.span<uint8_t>()) v = static_cast<uint8_t>(rng.next_u32());
  return t;
}

bool equal(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.raw(), b.raw(), a.nbytes()) == 0;
}

// A picture that JPEG keeps well: smooth, and different in every direction.
std::vector<uint8_t> smooth(int64_t h, int64_t w, int channels) {
  std::vector<uint8_t> samples;
  for (int64_t y = 0; y < h; ++y) {
    for (int64_t x = 0; x < w; ++x) {
      for (int c = 0; c < channels; ++c) {
        samples.push_back(static_cast<uint8_t>(c == 0   ? 20 + 200 * y / h
                                               : c == 1 ? 230 - 200 * x / w
                                                        : 60 + 100 * (x + y) / (h + w)));
      }
    }
  }
  return samples;
}

TEST(Png, WrittenPicturesComeBack) {
  for (const int64_t channels : {1, 3}) {
    for (const auto& [h, w] : {std::pair{1, 1}, {7, 5}, {1, 300}, {64, 33}}) {
      const Tensor pixels = noise({h, w, channels});
      EXPECT_TRUE(equal(decode_image(encode_png(pixels), "f").pixels, pixels));
      const ImageHead head = decode_image_head(encode_png(pixels), "f");
      EXPECT_EQ(head.height, h);
      EXPECT_EQ(head.width, w);
      EXPECT_EQ(head.channels, channels);
    }
  }
  const Tensor turned = noise({6, 9, 3}).transpose(0, 1);
  EXPECT_TRUE(equal(decode_image(encode_png(turned), "f").pixels, turned.contiguous()));
}

TEST(Png, AlphaIsBlendedOntoWhite) {
  const Tensor pixels =
      Tensor::from<uint8_t>({200, 100, 0, 255, 200, 100, 0, 0, 0, 0, 0, 128}, {1, 3, 4});
  const Tensor want = Tensor::from<uint8_t>({200, 100, 0, 255, 255, 255, 127, 127, 127}, {1, 3, 3});
  EXPECT_TRUE(equal(decode_image(encode_png(pixels), "f").pixels, want));
  const std::string grey_alpha =
      write_png({3, 1, 8, PNG_COLOR_TYPE_GRAY_ALPHA}, std::string("\x40\xff\x40\x00\x00\x80", 6));
  EXPECT_TRUE(equal(decode_image(grey_alpha, "f").pixels,
                    Tensor::from<uint8_t>({0x40, 255, 127}, {1, 3, 1})));
}

TEST(Png, EveryDepthIsExpanded) {
  // One row of increasing grey in each depth.
  const auto row = [](int depth, const std::string& samples, uint32_t width) {
    return decode_image(write_png({width, 1, depth, PNG_COLOR_TYPE_GRAY}, samples), "f").pixels;
  };
  EXPECT_TRUE(equal(row(1, "\x60", 4), Tensor::from<uint8_t>({0, 255, 255, 0}, {1, 4, 1})));
  EXPECT_TRUE(equal(row(2, "\x1b", 4), Tensor::from<uint8_t>({0, 85, 170, 255}, {1, 4, 1})));
  EXPECT_TRUE(equal(row(4, "\x0f\x51", 4), Tensor::from<uint8_t>({0, 255, 85, 17}, {1, 4, 1})));
  const std::string deep("\x00\x00\x80\x00\xff\xff\x40\x40", 8);
  EXPECT_TRUE(equal(row(16, deep, 4), Tensor::from<uint8_t>({0, 128, 255, 64}, {1, 4, 1})));
  const std::string colour("\x00\x00\x80\x00\xff\xff", 6);
  EXPECT_TRUE(equal(decode_image(write_png({1, 1, 16, PNG_COLOR_TYPE_RGB}, colour), "f").pixels,
                    Tensor::from<uint8_t>({0, 128, 255}, {1, 1, 3})));
}

TEST(Png, PalettesAreExpanded) {
  PngForm form{4, 1, 2, PNG_COLOR_TYPE_PALETTE};
  form.palette = {{1, 2, 3}, {40, 50, 60}, {255, 0, 7}};
  EXPECT_TRUE(equal(decode_image(write_png(form, "\x18"), "f").pixels,
                    Tensor::from<uint8_t>({1, 2, 3, 40, 50, 60, 255, 0, 7, 1, 2, 3}, {1, 4, 3})));
  form.palette_alpha = {255, 0};
  EXPECT_TRUE(
      equal(decode_image(write_png(form, "\x18"), "f").pixels,
            Tensor::from<uint8_t>({1, 2, 3, 255, 255, 255, 255, 0, 7, 1, 2, 3}, {1, 4, 3})));
  // An index beyond the palette is damage that libpng makes black or refuses; it must not overrun.
  try {
    decode_image(write_png(form, "\xff"), "f");
  } catch (const FormatError& e) {
    testing::expect_one_line(e.what());
  }
}

TEST(Png, OneTransparentGreyBecomesWhite) {
  PngForm form{3, 1, 8, PNG_COLOR_TYPE_GRAY};
  form.transparent_grey = true;
  form.transparent = 9;
  EXPECT_TRUE(equal(decode_image(write_png(form, "\x08\x09\x0a"), "f").pixels,
                    Tensor::from<uint8_t>({8, 255, 10}, {1, 3, 1})));
}

TEST(Png, InterlacedPicturesComeBack) {
  for (const auto& [h, w] : {std::pair{1u, 1u}, {3u, 2u}, {19u, 13u}}) {
    const Tensor pixels = noise({h, w, 3});
    PngForm form{w, h, 8, PNG_COLOR_TYPE_RGB};
    form.interlaced = true;
    const std::string rows(static_cast<const char*>(pixels.raw()), pixels.nbytes());
    EXPECT_TRUE(equal(decode_image(write_png(form, rows), "f").pixels, pixels));
  }
}

void expect_near(const Tensor& got, const std::vector<uint8_t>& want, int tolerance) {
  ASSERT_EQ(got.numel(), std::ssize(want));
  for (int64_t i = 0; i < got.numel(); ++i) {
    ASSERT_NEAR(got.data<uint8_t>()[i], want[i], tolerance) << "sample " << i;
  }
}

TEST(Jpeg, GreyColourAndProgressiveComeBack) {
  for (const int channels : {1, 3}) {
    for (const bool progressive : {false, true}) {
      for (const auto& [h, w] : {std::pair{1u, 1u}, {17u, 40u}, {64u, 9u}}) {
        JpegForm form{w, h, channels == 1 ? JCS_GRAYSCALE : JCS_RGB, channels, progressive};
        const std::vector<uint8_t> samples = smooth(h, w, channels);
        const std::string bytes = write_jpeg(form, samples);
        const Image image = decode_image(bytes, "f");
        EXPECT_EQ(image.pixels.shape(), (Dims{h, w, channels}));
        expect_near(image.pixels, samples, 8);
        const ImageHead head = decode_image_head(bytes, "f");
        EXPECT_EQ((Dims{head.height, head.width, head.channels}), image.pixels.shape());
      }
    }
  }
}

TEST(Jpeg, InksBecomeColours) {
  // libjpeg marks CMYK files as Adobe does, whose inks are inverted: 255 means none.
  std::vector<uint8_t> inks, want;
  for (int i = 0; i < 16 * 16; ++i) {
    const std::array<uint8_t, 4> ink = {250, static_cast<uint8_t>(8 * (i / 16)), 100, 200};
    inks.insert(inks.end(), ink.begin(), ink.end());
    for (int k = 0; k < 3; ++k) want.push_back(static_cast<uint8_t>(ink[k] * ink[3] / 255));
  }
  for (const J_COLOR_SPACE space : {JCS_CMYK, JCS_YCCK}) {
    const Image image = decode_image(write_jpeg({16, 16, space, 4}, inks), "f");
    EXPECT_EQ(image.channels(), 3);
    if (space == JCS_CMYK) expect_near(image.pixels, want, 8);
  }
}

// EXIF 2.3: where the stored row 0 and column 0 lie in the upright picture, orientations 1 to 8.
std::vector<Tensor> orientations_of(const Tensor& stored) {
  const auto flip_rows = [](const Tensor& t) {
    const Tensor out = Tensor::empty(t.shape(), DType::u8);
    for (int64_t y = 0; y < t.dim(0); ++y)
      out.select(0, t.dim(0) - 1 - y).copy_from(t.select(0, y));
    return out;
  };
  const auto flip_cols = [&](const Tensor& t) {
    return flip_rows(t.transpose(0, 1).contiguous()).transpose(0, 1).contiguous();
  };
  const auto turn = [](const Tensor& t) { return t.transpose(0, 1).contiguous(); };
  return {stored,
          flip_cols(stored),                   // top, right
          flip_rows(flip_cols(stored)),        // bottom, right
          flip_rows(stored),                   // bottom, left
          turn(stored),                        // left, top
          flip_cols(turn(stored)),             // right, top
          flip_rows(flip_cols(turn(stored))),  // right, bottom
          flip_rows(turn(stored))};            // left, bottom
}

TEST(Jpeg, CamerasOrientationIsApplied) {
  const uint32_t h = 24, w = 40;
  const std::vector<uint8_t> samples = smooth(h, w, 3);
  const Tensor stored = decode_image(write_jpeg({w, h}, samples), "f").pixels;
  const std::vector<Tensor> want = orientations_of(stored);
  for (int o = 1; o <= 8; ++o) {
    for (const bool little : {false, true}) {
      JpegForm form{w, h};
      form.exif = exif_orientation(o, little);
      const std::string bytes = write_jpeg(form, samples);
      EXPECT_TRUE(equal(decode_image(bytes, "f").pixels, want[o - 1])) << o;
      const ImageHead head = decode_image_head(bytes, "f");
      EXPECT_EQ(head.height, want[o - 1].dim(0));
      EXPECT_EQ(head.width, want[o - 1].dim(1));
    }
  }
}

uint32_t crc_of(const std::string& bytes) {
  return static_cast<uint32_t>(
      ::crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), static_cast<uInt>(bytes.size())));
}

TEST(Png, CamerasOrientationIsApplied) {
  for (const int64_t channels : {1, 3, 4}) {
    const std::string plain = encode_png(noise({5, 7, channels}));
    const std::vector<Tensor> want = orientations_of(decode_image(plain, "f").pixels);
    for (int o = 1; o <= 8; ++o) {
      for (const bool little : {false, true}) {
        for (const size_t prefix : {size_t{6}, size_t{0}}) {  // without and with JPEG's "Exif\0\0"
          const std::string bytes = testing::with_chunk(
              plain, "eXIf", exif_orientation(o, little).substr(prefix), little, crc_of);
          EXPECT_TRUE(equal(decode_image(bytes, "f").pixels, want[o - 1])) << o;
          const ImageHead head = decode_image_head(bytes, "f");
          EXPECT_EQ(head.height, want[o - 1].dim(0));
          EXPECT_EQ(head.width, want[o - 1].dim(1));
        }
      }
    }
  }
}

TEST(Png, BrokenExifIsNoOrientation) {
  const std::string plain = encode_png(noise({5, 7, 1}));
  const std::string whole = exif_orientation(6, true).substr(6);
  for (size_t n = 0; n < whole.size() - 6; ++n) {  // the last 4 bytes only say that nothing follows
    const std::string bytes = testing::with_chunk(plain, "eXIf", whole.substr(0, n), false, crc_of);
    const Image image = decode_image(bytes, "f");
    EXPECT_EQ(image.height() * image.width(), 5 * 7);
    EXPECT_EQ(decode_image_head(bytes, "f").height, image.height());
  }
  for (const int o : {0, 9, 65535}) {
    EXPECT_EQ(decode_image(testing::with_chunk(plain, "eXIf", exif_orientation(o, false).substr(6),
                                               false, crc_of),
                           "f")
                  .height(),
              5);
  }
  const std::string false_sum =
      testing::with_chunk(plain, "eXIf", whole, false, [](const std::string&) { return 7u; });
  EXPECT_EQ(decode_image(false_sum, "f").height(), 5);
}

TEST(Images, WhatIsTransparentIsLaidOverWhite) {
  // Black, from clear to solid.
  const Tensor pixels = Tensor::zeros({1, 4, 4}, DType::u8);
  const int alphas[] = {0, 51, 128, 255};
  for (int x = 0; x < 4; ++x) pixels.at<uint8_t>(0, x, 3) = static_cast<uint8_t>(alphas[x]);
  const Tensor got = decode_image(encode_png(pixels), "f").pixels;
  ASSERT_EQ(got.shape(), Dims({1, 4, 3}));
  for (int x = 0; x < 4; ++x) EXPECT_EQ(got.at<uint8_t>(0, x, 1), 255 - alphas[x]) << x;
}

TEST(Images, FilesOfOtherKindsAreNamed) {
  using std::string_literals::operator""s;
  const std::pair<std::string, const char*> kinds[] = {
      {"GIF89a....", "a GIF picture"},
      {"RIFF\1\2\3\4WEBPVP8 "s, "a WebP picture"},
      {"II*\0...."s, "a TIFF picture"},
      {"\0\0\0\x18"
       "ftypheic"s,
       "a HEIC picture"},
      {"BM\x10\0\0\0\0\0\0\0\x36"s, "a BMP picture"},
      {"%PDF-1.7", "a PDF document"},
      {"PK\3\4...."s, "a zip archive"},
      {"<!DOCTYPE HTML><html>", "an HTML page"},
      {"version https://git-lfs.github.com/spec/v1\n", "Git LFS"},
      {"just words\n", "text"}};
  for (const auto& [bytes, kind] : kinds) expect_refused(bytes, kind);
  expect_refused("", "the file is empty");
  expect_refused("\x01\x02\x03", "neither PNG nor JPEG");
}

TEST(Jpeg, BrokenExifIsNoOrientation) {
  const std::vector<uint8_t> samples = smooth(16, 8, 3);
  const std::string whole = exif_orientation(6, true);
  for (size_t n = 1; n < whole.size(); ++n) {
    for (const char last : {whole[n - 1], '\xff'}) {
      JpegForm form{8, 16};
      form.exif = whole.substr(0, n - 1) + last;
      const Image image = decode_image(write_jpeg(form, samples), "f");
      EXPECT_EQ(image.height() * image.width(), 8 * 16);
    }
  }
  std::string far = whole;  // a directory that begins at the end of the address space
  for (int i = 10; i < 14; ++i) far[i] = '\xff';
  JpegForm form{8, 16};
  form.exif = far;
  EXPECT_EQ(decode_image(write_jpeg(form, samples), "f").height(), 16);
  for (const int o : {0, 9, 65535}) {
    form.exif = exif_orientation(o, false);
    EXPECT_EQ(decode_image(write_jpeg(form, samples), "f").height(), 16);
  }
}

void set_png_size(std::string& png, uint32_t width, uint32_t height) {
  for (int i = 0; i < 4; ++i) {
    png[16 + i] = static_cast<char>(width >> (24 - 8 * i));
    png[20 + i] = static_cast<char>(height >> (24 - 8 * i));
  }
  const uint32_t crc =
      static_cast<uint32_t>(::crc32(0, reinterpret_cast<const Bytef*>(png.data()) + 12, 17));
  for (int i = 0; i < 4; ++i) png[29 + i] = static_cast<char>(crc >> (24 - 8 * i));
}

void set_jpeg_size(std::string& jpeg, uint16_t width, uint16_t height) {
  const size_t at = jpeg.find("\xff\xc0");  // SOF0: length, precision, height, width
  ASSERT_NE(at, std::string::npos);
  jpeg[at + 5] = static_cast<char>(height >> 8);
  jpeg[at + 6] = static_cast<char>(height);
  jpeg[at + 7] = static_cast<char>(width >> 8);
  jpeg[at + 8] = static_cast<char>(width);
}

TEST(Images, FarLargerThanMemoryAreRefusedByTheirHead) {
  std::string png = encode_png(noise({8, 8, 3}));
  set_png_size(png, 60'000, 60'000);
  expect_refused(png, "60000×60000 pixels, at most 64 million are allowed");
  message_of([&] { decode_image_head(png, "f"); });
  set_png_size(png, 0x7fff'ffff, 0x7fff'ffff);
  expect_refused(png, "at most 64 million");
  set_png_size(png, 0xffff'ffff, 0xffff'ffff);
  expect_refused(png, "at most 64 million");
  set_png_size(png, 30'000'000, 1);  // few pixels, but libpng draws a line
  refusal(png);
  set_png_size(png, 0, 8);
  expect_refused(png, "0×8");
  std::string jpeg = write_jpeg({8, 8}, smooth(8, 8, 3));
  set_jpeg_size(jpeg, 60'000, 60'000);
  expect_refused(jpeg, "60000×60000 pixels, at most 64 million are allowed");
  message_of([&] { decode_image_head(jpeg, "f"); });
  set_jpeg_size(jpeg, 8, 0);
  refusal(jpeg);
}

TEST(Images, HeadsThatPromiseMoreThanComesAreRefused) {
  std::string png = encode_png(noise({8, 8, 3}));
  set_png_size(png, 8, 9);
  expect_refused(png, "broken PNG");
  set_png_size(png, 5000, 5000);
  expect_refused(png, "broken PNG");
  std::string jpeg = write_jpeg({16, 16}, smooth(16, 16, 3));
  set_jpeg_size(jpeg, 16, 32);
  expect_refused(jpeg, "broken JPEG");
  set_jpeg_size(jpeg, 5000, 5000);
  expect_refused(jpeg, "broken JPEG");
}

TEST(Images, LimitsHold) {
  const std::string png = encode_png(noise({10, 10, 1}));
  EXPECT_EQ(decode_image(png, "f", {.max_pixels = 100}).height(), 10);
  refusal(png, {.max_pixels = 99});
  const TemporaryFolder folder;
  write_file(folder / "a.png", png);
  EXPECT_EQ(read_image(folder / "a.png").width(), 10);
  message_of([&] { read_image(folder / "a.png", {.max_bytes = png.size() - 1}); });
  message_of<IoError>([&] { read_image(folder / "b.png"); });
}

TEST(Images, WhatIsNoImageIsNamed) {
  expect_refused("", "f: the file is empty");
  expect_refused("GIF89a", "f: neither PNG nor JPEG");
  expect_refused(std::string_view("\x89PNG\r\n\x1a\n", 8), "truncated PNG");
  expect_refused("\x89PNG\r\n\x1a\nxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", "does not begin with a");
  expect_refused("\xff\xd8\xff", "broken JPEG");
  expect_refused("\xff\xd8\xff\xd9", "broken JPEG");
}

// More passes than any camera writes, each of them empty: a small file that would keep a decoder
// busy for long.
TEST(Jpeg, EndlessPassesAreRefused) {
  JpegForm form{256, 256, JCS_GRAYSCALE, 1, true};
  std::string bytes = write_jpeg(form, std::vector<uint8_t>(256 * 256, 128));
  const size_t first = bytes.find("\xff\xda"), end = bytes.size() - 2;
  const size_t last = bytes.rfind("\xff\xda");
  ASSERT_NE(first, last);
  const std::string pass = bytes.substr(last, end - last);
  std::string many = bytes.substr(0, end);
  for (int i = 0; i < 2000; ++i) many += pass;
  refusal(many + bytes.substr(end));
}

TEST(Images, TruncatedAnywhereIsRefused) {
  const std::string png = encode_png(noise({9, 7, 3}));
  const std::string jpeg = write_jpeg({24, 16}, smooth(16, 24, 3));
  const std::string progressive = write_jpeg({24, 16, JCS_RGB, 3, true}, smooth(16, 24, 3));
  const auto read = [](std::string_view b) { decode_image(b, "f"); };
  EXPECT_EQ(testing::truncate_everywhere(png, 1, read).accepted, 0);
  // A JPEG without its last two bytes (the end mark) has all its pixels; libjpeg misses the mark.
  EXPECT_EQ(testing::truncate_everywhere(jpeg, 1, read).accepted, 0);
  EXPECT_EQ(testing::truncate_everywhere(progressive, 1, read).accepted, 0);
}

TEST(Images, FlippedBitsNeverHurt) {
  const auto read = [](std::string_view b) {
    const Image image = decode_image(b, "f", {.max_pixels = 1 << 20});
    ASSERT_EQ(image.pixels.rank(), 3);
    uint64_t sum = 0;  // every pixel can be read
    for (const uint8_t v : image.pixels.span<uint8_t>()) sum += v;
    EXPECT_LE(sum, uint64_t{255} * static_cast<uint64_t>(image.pixels.numel()));
  };
  PngForm palette{5, 6, 4, PNG_COLOR_TYPE_PALETTE, true};
  palette.palette.resize(16);
  JpegForm exif{12, 8};
  exif.exif = exif_orientation(6, true);
  for (const std::string& bytes :
       {encode_png(noise({6, 5, 3})), write_png(palette, std::string(18, '\x35')),
        write_jpeg(exif, smooth(8, 12, 3)), write_jpeg({12, 8, JCS_RGB, 3, true}, smooth(8, 12, 3)),
        write_jpeg({9, 9, JCS_GRAYSCALE, 1}, smooth(9, 9, 1))}) {
    const testing::Outcome flipped = testing::flip_bits(bytes, 1, read);
    EXPECT_GT(flipped.refused, 0);
    testing::scramble(bytes, 500, read);
  }
}

TEST(Resize, EqualSizeIsEqualAndFlatStaysFlat) {
  const Tensor pixels = noise({9, 14, 3});
  EXPECT_TRUE(equal(resize(pixels, 9, 14), pixels));
  const Tensor flat = Tensor::full({13, 17, 1}, 201, DType::u8);
  for (const auto& [h, w] : {std::pair{1, 1}, {5, 40}, {26, 3}, {100, 100}}) {
    const Tensor out = resize(flat, h, w);
    EXPECT_EQ(out.shape(), (Dims{h, w, 1}));
    for (const uint8_t v : out.span<uint8_t>()) ASSERT_EQ(v, 201);
  }
}

TEST(Resize, ShrinkingAveragesAreas) {
  const Tensor pixels = Tensor::from<uint8_t>({0, 100, 200, 40, 60, 80}, {2, 3, 1});
  EXPECT_TRUE(equal(resize(pixels, 1, 1), Tensor::full({1, 1, 1}, 80, DType::u8)));
  // Three columns into two: each takes one and a half.
  EXPECT_TRUE(equal(resize(pixels, 2, 2), Tensor::from<uint8_t>({33, 167, 47, 73}, {2, 2, 1})));
}

TEST(Resize, GrowingInterpolatesBetweenCentres) {
  const Tensor pixels = Tensor::from<uint8_t>({0, 200}, {1, 2, 1});
  EXPECT_TRUE(equal(resize(pixels, 1, 4), Tensor::from<uint8_t>({0, 50, 150, 200}, {1, 4, 1})));
  EXPECT_TRUE(equal(resize(Tensor::full({1, 1, 1}, 9, DType::u8), 2, 3),
                    Tensor::full({2, 3, 1}, 9, DType::u8)));
}

TEST(Pixels, WrongShapesAreRefused) {
  EXPECT_THROW(encode_png(Tensor::zeros({4, 4, 2}, DType::u8)), ArgumentError);
  EXPECT_THROW(encode_png(Tensor::zeros({4, 4}, DType::u8)), ArgumentError);
  EXPECT_THROW(encode_png(Tensor::zeros({4, 4, 1})), ArgumentError);
  EXPECT_THROW(encode_png(Tensor::zeros({0, 4, 1}, DType::u8)), ArgumentError);
  EXPECT_THROW(encode_png(Tensor()), ArgumentError);
  EXPECT_THROW(resize(Tensor::zeros({4, 4, 1}, DType::u8), 0, 4), ArgumentError);
  EXPECT_THROW(resize(Tensor::zeros({0, 4, 1}, DType::u8), 4, 4), ArgumentError);
  EXPECT_THROW(to_grey(Tensor::zeros({4, 4, 4}, DType::u8)), ArgumentError);
}

TEST(Pixels, GreyIsLuma) {
  const Tensor rgb = Tensor::from<uint8_t>({255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9}, {1, 4, 3});
  EXPECT_TRUE(equal(to_grey(rgb), Tensor::from<uint8_t>({76, 150, 29, 9}, {1, 4, 1})));
}

}  // namespace
}  // namespace foci
