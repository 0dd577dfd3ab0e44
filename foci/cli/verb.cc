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

// One line, whatever a message holds.
std::string one_line(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return text;
}

int fail(int code, const std::string& message) {
  std::fprintf(stderr, "foci: %s\n", one_line(message).c_str());
  return code;
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
bool gives(const Words& words, const std::string& option) {
  for (const std::string& word : words) {
    if (word == "--") break;
    if (word == option || word.starts_with(option + "=")) return true;
  }
  return false;
}

// How long a run takes can be said in two ways, of which steps goes before minutes.
void check_length(const Words& words) {
  if (gives(words, "--minutes") && gives(words, "--steps")) {
    throw UsageError("--minutes and --steps: both given, one of them is right");
  }
}

// The file's settings as command-line words, to stand before the person's own, which then win.
Words words_of_config(const std::string& path, const CLI::App& app, const Words& own) {
  const nlohmann::json config =
      reading([&] { return parse_json(read_file(path, 1 << 20), "--config: " + path); });
  if (!config.is_object()) throw UsageError("--config: " + path + " must hold one JSON object");
  Words out, known;
  for (const CLI::Option* option : app.get_options()) {
    if (is_setting(*option)) known.push_back(option->get_lnames()[0]);
  }
  for (const auto& [key, value] : config.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      throw UsageError("--config: " + path + ": unknown key \"" + key + "\"" +
                       did_you_mean(key, known));
    }
    if (key == "steps" && gives(own, "--minutes")) continue;  // else they would go before it
    const CLI::Option& option = *app.get_option("--" + key);
    if (is_flag(option)) {
      if (!value.is_boolean()) {
        throw UsageError("--config: " + path + ": \"" + key + "\" must be true or false");
      }
      if (value.get<bool>()) out.push_back(fmt::format("--{}", key));
    } else if (value.is_string()) {
      out.push_back(fmt::format("--{}={}", key, value.get<std::string>()));
    } else if (value.is_number()) {
      out.push_back(fmt::format("--{}={}", key, value.dump()));
    } else {
      throw UsageError("--config: " + path + ": \"" + key + "\" must be a number or a text");
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

int run_verb(const VerbEntry& entry, const Words& words) {
  CLI::App app(entry.about, std::string("foci ") + entry.name);
  app.allow_extras();
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.option_defaults()->always_capture_default();
  app.get_formatter()->column_width(36);
  const std::unique_ptr<Verb> verb = entry.make();
  verb->declare(app);
  bool dump = false;
  std::string config;
  app.add_option("--config", config, "JSON file with options; the command line goes before it")
      ->type_name("FILE");
  app.add_flag("--dump-config", dump, "Print all options as such a file, and do nothing else");

  check_length(words);
  Words all = words;
  std::string path = config_path(words);
  if (path.empty()) path = verb->implied_config(words).string();
  if (!path.empty()) {
    all = words_of_config(path, app, words);
    all.insert(all.end(), words.begin(), words.end());
  }
  std::reverse(all.begin(), all.end());  // as CLI11 takes them
  try {
    app.parse(all);
  } catch (const CLI::CallForHelp&) {
    std::string text = app.help();
    for (size_t at; (at = text.find("\n\n\n")) != std::string::npos;) text.erase(at, 1);
    std::printf("%s", text.c_str());
    return kOk;
  } catch (const CLI::ParseError& e) {
    throw UsageError(std::string(entry.name) + ": " + e.what() + " (see foci " + entry.name +
                     " --help)");
  }
  if (const std::string problem = unexpected(app, entry.name); !problem.empty()) {
    throw UsageError(std::string(entry.name) + ": " + problem);
  }
  if (dump) {
    std::printf("%s", settings_json(app).c_str());
    return kOk;
  }
  (void)current_target();  // a wrong FOCI_TARGET is told before anything is written
  return verb->run();
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

int dispatch(const Words& words) {
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
    if (object.empty()) return run_verb(entry, {words.begin() + 1, words.end()});
    if (words.size() > 1 && words[1] == object) {
      return run_verb(entry, {words.begin() + 2, words.end()});
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
    out[name] = option->get_type_name() != "TEXT" && number.is_number()
                    ? number
                    : nlohmann::ordered_json(value);
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
    code = dispatch(Words(argv + std::min(argc, 1), argv + argc));
  } catch (const UsageError& e) {
    return fail(kUsage, e.what());
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
