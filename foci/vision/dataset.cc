// Cuts pictures into patches, packs a batch, and draws samples for training.
#include "foci/vision/dataset.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include "foci/core/rng.h"
#include "foci/core/threads.h"
#include "foci/io/file.h"

namespace foci::vision {
namespace {

// The order of a finite set's samples in one epoch.
std::vector<int64_t> permutation(int64_t size, uint64_t seed, int64_t epoch) {
  std::vector<int64_t> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), int64_t{0});
  constexpr uint32_t kPurpose = 0x6f726472;  // a key of its own, apart from others with this seed
  const auto key = philox(seed, {kPurpose, 0, 0, 0});
  Rng rng(uint64_t{key[0]} << 32 | key[1], static_cast<uint64_t>(epoch));
  for (int64_t i = size; i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
  return order;
}

std::vector<Sample> collect(int64_t count, const std::function<Sample(int64_t)>& get) {
  std::vector<Sample> samples(static_cast<size_t>(count));
  parallel_for(count, [&](int64_t i) { samples[static_cast<size_t>(i)] = get(i); });
  return samples;
}

}  // namespace

void validate(const PictureFormat& format) {
  constexpr int64_t kMaxSide = 1 << 14;
  require(format.patch >= 1 && format.patch <= 1024, "patch: {} pixels a side, 1 to 1024 are right",
          format.patch);
  require(format.channels == 1 || format.channels == 3, "channels: {}, 1 or 3 are right",
          format.channels);
  require(format.max_side >= format.patch && format.max_side <= kMaxSide,
          "max_side: {} pixels, from one patch ({}) to {} are right", format.max_side, format.patch,
          kMaxSide);
  require(format.max_side % format.patch == 0, "max_side: {} is not a multiple of the patch, {}",
          format.max_side, format.patch);
  require(std::isfinite(format.mean), "mean: {} is not finite", format.mean);
  require(std::isfinite(format.deviation) && format.deviation > 0,
          "deviation: {}, a number above 0 is right", format.deviation);
}

std::vector<Sample> training_samples(const Dataset& data, uint64_t seed, int64_t step,
                                     int64_t count) {
  require(step >= 0 && count >= 1, "training_samples: step {}, count {}", step, count);
  const int64_t first = step * count;
  const std::optional<int64_t> size = data.size(Split::train);
  if (!size) {
    return collect(count, [&](int64_t i) { return data.get(Split::train, first + i); });
  }
  require(*size >= 1, "training_samples: the data set has no training samples");
  struct Place {
    int64_t index, epoch;
  };
  std::vector<Place> places;
  std::vector<int64_t> order;
  for (int64_t position = first; position < first + count; ++position) {
    const int64_t epoch = position / *size;
    if (places.empty() || places.back().epoch != epoch) order = permutation(*size, seed, epoch);
    places.push_back({order[position % *size], epoch});
  }
  return collect(count, [&](int64_t i) {
    const Place& place = places[static_cast<size_t>(i)];
    return data.get(Split::train, place.index, place.epoch);
  });
}

std::vector<Sample> test_samples(const Dataset& data, int64_t begin, int64_t end) {
  require(0 <= begin && begin <= end, "test_samples: [{}, {})", begin, end);
  const std::optional<int64_t> size = data.size(Split::test);
  if (size) end = std::min(end, *size);
  return collect(std::max<int64_t>(end - begin, 0),
                 [&](int64_t i) { return data.get(Split::test, begin + i); });
}

