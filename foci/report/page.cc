// The page: sections in reading order around the charts and pictures.
#include <algorithm>
#include <cmath>
#include <utility>

#include "foci/io/file.h"
#include "foci/report/card.h"
#include "foci/report/chart.h"
#include "foci/report/picture.h"
#include "foci/report/report.h"
#include "foci/report/style.h"
#include "foci/report/text.h"

namespace foci::report {
namespace {

// The chart as a file of its own: style inside, white ground.
std::string standalone(const Chart& chart) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-12 -12 {0} {1}\" width=\"{2}\" "
      "height=\"{3}\"><title>{4}</title><style>{5}</style><rect x=\"-12\" y=\"-12\" "
      "width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>{6}</svg>",
      chart.width + 24, chart.height + 24, 2 * (chart.width + 24), 2 * (chart.height + 24),
      escape(chart.title), chart_style(), chart.body);
}

std::string downloads(const Chart& chart) {
  return fmt::format(
      "<p class=\"get\"><a download=\"{0}.svg\" title=\"download the picture\" href=\"{1}\">"
      "↓ SVG</a><a download=\"{0}.csv\" title=\"download the numbers\" href=\"{2}\">↓ CSV</a></p>",
      slug(chart.title), data_uri("image/svg+xml", standalone(chart)),
      data_uri("text/csv;charset=utf-8", chart.csv));
}

std::string figure(const Chart& chart, const std::string& caption) {
  std::string out = fmt::format(
      "<figure><svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">{}</svg>", chart.width,
      chart.height, escape(chart.title + ". " + chart.description), chart.body);
  if (!caption.empty()) out += fmt::format("<figcaption>{}</figcaption>", escape(caption));
  return out + downloads(chart) + "</figure>\n";
}

// A scene as a card of the page, which fits its width, and as a drawing to download.
std::string card(const std::string& id, const std::string& body, const Chart& drawing) {
  return fmt::format("<figure class=\"scene\" id=\"{}\">{}{}</figure>\n", id, body,
                     downloads(drawing));
}

struct Section {
  std::string id, title, body;
};

std::string paragraph(const char* classes, const std::string& text) {
  return fmt::format("<p class=\"{}\">{}</p>\n", classes, escape(text));
}

// What the marks on the pictures mean.
std::string key(bool landmarks) {
  std::string out =
      "<ul class=\"key\"><li><span class=\"ramp\"></span>attention, none to the "
      "head's largest</li>";
  if (landmarks) {
    out +=
        "<li><svg width=\"22\" height=\"16\" aria-hidden=\"true\"><path class=\"under\" "
        "d=\"M3 3h16v10h-16z\"/><path class=\"over\" d=\"M3 3h16v10h-16z\"/></svg>landmark "
        "patches: what is to be recognised lies here</li>";
  }
  return out +
         "<li><svg width=\"18\" height=\"18\" aria-hidden=\"true\"><path d=\"M0 "
         "0h18v18h-18z\"/><path class=\"ring\" "
         "d=\"M3 3h12v12h-12z\"/><path class=\"top\" d=\"M3 3h12v12h-12z\"/></svg>the "
         "most-attended patch</li></ul>\n";
}

// More pictures than this get a list of links above them, and smaller cards.
constexpr size_t kListed = 12;

Section gallery(const Report& r) {
  Section s{"looks", "Where it looks", ""};
  bool landmarks = false, truth = false;
  for (const Scene& scene : r.gallery) {
    landmarks |= !scene.landmark.empty();
    truth |= scene.truth.has_value();
  }
  s.body = paragraph(
      "", fmt::format(
              "{} Each card holds the picture as the model saw it, the same picture once for "
              "each head (one row a layer) with the head's attention laid over it, and what the "
              "last layer's heads look at together.",
              truth ? "Pictures that were never trained on." : "The pictures given."));
  if (!r.reading.empty()) {
    s.body +=
        paragraph("how", "How to read it: a patch's colour is " + r.reading +
                             ". Each head has its own scale, so compare places within a head, "
                             "not colours between heads.");
  }
  s.body += key(landmarks);
  const size_t n = r.gallery.size();
  const auto id = [](size_t i) { return fmt::format("g{}", i); };
  if (n > kListed) {
    s.body += "<ol class=\"index\">";
    for (size_t i = 0; i < n; ++i) s.body += index_entry(r.gallery[i], r.classes, id(i));
    s.body += "</ol>\n";
  }
  // Many heads want the whole width, and so does a picture alone.
  const bool wide = r.gallery.front().heads > 6;
  s.body += fmt::format("<div class=\"flow{}\">\n", n == 1        ? " one"
                                                    : wide        ? " wide"
                                                    : n > kListed ? " many"
                                                                  : "");
  for (size_t i = 0; i < n; ++i) {
    s.body += card(id(i), scene_card(r.gallery[i], r.classes, id(i)),
                   draw_scene(r.gallery[i], r.classes, id(i)));
  }
  s.body += "</div>";
  return s;
}

