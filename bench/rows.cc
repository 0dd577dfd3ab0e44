// rows.json read, options read, and results written.
#include "rows.h"

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "foci/core/error.h"
#include "foci/core/threads.h"
#include "foci/spec/json_value.h"

namespace foci::bench {
namespace {

using Json = nlohmann::json;

constexpr const char* kUsage =
    "usage: {} [--quick] [--rows REGEX] [--threads N] [--json FILE]\n"
    "  --quick        shorter measurements, without the slow rows\n"
    "  --rows REGEX   only rows whose name has a match\n"
    "  --threads N    default: all that this process may run on ({})\n"
    "  --json FILE    the results as JSON too; - is standard output\n";

AttentionShape shape_of(const Json& json) {
  AttentionShape s;
  for (const auto& [letter, value] : json.items()) {
    const bool known = letter == "B" || letter == "H" || letter == "Hk" || letter == "N" ||
                       letter == "M" || letter == "D" || letter == "Dv";
    require(known, "shape: unknown letter '{}'", letter);
  }
  s.B = json.value("B", int64_t{1});
  s.H = json.value("H", int64_t{1});
  s.Hk = json.value("Hk", s.H);
  s.N = json.value("N", int64_t{0});
  s.M = json.value("M", s.N);
  s.D = json.value("D", int64_t{0});
  s.Dv = json.value("Dv", s.D);
  return s;
}

// None where the list names a bound for other SIMD targets only.
std::optional<Target> target_of(const Json& json, SimdTarget simd) {
  require(json.is_object() && json.size() == 1 &&
              (json.contains("at_least") || json.contains("at_most")),
          "target: {}, must be {{\"at_least\": …}} or {{\"at_most\": …}}", json.dump());
  const Json& bound = json.begin().value();
  const std::string name(name_of(simd));
  if (bound.is_object() && !bound.contains(name)) return std::nullopt;
  return Target{json.contains("at_least"),
                bound.is_object() ? bound.at(name).get<double>() : bound.get<double>()};
}

Definition definition_of(const Json& json, SimdTarget simd) {
  Definition d;
  d.row = json.at("row").get<std::string>();
  if (json.contains("shape")) d.shape = shape_of(json.at("shape"));
  if (json.contains("spec")) d.spec = spec_from_json(json.at("spec"));
  d.scores = json.value("scores", d.scores);
  d.over = json.value("over", d.over);
  d.wanted = json.value("wanted", d.wanted);
  d.lengths = json.value("lengths", d.lengths);
  if (json.contains("targets")) {
    for (const auto& [measure, target] : json.at("targets").items()) {
      if (const auto t = target_of(target, simd)) d.targets[measure] = *t;
    }
  }
  return d;
}

Json json_of(const Target& t) {
  return {{t.at_least ? "at_least" : "at_most", t.bound}};
}

}  // namespace

std::optional<int> read_options(int argc, char** argv, const std::string& bench, Options& o) {
  const auto refuse = [&](const std::string& why) {
    fmt::print(stderr, "{}: {}; --help says what there is\n", bench, why);
    return 2;
  };
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--help" || word == "-h") {
      fmt::print(kUsage, bench, num_threads());
      return 0;
    }
    if (word == "--quick") {
      o.quick = true;
      continue;
    }
    if (word != "--json" && word != "--rows" && word != "--threads") {
      return refuse(fmt::format("unknown option '{}'", word));
    }
    if (i + 1 == argc) return refuse(word + " wants a value");
    const std::string value = argv[++i];
    if (word == "--json") {
      o.json = value;
    } else if (word == "--rows") {
      try {
        o.rows = std::regex(value);
      } catch (const std::regex_error&) {
        return refuse(fmt::format("--rows: '{}' is no regular expression", value));
      }
    } else {
      size_t used = 0;
      int n = 0;
      try {
        n = std::stoi(value, &used);
      } catch (const std::exception&) {
      }
      if (used != value.size() || n < 1 || n > 1024) {
        return refuse(fmt::format("--threads: '{}', must be 1 to 1024", value));
      }
      set_num_threads(n);
    }
  }
  return std::nullopt;
}