Batch make_batch(std::span<const Sample> samples, const PictureFormat& format) {
  validate(format);
  require(!samples.empty(), "make_batch: no samples");
  const int64_t p = format.patch, c = format.channels;
  Batch batch;
  batch.offsets.push_back(0);
  bool all_have_landmarks = true;
  for (const Sample& sample : samples) {
    const Tensor& pixels = sample.picture.pixels;
    require(pixels.defined() && pixels.dtype() == DType::u8 && pixels.rank() == 3 &&
                pixels.is_contiguous(),
            "make_batch: {}: pixels must be [height, width, channels] uint8", sample.name);
    const Grid grid = sample.grid;
    require(pixels.dim(0) == grid.rows * p && pixels.dim(1) == grid.cols * p &&
                pixels.dim(2) == c && grid.rows >= 1 && grid.cols >= 1,
            "make_batch: {}: pixels {} do not make {}×{} patches of {}×{}×{}", sample.name,
            pixels.shape(), grid.rows, grid.cols, p, p, c);
    require(
        sample.landmarks.empty() || static_cast<int64_t>(sample.landmarks.size()) == grid.tokens(),
        "make_batch: {}: {} landmarks for {} patches", sample.name, sample.landmarks.size(),
        grid.tokens());
    all_have_landmarks = all_have_landmarks && !sample.landmarks.empty();
    batch.grids.push_back(grid);
    batch.offsets.push_back(batch.offsets.back() + grid.tokens());
  }
  const int64_t tokens = batch.offsets.back();
  require(tokens <= INT32_MAX, "make_batch: {} patches are too many", tokens);
  batch.patches = Tensor::empty({tokens, p * p * c});
  batch.segments = Tensor::empty({1, tokens}, DType::i32);
  batch.positions = Tensor::empty({tokens, 2}, DType::i32);
  batch.labels = Tensor::empty({batch.size()}, DType::i64);
  if (all_have_landmarks) batch.landmarks = Tensor::empty({tokens}, DType::u8);

  std::array<float, 256> value{};  // of each pixel
  for (int i = 0; i < 256; ++i) {
    value[i] = static_cast<float>((i / 255.0 - format.mean) / format.deviation);
  }
  parallel_for(batch.size(), [&](int64_t b) {
    const Sample& sample = samples[static_cast<size_t>(b)];
    const auto [rows, cols] = batch.grids[b];
    const int64_t first = batch.offsets[b];
    const uint8_t* pixels = sample.picture.pixels.data<uint8_t>();
    batch.labels.data<int64_t>()[b] = sample.label;
    for (int64_t token = 0; token < rows * cols; ++token) {
      const int64_t row = token / cols, col = token % cols;
      float* to = batch.patches.data<float>() + (first + token) * p * p * c;
      for (int64_t y = 0; y < p; ++y) {
        const uint8_t* from = pixels + ((row * p + y) * cols + col) * p * c;
        for (int64_t x = 0; x < p * c; ++x) *to++ = value[from[x]];
      }
      batch.segments.data<int32_t>()[first + token] = static_cast<int32_t>(b);
      batch.positions.data<int32_t>()[2 * (first + token)] = static_cast<int32_t>(row);
      batch.positions.data<int32_t>()[2 * (first + token) + 1] = static_cast<int32_t>(col);
    }
    if (all_have_landmarks) {
      std::copy(sample.landmarks.begin(), sample.landmarks.end(),
                batch.landmarks.data<uint8_t>() + first);
    }
  });
  return batch;
}

Image fit(const Image& picture, const PictureFormat& format) {
  validate(format);
  Tensor pixels = picture.pixels;
  require(pixels.defined() && pixels.rank() == 3 && (pixels.dim(2) == 1 || pixels.dim(2) == 3) &&
              pixels.dim(0) >= 1 && pixels.dim(1) >= 1,
          "fit: pixels must be [height, width, 1 or 3] uint8");
  const double longer = static_cast<double>(std::max(pixels.dim(0), pixels.dim(1)));
  const double scale = std::min(1.0, static_cast<double>(format.max_side) / longer);
  const auto side = [&](int64_t old) {
    const double patches = static_cast<double>(old) * scale / static_cast<double>(format.patch);
    return std::max<int64_t>(1, std::llround(patches)) * format.patch;
  };
  const int64_t height = side(pixels.dim(0)), width = side(pixels.dim(1));
  if (format.channels == 1) pixels = to_grey(pixels);
  if (height != pixels.dim(0) || width != pixels.dim(1)) pixels = resize(pixels, height, width);
  if (format.channels == 3 && pixels.dim(2) == 1) {
    pixels = pixels.broadcast_to({height, width, 3});
  }
  return {pixels.contiguous()};
}

Sample read_sample(const std::filesystem::path& path, const PictureFormat& format) {
  Sample sample;
  sample.picture = fit(read_image(path), format);
  sample.grid = {sample.picture.height() / format.patch, sample.picture.width() / format.patch};
  sample.name = shown(path);
  return sample;
}

}  // namespace foci::vision
