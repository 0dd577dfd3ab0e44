// The command line: finds the verb, reads its options (and a config file), runs it, and turns every
// failure into one line.
#include "foci/cli/verb.h"

#include <signal.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "foci/cli/suggest.h"
#include "foci/core/json.h"
#include "foci/core/simd_target.h"
#include "foci/io/file.h"

namespace foci::cli {

std::unique_ptr<Verb> make_bench_attention();
std::unique_ptr<Verb> make_bench_train();
std::unique_ptr<Verb> make_classify();
std::unique_ptr<Verb> make_demo();
std::unique_ptr<Verb> make_inspect();
std::unique_ptr<Verb> make_train_vit();
std::unique_ptr<Verb> make_verify();
std::unique_ptr<Verb> make_version();

namespace {

constexpr VerbEntry kVerbs[] = {
    {"demo", "Train a small transformer on digits in clutter and show where it looks", make_demo},
    {"train vit", "Train a vision transformer on a folder of pictures, or on the demo's digits",
     make_train_vit},
    {"classify", "Name what pictures show, with a trained model", make_classify},
    {"inspect", "Show where a trained model looks in pictures, as a report", make_inspect},
    {"bench attention", "Measure attention for any spec and shape, against the machine's peak",
     make_bench_attention},
    {"bench train", "Measure training steps, by operator too, against the machine's peak",
     make_bench_train},
    {"verify", "Check the attention engine against case files", make_verify},
    {"version", "Say what this program was built from and what it runs on", make_version},
};

using Words = std::vector<std::string>;

std::pair<std::string, std::string> split_name(const std::string& name) {
  const size_t space = name.find(' ');
  if (space == std::string::npos) return {name, ""};
  return {name.substr(0, space), name.substr(space + 1)};
}

// The words that may stand first, or after `group`.
Words names_after(const std::string& group) {
  Words out;
  for (const VerbEntry& entry : kVerbs) {
    const auto [first, second] = split_name(entry.name);
    const std::string& name = group.empty() ? first : second;
    if ((group.empty() || first == group) && std::find(out.begin(), out.end(), name) == out.end()) {
      out.push_back(name);
    }
  }
  return out;
}

std::string joined(const Words& words, const char* between = ", ") {
  std::string out;
  for (const std::string& w : words) out += (out.empty() ? "" : between) + w;
  return out;
}

int fail(int code, const std::string& message) {
  complain(message);
  return code;
}

int fail(const UsageError& e) {
  constexpr size_t kShown = 50;
  complain(e.what());
  const std::vector<std::string>& lines = e.lines();
  for (size_t i = 0; i < std::min(kShown, lines.size()); ++i) complain("  " + lines[i]);
  if (lines.size() > kShown) complain(fmt::format("  and {} more", lines.size() - kShown));
  return kUsage;
}

Words long_options(const CLI::App& app) {
  Words out;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) out.push_back(fmt::format("--{}", name));
  }
  return out;
}

// ---- the config file ----

// Options that a config file may not hold, being about the file or about no run at all.
bool is_setting(const CLI::Option& option) {
  const Words& names = option.get_lnames();
  return !names.empty() && names[0] != "help" && names[0] != "config" && names[0] != "dump-config";
}

bool is_flag(const CLI::Option& option) {
  return option.get_expected_max() == 0;
}

// Whether an option stands among the words.
bool gives(const Words& words, std::string_view option) {
  for (const std::string& word : words) {
    if (word == "--") break;
    if (word.substr(0, word.find('=')) == option) return true;
  }
  return false;
}

// How long a run takes can be said in two ways, of which steps goes before minutes.
void check_length(const Words& words) {
  if (gives(words, "--minutes") && gives(words, "--steps")) {
    throw UsageError("--minutes and --steps: both given, one of them is right");
  }
}

