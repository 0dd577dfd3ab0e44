// Line charts and what all charts share: ticks, thinning, axes.
#include "foci/report/chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "foci/report/text.h"

namespace foci::report {
namespace {

constexpr int kWidth = 420, kHeight = 262;
constexpr double kLeft = 50, kRight = 12, kTop = 50, kBottom = 40;
constexpr double kCharacter = 6.8;    // about the width of one, in ticks
constexpr size_t kPointsDrawn = 160;  // more than this is finer than the screen

// Maps data to the plot's rectangle.
struct Axes {
  double x_low, x_high, y_low, y_high;
  double px(double x) const {
    return kLeft + (x - x_low) / (x_high - x_low) * (kWidth - kLeft - kRight);
  }
  double py(double y) const {
    return kHeight - kBottom - (y - y_low) / (y_high - y_low) * (kHeight - kTop - kBottom);
  }
};

void widen(std::pair<double, double>& range, double value) {
  if (!std::isfinite(value)) return;
  range.first = std::min(range.first, value);
  range.second = std::max(range.second, value);
}

std::string axis_text(double value, bool as_percent) {
  return as_percent ? fmt::format("{:.4g} %", 100 * value) : number(value, 4);
}

std::string x_text(double x) {
  const bool whole = x == std::floor(x) && std::abs(x) < 1e15;
  return whole ? grouped(static_cast<long long>(x)) : number(x, 6);
}

std::string axes_svg(const Axes& axes, const LineChart& chart, const std::vector<double>& xs,
                     const std::vector<double>& ys) {
  std::string out;
  for (double y : ys) {
    out += fmt::format(
        "<path class=\"grid\" d=\"M{:.1f} {:.1f}H{}\"/><text class=\"tick end\" x=\"{:.1f}\" "
        "y=\"{:.1f}\">{}</text>",
        kLeft, axes.py(y), kWidth - kRight, kLeft - 6, axes.py(y) + 4, axis_text(y, chart.percent));
  }
  for (double x : xs) {
    out +=
        fmt::format("<text class=\"tick {}\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
                    x == xs.back() ? "end" : "mid", axes.px(x), kHeight - kBottom + 16, x_text(x));
  }
  out += fmt::format("<path class=\"axis\" d=\"M{:.1f} {:.1f}H{}\"/>", kLeft, kHeight - kBottom,
                     kWidth - kRight);
  out += fmt::format("<text class=\"tick mid\" x=\"{:.1f}\" y=\"{}\">{}</text>",
                     (kLeft + kWidth - kRight) / 2, kHeight - 6, escape(chart.x_label));
  return out;
}

// The polyline of finite points; NaN lifts the pen.
std::string path_of(const Axes& axes, const std::vector<double>& x, const std::vector<double>& y) {
  std::string d;
  bool pen_down = false;
  for (size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(y[i])) {
      pen_down = false;
      continue;
    }
    d += fmt::format("{}{:.1f} {:.1f}", pen_down ? 'L' : 'M', axes.px(x[i]), axes.py(y[i]));
    pen_down = true;
  }
  return d;
}

std::string line_svg(const Axes& axes, const Line& line) {
  std::string out;
  const Thinned thinned = thin(line.x, line.y, kPointsDrawn);
  if (line.x.size() > kPointsDrawn) {
    std::string band;
    for (size_t i = 0; i < thinned.x.size(); ++i) {
      if (!std::isfinite(thinned.high[i])) continue;
      band += fmt::format("{}{:.1f} {:.1f}", band.empty() ? 'M' : 'L', axes.px(thinned.x[i]),
                          axes.py(thinned.high[i]));
    }
    for (size_t i = thinned.x.size(); i-- > 0;) {
      if (!std::isfinite(thinned.low[i])) continue;
      band += fmt::format("L{:.1f} {:.1f}", axes.px(thinned.x[i]), axes.py(thinned.low[i]));
    }
    if (!band.empty()) {
      out += fmt::format("<path class=\"band c{}\" d=\"{}Z\"/>", line.colour, band);
    }
  }
  out += fmt::format("<path class=\"line c{}\" d=\"{}\"/>", line.colour,
                     path_of(axes, thinned.x, thinned.mean));
  // A single point has no line, so it gets a dot in any case.
  if (line.dots || thinned.x.size() == 1) {
    for (size_t i = 0; i < thinned.x.size(); ++i) {
      if (!std::isfinite(thinned.mean[i])) continue;
      out += fmt::format("<circle class=\"dot c{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\"/>",
                         line.colour, axes.px(thinned.x[i]), axes.py(thinned.mean[i]));
    }
  }
  return out;
}

std::string legend_svg(const std::vector<Line>& lines) {
  std::string out;
  double x = kLeft;
  for (const Line& line : lines) {
    out += fmt::format(
        "<path class=\"line c{}\" d=\"M{:.1f} 36h18\"/>{}<text class=\"tick\" x=\"{:.1f}\" "
        "y=\"40\">{}</text>",
        line.colour, x,
        line.dots ? fmt::format("<circle class=\"dot c{}\" cx=\"{:.1f}\" cy=\"36\" r=\"3.5\"/>",
                                line.colour, x + 9)
                  : "",
        x + 24, escape(line.label));
    x += 44 + 6.5 * static_cast<double>(characters(line.label));
  }
  return out;
}

std::string csv_of(const LineChart& chart) {
  std::string out = csv_line({"series", chart.x_label, "value"});
  for (const Line& line : chart.lines) {
    const Thinned t = thin(line.x, line.y, kMaxCurveRows);
    for (size_t i = 0; i < t.x.size(); ++i) {
      out += csv_line({line.label, fmt::format("{:.10g}", t.x[i]),
                       std::isnan(t.mean[i]) ? "" : fmt::format("{:.6g}", t.mean[i])});
    }
  }
  return out;
}

}  // namespace

