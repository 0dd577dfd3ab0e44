// Charts about heads and classes: landmark hit rates, a bar for each head, the confusion matrix.
#include <algorithm>
#include <cmath>

#include "foci/report/chart.h"
#include "foci/report/text.h"

namespace foci::report {
namespace {

constexpr int kWidth = 420;

std::string text(const char* classes, double x, double y, const std::string& raw) {
  return fmt::format("<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>", classes, x, y,
                     escape(raw));
}

// A label in lines of at most `limit` characters, broken between words; a word longer than a line
// loses its middle, and what two lines do not hold is cut.
std::vector<std::string> wrapped(const std::string& label, size_t limit) {
  std::vector<std::string> lines(1);
  for (size_t at = 0; at < label.size();) {
    const size_t end = std::min(label.size(), label.find(' ', at));
    const std::string word = cut_middle(label.substr(at, end - at), limit);
    at = end + 1;
    const bool fits = characters(lines.back()) + characters(word) + 1 <= limit;
    if (lines.back().empty()) {
      lines.back() = word;
    } else if (fits) {
      lines.back() += " " + word;
    } else if (lines.size() < 2) {
      lines.push_back(word);
    } else {
      lines.back() = cut_end(lines.back() + " " + word, limit);
      break;
    }
  }
  return lines;
}

}  // namespace

double HeadGrid::bound() const {
  double largest = full;
  for (const std::vector<double>* all : {&value, &reference}) {
    for (double v : *all) {
      if (std::isfinite(v)) largest = std::max(largest, v);
    }
  }
  return largest;
}

Chart draw_hits(const LandmarkHits& hits) {
  constexpr double kLeft = 12, kRight = 12, kRow = 46, kTop = 40, kSecondLine = 16;
  constexpr size_t kLabel = 48;  // characters beside the number
  double bottom = kTop;
  for (const LandmarkHits::Line& line : hits.lines) {
    bottom += kRow + kSecondLine * static_cast<double>(wrapped(line.label, kLabel).size() - 1);
  }
  const auto px = [](double share) { return kLeft + share * (kWidth - kLeft - kRight); };
  Chart out;
  out.width = kWidth;
  out.height = static_cast<int>(bottom) + 40;
  out.title = "Is the most-attended patch part of the digit?";
  out.description = "Landmark hit rates with 95 % intervals.";
  out.csv = csv_line({"what", "rate", "low", "high", "scenes", "independent"});
  out.body = text("title", 0, 16, "Landmark hit rate");
  for (int i = 0; i <= 4; ++i) {
    out.body +=
        fmt::format("<path class=\"axis\" d=\"M{:.1f} {:.1f}v5\"/>", px(i / 4.0), bottom - 4);
    const char* anchor = i == 0 ? "tick" : i == 4 ? "tick end" : "tick mid";
    out.body += text(anchor, px(i / 4.0), bottom + 16, percent(i / 4.0, 0));
  }
  double y = kTop;
  for (const LandmarkHits::Line& line : hits.lines) {
    const char* colour = line.trained ? "c0" : "c1";
    const std::vector<std::string> label = wrapped(line.label, kLabel);
    const double value_y = y + 6;
    for (size_t i = 0; i < label.size(); ++i) {
      if (i > 0) y += kSecondLine;
      out.body += text("label", kLeft, y + 6, label[i]);
    }
    if (!std::isnan(line.rate.value)) {
      out.body += text("label end strong", kWidth - kRight, value_y, percent(line.rate.value));
      out.body += fmt::format(
          "<path class=\"track\" d=\"M{0:.1f} {3:.1f}H{4:.1f}\"/>"
          "<path class=\"interval {5}\" d=\"M{1:.1f} {3:.1f}H{2:.1f}\"/>"
          "<circle class=\"dot {5}\" cx=\"{6:.1f}\" cy=\"{3:.1f}\" r=\"6\"/>",
          kLeft, px(std::isnan(line.rate.low) ? line.rate.value : line.rate.low),
          px(std::isnan(line.rate.high) ? line.rate.value : line.rate.high), y + 20,
          kWidth - kRight, colour, px(line.rate.value));
    }
    if (!std::isnan(hits.chance)) {
      out.body +=
          fmt::format("<path class=\"chance\" d=\"M{:.1f} {:.1f}v18\"/>", px(hits.chance), y + 11);
    }
    out.csv +=
        csv_line({line.label, fmt::format("{:.6g}", line.rate.value),
                  fmt::format("{:.6g}", line.rate.low), fmt::format("{:.6g}", line.rate.high),
                  std::to_string(line.rate.count), std::to_string(line.rate.independent)});
    y += kRow;
  }
  if (std::isnan(hits.chance)) return out;
  const bool right_half = hits.chance > 0.5;
  out.body += text(right_half ? "tick end" : "tick", px(hits.chance) + (right_half ? -5 : 5),
                   bottom + 32, "chance " + percent(hits.chance));
  out.body += fmt::format("<path class=\"chance\" d=\"M{0:.1f} {1:.1f}V{2:.1f}\"/>",
                          px(hits.chance), bottom + 22, bottom + 34);
  out.csv += csv_line({"chance", fmt::format("{:.6g}", hits.chance), "", "", "", ""});
  return out;
}

Chart draw_heads(const HeadGrid& grid, const std::string& title, const std::string& description,
                 bool as_percent) {
  const size_t cells = static_cast<size_t>(grid.layers * grid.heads);
  require(grid.layers >= 1 && grid.heads >= 1 && grid.value.size() == cells,
          "head grid: {} values for {} layers × {} heads", grid.value.size(), grid.layers,
          grid.heads);
  require(grid.reference.empty() || grid.reference.size() == cells,
          "head grid: {} reference values for {} layers × {} heads", grid.reference.size(),
          grid.layers, grid.heads);
  require(grid.full >= 0 && std::isfinite(grid.full),
          "head grid: a full bar stands for {}; give 0 or more", grid.full);
  const double bound = grid.bound();
  constexpr double kLeft = 56, kTop = 46, kGap = 4;
  const double pitch = (kWidth - kLeft) / static_cast<double>(grid.heads);
  const double cell = pitch - std::min(kGap, pitch / 5);
  const double row = std::clamp(pitch * 0.62, 26.0, 56.0);
  const bool numbers = cell >= 30;
  const double bar_top = numbers ? 15 : 0;  // the number stands above its bar
  const double bar_height = row - kGap - bar_top;
  Chart out;
  out.width = kWidth;
  out.height = static_cast<int>(kTop + row * static_cast<double>(grid.layers) + 6);
  out.title = title;
  out.description = description;
  out.csv = csv_line({"layer", "head", "value", "before_training"});
  out.body = text("title", 0, 16, title);
  for (int64_t h = 0; h < grid.heads; ++h) {
    if (grid.heads > 16 && h % 4 != 0) continue;
    out.body += text("tick mid", kLeft + pitch * static_cast<double>(h) + cell / 2, kTop - 8,
                     cell >= 44 ? fmt::format("head {}", h + 1) : std::to_string(h + 1));
  }
  for (int64_t l = 0; l < grid.layers; ++l) {
    const double y = kTop + row * static_cast<double>(l);
    out.body += text("tick", 0, y + row / 2 + 2, fmt::format("layer {}", l + 1));
    for (int64_t h = 0; h < grid.heads; ++h) {
      const size_t i = static_cast<size_t>(l * grid.heads + h);
      const double x = kLeft + pitch * static_cast<double>(h), value = grid.value[i];
      const double base = y + bar_top;
      const auto width_of = [&](double v) {
        return bound > 0 ? std::clamp(v / bound, 0.0, 1.0) * cell : 0.0;
      };
      const std::string shown = as_percent ? percent(value, 0) : fmt::format("{:.2f}", value);
      out.body += fmt::format(
          "<g><title>{}</title><rect class=\"cell\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
          "height=\"{:.1f}\" rx=\"2\"/>",
          escape(
              fmt::format("layer {}, head {}: {}", l + 1, h + 1, std::isnan(value) ? "–" : shown)),
          x, base, cell, bar_height);
      if (!std::isnan(value)) {
        out.body += fmt::format(
            "<rect class=\"bar c0\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
            "rx=\"2\"/>",
            x, base, width_of(value), bar_height);
      }
      if (!grid.reference.empty() && !std::isnan(grid.reference[i])) {
        out.body += fmt::format(
            "<path class=\"mark edge\" d=\"M{0:.1f} {1:.1f}v{2:.1f}\"/><path class=\"mark c1\" "
            "d=\"M{0:.1f} {1:.1f}v{2:.1f}\"/>",
            x + width_of(grid.reference[i]), base - 2, bar_height + 4);
      }
      out.body += "</g>";
      if (numbers) {
        out.body += text("small", x, y + 11, std::isnan(value) ? "–" : shown);
      }
      out.csv += csv_line({std::to_string(l + 1), std::to_string(h + 1),
                           std::isnan(value) ? "" : fmt::format("{:.6g}", value),
                           grid.reference.empty() ? "" : fmt::format("{:.6g}", grid.reference[i])});
    }
  }
  return out;
}

Chart draw_confusion(const Confusion& confusion, const std::vector<std::string>& classes) {
  const int64_t n = static_cast<int64_t>(classes.size());
  require(
      n >= 1 && n <= kMaxConfusionClasses && static_cast<int64_t>(confusion.counts.size()) == n * n,
      "confusion matrix: {} counts for {} classes", confusion.counts.size(), n);
  constexpr double kCharacter = 6.8, kLargestCell = 72;
  size_t longest = 0;
  for (const std::string& name : classes) longest = std::max(longest, characters(name));
  // Names of rows get the room that they need, within bounds.
  const double left = std::clamp(kCharacter * static_cast<double>(longest) + 12, 50.0, 140.0);
  const size_t in_row = static_cast<size_t>((left - 8) / kCharacter);
  const double cell = std::min((kWidth - left) / static_cast<double>(n), kLargestCell);
  // Those of columns are turned where they are wider than their cells.
  constexpr size_t kTurned = 16;
  const bool turned = kCharacter * static_cast<double>(longest) > cell - 4;
  const double top =
      turned ? 54 + kCharacter * static_cast<double>(std::min(longest, kTurned)) : 62;
  Chart out;
  out.width = kWidth;
  out.height = static_cast<int>(top + cell * static_cast<double>(n) + 6);
  out.title = "Confusion matrix";
  out.description = "Rows are what a scene showed, columns what the model said.";
  std::vector<std::string> header{"true \\ predicted"};
  header.insert(header.end(), classes.begin(), classes.end());
  out.csv = csv_line(header);
  out.body = text("title", 0, 16, "Confusion matrix");
  out.body += text("tick", left, 38, "predicted →");
  out.body += text("tick", 0, 38, "true ↓");
  for (int64_t i = 0; i < n; ++i) {
    const double middle = cell * (static_cast<double>(i) + 0.5);
    if (cell >= 14 || i % 2 == 0) {
      if (turned) {
        out.body += fmt::format(
            "<text class=\"tick\" transform=\"translate({:.1f} {:.1f}) rotate(-90)\">{}</text>",
            left + middle + 4, top - 6, escape(cut_middle(classes[i], kTurned)));
      } else {
        out.body += text("tick mid", left + middle, top - 6, classes[i]);
      }
      out.body += text("tick end", left - 6, top + middle + 4, cut_middle(classes[i], in_row));
    }
    int64_t total = 0;
    for (int64_t j = 0; j < n; ++j) total += confusion.counts[i * n + j];
    std::vector<std::string> line{classes[i]};
    for (int64_t j = 0; j < n; ++j) {
      const int64_t count = confusion.counts[i * n + j];
      const double share = total > 0 ? static_cast<double>(count) / static_cast<double>(total) : 0;
      const double x = left + cell * static_cast<double>(j);
      const double y = top + cell * static_cast<double>(i);
      // Mistakes are rare, so their shade grows with the root: one in a hundred is still seen.
      out.body += fmt::format(
          "<g><title>{}</title><rect class=\"cell\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
          "height=\"{:.1f}\"/>",
          escape(fmt::format("true {}, predicted {}: {} ({})", classes[i], classes[j], count,
                             percent(share))),
          x, y, cell - 1, cell - 1);
      if (count > 0) {
        out.body += fmt::format(
            "<rect class=\"bar {}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
            "opacity=\"{:.2f}\"/>",
            i == j ? "c0" : "c1", x, y, cell - 1, cell - 1, std::sqrt(share));
        if (cell >= 22) {
          out.body += text(std::sqrt(share) > 0.6 ? "small mid on" : "small mid", x + cell / 2,
                           y + cell / 2 + 4, std::to_string(count));
        }
      }
      out.body += "</g>";
      line.push_back(std::to_string(count));
    }
    out.csv += csv_line(line);
  }
  return out;
}

}  // namespace foci::report
