// Scenes as SVG: the picture once, and a small PNG of heat for each head.
#include "foci/report/picture.h"

#include <algorithm>
#include <cmath>

#include "foci/io/image.h"
#include "foci/report/text.h"

namespace foci::report {
namespace {

constexpr int kWidth = 600;

// Where a picture stands in the drawing; the height follows from its aspect.
struct Box {
  double x, y, width, height;
};

Tensor shrunk(const Tensor& pixels) {
  const int64_t side = std::max(pixels.dim(0), pixels.dim(1));
  if (side <= kMaxPictureSide) return pixels.contiguous();
  return resize(pixels, std::max<int64_t>(1, pixels.dim(0) * kMaxPictureSide / side),
                std::max<int64_t>(1, pixels.dim(1) * kMaxPictureSide / side));
}

// The largest box of the scene's aspect with this width whose height is at most max_height.
Box box_at(const Scene& scene, double x, double y, double width, double max_height) {
  const double aspect =
      static_cast<double>(scene.pixels.dim(0)) / static_cast<double>(scene.pixels.dim(1));
  Box box{x, y, width, width * aspect};
  if (box.height > max_height) {
    box.height = max_height;
    box.width = max_height / aspect;
    box.x += (width - box.width) / 2;
  }
  return box;
}

std::string opened(const Scene& scene, const Box& box) {
  return fmt::format(
      "<svg x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" viewBox=\"0 0 {} {}\" "
      "preserveAspectRatio=\"none\" overflow=\"visible\">",
      box.x, box.y, box.width, box.height, scene.columns, scene.rows);
}

std::string original(const Scene& scene, const std::string& id, const Box& box) {
  return opened(scene, box) + original_marks(id) + "</svg>";
}

std::string overlay(const Scene& scene, const float* heat, const std::string& id, const Box& box,
                    const std::string& title) {
  return opened(scene, box) + fmt::format("<title>{}</title>", escape(title)) +
         heat_marks(scene, heat, id) + "</svg>";
}

std::string text(const char* classes, double x, double y, const std::string& raw) {
  return fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", classes, x, y,
                     escape(raw));
}

// "true: 7", "✓ said: 7", "98 % sure", one under the other from (x, y) on; each as long as `limit`
// characters at most.
std::string verdict(const Scene& scene, const std::vector<std::string>& classes, double x, double y,
                    size_t limit) {
  constexpr double kLine = 17;
  const auto line = [&](const char* kind, const std::string& raw) {
    std::string out = text(kind, x, y, cut_middle(raw, limit));
    y += kLine;
    return out;
  };
  const std::string& said = classes[static_cast<size_t>(scene.predicted)];
  std::string out;
  if (scene.truth) {
    out += line("label", "true: " + classes[static_cast<size_t>(*scene.truth)]);
    out += *scene.truth == scene.predicted ? line("label good", "✓ said: " + said)
                                           : line("label bad", "✗ said: " + said);
  } else {
    out += line("label strong", "says: " + said);
  }
  if (!scene.probabilities.empty()) out += line("tick", confidence(scene) + " sure");
  return out;
}

std::string csv_of(const Scene& scene) {
  std::vector<std::string> header{"layer", "head"};
  const int64_t patches = scene.rows * scene.columns;
  for (int64_t p = 0; p < patches; ++p) {
    header.push_back(fmt::format("row{}_col{}", p / scene.columns + 1, p % scene.columns + 1));
  }
  std::string out = csv_line(header);
  if (!scene.landmark.empty()) {
    std::vector<std::string> line{"landmark", ""};
    for (uint8_t flag : scene.landmark) line.push_back(flag ? "1" : "0");
    out += csv_line(line);
  }
  for (int64_t i = 0; i < scene.layers * scene.heads; ++i) {
    std::vector<std::string> line{std::to_string(i / scene.heads + 1),
                                  std::to_string(i % scene.heads + 1)};
    for (int64_t p = 0; p < patches; ++p) {
      line.push_back(fmt::format("{:.4g}", scene.attention[static_cast<size_t>(i * patches + p)]));
    }
    out += csv_line(line);
  }
  return out;
}

}  // namespace

