// The page's parts: text is escaped, charts and pictures say what they were given, contradictions
// are refused, and sizes stay within the stated budget.
#include "foci/report/report.h"

#include <gtest/gtest.h>

#include <cmath>

#include "foci/report/chart.h"
#include "foci/report/picture.h"
#include "foci/report/text.h"
#include "report/sample.h"

namespace foci::report {
namespace {

size_t count(const std::string& text, const std::string& what) {
  size_t n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

TEST(Text, EscapesMarkupControlsAndBrokenUtf8) {
  EXPECT_EQ(escape("<a href=\"x\" b='y'>&"), "&lt;a href=&quot;x&quot; b=&#39;y&#39;&gt;&amp;");
  EXPECT_EQ(escape("grün ✓ 🙂"), "grün ✓ 🙂");
  const std::string bad = "\xEF\xBF\xBD";
  EXPECT_EQ(escape(std::string("a\0b", 3)), "a" + bad + "b");
  EXPECT_EQ(escape("\xFF"), bad);
  EXPECT_EQ(escape("\xC0\xAF"), bad + bad);                      // over-long
  EXPECT_EQ(escape("\xED\xA0\x80"), bad + bad + bad);            // surrogate
  EXPECT_EQ(escape("\xF4\x90\x80\x80"), bad + bad + bad + bad);  // above U+10FFFF
  EXPECT_EQ(escape("\xE2\x82"), bad + bad);                      // cut off
}

TEST(Text, Base64OfTheRfc) {
  EXPECT_EQ(base64(""), "");
  EXPECT_EQ(base64("f"), "Zg==");
  EXPECT_EQ(base64("fo"), "Zm8=");
  EXPECT_EQ(base64("foo"), "Zm9v");
  EXPECT_EQ(base64("foobar"), "Zm9vYmFy");
  EXPECT_EQ(base64("\xFF\xFE\xFD"), "//79");
}

TEST(Text, NumbersNamesAndCsv) {
  EXPECT_EQ(number(0.012345), "0.0123");
  EXPECT_EQ(number(-0.0), "0");
  EXPECT_EQ(number(NAN), "–");
  EXPECT_EQ(percent(0.8755), "87.5 %");
  EXPECT_EQ(percent(1), "100.0 %");
  EXPECT_EQ(percent(0, 0), "0 %");
  EXPECT_EQ(percent(0.9996), "99.96 %");  // not all
  EXPECT_EQ(percent(0.998, 0), "99.8 %");
  EXPECT_EQ(percent(0.999999, 0), "> 99.99 %");
  EXPECT_EQ(percent(1e-9), "< 0.001 %");
  EXPECT_EQ(percent(0.0004), "0.04 %");
  EXPECT_EQ(duration(0.44), "0.4 s");
  EXPECT_EQ(duration(9.97), "10 s");
  EXPECT_EQ(duration(69), "1 min 09 s");
  EXPECT_EQ(duration(7500), "2 h 05 min");
  EXPECT_EQ(counted(1, "step", "steps"), "1 step");
  EXPECT_EQ(counted(1200, "step", "steps"), "1,200 steps");
  EXPECT_EQ(cut_middle("a/long/folder/picture_0017.png", 15), "a/long/…017.png");
  EXPECT_EQ(cut_middle("äöüäöüäöü", 5), "äö…öü");
  EXPECT_EQ(cut_middle("short", 5), "short");
  EXPECT_EQ(cut_end("äöüäöü", 4), "äöü…");
  EXPECT_EQ(grouped(1234567), "1,234,567");
  EXPECT_EQ(grouped(-999), "-999");
  EXPECT_EQ(grouped(1000), "1,000");
  EXPECT_EQ(slug("Scene 3 (7)!"), "scene-3-7");
  EXPECT_EQ(slug("../../etc"), "etc");
  EXPECT_EQ(slug("✓"), "picture");
  EXPECT_EQ(csv_line({"a", "b,c", "d\"e", "-1.5", "=SUM(A1)"}),
            "a,\"b,c\",\"d\"\"e\",-1.5,'=SUM(A1)\r\n");
}

TEST(Charts, TicksAreRoundAndCoverTheRange) {
  EXPECT_EQ(ticks(0, 1, 4), (std::vector<double>{0, 0.25, 0.5, 0.75, 1}));
  EXPECT_EQ(ticks(0, 2.3, 4).back(), 3);
  EXPECT_EQ(ticks(0, 1200, 5).front(), 0);
  EXPECT_GE(ticks(5, 5, 4).size(), 2u);
  for (double high : {1e-9, 0.003, 0.7, 13.0, 9e12}) {
    const auto t = ticks(0, high, 4);
    EXPECT_GE(t.back(), high * (1 - 1e-9));
    EXPECT_LE(t.size(), 7u);
  }
}

TEST(Charts, TicksEndWhereTheRangeDoes) {
  EXPECT_EQ(ticks_within(0, 1204, 5), (std::vector<double>{0, 250, 500, 750, 1000, 1204}));
  EXPECT_EQ(ticks_within(0, 1200, 5, 0.2).back(), 1200);
  for (double high : {5.0, 9.0, 96.0, 1001.0, 123456.0}) {
    const auto t = ticks_within(0, high, 5, 0.2);
    EXPECT_EQ(t.back(), high);
    EXPECT_LE(t[t.size() - 2], 0.8 * high);
  }
  LineChart chart{"t", "d", "step", {{"a", {0, 1204}, {1, 2}, 0, false}}};
  EXPECT_NE(draw(chart).body.find(">1,204</text>"), std::string::npos);
}

TEST(Charts, NoBarIsLongerThanItsCell) {
  HeadGrid grid{1, 3, {1, 2, 3}, {0.5, 4, NAN}, 2};
  EXPECT_EQ(grid.bound(), 4);
  grid.reference.clear();
  EXPECT_EQ(grid.bound(), 3);
  const auto bar = [&](int head) {  // width of a head's bar over that of its cell
    std::string body = draw_heads(grid, "t", "d", false).body;
    for (int h = 0; h <= head; ++h) body = body.substr(body.find("class=\"cell\"") + 1);
    const auto width = [&](const char* what) {
      const size_t at = body.find("width=\"", what[0] == 0 ? 0 : body.find(what)) + 7;
      return std::stod(body.substr(at));
    };
    const double cell = width("");
    return width("class=\"bar") / cell;
  };
  EXPECT_NEAR(bar(0), 1.0 / 3, 2e-3);
  EXPECT_NEAR(bar(1), 2.0 / 3, 2e-3);
  EXPECT_NEAR(bar(2), 1.0, 2e-3);
}

TEST(Charts, PicturesOfOnePatchHaveNoEntropyAndStillAPage) {
  Report r = sample_report(1, 1, 2);
  r.entropy = {1, 2, {0, 0}, {}, 0};
  const std::string page = render(r);
  EXPECT_NE(page.find("no bar, since every token had one thing alone to attend to"),
            std::string::npos);
  EXPECT_EQ(draw_heads(r.entropy, "t", "d", false).body.find("nan"), std::string::npos);
  r.entropy.full = -1;
  EXPECT_THROW(render(r), ArgumentError);
}

TEST(Charts, TheCaptionsBoundIsTheLargestThatIsDrawn) {
  Report r = sample_report(1, 1, 2);
  r.entropy = {1, 2, {1, 2.5}, {}, 2, 3};
  EXPECT_NE(render(r).find("a full bar is 2.50 nats, the largest number here. Of 3 pictures."),
            std::string::npos);
  r.entropy.full = 3;
  EXPECT_NE(render(r).find("a full bar is 3.00 nats, as much as attention spread evenly"),
            std::string::npos);
}

TEST(Charts, LabelsOfHitsAreWhole) {
  LandmarkHits hits;
  const std::string label = "untrained, head chosen on other scenes (layer 12, head 16)";
  hits.lines = {{label, {0.5, 0.4, 0.6, 100, 100}, false}};
  hits.chance = 0.1;
  std::string shown;
  const std::string body = draw_hits(hits).body;
  for (size_t at = body.find("class=\"label\""); at != std::string::npos;
       at = body.find("class=\"label\"", at + 1)) {
    const size_t begin = body.find('>', at) + 1;
    shown += (shown.empty() ? "" : " ") + body.substr(begin, body.find('<', begin) - begin);
  }
  EXPECT_EQ(shown, label);
}

TEST(Charts, ThinningKeepsMeansAndExtremes) {
  std::vector<double> x, y;
  for (int i = 0; i < 1000; ++i) {
    x.push_back(i);
    y.push_back(i == 500 ? 9 : i % 2);
  }
  const Thinned t = thin(x, y, 10);
  ASSERT_EQ(t.x.size(), 10u);
  EXPECT_EQ(t.mean[0], 0.5);
  EXPECT_EQ(t.low[3], 0);
  EXPECT_EQ(t.high[5], 9);
  EXPECT_EQ(thin(x, y, 5000).mean, y);
  y[3] = NAN;
  EXPECT_FALSE(std::isnan(thin(x, y, 10).mean[0]));
}

TEST(Charts, LinesSurviveNothingOnePointAndNonFiniteValues) {
  for (const std::vector<double>& y :
       {std::vector<double>{}, {1.0}, {NAN, INFINITY}, {1, NAN, 2}, {3, 3, 3}}) {
    LineChart chart{"t", "d", "step", {{"a", {}, y, 0, false}}};
    for (size_t i = 0; i < y.size(); ++i) chart.lines[0].x.push_back(static_cast<double>(i));
    const Chart drawn = draw(chart);
    EXPECT_EQ(drawn.body.find("nan"), std::string::npos);
    EXPECT_EQ(drawn.body.find("inf"), std::string::npos);
  }
}

TEST(Charts, CsvHoldsTheNumbersDrawn) {
  const Report r = sample_report();
  EXPECT_NE(draw_hits(r.hits).csv.find("\"trained, all heads together\",0.93,0.914,0.945,1000"),
            std::string::npos);
  EXPECT_EQ(count(draw_heads(r.entropy, "e", "", false).csv, "\r\n"), 17u);
  EXPECT_EQ(count(draw_confusion(r.confusion, r.classes).csv, "\r\n"), 11u);
  EXPECT_EQ(count(draw_scene(r.gallery[0], r.classes, "g").csv, "\r\n"), 18u);
}

TEST(Pictures, HeatIsClearAtNoneAndStrongestAtTheTop) {
  const std::vector<float> heat{0, 1, 2, 4};
  const Tensor p = heat_pixels(heat.data(), 2, 2);
  EXPECT_EQ(p.shape(), (Dims{2, 2, 4}));
  EXPECT_EQ(p.at<uint8_t>(0, 0, 3), 0);
  EXPECT_LT(p.at<uint8_t>(0, 1, 3), p.at<uint8_t>(1, 0, 3));
  EXPECT_LT(p.at<uint8_t>(1, 0, 3), p.at<uint8_t>(1, 1, 3));
  const std::vector<float> none(4, 0.0f);
  EXPECT_EQ(heat_pixels(none.data(), 2, 2).at<uint8_t>(1, 1, 3), 0);
  EXPECT_EQ(top_patch(heat.data(), 4), 3);
}

TEST(Pictures, OutlineGoesAroundTheLandmarksOnly) {
  EXPECT_EQ(outline_path({}, 2, 2), "");
  EXPECT_EQ(outline_path({0, 0, 0, 0}, 2, 2), "");
  // Two patches side by side have six outer edges and no line between them.
  EXPECT_EQ(count(outline_path({1, 1, 0, 0}, 2, 2), "M"), 6u);
}

TEST(Page, HoldsNoScriptNoOutsideAddressAndIsClosed) {
  const std::string page = render(sample_report());
  EXPECT_EQ(count(page, "<script"), 0u);
  EXPECT_EQ(count(page, "http://"), 0u);
  EXPECT_EQ(count(page, "https://"), 0u);
  EXPECT_EQ(count(page, "<svg"), count(page, "</svg>"));
  EXPECT_EQ(count(page, "<figure"), count(page, "</figure>"));
  EXPECT_EQ(count(page, "<figure"), count(page, "href=\"data:image/svg+xml;base64,"));
  EXPECT_EQ(count(page, "<figure"), count(page, "href=\"data:text/csv;charset=utf-8;base64,"));
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  for (const char* words : {"Where it looks", "Does it look at the right place?", "How it learned",
                            "What it mixes up", "Its mistakes", "91.2 %", "avx2"}) {
    EXPECT_NE(page.find(words), std::string::npos) << words;
  }
}

TEST(Page, TextFromOutsideNeverBecomesMarkup) {
  Report r = sample_report(1);
  const std::string evil = "</style><script>alert(1)</script>";
  r.title = r.summary = r.reading = r.classes[3] = r.gallery[0].name = evil;
  r.numbers = {{evil, evil, evil}};
  r.provenance = {{evil, evil}};
  r.hits.lines[0].label = evil;
  const std::string page = render(r);
  EXPECT_EQ(count(page, "<script"), 0u);
  EXPECT_GE(count(page, "&lt;script&gt;"), 7u);
}

TEST(Page, StaysWithinItsBudget) {
  EXPECT_LT(render(sample_report()).size(), kDemoBudget);
  // Large pictures are shrunk: noise, which no PNG can squeeze, of nine megapixels.
  Report r = sample_report(1);
  Rng rng(2);
  Tensor& pixels = r.gallery[0].pixels;
  pixels = Tensor::empty({3000, 3000, 3}, DType::u8);
  for (uint8_t& v : pixels.span<uint8_t>()) v = static_cast<uint8_t>(rng.next_u32());
  EXPECT_LT(render(r).size(), kDemoBudget);
}

TEST(Page, EmptyPartsAreLeftOut) {
  Report r;
  r.title = "nothing";
  const std::string page = render(r);
  EXPECT_EQ(count(page, "<section"), 0u);
  EXPECT_EQ(count(page, "<figure"), 0u);
  r.unseen_count = 50;
  EXPECT_NE(render(r).find("None among 50 unseen pictures."), std::string::npos);
}

TEST(Page, ManyClassesBecomeAList) {
  Report r;
  r.title = "many";
  for (int i = 0; i < 100; ++i) r.classes.push_back("class " + std::to_string(i));
  r.confusion.counts.assign(10000, 0);
  r.confusion.counts[7] = 12;  // class 0 taken for class 7
  const std::string page = render(r);
  EXPECT_NE(page.find("<td>class 0</td><td>class 7</td><td>12</td>"), std::string::npos);
}

TEST(Page, ContradictionsAreRefusedByName) {
  const auto message = [](auto&& change) -> std::string {
    Report r = sample_report(2);
    change(r);
    try {
      render(r);
    } catch (const ArgumentError& e) {
      return e.what();
    }
    return "nothing thrown";
  };
  const auto holds = [&](auto&& change, const char* words) {
    const std::string got = message(change);
    EXPECT_NE(got.find(words), std::string::npos) << got;
  };
  holds([](Report& r) { r.gallery[1].attention.pop_back(); }, "gallery scene 1");
  holds([](Report& r) { r.mistakes[0].predicted = 10; }, "predicted class 10 of 10");
  holds([](Report& r) { r.gallery[0].truth = -1; }, "true class -1");
  holds([](Report& r) { r.gallery[0].attention[3] = NAN; }, "finite");
  holds([](Report& r) { r.gallery[0].pixels = Tensor(); }, "pixels");
  holds([](Report& r) { r.gallery[0].landmark.push_back(1); }, "landmark");
  holds([](Report& r) { r.confusion.counts.pop_back(); }, "99 confusion counts");
  holds([](Report& r) { r.entropy.value.pop_back(); }, "15 values");
}

}  // namespace
}  // namespace foci::report