// Settings as command-line words, to stand before those that win over them. `origin` says where
// they come from.
Words words_of_settings(const std::string& text, const std::string& origin, const CLI::App& app,
                        const Words& later) {
  const nlohmann::json config = reading([&] { return parse_json(text, origin); });
  if (!config.is_object()) throw UsageError(origin + " must hold one JSON object");
  Words out, known;
  for (const CLI::Option* option : app.get_options()) {
    if (is_setting(*option)) known.push_back(option->get_lnames()[0]);
  }
  for (const auto& [key, value] : config.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      throw UsageError(origin + ": unknown key \"" + key + "\"" + did_you_mean(key, known));
    }
    if (key == "steps" && gives(later, "--minutes")) continue;  // else they would go before it
    const CLI::Option& option = *app.get_option("--" + key);
    if (is_flag(option)) {
      if (!value.is_boolean()) {
        throw UsageError(origin + ": \"" + key + "\" must be true or false");
      }
      if (value.get<bool>()) out.push_back(fmt::format("--{}", key));
    } else if (value.is_string()) {
      out.push_back(fmt::format("--{}={}", key, value.get<std::string>()));
    } else if (value.is_number()) {
      out.push_back(fmt::format("--{}={}", key, value.dump()));
    } else {
      throw UsageError(origin + ": \"" + key + "\" must be a number or a text");
    }
  }
  return out;
}

// What --config names in the words, or empty.
std::string config_path(const Words& words) {
  std::string path;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--") break;
    if (words[i] == "--config" && i + 1 < words.size()) path = words[i + 1];
    if (words[i].starts_with("--config=")) path = words[i].substr(9);
  }
  return path;
}

// ---- parsing ----

// A word that no option or argument took.
std::string unexpected(const CLI::App& app, const std::string& verb) {
  for (const std::string& word : app.remaining()) {
    if (word == "--") continue;
    const std::string name = word.substr(0, word.find('='));
    if (word.starts_with("-")) {
      return "unknown option " + name + did_you_mean(name, long_options(app)) + " (foci " + verb +
             " --help lists them)";
    }
    return "unexpected argument '" + word + "' (foci " + verb + " --help says what it takes)";
  }
  return "";
}

// A verb with its options, to be parsed once.
struct Attempt {
  const VerbEntry& entry;
  CLI::App app;
  std::unique_ptr<Verb> verb = entry.make();
  std::string config;
  bool dump = false;

  Attempt(const VerbEntry& e, const Call& call)
      : entry(e), app(e.about, std::string("foci ") + e.name) {
    app.allow_extras();
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    app.option_defaults()->always_capture_default();
    app.get_formatter()->column_width(36);
    verb->call = call;
    verb->declare(app);
    app.add_option("--config", config, "JSON file with options; the command line goes before it")
        ->type_name("FILE");
    app.add_flag("--dump-config", dump, "Print all options as such a file, and do nothing else");
    if (call.gives("--dump-config")) {
      for (CLI::Option* option : app.get_options()) option->required(false);
    }
  }

  // False where help was asked for, and given.
  bool parse(Words words) {
    std::reverse(words.begin(), words.end());  // as CLI11 takes them
    try {
      app.parse(words);
    } catch (const CLI::CallForHelp&) {
      std::string text = app.help();
      for (size_t at; (at = text.find("\n\n\n")) != std::string::npos;) text.erase(at, 1);
      std::printf("%s", text.c_str());
      return false;
    } catch (const CLI::ParseError& e) {
      throw UsageError(std::string(entry.name) + ": " + e.what() + " (see foci " + entry.name +
                       " --help)");
    }
    if (const std::string problem = unexpected(app, entry.name); !problem.empty()) {
      throw UsageError(std::string(entry.name) + ": " + problem);
    }
    return true;
  }
};

int run_verb(const VerbEntry& entry, const Call& call) {
  check_length(call.words);
  Attempt first(entry, call);
  Words all;
  if (const std::string path = config_path(call.words); !path.empty()) {
    const std::string text = reading([&] { return read_file(path, 1 << 20); });
    all = words_of_settings(text, "--config: " + shown(path), first.app, call.words);
  }
  all.insert(all.end(), call.words.begin(), call.words.end());
  if (!first.parse(all)) return kOk;
  // Where it goes on from an earlier call, that one's settings stand before all others.
  const std::string earlier = first.verb->settings_to_go_on_from();
  Attempt second(entry, call);
  if (!earlier.empty()) {
    Words again = words_of_settings(earlier, "--resume: the run's record", first.app, all);
    again.insert(again.end(), all.begin(), all.end());
    second.parse(again);
  }
  const Attempt& last = earlier.empty() ? first : second;
  if (last.dump) {
    std::printf("%s", settings_json(last.app).c_str());
    return kOk;
  }
  try {
    (void)current_target();  // a wrong one is told before anything is written
  } catch (const ArgumentError& e) {
    throw UsageError(fmt::format("FOCI_TARGET: {}", e.what()));
  }
  return last.verb->run();
}