std::vector<Definition> definitions_of(const std::string& text, const std::string& section,
                                       const Options& options, SimdTarget target) {
  std::vector<Definition> list;
  size_t at = 0;
  try {
    const Json all = Json::parse(text);
    for (const Json& json : all.at(section)) {
      if (!(options.quick && json.value("slow", false))) {
        Definition d = definition_of(json, target);
        if (!options.rows || std::regex_search(d.row, *options.rows)) list.push_back(std::move(d));
      }
      ++at;
    }
  } catch (const std::exception& e) {  // of the JSON library, or an Error from a spec
    throw Error(fmt::format("rows.json, {}[{}]: {}", section, at, e.what()));
  }
  return list;
}

std::vector<Definition> definitions(const std::string& section, const Options& options) {
  std::ifstream file(FOCI_BENCH_ROWS);
  std::ostringstream text;
  text << file.rdbuf();
  require<Error>(file.good(), "{}: cannot be read", FOCI_BENCH_ROWS);
  return definitions_of(text.str(), section, options, current_target());
}

Report::Report(const std::string& bench, const Options& options)
    : bench_(bench), options_(options) {
  fmt::print(options_.json == "-" ? stderr : stdout,
             "{}: SIMD target {}, {} threads\n{:<38}{:<34}{}\n", bench, name_of(current_target()),
             num_threads(), "row", "measure", "median (quartiles)");
}

void Report::add(const Definition& d, const std::string& measure, const Value& v,
                 const std::string& note) {
  const auto found = d.targets.find(measure);
  Row row{d.row, measure, v, std::nullopt, note};
  std::string goal;
  if (found != d.targets.end()) {
    row.target = found->second;
    goal = fmt::format("  {} {:.4g}{}", row.target->at_least ? "at least" : "at most",
                       row.target->bound, row.target->met(v.median) ? "" : ": falls short");
  }
  FILE* out = options_.json == "-" ? stderr : stdout;
  fmt::print(out, "{:<38}{:<34}{:.4g} ({:.4g} - {:.4g}){}{}{}\n", d.row, measure, v.median, v.low,
             v.high, goal, note.empty() ? "" : "  ", note);
  std::fflush(out);
  rows_.push_back(std::move(row));
}

void Report::fact(const std::string& name, double value) {
  facts_[name] = value;
}

std::string Report::json() const {
  Json out = {{"bench", bench_},          {"simd", name_of(current_target())},
              {"threads", num_threads()}, {"quick", options_.quick},
              {"facts", facts_},          {"rows", Json::array()}};
  for (const Row& r : rows_) {
    Json row = {{"row", r.row},       {"measure", r.measure}, {"value", r.value.median},
                {"low", r.value.low}, {"high", r.value.high}, {"target", nullptr},
                {"met", nullptr},     {"note", r.note}};
    if (r.target) {
      row["target"] = json_of(*r.target);
      row["met"] = r.target->met(r.value.median);
    }
    out["rows"].push_back(row);
  }
  return out.dump(2);
}

int Report::finish() const {
  if (options_.json.empty()) return 0;
  if (options_.json == "-") {
    fmt::print("{}\n", json());
    return 0;
  }
  std::ofstream file(options_.json);
  file << json() << "\n";
  file.close();
  require<Error>(file.good(), "--json: {} cannot be written", options_.json);
  return 0;
}

int run(int argc, char** argv, const std::string& bench, void (*body)(const Options&, Report&)) {
  try {
    Options options;
    if (const auto code = read_options(argc, argv, bench, options)) return *code;
    Report report(bench, options);
    body(options, report);
    return report.finish();
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}: {}\n", bench, e.what());
    return 1;
  }
}

}  // namespace foci::bench
