// Packing: every pixel arrives where the batch says, a batch equals its members, and an epoch shows
// each picture once.
#include "foci/vision/dataset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>

namespace foci::vision {
namespace {

Sample sample_of(int64_t rows, int64_t cols, const PictureFormat& format, int64_t label) {
  Sample sample;
  sample.grid = {rows, cols};
  sample.label = label;
  sample.picture.pixels =
      Tensor::empty({rows * format.patch, cols * format.patch, format.channels}, DType::u8);
  for (int64_t i = 0; i < sample.picture.pixels.numel(); ++i) {
    sample.picture.pixels.data<uint8_t>()[i] = static_cast<uint8_t>(i * 7 + label);
  }
  sample.landmarks.assign(static_cast<size_t>(rows * cols), 0);
  sample.landmarks.back() = 1;
  return sample;
}

TEST(Batch, EveryPixelArrives) {
  for (const int64_t channels : {1, 3}) {
    const PictureFormat format{4, channels, 32, 0.5, 0.25};
    const std::vector<Sample> samples = {sample_of(2, 5, format, 3), sample_of(1, 1, format, 1),
                                         sample_of(4, 2, format, 9)};
    const Batch batch = make_batch(samples, format);
    ASSERT_EQ(batch.offsets, (std::vector<int64_t>{0, 10, 11, 19}));
    ASSERT_EQ(batch.patches.shape(), (Dims{19, 16 * channels}));
    ASSERT_EQ(batch.segments.shape(), (Dims{1, 19}));
    for (int64_t b = 0; b < 3; ++b) {
      const Sample& sample = samples[b];
      EXPECT_EQ(batch.labels.at<int64_t>(b), sample.label);
      EXPECT_EQ(batch.grids[b], sample.grid);
      for (int64_t y = 0; y < sample.picture.height(); ++y) {
        for (int64_t x = 0; x < sample.picture.width(); ++x) {
          const int64_t token = batch.offsets[b] + y / 4 * sample.grid.cols + x / 4;
          ASSERT_EQ(batch.segments.at<int32_t>(0, token), b);
          ASSERT_EQ(batch.positions.at<int32_t>(token, 0), y / 4);
          ASSERT_EQ(batch.positions.at<int32_t>(token, 1), x / 4);
          for (int64_t c = 0; c < channels; ++c) {
            const double pixel = sample.picture.pixels.at<uint8_t>(y, x, c);
            ASSERT_FLOAT_EQ(batch.patches.at<float>(token, (y % 4 * 4 + x % 4) * channels + c),
                            static_cast<float>((pixel / 255 - 0.5) / 0.25));
          }
        }
      }
      for (int64_t t = batch.offsets[b]; t < batch.offsets[b + 1]; ++t) {
        EXPECT_EQ(batch.landmarks.at<uint8_t>(t), t + 1 == batch.offsets[b + 1] ? 1 : 0);
      }
    }
  }
}

TEST(Batch, WithoutLandmarksThereAreNone) {
  const PictureFormat format;
  std::vector<Sample> samples = {sample_of(2, 2, format, 0), sample_of(1, 3, format, 0)};
  samples[1].landmarks.clear();
  EXPECT_FALSE(make_batch(samples, format).landmarks.defined());
}

TEST(Batch, RefusesWhatDoesNotFit) {
  const PictureFormat format;
  EXPECT_THROW(make_batch({}, format), ArgumentError);
  std::vector<Sample> samples = {sample_of(2, 2, format, 0)};
  EXPECT_THROW(make_batch(samples, {4, 3, 32}), ArgumentError);
  EXPECT_THROW(make_batch(samples, {8, 1, 32}), ArgumentError);
  samples[0].grid.rows = 1;
  EXPECT_THROW(make_batch(samples, format), ArgumentError);
  samples[0].grid.rows = 2;
  samples[0].landmarks.pop_back();
  EXPECT_THROW(make_batch(samples, format), ArgumentError);
}

TEST(Format, ValuesThatMakeNoSenseAreRefused) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const PictureFormat& bad :
       {PictureFormat{0, 1, 32}, PictureFormat{4, 2, 32}, PictureFormat{4, 1, 30},
        PictureFormat{4, 1, 0}, PictureFormat{4, 1, 1 << 20}, PictureFormat{4, 1, 32, nan},
        PictureFormat{4, 1, 32, 0.5, 0}, PictureFormat{4, 1, 32, 0.5, nan}}) {
    EXPECT_THROW(validate(bad), ArgumentError);
  }
}

