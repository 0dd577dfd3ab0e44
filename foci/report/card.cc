// Tiles are small SVGs of their own, which the style sheet lays out; words are words of the page.
#include "foci/report/card.h"

#include <algorithm>

#include "foci/report/picture.h"
#include "foci/report/text.h"

namespace foci::report {
namespace {

// Longer names are cut in the middle; the whole stands in the title that hovering shows.
constexpr size_t kLongestName = 90;
constexpr double kTallest = 1.6;  // height of a tile over the width that it is given
constexpr double kTallestListed = 1;

std::string tile(const Scene& scene, const std::string& marks, const std::string& label,
                 const std::string& title, double tallest = kTallest) {
  const double width = static_cast<double>(scene.pixels.dim(1));
  const double height = static_cast<double>(scene.pixels.dim(0));
  const double share = std::min(1.0, tallest * width / height);
  return fmt::format(
      "<div class=\"tile\"><svg viewBox=\"0 0 {} {}\" preserveAspectRatio=\"none\" "
      "style=\"aspect-ratio:{}/{};width:{:.1f}%\" role=\"img\" aria-label=\"{}\"><title>{}</title>"
      "{}</svg><span>{}</span></div>",
      scene.columns, scene.rows, width, height, 100 * share, escape(title), escape(title), marks,
      escape(label));
}

// The picture itself, with what the tiles behind it refer to.
std::string original(const Scene& scene, const std::string& id) {
  return tile(scene, scene_definitions(scene, id) + original_marks(id), "the picture",
              "the picture");
}

std::string verdict(const Scene& scene, const std::vector<std::string>& classes) {
  const std::string said = escape(classes[static_cast<size_t>(scene.predicted)]);
  std::string out;
  if (!scene.truth) {
    out = fmt::format("says: <b>{}</b>", said);
  } else {
    const bool right = *scene.truth == scene.predicted;
    out = fmt::format("true: <b>{}</b> <b class=\"{}\">{} said: {}</b>",
                      escape(classes[static_cast<size_t>(*scene.truth)]), right ? "good" : "bad",
                      right ? "✓" : "✗", said);
  }
  if (!scene.probabilities.empty()) {
    out += fmt::format(" <span class=\"soft\">{} sure</span>", confidence(scene));
  }
  return out;
}

std::string head_of(const Scene& scene, const std::vector<std::string>& classes) {
  return fmt::format("<p class=\"name\" title=\"{}\">{}</p><p class=\"verdict\">{}</p>",
                     escape(scene.name), escape(cut_middle(scene.name, kLongestName)),
                     verdict(scene, classes));
}

std::string together(const Scene& scene, const std::string& id, const char* label) {
  return tile(scene, heat_marks(scene, last_layer_mean(scene).data(), id), label,
              "mean of the last layer's heads");
}

}  // namespace

std::string scene_card(const Scene& scene, const std::vector<std::string>& classes,
                       const std::string& id) {
  std::string out = head_of(scene, classes) + "<div class=\"looks\"><div class=\"whole\">" +
                    original(scene, id) + together(scene, id, "last layer, mean") +
                    "</div><div class=\"layers\">";
  const int64_t patches = scene.rows * scene.columns;
  for (int64_t l = 0; l < scene.layers; ++l) {
    out += fmt::format(
        "<div class=\"layer\"><span>layer {}</span><div class=\"heads\" "
        "style=\"--heads:{}\">",
        l + 1, scene.heads);
    for (int64_t h = 0; h < scene.heads; ++h) {
      const float* heat = &scene.attention[static_cast<size_t>((l * scene.heads + h) * patches)];
      out += tile(scene, heat_marks(scene, heat, id), fmt::format("head {}", h + 1),
                  fmt::format("layer {}, head {}", l + 1, h + 1));
    }
    out += "</div></div>";
  }
  return out + "</div></div>";
}

std::string mistake_card(const Scene& scene, const std::vector<std::string>& classes,
                         const std::string& id) {
  return head_of(scene, classes) + "<div class=\"pair\">" + original(scene, id) +
         together(scene, id, "last layer") + "</div>";
}

std::string index_entry(const Scene& scene, const std::vector<std::string>& classes,
                        const std::string& id) {
  constexpr size_t kShort = 24;
  return fmt::format("<li><a href=\"#{}\" title=\"{}\">{}</a></li>", id,
                     escape(describe(scene, classes)),
                     tile(scene, original_marks(id), cut_middle(scene.name, kShort),
                          describe(scene, classes), kTallestListed));
}

}  // namespace foci::report