std::vector<double> ticks(double low, double high, int count) {
  if (!(high > low)) high = low + (low == 0 ? 1 : std::abs(low));
  const double rough = (high - low) / std::max(1, count);
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (double factor : {1.0, 2.0, 2.5, 5.0}) {
    if (factor * power >= rough * (1 - 1e-9)) {
      step = factor * power;
      break;
    }
  }
  std::vector<double> out;
  const double first = std::floor(low / step + 1e-9);
  for (int i = 0; i < 1000; ++i) {
    out.push_back((first + i) * step);
    if (out.back() >= high - 1e-9 * step) break;
  }
  return out;
}

std::vector<double> ticks_within(double low, double high, int count, double clear) {
  std::vector<double> out = ticks(low, high, count);
  std::erase_if(out, [&](double x) { return x < low || x > high - clear * (high - low); });
  out.push_back(high);
  return out;
}

Thinned thin(const std::vector<double>& x, const std::vector<double>& y, size_t limit) {
  require(x.size() == y.size(), "line: {} x values for {} y values", x.size(), y.size());
  Thinned out;
  const size_t buckets = std::min(limit, x.size());
  for (size_t b = 0; b < buckets; ++b) {
    const size_t begin = b * x.size() / buckets, end = (b + 1) * x.size() / buckets;
    double sum_x = 0, sum = 0, low = std::numeric_limits<double>::infinity(), high = -low;
    size_t finite = 0;
    for (size_t i = begin; i < end; ++i) {
      sum_x += x[i];
      if (!std::isfinite(y[i])) continue;
      sum += y[i];
      low = std::min(low, y[i]);
      high = std::max(high, y[i]);
      ++finite;
    }
    const double nan = std::numeric_limits<double>::quiet_NaN();
    out.x.push_back(sum_x / static_cast<double>(end - begin));
    out.mean.push_back(finite ? sum / static_cast<double>(finite) : nan);
    out.low.push_back(finite ? low : nan);
    out.high.push_back(finite ? high : nan);
  }
  return out;
}

Chart draw(const LineChart& chart) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  std::pair<double, double> x_range{kInf, -kInf}, y_range{kInf, -kInf};
  for (const Line& line : chart.lines) {
    const Thinned t = thin(line.x, line.y, kPointsDrawn);
    for (double x : line.x) widen(x_range, x);  // neighbours' means would end before the last
    const bool band = line.x.size() > kPointsDrawn;
    for (size_t i = 0; i < t.x.size(); ++i) {
      widen(y_range, band ? t.low[i] : t.mean[i]);
      widen(y_range, band ? t.high[i] : t.mean[i]);
    }
  }
  if (x_range.first > x_range.second) x_range = {0, 1};
  if (y_range.first > y_range.second) y_range = {0, 1};
  if (chart.from_zero) y_range.first = std::min(0.0, y_range.first);
  if (chart.percent) y_range = {0, 1};
  if (x_range.second - x_range.first > 4) x_range.first = std::min(x_range.first, 0.0);
  const std::vector<double> ys = ticks(y_range.first, y_range.second, 4);
  if (!(x_range.second > x_range.first)) x_range.second = x_range.first + 1;
  // Room for the last number, which ends where the axis does, and half of the one before it.
  const double label = kCharacter * static_cast<double>(x_text(x_range.second).size());
  const double clear = (1.5 * label + 10) / (kWidth - kLeft - kRight);
  const std::vector<double> xs = ticks_within(x_range.first, x_range.second, 5, clear);
  const Axes axes{x_range.first, x_range.second, ys.front(), ys.back()};

  Chart out{kWidth, kHeight, chart.title, chart.description, "", csv_of(chart)};
  out.body = fmt::format("<text class=\"title\" x=\"0\" y=\"16\">{}</text>", escape(chart.title));
  out.body += axes_svg(axes, chart, xs, ys);
  for (const Line& line : chart.lines) out.body += line_svg(axes, line);
  if (chart.lines.size() > 1) out.body += legend_svg(chart.lines);
  return out;
}

}  // namespace foci::report
