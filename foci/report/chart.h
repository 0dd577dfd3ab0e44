// Charts as inline SVG: lines, intervals, a grid of heads, a confusion matrix.
//
// Each function gives the inside of an <svg> element together with its size; the page wraps it, and
// wraps it once more, with its own style, as the file behind the download link. Colours are classes
// (style.h), so that a chart follows the page into dark mode.
#pragma once

#include <string>
#include <vector>

#include "foci/report/report.h"

namespace foci::report {

struct Chart {
  int width = 0, height = 0;       // of the viewBox
  std::string title, description;  // not escaped yet
  std::string body;                // SVG elements
  std::string csv;                 // the numbers behind it
};

struct Line {
  std::string label;
  std::vector<double> x, y;  // equal lengths; NaN breaks the line
  int colour = 0;            // 0 … 3, see style.h
  bool dots = false;         // marks the points; else long lines are drawn as means and a band
};

struct LineChart {
  std::string title, description, x_label;
  std::vector<Line> lines;
  bool percent = false;   // y is a share
  bool from_zero = true;  // the y axis starts at 0
};
Chart draw(const LineChart& chart);

// Rates with their intervals, one under the other, and a dashed line at `chance`.
Chart draw_hits(const LandmarkHits& hits);

// Layers × heads; each cell holds a bar, its number and a tick at the reference.
Chart draw_heads(const HeadGrid& grid, const std::string& title, const std::string& description,
                 bool percent);

// The matrix up to kMaxConfusionClasses classes; above that use the list of worst_confusions.
inline constexpr int64_t kMaxConfusionClasses = 40;
Chart draw_confusion(const Confusion& confusion, const std::vector<std::string>& classes);

// Round values that cover [low, high] in about `count` steps; at least two.
std::vector<double> ticks(double low, double high, int count);
// The round ones inside [low, high], then high itself; a round one nearer to it than `clear` of the
// range makes place for it. So an axis ends where its curve does, with a number.
std::vector<double> ticks_within(double low, double high, int count, double clear = 0.1);

// At most `limit` points: neighbours are replaced by their mean (band: their smallest and largest).
struct Thinned {
  std::vector<double> x, mean, low, high;
};
Thinned thin(const std::vector<double>& x, const std::vector<double>& y, size_t limit);

}  // namespace foci::report
