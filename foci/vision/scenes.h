// Scenes: one whole handwritten digit somewhere on a canvas of clutter. The label is the digit, and
// the patches that it covers are the landmarks: where a model that knows its task should look.
//
// Canvases have any size from 16 to 32 pixels a side, in steps of the patch. Clutter is cut from
// other digits of the same split, in pieces smaller than a digit; it may touch the digit's box but
// never lies on it. Scene i is a pure function of (seed, split, i).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "foci/core/api.h"
#include "foci/vision/dataset.h"

namespace foci::vision {

// Random changes to the digit and to each piece of clutter in training scenes; each is drawn anew,
// uniformly within ± its value. Test scenes are never changed.
struct Augmentation {
  double rotation = 10;     // degrees
  double scale = 0.1;       // relative size
  double shear = 0.1;       // pixels sideways for each pixel down
  double shift = 0.3;       // pixels, each direction
  double intensity = 0.15;  // relative ink
  double noise = 0.03;      // of every pixel of the canvas; full ink is 1

  static Augmentation none() { return {0, 0, 0, 0, 0, 0}; }
};

struct SceneOptions {
  uint64_t seed = 1;
  bool anywhere = false;  // the digit's corner at any pixel, not only where a patch begins
  int64_t patch = 4;      // divides 8, a digit's side
  int64_t min_side = 16;  // of a canvas, multiples of patch, at least a digit's side
  int64_t max_side = 32;
  double clutter = 1.5;   // pieces for every 64 pixels of canvas, ≥ 0
  int64_t min_piece = 3;  // pixels a side of a piece, 1 to 7
  int64_t max_piece = 5;
  Augmentation augmentation;
};

class FOCI_API Scenes : public Dataset {
 public:
  // Throws ArgumentError naming the option that makes no sense.
  explicit Scenes(const SceneOptions& options = {});

  const SceneOptions& options() const { return options_; }
  const PictureFormat& format() const override { return format_; }
  const std::vector<std::string>& classes() const override;  // "0" … "9"
  std::optional<int64_t> size(Split) const override { return std::nullopt; }
  bool has_landmarks() const override { return true; }
  std::string fingerprint() const override;
  Sample get(Split split, int64_t index, int64_t epoch = 0) const override;

 private:
  SceneOptions options_;
  PictureFormat format_;
};

}  // namespace foci::vision
