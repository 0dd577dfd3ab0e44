// Draws scenes: the canvas, its clutter, the digit on it, and where the digit lies.
#include "foci/vision/scenes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "foci/core/rng.h"
#include "foci/vision/digits.h"

namespace foci::vision {
namespace {

constexpr int kSide = Digit::kSide;
constexpr float kFullInk = 16;

// Mean and deviation of pixels in scenes of the default options, measured; near enough for others.
constexpr double kMean = 0.168;
constexpr double kDeviation = 0.304;

double within(Rng& rng, double range) {
  return range * (2 * rng.uniform() - 1);
}

// Sine and cosine of an angle within ±π, good to 1e-9. The library's own may differ in the last bit
// from machine to machine, and scenes may not.
struct SinCos {
  double sin, cos;
};
SinCos sin_cos(double angle) {
  SinCos sum{0, 0};
  double term = 1;  // angle^n / n!, with the sign of its place in the two series
  for (int n = 0; n < 24; n += 2) {
    sum.cos += term;
    term *= angle / (n + 1);
    sum.sin += term;
    term *= -angle / (n + 2);
  }
  return sum;
}

// A digit seen through a random change, drawn once: ink at any (y, x), 0 to 1.
class Drawing {
 public:
  // As it is.
  explicit Drawing(const Digit& digit) : digit_(digit) {}
  // Turned, scaled, sheared and shifted about its centre.
  Drawing(const Digit& digit, const Augmentation& by, Rng& rng) : digit_(digit), changed_(true) {
    const double angle = within(rng, by.rotation) * std::numbers::pi / 180;
    const double size = 1 + within(rng, by.scale);
    shear_ = within(rng, by.shear);
    down_ = within(rng, by.shift);
    right_ = within(rng, by.shift);
    strength_ = static_cast<float>(1 + within(rng, by.intensity));
    const SinCos turn = sin_cos(angle);
    cos_ = turn.cos / size;
    sin_ = turn.sin / size;
  }

  float ink(int64_t y, int64_t x) const {
    if (!changed_) return source(y, x);
    // From a place in the result back to the place in the source.
    constexpr double kCentre = (kSide - 1) / 2.0;
    const double dy = static_cast<double>(y) - kCentre - down_;
    const double dx = static_cast<double>(x) - kCentre - right_ - shear_ * dy;
    return std::clamp(
        strength_ * cubic(cos_ * dy - sin_ * dx + kCentre, sin_ * dy + cos_ * dx + kCentre), 0.0f,
        1.0f);
  }

 private:
  float source(int64_t y, int64_t x) const {  // paper lies around the digit
    if (y < 0 || x < 0 || y >= kSide || x >= kSide) return 0;
    return static_cast<float>(digit_.ink[static_cast<size_t>(y * kSide + x)]) / kFullInk;
  }

  // Catmull–Rom: strokes here are one or two pixels wide, and a linear mean would wash them out.
  static std::array<float, 4> cubic_weights(float t) {
    return {t * (-0.5f + t * (1 - 0.5f * t)), 1 + t * t * (-2.5f + 1.5f * t),
            t * (0.5f + t * (2 - 1.5f * t)), t * t * (-0.5f + 0.5f * t)};
  }
  float cubic(double y, double x) const {
    const double y0 = std::floor(y), x0 = std::floor(x);
    const std::array<float, 4> wy = cubic_weights(static_cast<float>(y - y0));
    const std::array<float, 4> wx = cubic_weights(static_cast<float>(x - x0));
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      float row = 0;
      for (int j = 0; j < 4; ++j) {
        row += wx[j] * source(static_cast<int64_t>(y0) - 1 + i, static_cast<int64_t>(x0) - 1 + j);
      }
      sum += wy[i] * row;
    }
    return sum;
  }

  const Digit& digit_;
  bool changed_ = false;
  double shear_ = 0, down_ = 0, right_ = 0, cos_ = 1, sin_ = 0;
  float strength_ = 1;
};

// Clutter without ink would be no clutter: of a few cuts the first with enough ink is taken.
constexpr int kCuts = 4;

struct Cut {
  int64_t top, left;
};
Cut cut_with_ink(const Digit& digit, int64_t height, int64_t width, Rng& rng) {
  Cut cut{};
  for (int i = 0; i < kCuts; ++i) {
    cut = {rng.below(kSide - height + 1), rng.below(kSide - width + 1)};
    int64_t ink = 0;
    for (int64_t y = 0; y < height; ++y) {
      for (int64_t x = 0; x < width; ++x) {
        ink += digit.ink[static_cast<size_t>((cut.top + y) * kSide + cut.left + x)];
      }
    }
    if (4 * ink >= static_cast<int64_t>(kFullInk) * height * width) break;  // a quarter of the full
  }
  return cut;
}

void check_options(const SceneOptions& o) {
  require(o.patch >= 1 && kSide % o.patch == 0, "patch: {}, a divisor of {} is right", o.patch,
          kSide);
  require(o.min_side >= kSide && o.min_side % o.patch == 0,
          "min_side: {}, a multiple of the patch ({}) and at least {} is right", o.min_side,
          o.patch, kSide);
  require(o.max_side >= o.min_side && o.max_side % o.patch == 0 && o.max_side <= 4096,
          "max_side: {}, a multiple of the patch ({}) from min_side ({}) to 4096 is right",
          o.max_side, o.patch, o.min_side);
  require(o.clutter >= 0 && o.clutter <= 100, "clutter: {}, 0 to 100 is right", o.clutter);
  require(o.min_piece >= 1 && o.min_piece <= o.max_piece && o.max_piece < kSide,
          "min_piece, max_piece: {}, {}, from 1 to {} in this order is right", o.min_piece,
          o.max_piece, kSide - 1);
  const Augmentation& a = o.augmentation;
  const auto in = [](double x, double most, const char* name) {
    require(x >= 0 && x <= most, "augmentation {}: {}, 0 to {} is right", name, x, most);
  };
  in(a.rotation, 180, "rotation");
  in(a.scale, 0.9, "scale");
  in(a.shear, 2, "shear");
  in(a.shift, kSide, "shift");
  in(a.intensity, 1, "intensity");
  in(a.noise, 1, "noise");
}

// Every scene draws from a generator of its own.
Rng scene_rng(uint64_t seed, Split split, int64_t index, int64_t epoch) {
  constexpr uint32_t kPurpose = 0x7363656e;
  const auto e = static_cast<uint64_t>(epoch);
  const auto key = philox(seed, {kPurpose, static_cast<uint32_t>(split), static_cast<uint32_t>(e),
                                 static_cast<uint32_t>(e >> 32)});
  return Rng(uint64_t{key[0]} << 32 | key[1], static_cast<uint64_t>(index));
}

}  // namespace

