// A report with made-up numbers, the size of a demo's, for the tests of the page.
#pragma once

#include <algorithm>
#include <cmath>

#include "foci/core/rng.h"
#include "foci/report/report.h"

namespace foci::report {

// A scene of `height` × `width` pixels in patches of 4, a ring drawn somewhere in it, and maps that
// look at it more in later layers.
inline Scene sample_scene(Rng& rng, int64_t height, int64_t width, int64_t layers, int64_t heads,
                          int64_t channels) {
  constexpr int64_t kPatch = 4;
  Scene s;
  s.rows = height / kPatch;
  s.columns = width / kPatch;
  s.layers = layers;
  s.heads = heads;
  s.pixels = Tensor::zeros({height, width, channels}, DType::u8);
  const int64_t top = rng.below(s.rows - 1), left = rng.below(s.columns - 1);
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      const double dy = static_cast<double>(y - (top + 1) * kPatch) + 0.5;
      const double dx = static_cast<double>(x - (left + 1) * kPatch) + 0.5;
      const double ring = 255 * std::exp(-std::pow(std::hypot(dy, dx) - 2.6, 2));
      for (int64_t c = 0; c < channels; ++c) {
        const double noise = 60 * rng.uniform() * static_cast<double>(c + 1);
        s.pixels.at<uint8_t>(y, x, c) = static_cast<uint8_t>(std::min(255.0, ring + noise));
      }
    }
  }
  s.landmark.assign(static_cast<size_t>(s.rows * s.columns), 0);
  for (int64_t r = top; r < top + 2; ++r) {
    for (int64_t c = left; c < left + 2; ++c)
      s.landmark[static_cast<size_t>(r * s.columns + c)] = 1;
  }
  for (int64_t l = 0; l < layers; ++l) {
    const double focus = static_cast<double>(l) / static_cast<double>(layers);
    for (int64_t h = 0; h < heads; ++h) {
      for (uint8_t marked : s.landmark) {
        s.attention.push_back(static_cast<float>(std::exp(2 * rng.uniform() + 3 * focus * marked)));
      }
    }
  }
  s.truth = rng.below(10);
  s.predicted = *s.truth;
  s.probabilities.assign(10, 0.02);
  s.probabilities[static_cast<size_t>(s.predicted)] = 0.82;
  return s;
}

inline Report sample_report(int64_t scenes = 12, int64_t layers = 4, int64_t heads = 4) {
  Rng rng(1);
  Report r;
  r.title = "A transformer learned to read digits in clutter";
  r.summary = "A sample page with made-up numbers: a model of 4 layers × 4 heads.";
  r.numbers = {{"right on unseen scenes", "91.2 %", "95 % interval 89.4 – 92.8 %, 1,000 scenes"},
               {"looks at the digit", "93.0 %", "untrained 14.1 %, chance 12.4 %"},
               {"training", "61 s", "1,204 steps, 51 ms a step"},
               {"parameters", "203,146", "4 layers, 4 heads, width 64"}};
  for (int i = 0; i < 10; ++i) r.classes.push_back(std::to_string(i));
  for (int64_t step = 1; step <= 1200; ++step) {
    const double t = static_cast<double>(step) / 1200;
    const double loss = 0.25 + 2.1 * std::exp(-4 * t) + 0.15 * rng.normal() * std::exp(-t);
    r.steps.push_back({step, loss, std::clamp(1 - loss / 2.6 + 0.03 * rng.normal(), 0.0, 1.0),
                       1e-3 * std::min(1.0, t * 12) * (1 + std::cos(3.14159 * t)),
                       1 + 0.5 * std::exp(-3 * t) + 0.2 * std::abs(rng.normal())});
    if (step % 100 == 0) {
      r.evaluations.push_back({step, loss + 0.1, std::clamp(0.95 - loss / 2.8, 0.0, 1.0)});
    }
  }
  for (int64_t i = 0; i < 10; ++i) {
    for (int64_t j = 0; j < 10; ++j) {
      r.confusion.counts.push_back(i == j ? 80 + rng.below(15) : rng.below(3));
    }
  }
  r.reading = "how much attention the patch received from all patches, averaged";
  const auto side = [&] { return 16 + 4 * rng.below(5); };
  for (int64_t i = 0; i < scenes; ++i) {
    const int64_t height = side();
    r.gallery.push_back(sample_scene(rng, height, side(), layers, heads, i % 4 == 3 ? 3 : 1));
    r.gallery.back().name = "scene " + std::to_string(i + 1);
    r.mistakes.push_back(sample_scene(rng, side(), height, layers, heads, 1));
    r.mistakes.back().name = "mistake " + std::to_string(i + 1);
    r.mistakes.back().predicted = (*r.mistakes.back().truth + 1) % 10;
    std::rotate(r.mistakes.back().probabilities.begin(), r.mistakes.back().probabilities.end() - 1,
                r.mistakes.back().probabilities.end());
  }
  r.mistake_count = 88;
  r.unseen_count = 1000;
  r.entropy = {layers, heads, {}, {}, std::log(64.0)};
  r.hits.per_head = {layers, heads, {}, {}, 1};
  for (int64_t i = 0; i < layers * heads; ++i) {
    r.entropy.value.push_back(1 + 2.5 * rng.uniform());
    r.entropy.reference.push_back(3.8 + 0.3 * rng.uniform());
    r.hits.per_head.value.push_back(rng.uniform());
    r.hits.per_head.reference.push_back(0.1 + 0.1 * rng.uniform());
  }
  r.hits.lines = {{"trained, all heads together", {0.93, 0.914, 0.945, 1000}, true},
                  {"trained, best head", {0.961, 0.948, 0.972, 1000}, true},
                  {"untrained, all heads together", {0.141, 0.12, 0.163, 1000}, false}};
  r.hits.chance = 0.124;
  r.provenance = {{"program", "foci 0.1.0"},
                  {"model (SHA-256)", std::string(64, 'a')},
                  {"seed", "1"},
                  {"SIMD target", "avx2"},
                  {"threads", "2"},
                  {"data", "1,797 handwritten digits, E. Alpaydin and C. Kaynak, CC BY 4.0"}};
  return r;
}

}  // namespace foci::report
