// The report: one HTML file that shows how a model was trained and where it looks.
//
// Everything here is plain data, so that any task can fill it. A part that is left empty is left
// out of the page. The page loads nothing from anywhere (its Content-Security-Policy forbids it),
// holds no script, and every text that comes from outside is escaped.
//
// Size: a demo's page (12 + 12 scenes, 4 layers × 4 heads) stays under kDemoBudget; pictures are
// shrunk to kMaxPictureSide and curves thinned to kMaxCurveRows, whatever comes in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "foci/core/api.h"
#include "foci/core/tensor.h"
#include "foci/insight/estimate.h"

namespace foci::report {

inline constexpr size_t kDemoBudget = 2 << 20;  // bytes
inline constexpr int64_t kMaxPictureSide = 256;
inline constexpr int64_t kMaxCurveRows = 4000;

// A number in the row at the top of the page.
struct KeyNumber {
  std::string label;  // "right on unseen scenes"
  std::string value;  // "91.2 %"
  std::string note;   // "95 % interval 89.4 – 92.8 %"
};

struct StepRecord {
  int64_t step = 0;
  double loss = 0, accuracy = 0, learning_rate = 0, grad_norm = 0;  // accuracy on the batch, [0, 1]
};

struct EvaluationRecord {
  int64_t step = 0;
  double loss = 0, accuracy = 0;  // on pictures never trained on
  int64_t count = 0;              // of so many; 0 where nobody knows
};

struct Confusion {
  std::vector<int64_t> counts;  // [C, C], row = true class, column = predicted class
};

// One picture as the model saw it, and what every head did with it. L layers, H heads, the picture
// cut into R × C patches of equal size.
struct Scene {
  std::string name;
  Tensor pixels;  // [height, width, 1 or 3] uint8
  int64_t rows = 0, columns = 0;
  int64_t layers = 0, heads = 0;
  std::vector<float> attention;   // [L, H, R, C], finite and ≥ 0
  std::vector<uint8_t> landmark;  // [R, C], 1 where the thing to be recognised lies; may be empty
  std::optional<int64_t> truth;   // index into Report::classes
  int64_t predicted = 0;
  std::vector<double> probabilities;  // [classes], may be empty
};

// A number for each head of each layer.
struct HeadGrid {
  int64_t layers = 0, heads = 0;
  std::vector<double> value;      // [L, H], NaN where there is none
  std::vector<double> reference;  // [L, H] of the same model before training; may be empty
  double full = 1;                // what a full bar stands for, where no number is larger; ≥ 0
  int64_t count = 0;              // pictures behind each number; 0 where nobody knows
  // What a full bar stands for: `full` or the largest number, and 0 only where all numbers are.
  double bound() const;
  bool empty() const { return value.empty(); }
};

struct LandmarkHits {
  // One line of the chart: "trained, all heads", "untrained, all heads", …
  struct Line {
    std::string label;
    insight::Estimate rate;
    bool trained = true;
  };
  std::vector<Line> lines;
  double chance = 0;  // mean share of landmark patches
  HeadGrid per_head;  // hit rates
};

struct Report {
  std::string title, summary;
  std::vector<KeyNumber> numbers;
  std::vector<std::string> classes;
  std::vector<StepRecord> steps;
  std::vector<EvaluationRecord> evaluations;
  std::string training_note;  // a sentence about how to read the curves; may be empty
  Confusion confusion;
  std::string reading;  // what a patch's heat is, as the end of "A patch's colour is …"
  std::vector<Scene> gallery;
  std::vector<Scene> mistakes;
  int64_t mistake_count = 0;  // how many there were in all
  int64_t unseen_count = 0;   // among how many scenes
  HeadGrid entropy;           // nats
  LandmarkHits hits;
  std::vector<std::pair<std::string, std::string>> provenance;  // "model" → its SHA-256, …
};

// The page. Throws ArgumentError where a part contradicts itself (sizes, classes out of range).
FOCI_API std::string render(const Report& report);

// Renders and writes all or nothing. Throws ArgumentError, IoError.
FOCI_API void write_report(const std::filesystem::path& path, const Report& report);

}  // namespace foci::report
