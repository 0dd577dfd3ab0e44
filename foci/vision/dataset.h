// Pictures for training: what a sample is, where samples come from, and how samples of different
// sizes become one packed batch of patches.
//
// A data set is a pure function: the same (split, index, epoch) gives the same sample on every
// machine, thread and run. So a training run's place in the data is one number, its step.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "foci/core/api.h"
#include "foci/core/tensor.h"
#include "foci/io/image.h"

namespace foci::vision {

enum class Split : uint8_t { train, test };

// What a model takes: part of its config, since a picture must be prepared as in training.
struct PictureFormat {
  int64_t patch = 4;      // pixels a side of a patch, ≥ 1
  int64_t channels = 1;   // 1 grey, 3 colour
  int64_t max_side = 32;  // longer pictures are shrunk; a multiple of patch
  double mean = 0.5;      // the model sees (pixel/255 − mean) / deviation
  double deviation = 0.25;
  bool operator==(const PictureFormat&) const = default;
};
// Throws ArgumentError naming the field that makes no sense.
FOCI_API void validate(const PictureFormat& format);

// Patches of one picture, row by row.
struct Grid {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t tokens() const { return rows * cols; }
  bool operator==(const Grid&) const = default;
};

struct Sample {
  Image picture;  // [rows·P, cols·P, channels] uint8
  Grid grid;
  int64_t label = 0;               // index into classes()
  std::vector<uint8_t> landmarks;  // [rows·cols], 1 where a patch shows the labelled thing; empty
                                   // where nobody knows
  int64_t source = 0;              // which original it shows: samples of one are not independent
  std::string name;                // for people: "test scene 17", or a file's path
};

class FOCI_API Dataset {
 public:
  virtual ~Dataset() = default;
  virtual const PictureFormat& format() const = 0;
  virtual const std::vector<std::string>& classes() const = 0;
  // Number of samples of a split; nothing where it never ends.
  virtual std::optional<int64_t> size(Split split) const = 0;
  // Whether samples have landmarks.
  virtual bool has_landmarks() const = 0;
  // A word for all that samples are made of: other data have another one. Empty where nobody knows.
  virtual std::string fingerprint() const { return {}; }
  // Sample `index` ≥ 0 (and < size). In training, `epoch` varies what is random about it; a test
  // sample is the same in all epochs. May be called from several threads at once.
  virtual Sample get(Split split, int64_t index, int64_t epoch = 0) const = 0;
};

// The samples of training step `step` ≥ 0: `count` in a row of an endless set; of a finite one, the
// next `count` of its permutation, which (seed, epoch) decide. Every sample comes once an epoch.
FOCI_API std::vector<Sample> training_samples(const Dataset& data, uint64_t seed, int64_t step,
                                              int64_t count);
// Test samples [begin, end), end cut at the size of the set.
FOCI_API std::vector<Sample> test_samples(const Dataset& data, int64_t begin, int64_t end);

// Pictures of different sizes, one after the other. T = all their patches, B = pictures.
struct Batch {
  Tensor patches;           // [T, P·P·C] float32; pixel (y, x), channel c at (y·P + x)·C + c
  Tensor segments;          // [1, T] int32: the picture that a token belongs to
  Tensor positions;         // [T, 2] int32: row and column in its grid
  Tensor labels;            // [B] int64
  Tensor landmarks;         // [T] uint8; undefined where a sample has none
  std::vector<Grid> grids;  // [B]
  std::vector<int64_t> offsets;  // [B + 1]: the first token of each picture, then T
  int64_t size() const { return static_cast<int64_t>(grids.size()); }
};
// Throws ArgumentError for no samples, or one that does not have the format.
FOCI_API Batch make_batch(std::span<const Sample> samples, const PictureFormat& format);

// A picture as the format wants it: grey or colour, its longer side at most max_side, both sides
// multiples of the patch (rounded, so that the aspect stays as near as it can).
FOCI_API Image fit(const Image& picture, const PictureFormat& format);
// A picture of a person's own, for a trained model; its label is 0 and means nothing. Throws as
// read_image does.
FOCI_API Sample read_sample(const std::filesystem::path& path, const PictureFormat& format);

}  // namespace foci::vision