Scenes::Scenes(const SceneOptions& options) : options_(options) {
  check_options(options_);
  format_ = {options_.patch, 1, options_.max_side, kMean, kDeviation};
}

const std::vector<std::string>& Scenes::classes() const {
  static const std::vector<std::string> names = {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"};
  return names;
}

std::string Scenes::fingerprint() const {
  const SceneOptions& o = options_;
  const Augmentation& a = o.augmentation;
  return fmt::format("scenes {} {} {} {} {} {} {} {} {} {} {} {} {} {}", o.seed, o.anywhere,
                     o.patch, o.min_side, o.max_side, o.clutter, o.min_piece, o.max_piece,
                     a.rotation, a.scale, a.shear, a.shift, a.intensity, a.noise);
}

Sample Scenes::get(Split split, int64_t index, int64_t epoch) const {
  require(index >= 0 && epoch >= 0, "Scenes::get: index {}, epoch {}", index, epoch);
  const bool training = split == Split::train;
  Rng rng = scene_rng(options_.seed, split, index, training ? epoch : 0);
  const std::vector<int64_t>& pool = digit_indices(split);
  const auto pick = [&] { return pool[static_cast<size_t>(rng.below(std::ssize(pool)))]; };
  const auto draw = [&](int64_t which) {
    const Digit& digit = digits()[static_cast<size_t>(which)];
    return training ? Drawing(digit, options_.augmentation, rng) : Drawing(digit);
  };
  const auto between = [&](int64_t low, int64_t high) { return low + rng.below(high - low + 1); };

  const int64_t p = options_.patch;
  const int64_t h = p * between(options_.min_side / p, options_.max_side / p);
  const int64_t w = p * between(options_.min_side / p, options_.max_side / p);
  const int64_t target = pick();
  const int64_t step = options_.anywhere ? 1 : p;
  const int64_t top = step * rng.below((h - kSide) / step + 1);
  const int64_t left = step * rng.below((w - kSide) / step + 1);

  std::vector<float> canvas(static_cast<size_t>(h * w), 0.0f);
  const auto pixel = [&](int64_t y, int64_t x) -> float& {
    return canvas[static_cast<size_t>(y * w + x)];
  };
  const auto area = static_cast<double>(h * w);
  const int64_t pieces = std::llround(options_.clutter * area / (kSide * kSide));
  for (int64_t n = 0; n < pieces; ++n) {
    int64_t other = pick();
    while (other == target) other = pick();
    const int64_t ph = between(options_.min_piece, options_.max_piece);
    const int64_t pw = between(options_.min_piece, options_.max_piece);
    const Cut cut = cut_with_ink(digits()[static_cast<size_t>(other)], ph, pw, rng);
    const Drawing drawing = draw(other);
    const int64_t y0 = rng.below(h - ph + 1), x0 = rng.below(w - pw + 1);
    for (int64_t y = 0; y < ph; ++y) {
      for (int64_t x = 0; x < pw; ++x) {
        float& to = pixel(y0 + y, x0 + x);
        to = std::max(to, drawing.ink(cut.top + y, cut.left + x));
      }
    }
  }
  // The digit comes last and takes its whole box, so that nothing hides it.
  const Drawing whole = draw(target);
  for (int64_t y = 0; y < kSide; ++y) {
    for (int64_t x = 0; x < kSide; ++x) {
      pixel(top + y, left + x) = whole.ink(y, x);
    }
  }

  Sample sample;
  sample.picture.pixels = Tensor::empty({h, w, 1}, DType::u8);
  uint8_t* to = sample.picture.pixels.data<uint8_t>();
  const double noise = training ? options_.augmentation.noise : 0;
  for (size_t i = 0; i < canvas.size(); ++i) {
    // 32 random bits are plenty for a pixel.
    const double grain = noise > 0 ? noise * (rng.next_u32() * 0x1p-31 - 1) : 0;
    to[i] = static_cast<uint8_t>(std::clamp(255 * (canvas[i] + grain) + 0.5, 0.0, 255.0));
  }
  sample.grid = {h / p, w / p};
  sample.label = digits()[static_cast<size_t>(target)].label;
  sample.source = target;
  sample.landmarks.assign(static_cast<size_t>(sample.grid.tokens()), 0);
  for (int64_t row = top / p; row * p < top + kSide; ++row) {
    for (int64_t col = left / p; col * p < left + kSide; ++col) {
      sample.landmarks[static_cast<size_t>(row * sample.grid.cols + col)] = 1;
    }
  }
  sample.name = fmt::format("{} scene {}", training ? "training" : "test", index);
  return sample;
}

}  // namespace foci::vision