std::string help() {
  std::string out =
      "foci: attention on CPUs, and instruments that show where a model looks\n\n"
      "usage: foci VERB [OPTIONS] [ARGUMENTS]\n\n";
  for (const VerbEntry& entry : kVerbs)
    out += fmt::format("  {:<16} {}\n", entry.name, entry.about);
  return out +
         "\nfoci VERB --help lists a verb's options with their defaults.\n"
         "Results go to stdout, progress and remarks to stderr.\n"
         "Exit codes: 0 done, 1 failed, 2 wrong use or unreadable file, 130 ended by Ctrl-C.\n"
         "FOCI_TARGET=baseline|avx2|avx512 forces a SIMD target.\n";
}

int dispatch(const std::string& program, const Words& words) {
  if (words.empty()) {
    throw UsageError("which verb? " + joined(names_after("")) + " (foci --help says more)");
  }
  const std::string& first = words[0];
  if (first == "--help" || first == "-h" || first == "help") {
    std::printf("%s", help().c_str());
    return kOk;
  }
  const bool asks_version = first == "--version";
  for (const VerbEntry& entry : kVerbs) {
    const auto [verb, object] = split_name(entry.name);
    if (asks_version ? verb != "version" : verb != first) continue;
    if (object.empty()) return run_verb(entry, {program, {words.begin() + 1, words.end()}});
    if (words.size() > 1 && words[1] == object) {
      return run_verb(entry, {program, {words.begin() + 2, words.end()}});
    }
  }
  const Words known = names_after("");
  if (std::find(known.begin(), known.end(), first) == known.end()) {
    throw UsageError("unknown verb '" + first + "'" + did_you_mean(first, known) +
                     " (foci --help lists them)");
  }
  const Words objects = names_after(first);
  if (words.size() < 2 || words[1] == "--help" || words[1] == "-h") {
    const std::string choices = "usage: foci " + first + " " + joined(objects, "|") + " [OPTIONS]";
    if (words.size() < 2) throw UsageError(first + ": which one? " + choices);
    std::printf("%s\n", choices.c_str());
    return kOk;
  }
  throw UsageError(first + ": unknown object '" + words[1] + "'" + did_you_mean(words[1], objects) +
                   " (there is: " + joined(objects) + ")");
}

}  // namespace

bool Call::gives(std::string_view option) const {
  return cli::gives(words, option);
}

std::string settings_json(const CLI::App& app, std::span<const std::string_view> without) {
  nlohmann::ordered_json out = nlohmann::ordered_json::object();
  for (const CLI::Option* option : app.get_options()) {
    if (!is_setting(*option)) continue;
    const std::string& name = option->get_lnames()[0];
    if (std::find(without.begin(), without.end(), name) != without.end()) continue;
    if (is_flag(*option)) {
      out[name] = option->count() > 0;
      continue;
    }
    const std::string value =
        option->count() > 0 ? option->results().back() : option->get_default_str();
    if (value.empty()) continue;  // not set, and no default to tell
    const nlohmann::ordered_json number =
        nlohmann::ordered_json::parse(value, nullptr, /*allow_exceptions=*/false);
    // A folder may be called 007, or 1e3.
    const std::string type = option->get_type_name();
    const bool is_number = type == "N" || type == "X" || type == "MINUTES";
    out[name] = is_number && number.is_number() ? number : nlohmann::ordered_json(value);
    try {
      (void)out[name].dump();
    } catch (const nlohmann::json::type_error&) {
      throw UsageError(fmt::format("--{}: {} is not UTF-8, which a file of settings must be", name,
                                   in_quotes(value)));
    }
  }
  return out.dump(2) + "\n";
}

std::span<const VerbEntry> verbs() {
  return kVerbs;
}

int run_program(int argc, const char* const* argv) {
  int code = kFailure;
  signal(SIGXFSZ, SIG_IGN);  // a write beyond a limit then fails, and is told, as on a full disk
  try {
    code = dispatch(argc > 0 && *argv[0] ? argv[0] : "foci",
                    Words(argv + std::min(argc, 1), argv + argc));
  } catch (const UsageError& e) {
    return fail(e);
  } catch (const ArgumentError& e) {
    return fail(kUsage, e.what());
  } catch (const FormatError& e) {
    return fail(kUsage, e.what());
  } catch (const std::bad_alloc&) {
    return fail(kFailure, "out of memory");
  } catch (const std::exception& e) {
    return fail(kFailure, e.what());
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
    return fail(kFailure, "stdout: the result could not be written");
  }
  return code;
}

}  // namespace foci::cli