// ", from 1,000 pictures of 359 originals"
std::string behind(const insight::Estimate& e) {
  if (e.count == 0) return "";
  const std::string all = ", from " + counted(e.count, "picture", "pictures");
  if (e.independent == 0 || e.independent == e.count) return all;
  return fmt::format("{} that show {}, which count once each", all,
                     counted(e.independent, "original", "originals"));
}

// " Of 1,000 pictures."
std::string of_pictures(const HeadGrid& grid) {
  return grid.count == 0 ? "" : " Of " + counted(grid.count, "picture", "pictures") + ".";
}

// What a full bar of entropy is: never less than a number shown.
std::string full_bar(const HeadGrid& grid) {
  const double bound = grid.bound();
  if (bound <= 0) {
    return "One cell a head; no bar, since every token had one thing alone to attend to.";
  }
  // Means of numbers in single precision may pass the bound in their last place.
  const bool even = bound <= grid.full * (1 + 1e-4);
  return fmt::format("One cell a head; a full bar is {:.2f} nats, {}.", bound,
                     even ? "as much as attention spread evenly over all tokens would have"
                          : "the largest number here");
}

Section hits(const Report& r) {
  Section s{"landmarks", "Does it look at the right place?", ""};
  s.body = paragraph(
      "",
      "The landmark hit rate is the share of unseen pictures in which the most-attended patch is "
      "one of the landmarks. A model that looks anywhere scores about the mean share of landmark "
      "patches (chance); the same model before training is the fair comparison.");
  s.body += "<div class=\"cards two\">\n";
  if (!r.hits.lines.empty()) {
    s.body += figure(
        draw_hits(r.hits),
        fmt::format("Dot: the rate. Bar around it: Wilson's 95 % interval{}. Dashed: chance. "
                    "Where intervals do not overlap, luck does not explain the difference.",
                    behind(r.hits.lines.front().rate)));
  }
  if (!r.hits.per_head.empty()) {
    s.body += figure(
        draw_heads(r.hits.per_head, "Hit rate of each head",
                   "Landmark hit rate for every layer and head.", true),
        "One cell a head; a full bar is 100 %." + of_pictures(r.hits.per_head) +
            (r.hits.per_head.reference.empty() ? "" : " Orange tick: the same head untrained."));
  }
  s.body += "</div>";
  return s;
}

// The narrowest and the widest head, and what their entropies mean.
std::string extremes(const HeadGrid& grid) {
  std::vector<size_t> order;
  for (size_t i = 0; i < grid.value.size(); ++i) {
    if (std::isfinite(grid.value[i])) order.push_back(i);
  }
  if (order.size() < 2) return "";
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return grid.value[a] < grid.value[b]; });
  std::string out = "<table class=\"short\">";
  for (const auto& [what, i] : {std::pair{"narrowest", order.front()}, {"widest", order.back()}}) {
    const auto at = static_cast<int64_t>(i);
    out += fmt::format(
        "<tr><th scope=\"row\">{}</th><td>layer {}, head {}: {:.2f} nats, as an even spread over "
        "{:.1f} tokens has</td></tr>",
        what, at / grid.heads + 1, at % grid.heads + 1, grid.value[i], std::exp(grid.value[i]));
  }
  return out + "</table>\n";
}

Section entropy(const Report& r) {
  Section s{"entropy", "How widely each head looks", ""};
  s.body = paragraph("",
                     "Entropy of the attention weights, averaged over queries and pictures, in "
                     "nats. Low: the head picks few patches. High: it spreads over many.");
  s.body = "<div class=\"side\"><div>" + s.body + extremes(r.entropy) + "</div>";
  s.body +=
      figure(draw_heads(r.entropy, "Attention entropy of each head",
                        "Mean entropy in nats for every layer and head.", false),
             full_bar(r.entropy) + of_pictures(r.entropy) +
                 (r.entropy.reference.empty() ? "" : " Orange tick: the same head untrained."));
  s.body += "</div>";
  return s;
}