std::string confidence(const Scene& scene) {
  if (scene.probabilities.empty()) return "";
  return percent(scene.probabilities[static_cast<size_t>(scene.predicted)], 0);
}

std::string describe(const Scene& scene, const std::vector<std::string>& classes) {
  std::string out = scene.name + ": ";
  if (scene.truth) out += "true " + classes[static_cast<size_t>(*scene.truth)] + ", ";
  out += "predicted " + classes[static_cast<size_t>(scene.predicted)];
  return scene.probabilities.empty() ? out : out + " (" + confidence(scene) + ")";
}

std::string scene_definitions(const Scene& scene, const std::string& id) {
  const std::string path = outline_path(scene.landmark, scene.rows, scene.columns);
  return fmt::format(
      "<defs><image id=\"{0}-p\" class=\"px\" width=\"{1}\" height=\"{2}\" "
      "preserveAspectRatio=\"none\" href=\"{3}\"/><g id=\"{0}-o\"><path class=\"under\" "
      "d=\"{4}\"/><path class=\"over\" d=\"{4}\"/></g></defs>",
      id, scene.columns, scene.rows, data_uri("image/png", encode_png(shrunk(scene.pixels))), path);
}

std::string original_marks(const std::string& id) {
  return fmt::format("<use href=\"#{0}-p\"/><use href=\"#{0}-o\"/>", id);
}

std::string heat_marks(const Scene& scene, const float* heat, const std::string& id) {
  const int64_t top = top_patch(heat, scene.rows * scene.columns);
  // About the frame's own width at the sizes of the page.
  const double off = 0.016 * static_cast<double>(std::max(scene.rows, scene.columns));
  const double side = 1 + 2 * off;
  const std::string frame =
      fmt::format("x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\"",
                  static_cast<double>(top % scene.columns) - off,
                  static_cast<double>(top / scene.columns) - off, side, side);
  return fmt::format(
      "<use href=\"#{0}-p\"/><rect class=\"veil\" width=\"{1}\" height=\"{2}\"/><image "
      "class=\"px\" width=\"{1}\" height=\"{2}\" preserveAspectRatio=\"none\" href=\"{3}\"/><use "
      "href=\"#{0}-o\"/><rect class=\"ring\" {4}/><rect class=\"top\" {4}/>",
      id, scene.columns, scene.rows,
      data_uri("image/png", encode_png(heat_pixels(heat, scene.rows, scene.columns))), frame);
}

void check_scene(const Scene& scene, size_t classes, const std::string& what) {
  require(scene.pixels.defined() && scene.pixels.rank() == 3 && scene.pixels.dtype() == DType::u8 &&
              (scene.pixels.dim(2) == 1 || scene.pixels.dim(2) == 3) && scene.pixels.numel() > 0,
          "{}: pixels must be [height, width, 1 or 3] uint8, got {}", what,
          scene.pixels.defined() ? scene.pixels.shape().str() : "nothing");
  require(scene.rows >= 1 && scene.columns >= 1 && scene.layers >= 1 && scene.heads >= 1,
          "{}: {} × {} patches, {} layers, {} heads; each must be 1 or more", what, scene.rows,
          scene.columns, scene.layers, scene.heads);
  const size_t patches = static_cast<size_t>(scene.rows * scene.columns);
  const size_t wanted = patches * static_cast<size_t>(scene.layers * scene.heads);
  require(scene.attention.size() == wanted,
          "{}: {} attention values for {} layers × {} heads × {} × {} patches", what,
          scene.attention.size(), scene.layers, scene.heads, scene.rows, scene.columns);
  require(scene.landmark.empty() || scene.landmark.size() == patches,
          "{}: {} landmark flags for {} × {} patches", what, scene.landmark.size(), scene.rows,
          scene.columns);
  for (float a : scene.attention) {
    require(std::isfinite(a) && a >= 0, "{}: attention holds {}; weights are finite and ≥ 0", what,
            a);
  }
  require(scene.predicted >= 0 && static_cast<size_t>(scene.predicted) < classes,
          "{}: predicted class {} of {}", what, scene.predicted, classes);
  require(!scene.truth || (*scene.truth >= 0 && static_cast<size_t>(*scene.truth) < classes),
          "{}: true class {} of {}", what, scene.truth.value_or(0), classes);
  require(scene.probabilities.empty() || scene.probabilities.size() == classes,
          "{}: {} probabilities for {} classes", what, scene.probabilities.size(), classes);
}