TEST(Fit, SidesAreMultiplesWithinTheLimit) {
  for (const int64_t channels : {1, 3}) {
    for (const int64_t patch : {1, 4, 8}) {
      const PictureFormat format{patch, channels, 32};
      for (const int64_t h : {1, 3, 8, 17, 32, 33, 100, 1000}) {
        for (const int64_t w : {1, 5, 16, 31, 64, 999}) {
          const Image in{Tensor::full({h, w, 3}, 77, DType::u8)};
          const Image out = fit(in, format);
          ASSERT_EQ(out.channels(), channels);
          ASSERT_TRUE(out.height() % patch == 0 && out.height() >= patch && out.height() <= 32);
          ASSERT_TRUE(out.width() % patch == 0 && out.width() >= patch && out.width() <= 32);
          for (const uint8_t v : out.pixels.span<uint8_t>()) ASSERT_EQ(v, 77);
          const double scale = std::min(1.0, 32.0 / static_cast<double>(std::max(h, w)));
          EXPECT_LE(std::abs(static_cast<double>(out.height()) - scale * static_cast<double>(h)),
                    static_cast<double>(patch));
        }
      }
    }
  }
}

TEST(Fit, WhatFitsIsLeftAlone) {
  const PictureFormat format;
  const Sample sample = sample_of(3, 7, format, 2);
  EXPECT_TRUE(fit(sample.picture, format).pixels.shares_storage(sample.picture.pixels));
}

// A finite set whose samples tell who they are.
class Numbers : public Dataset {
 public:
  explicit Numbers(int64_t n) : n_(n) {}
  const PictureFormat& format() const override { return format_; }
  const std::vector<std::string>& classes() const override { return classes_; }
  std::optional<int64_t> size(Split) const override { return n_; }
  bool has_landmarks() const override { return false; }
  Sample get(Split, int64_t index, int64_t epoch) const override {
    Sample sample;
    sample.source = index;
    sample.label = epoch;
    return sample;
  }

 private:
  int64_t n_;
  PictureFormat format_;
  std::vector<std::string> classes_ = {"a", "b"};
};

TEST(TrainingSamples, EachEpochShowsEachSampleOnceInAnotherOrder) {
  const Numbers data(10);
  std::vector<std::vector<int64_t>> epochs(4);
  for (int64_t step = 0; step < 10; ++step) {
    for (const Sample& sample : training_samples(data, 7, step, 4)) {
      epochs[sample.label].push_back(sample.source);
    }
  }
  for (const auto& epoch : epochs) {
    EXPECT_EQ(std::set<int64_t>(epoch.begin(), epoch.end()).size(), 10u);
    EXPECT_EQ(epoch.size(), 10u);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  const auto order = [&](uint64_t seed) {
    std::vector<int64_t> sources;
    for (const Sample& s : training_samples(data, seed, 0, 10)) sources.push_back(s.source);
    return sources;
  };
  EXPECT_NE(order(7), order(8));
  EXPECT_EQ(order(7), order(7));
}

TEST(TrainingSamples, ABatchMayBeLargerThanTheSet) {
  EXPECT_EQ(training_samples(Numbers(3), 1, 0, 8).size(), 8u);
  EXPECT_THROW(training_samples(Numbers(0), 1, 0, 8), ArgumentError);
  EXPECT_THROW(training_samples(Numbers(3), 1, -1, 8), ArgumentError);
}

TEST(TestSamples, EndWhereTheSetEnds) {
  const std::vector<Sample> samples = test_samples(Numbers(5), 3, 9);
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(samples[1].source, 4);
  EXPECT_TRUE(test_samples(Numbers(5), 7, 9).empty());
}

}  // namespace
}  // namespace foci::vision