Section curves(const Report& r) {
  Section s{"training", "How it learned", ""};
  const int64_t tried = r.evaluations.empty() ? 0 : r.evaluations.back().count;
  s.body = paragraph(
      "",
      fmt::format(
          "Each chart has the training step on the horizontal axis. Light bands, in longer runs, "
          "span the smallest and largest value of neighbouring steps, the line is their mean; "
          "dots are measured on {} held back from training.",
          tried > 0 ? counted(tried, "picture", "pictures") : "pictures"));
  if (!r.training_note.empty()) s.body += paragraph("how", r.training_note);
  Line loss{"training batch", {}, {}, 0, false}, accuracy = loss, rate = loss, norm = loss;
  rate.label = "learning rate";
  norm.label = "gradient norm";
  for (const StepRecord& step : r.steps) {
    for (auto [line, value] :
         {std::pair{&loss, step.loss}, std::pair{&accuracy, step.accuracy},
          std::pair{&rate, step.learning_rate}, std::pair{&norm, step.grad_norm}}) {
      line->x.push_back(static_cast<double>(step.step));
      line->y.push_back(value);
    }
  }
  Line unseen_loss{"held back", {}, {}, 1, true}, unseen_accuracy = unseen_loss;
  for (const EvaluationRecord& e : r.evaluations) {
    for (auto [line, value] :
         {std::pair{&unseen_loss, e.loss}, std::pair{&unseen_accuracy, e.accuracy}}) {
      line->x.push_back(static_cast<double>(e.step));
      line->y.push_back(value);
    }
  }
  const auto lines = [](Line a, const Line& b) {
    std::vector<Line> out;
    if (!a.x.empty()) out.push_back(std::move(a));
    if (std::any_of(b.y.begin(), b.y.end(), [](double y) { return std::isfinite(y); })) {
      out.push_back(b);
    }
    return out;
  };
  s.body += "<div class=\"cards two\">\n";
  s.body += figure(draw({"Loss", "Cross-entropy by step.", "step", lines(loss, unseen_loss)}),
                   "Cross-entropy in nats: lower is better. A flat start means that warm-up is "
                   "not over; a rise means that the learning rate is too high.");
  s.body += figure(draw({"Accuracy", "Share of right answers by step.", "step",
                         lines(accuracy, unseen_accuracy), true}),
                   "Share of right answers. Batches that do much better than what is held back "
                   "mean overfitting.");
  if (!r.steps.empty()) {
    s.body += figure(draw({"Learning rate", "Learning rate by step.", "step", {rate}}),
                     "The schedule: a warm-up, then a slow fall.");
    s.body += figure(draw({"Gradient norm", "Norm of the gradient by step.", "step", {norm}}),
                     "Norm of the whole gradient before clipping. Spikes mark unstable steps.");
  }
  s.body += "</div>";
  return s;
}

// The pairs mixed up most often, at most so many.
std::string worst_confusions(const Report& r, size_t most) {
  struct Pair {
    int64_t truth, predicted, count;
  };
  const int64_t n = static_cast<int64_t>(r.classes.size());
  std::vector<Pair> pairs;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const int64_t count = r.confusion.counts[static_cast<size_t>(i * n + j)];
      if (i != j && count > 0) pairs.push_back({i, j, count});
    }
  }
  std::stable_sort(pairs.begin(), pairs.end(),
                   [](const Pair& a, const Pair& b) { return a.count > b.count; });
  if (pairs.empty()) return "";
  std::string out = "<table><tr><th>true</th><th>predicted</th><th>times</th></tr>";
  for (size_t i = 0; i < std::min(pairs.size(), most); ++i) {
    out += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td></tr>",
                       escape(r.classes[static_cast<size_t>(pairs[i].truth)]),
                       escape(r.classes[static_cast<size_t>(pairs[i].predicted)]), pairs[i].count);
  }
  return out + "</table>";
}

Section confusion(const Report& r) {
  Section s{"confusion", "What it mixes up", ""};
  const size_t n = r.classes.size();
  require(r.confusion.counts.size() == n * n, "report: {} confusion counts for {} classes",
          r.confusion.counts.size(), n);
  if (static_cast<int64_t>(n) > kMaxConfusionClasses) {
    s.body = paragraph("", "The pairs mixed up most often.") + worst_confusions(r, 30);
    return s;
  }
  s.body = paragraph("",
                     "Rows are what a picture shows, columns what the model said: right answers "
                     "lie on the diagonal.");
  if (n > 2) s.body += worst_confusions(r, 10);
  s.body = "<div class=\"side\"><div>" + s.body + "</div>" +
           figure(draw_confusion(r.confusion, r.classes),
                  "Blue: right. Orange: wrong. A cell's shade grows with the square root of its "
                  "share of the row, so that rare mistakes are seen.") +
           "</div>";
  return s;
}