Tensor heat_pixels(const float* heat, int64_t rows, int64_t columns) {
  Tensor out = Tensor::empty({rows, columns, 4}, DType::u8);
  const float largest = *std::max_element(heat, heat + rows * columns);
  uint8_t* pixel = out.data<uint8_t>();
  for (int64_t p = 0; p < rows * columns; ++p, pixel += 4) {
    const double t = largest > 0 ? heat[p] / largest : 0.0;
    // Amber (255, 190, 11) → vermilion (251, 86, 7) → crimson (208, 0, 60): lightness falls
    // steadily, so the order is seen without telling the hues apart.
    const auto blend = [t](double a, double b, double c) {
      return t < 0.5 ? a + (b - a) * 2 * t : b + (c - b) * (2 * t - 1);
    };
    pixel[0] = static_cast<uint8_t>(std::lround(blend(255, 251, 208)));
    pixel[1] = static_cast<uint8_t>(std::lround(blend(190, 86, 0)));
    pixel[2] = static_cast<uint8_t>(std::lround(blend(11, 7, 60)));
    pixel[3] = static_cast<uint8_t>(std::lround(215 * std::pow(t, 0.7)));
  }
  return out;
}

int64_t top_patch(const float* heat, int64_t patches) {
  return std::max_element(heat, heat + patches) - heat;
}

std::string outline_path(const std::vector<uint8_t>& landmark, int64_t rows, int64_t columns) {
  if (landmark.empty()) return "";
  const auto inside = [&](int64_t r, int64_t c) {
    return r >= 0 && r < rows && c >= 0 && c < columns &&
           landmark[static_cast<size_t>(r * columns + c)] != 0;
  };
  std::string d;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      if (!inside(r, c)) continue;
      if (!inside(r - 1, c)) d += fmt::format("M{} {}h1", c, r);
      if (!inside(r + 1, c)) d += fmt::format("M{} {}h1", c, r + 1);
      if (!inside(r, c - 1)) d += fmt::format("M{} {}v1", c, r);
      if (!inside(r, c + 1)) d += fmt::format("M{} {}v1", c + 1, r);
    }
  }
  return d;
}

std::vector<float> last_layer_mean(const Scene& scene) {
  const size_t patches = static_cast<size_t>(scene.rows * scene.columns);
  std::vector<float> mean(patches, 0.0f);
  for (int64_t h = 0; h < scene.heads; ++h) {
    const float* map =
        &scene.attention[static_cast<size_t>((scene.layers - 1) * scene.heads + h) * patches];
    double sum = 0;
    for (size_t p = 0; p < patches; ++p) sum += map[p];
    const double factor = sum > 0 ? 1 / (sum * static_cast<double>(scene.heads)) : 0;
    for (size_t p = 0; p < patches; ++p) mean[p] += static_cast<float>(map[p] * factor);
  }
  return mean;
}

