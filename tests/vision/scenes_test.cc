// Scenes: the digit is whole and where the landmarks say, nothing crosses from test to training,
// and scene i is the same scene whoever asks, whenever.
#include "foci/vision/scenes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "foci/core/threads.h"
#include "foci/vision/digits.h"

namespace foci::vision {
namespace {

bool same(const Sample& a, const Sample& b) {
  return a.picture.pixels.shape() == b.picture.pixels.shape() && a.label == b.label &&
         a.landmarks == b.landmarks &&
         std::memcmp(a.picture.pixels.raw(), b.picture.pixels.raw(), a.picture.pixels.nbytes()) ==
             0;
}

uint8_t tone(uint8_t ink) {
  return static_cast<uint8_t>(255 * (ink / 16.0) + 0.5);
}

// Where the digit lies whole, if anywhere: {top, left}.
std::vector<std::pair<int64_t, int64_t>> places_of(const Sample& scene, const Digit& digit) {
  std::vector<std::pair<int64_t, int64_t>> places;
  const Tensor& pixels = scene.picture.pixels;
  for (int64_t top = 0; top + 8 <= pixels.dim(0); ++top) {
    for (int64_t left = 0; left + 8 <= pixels.dim(1); ++left) {
      bool whole = true;
      for (int i = 0; i < 64 && whole; ++i) {
        whole = pixels.data<uint8_t>()[(top + i / 8) * pixels.dim(1) + left + i % 8] ==
                tone(digit.ink[i]);
      }
      if (whole) places.emplace_back(top, left);
    }
  }
  return places;
}

TEST(Scenes, TheDigitIsWholeAndItsPatchesAreTheLandmarks) {
  for (const bool anywhere : {false, true}) {
    SceneOptions options;
    options.anywhere = anywhere;
    const Scenes scenes(options);
    int off_grid = 0;
    for (int64_t i = 0; i < 300; ++i) {
      const Sample scene = scenes.get(Split::test, i);
      const Digit& digit = digits()[scene.source];
      ASSERT_EQ(digit.label, scene.label);
      const auto places = places_of(scene, digit);
      ASSERT_EQ(places.size(), 1u) << "scene " << i;
      const auto [top, left] = places[0];
      off_grid += top % 4 != 0 || left % 4 != 0;
      ASSERT_EQ(std::ssize(scene.landmarks), scene.grid.tokens());
      for (int64_t row = 0; row < scene.grid.rows; ++row) {
        for (int64_t col = 0; col < scene.grid.cols; ++col) {
          const bool overlaps =
              4 * row < top + 8 && 4 * row + 4 > top && 4 * col < left + 8 && 4 * col + 4 > left;
          ASSERT_EQ(scene.landmarks[row * scene.grid.cols + col], overlaps ? 1 : 0)
              << "scene " << i << " patch " << row << ", " << col;
        }
      }
    }
    if (anywhere) {
      EXPECT_GT(off_grid, 200);
    } else {
      EXPECT_EQ(off_grid, 0);
    }
  }
}

TEST(Scenes, SizesAspectsPlacesAndLabelsAllOccur) {
  const Scenes scenes;
  std::set<std::pair<int64_t, int64_t>> sizes;
  std::map<int64_t, int> labels;
  std::set<int64_t> corners;
  for (int64_t i = 0; i < 2000; ++i) {
    const Sample scene = scenes.get(Split::train, i);
    const int64_t h = scene.picture.height(), w = scene.picture.width();
    ASSERT_TRUE(h >= 16 && h <= 32 && h % 4 == 0 && w >= 16 && w <= 32 && w % 4 == 0);
    ASSERT_EQ(scene.grid, (Grid{h / 4, w / 4}));
    sizes.insert({h, w});
    ++labels[scene.label];
    for (size_t t = 0; t < scene.landmarks.size(); ++t) {
      if (scene.landmarks[t] != 1) continue;
      if (h == 16 && w == 16) corners.insert(static_cast<int64_t>(t));
      break;
    }
  }
  EXPECT_EQ(sizes.size(), 25u);
  EXPECT_EQ(labels.size(), 10u);
  for (const auto& [label, n] : labels) EXPECT_NEAR(n, 200, 70) << label;
  EXPECT_EQ(corners.size(), 9u);  // all places of a 2×2 digit on a 4×4 grid
}

TEST(Scenes, ArePureFunctions) {
  const Scenes scenes;
  const Scenes twin;
  std::vector<Sample> forwards;
  for (int64_t i = 0; i < 40; ++i) forwards.push_back(scenes.get(Split::train, i, 3));
  for (int64_t i = 39; i >= 0; --i) {
    EXPECT_TRUE(same(forwards[i], twin.get(Split::train, i, 3))) << i;
  }
  const int before = num_threads();
  for (const int threads : {1, 2, 5}) {
    set_num_threads(threads);
    const std::vector<Sample> all = training_samples(scenes, 1, 2, 8);  // scenes 16 to 23, epoch 0
    for (int64_t i = 0; i < 8; ++i) {
      EXPECT_TRUE(same(all[i], scenes.get(Split::train, 16 + i))) << i;
    }
  }
  set_num_threads(before);
}

TEST(Scenes, SeedSplitIndexAndEpochAllMatter) {
  const Scenes scenes;
  SceneOptions options;
  options.seed = 2;
  const Scenes others(options);
  const Sample scene = scenes.get(Split::train, 5);
  EXPECT_FALSE(same(scene, scenes.get(Split::train, 6)));
  EXPECT_FALSE(same(scene, scenes.get(Split::test, 5)));
  EXPECT_FALSE(same(scene, scenes.get(Split::train, 5, 1)));
  EXPECT_FALSE(same(scene, others.get(Split::train, 5)));
  EXPECT_TRUE(same(scenes.get(Split::test, 5), scenes.get(Split::test, 5, 1)));
}

TEST(Scenes, TargetsComeFromTheirSplit) {
  const Scenes scenes;
  for (const Split split : {Split::train, Split::test}) {
    const std::vector<int64_t>& pool = digit_indices(split);
    const std::set<int64_t> allowed(pool.begin(), pool.end());
    std::set<int64_t> seen;
    for (int64_t i = 0; i < 3000; ++i) {
      const int64_t source = scenes.get(split, i).source;
      ASSERT_TRUE(allowed.count(source) == 1) << source;
      seen.insert(source);
    }
    EXPECT_GT(seen.size(), pool.size() / 2);
  }
}

// Whether what can be seen of the 5×5 window at (y0, x0), outside the digit, is a cut of a digit
// of the pool.
bool is_cut_of(const std::vector<int64_t>& pool, const Sample& scene, int64_t y0, int64_t x0) {
  const int64_t width = scene.picture.width();
  const uint8_t* pixels = scene.picture.pixels.data<uint8_t>();
  for (const int64_t which : pool) {
    for (int cut = 0; cut < 16; ++cut) {
      bool equal = true;
      for (int k = 0; k < 25 && equal; ++k) {
        const int64_t y = y0 + k / 5, x = x0 + k % 5;
        if (scene.landmarks[y / 4 * scene.grid.cols + x / 4] != 0) continue;
        const int at = (cut / 4 + k / 5) * 8 + cut % 4 + k % 5;
        equal = pixels[y * width + x] == tone(digits()[which].ink[at]);
      }
      if (equal) return true;
    }
  }
  return false;
}

// A single piece of clutter on each canvas: whatever ink lies outside the digit must be a cut of a
// digit of the same split, and (as pieces tell digits apart) hardly ever of the other.
TEST(Scenes, ClutterComesFromItsSplit) {
  SceneOptions options;
  options.clutter = 0.25;  // one piece on 16×16 pixels
  options.max_side = 16;
  options.min_piece = options.max_piece = 5;
  options.augmentation = Augmentation::none();
  const Scenes scenes(options);
  for (const Split split : {Split::train, Split::test}) {
    const Split other = split == Split::train ? Split::test : Split::train;
    int seen = 0, of_other = 0;
    for (int64_t i = 0; i < 60; ++i) {
      const Sample scene = scenes.get(split, i);
      const uint8_t* pixels = scene.picture.pixels.data<uint8_t>();
      const auto ink = [&](int64_t y, int64_t x) -> int {
        return scene.landmarks[y / 4 * 4 + x / 4] != 0 ? 0 : pixels[y * 16 + x];
      };
      int inked = 0;
      for (int k = 0; k < 256; ++k) inked += ink(k / 16, k % 16) > 0;
      if (inked < 8) continue;  // mostly behind the digit
      ++seen;
      bool found = false, elsewhere = false;
      for (int64_t y0 = 0; y0 + 5 <= 16; ++y0) {
        for (int64_t x0 = 0; x0 + 5 <= 16; ++x0) {
          int inside = 0;
          for (int k = 0; k < 25; ++k) inside += ink(y0 + k / 5, x0 + k % 5) > 0;
          if (inside != inked) continue;
          found = found || is_cut_of(digit_indices(split), scene, y0, x0);
          elsewhere = elsewhere || is_cut_of(digit_indices(other), scene, y0, x0);
        }
      }
      EXPECT_TRUE(found) << "scene " << i;
      of_other += elsewhere;
    }
    EXPECT_GT(seen, 20);
    EXPECT_LT(of_other, seen / 5);
  }
}

TEST(Scenes, FormatHasTheMeanAndDeviationOfTheScenes) {
  const Scenes scenes;
  double sum = 0, square = 0, n = 0;
  for (int64_t i = 0; i < 2000; ++i) {
    const Image picture = scenes.get(Split::train, i).picture;
    for (const uint8_t v : picture.pixels.span<uint8_t>()) {
      sum += v / 255.0;
      square += v / 255.0 * (v / 255.0);
      ++n;
    }
  }
  EXPECT_NEAR(scenes.format().mean, sum / n, 0.01);
  EXPECT_NEAR(scenes.format().deviation, std::sqrt(square / n - sum / n * (sum / n)), 0.01);
}

TEST(Scenes, AugmentationChangesTrainingOnlyAndCanBeTurnedOff) {
  SceneOptions options;
  options.augmentation = Augmentation::none();
  const Scenes still(options);
  for (int64_t i = 0; i < 50; ++i) {
    const Sample scene = still.get(Split::train, i);
    EXPECT_EQ(places_of(scene, digits()[scene.source]).size(), 1u) << i;
  }
  const Scenes moving;
  int unchanged = 0;
  for (int64_t i = 0; i < 50; ++i) {
    const Sample scene = moving.get(Split::train, i);
    unchanged += !places_of(scene, digits()[scene.source]).empty();
    EXPECT_TRUE(same(moving.get(Split::test, i), still.get(Split::test, i)));
  }
  EXPECT_EQ(unchanged, 0);
}

TEST(Scenes, OptionsThatMakeNoSenseAreRefused) {
  const auto refused = [](auto change) {
    SceneOptions options;
    change(options);
    EXPECT_THROW(Scenes{options}, ArgumentError);
  };
  refused([](SceneOptions& o) { o.patch = 3; });
  refused([](SceneOptions& o) { o.patch = 0; });
  refused([](SceneOptions& o) { o.min_side = 18; });
  refused([](SceneOptions& o) { o.min_side = 4; });
  refused([](SceneOptions& o) { o.max_side = 12; });
  refused([](SceneOptions& o) { o.max_side = 1 << 20; });
  refused([](SceneOptions& o) { o.clutter = -1; });
  refused([](SceneOptions& o) { o.clutter = std::nan(""); });
  refused([](SceneOptions& o) { o.max_piece = 8; });
  refused([](SceneOptions& o) { o.min_piece = 6; });
  refused([](SceneOptions& o) { o.augmentation.rotation = -1; });
  refused([](SceneOptions& o) { o.augmentation.noise = std::nan(""); });
  EXPECT_THROW(Scenes().get(Split::train, -1), ArgumentError);
}

}  // namespace
}  // namespace foci::vision
