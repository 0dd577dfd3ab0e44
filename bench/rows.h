// What the benchmarks share: the rows to measure with what each must reach (rows.json, the one
// list), the options they all take, and what they print: a table, and JSON that bench/check.py
// reads.
#pragma once

#include <map>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/core/simd_target.h"
#include "foci/spec/spec.h"

namespace foci::bench {

struct Options {
  bool quick = false;              // shorter measurements, without the slow rows
  std::string json;                // a file, "-" being standard output
  std::optional<std::regex> rows;  // of row names, searched
};

// Reads --quick, --json FILE, --rows REGEX, --threads N (sets them). Where the program should end
// now it says so on the right stream and gives the exit code: 0 after --help, 2 for what it cannot
// take.
std::optional<int> read_options(int argc, char** argv, const std::string& bench, Options& options);

// What a measure must reach: a least or a most value.
struct Target {
  bool at_least = true;
  double bound = 0;
  bool met(double value) const { return at_least ? value >= bound : value <= bound; }
};

struct Definition {
  std::string row;
  AttentionShape shape;
  AttentionSpec spec;
  std::string scores = "random";    // or "trained", "clustered": inputs.h
  std::string over;                 // ratios: what it is compared with
  std::vector<std::string> wanted;  // gradients beside those of q, k and v
  std::vector<int64_t> lengths;
  std::map<std::string, Target> targets;  // by measure, of the SIMD target in use
};

// The rows of one section that the options let through. Throws Error with the place where the list
// is wrong.
std::vector<Definition> definitions(const std::string& section, const Options& options);
// The same, of a list given as text.
std::vector<Definition> definitions_of(const std::string& text, const std::string& section,
                                       const Options& options, SimdTarget target);

// A value with its quartiles.
struct Value {
  double median = 0, low = 0, high = 0;
};

// Rows as they are measured. Prints each at once (to standard error where the JSON goes to standard
// output).
class Report {
 public:
  Report(const std::string& bench, const Options& options);
  void add(const Definition& definition, const std::string& measure, const Value& value,
           const std::string& note = "");
  // A number that goes with all rows ("peak_gflops").
  void fact(const std::string& name, double value);
  std::string json() const;
  // Writes the JSON where it was asked for; the exit code.
  int finish() const;

 private:
  struct Row {
    std::string row, measure;
    Value value;
    std::optional<Target> target;
    std::string note;
  };
  std::string bench_;
  Options options_;
  std::vector<Row> rows_;
  std::map<std::string, double> facts_;
};

// Runs `body` after reading options; an exception becomes one line and exit code 1.
int run(int argc, char** argv, const std::string& bench, void (*body)(const Options&, Report&));

}  // namespace foci::bench