Chart draw_scene(const Scene& scene, const std::vector<std::string>& classes,
                 const std::string& id) {
  constexpr double kHeader = 26, kGap = 6, kLabel = 20;
  // Few heads stand beside the original; many take the whole width below it.
  const bool beside = scene.heads <= 6;
  const double original_width = beside ? 128 : 170;
  const double left = (beside ? original_width + 14 : 0) + kLabel;
  const double pitch = (kWidth + kGap - left) / static_cast<double>(scene.heads);
  const double tile = pitch - std::min(kGap, pitch / 8);
  const Box first = box_at(scene, 0, kHeader, original_width, 210);
  const Box unit = box_at(scene, 0, 0, tile, tile * 1.6);
  const double row = unit.height + kGap;
  const double grid_top = beside ? kHeader : kHeader + first.height + 34;

  Chart out;
  out.width = kWidth;
  out.title = describe(scene, classes);
  out.description =
      fmt::format("Attention of {} in {} laid over the picture.",
                  counted(scene.heads, "head", "heads"), counted(scene.layers, "layer", "layers"));
  out.csv = csv_of(scene);
  out.body = scene_definitions(scene, id);
  out.body += text("tick", 0, 12, cut_middle(scene.name, beside ? 22 : 60));
  out.body += original(scene, id, first);
  const double words_y = beside ? kHeader + first.height + 20 : kHeader + 14;
  out.body += verdict(scene, classes, beside ? 0 : original_width + 14, words_y, 18);
  // What the heads of the last layer look at together: below the words, or right of them.
  const double words = (scene.truth ? 17 : 0) + 17 + (scene.probabilities.empty() ? 0 : 17);
  const Box together = beside
                           ? box_at(scene, 0, words_y + words + 14, original_width, 210)
                           : box_at(scene, kWidth - original_width, kHeader, original_width, 210);
  out.body += text("tick", together.x, together.y - 7, "last layer, mean");
  out.body +=
      overlay(scene, last_layer_mean(scene).data(), id, together, "mean of the last layer's heads");
  for (int64_t h = 0; h < scene.heads; ++h) {
    out.body += text("tick mid", left + pitch * static_cast<double>(h) + tile / 2, grid_top - 8,
                     tile >= 50 ? fmt::format("head {}", h + 1) : std::to_string(h + 1));
  }
  const int64_t patches = scene.rows * scene.columns;
  for (int64_t l = 0; l < scene.layers; ++l) {
    const double y = grid_top + row * static_cast<double>(l);
    const double middle = y + unit.height / 2;
    out.body += fmt::format(
        "<text class=\"tick mid\" transform=\"translate({:.1f} {:.1f}) rotate(-90)\">{}</text>",
        left - 8, middle,
        unit.height >= 50 ? fmt::format("layer {}", l + 1) : std::to_string(l + 1));
    for (int64_t h = 0; h < scene.heads; ++h) {
      const Box box = box_at(scene, left + pitch * static_cast<double>(h), y, tile, tile * 1.6);
      out.body +=
          overlay(scene, &scene.attention[static_cast<size_t>((l * scene.heads + h) * patches)], id,
                  box, fmt::format("layer {}, head {}", l + 1, h + 1));
    }
  }
  const double grid_end = grid_top + row * static_cast<double>(scene.layers);
  out.height = static_cast<int>(std::ceil(std::max(grid_end, together.y + together.height))) + 4;
  return out;
}

Chart draw_mistake(const Scene& scene, const std::vector<std::string>& classes,
                   const std::string& id) {
  constexpr double kHeader = 26, kTile = 140, kWide = 296;
  const std::vector<float> mean = last_layer_mean(scene);
  const Box left = box_at(scene, 0, kHeader, kTile, 210);
  const Box right = box_at(scene, kWide - kTile, kHeader, kTile, 210);
  Chart out;
  out.width = static_cast<int>(kWide);
  out.height = static_cast<int>(kHeader + left.height + 60);
  out.title = describe(scene, classes);
  out.description = "The picture, and the mean attention of the last layer's heads over it.";
  out.csv = csv_of(scene);
  out.body = scene_definitions(scene, id) + text("tick", 0, 12, cut_middle(scene.name, 22)) +
             text("tick", kWide - kTile, 12, "last layer, mean") + original(scene, id, left) +
             overlay(scene, mean.data(), id, right, "mean of the last layer's heads") +
             verdict(scene, classes, 0, kHeader + left.height + 20, 40);
  return out;
}

}  // namespace foci::report