Section mistakes(const Report& r) {
  Section s{"mistakes", "Its mistakes", ""};
  if (r.mistakes.empty()) {
    s.body = paragraph("", fmt::format("None among {}.", counted(r.unseen_count, "unseen picture",
                                                                 "unseen pictures")));
    return s;
  }
  const std::string shown = static_cast<int64_t>(r.mistakes.size()) < r.mistake_count
                                ? fmt::format("; the first {} are shown", r.mistakes.size())
                                : std::string();
  s.body = paragraph(
      "",
      fmt::format("{} of {} {} named wrongly{}. Left the picture, right the mean attention of the "
                  "last layer's heads: did it look at the wrong place, or look at the right place "
                  "and misread it?",
                  grouped(r.mistake_count),
                  counted(r.unseen_count, "unseen picture", "unseen pictures"),
                  r.mistake_count == 1 ? "was" : "were", shown));
  s.body += "<div class=\"flow slim\">\n";
  for (size_t i = 0; i < r.mistakes.size(); ++i) {
    const std::string id = fmt::format("m{}", i);
    s.body += card(id, mistake_card(r.mistakes[i], r.classes, id),
                   draw_mistake(r.mistakes[i], r.classes, id));
  }
  s.body += "</div>";
  return s;
}

std::string footer(const Report& r) {
  std::string out =
      "<footer><section id=\"provenance\"><h2>Where this page comes from</h2>"
      "<table class=\"prov\">";
  for (const auto& [name, value] : r.provenance) {
    out +=
        fmt::format("<tr><th scope=\"row\">{}</th><td>{}</td></tr>", escape(name), escape(value));
  }
  return out + "</table></section></footer>\n";
}

}  // namespace

std::string render(const Report& r) {
  for (size_t i = 0; i < r.gallery.size(); ++i) {
    check_scene(r.gallery[i], r.classes.size(), fmt::format("report: gallery scene {}", i));
  }
  for (size_t i = 0; i < r.mistakes.size(); ++i) {
    check_scene(r.mistakes[i], r.classes.size(), fmt::format("report: mistake {}", i));
  }
  std::vector<Section> sections;
  if (!r.gallery.empty()) sections.push_back(gallery(r));
  if (!r.hits.lines.empty() || !r.hits.per_head.empty()) sections.push_back(hits(r));
  if (!r.entropy.empty()) sections.push_back(entropy(r));
  if (!r.steps.empty() || !r.evaluations.empty()) sections.push_back(curves(r));
  if (!r.confusion.counts.empty()) sections.push_back(confusion(r));
  if (r.unseen_count > 0) sections.push_back(mistakes(r));

  std::string out = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"referrer\" content=\"no-referrer\"><meta name=\"generator\" "
      "content=\"foci\">\n<title>{}</title>\n<style>{}</style></head>\n<body><header>"
      "<h1>{}</h1>\n",
      escape(r.title), page_style(), escape(r.title));
  if (!r.summary.empty()) out += paragraph("lead", r.summary);
  if (!r.numbers.empty()) {
    out += "<dl class=\"numbers\">";
    for (const KeyNumber& n : r.numbers) {
      out +=
          fmt::format("<div><dt>{}</dt><dd class=\"value\">{}</dd><dd class=\"note\">{}</dd></div>",
                      escape(n.label), escape(n.value), escape(n.note));
    }
    out += "</dl>\n";
  }
  if (sections.size() > 1) {
    out += "<nav aria-label=\"Parts of this page\">";
    for (const Section& s : sections) {
      out += fmt::format("<a href=\"#{}\">{}</a>", s.id, escape(s.title));
    }
    out += "</nav>";
  }
  out += "</header>\n<main>\n";
  for (const Section& s : sections) {
    out += fmt::format("<section id=\"{}\"><h2>{}</h2>\n{}</section>\n", s.id, escape(s.title),
                       s.body);
  }
  out += "</main>\n";
  if (!r.provenance.empty()) out += footer(r);
  return out + "</body></html>\n";
}

void write_report(const std::filesystem::path& path, const Report& report) {
  write_file(path, render(report));
}

}  // namespace foci::report
