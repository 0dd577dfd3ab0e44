// Records of runs, read and compared; the lock, and the cleaning up.
#include "foci/cli/run_folder.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <nlohmann/json.hpp>
#include <system_error>

#include "foci/cli/json_text.h"
#include "foci/io/file.h"
#include "foci/vision/trainer.h"

namespace foci::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr const char* kModelFile = "model.safetensors";  // the last file that a checkpoint writes
constexpr const char* kPicturesFile = "pictures.txt";
constexpr const char* kFiles[] = {vision::kTrainingFile, "config.json", kModelFile, kPicturesFile,
                                  "report.html"};

// What differs from call to call and is no part of a run.
constexpr std::string_view kOfThisCall[] = {"resume", "quiet", "json", "threads", "out"};
// What a run may be given anew when it goes on: how long it lasts, and what leaves the weights as
// they are. All else must stay. Data may have moved; their fingerprint tells whether they are the
// same.
constexpr std::string_view kMayChange[] = {
    "steps", "minutes", "scenes", "report", "data", "checkpoint-seconds", "checkpoint-layers"};

bool is_there(const fs::path& path) {
  std::error_code unknown;
  return fs::exists(path, unknown);
}

struct Record {
  std::string verb;
  ordered_json options = ordered_json::object();
  std::string data;
};

Record parse_record(const std::string& text, const fs::path& folder) {
  const auto bad = [&] {
    return UsageError(fmt::format("{}: the record of its run cannot be read",
                                  shown(folder / vision::kTrainingFile)));
  };
  const ordered_json all = ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!all.is_object()) throw bad();
  Record out;
  for (const auto& [key, value] : all.items()) {
    if (key == "verb" && value.is_string()) out.verb = value.get<std::string>();
    if (key == "options" && value.is_object()) out.options = value;
    if (key == "data" && value.is_string()) out.data = value.get<std::string>();
  }
  if (out.verb.empty()) throw bad();
  return out;
}

// The text of the run that a folder holds; throws UsageError where there is none.
std::string text_of_run(const fs::path& folder) {
  if (!is_there(folder / vision::kTrainingFile)) {
    throw UsageError(fmt::format("--resume: {} holds no run to go on with: {}", shown(folder),
                                 is_there(folder)
                                     ? fmt::format("no {} in it", vision::kTrainingFile)
                                     : std::string("no such folder")));
  }
  const std::string text = reading([&] { return vision::read_record(folder); });
  if (text.empty()) {
    throw UsageError(fmt::format("--resume: {} was not written by foci demo or foci train",
                                 shown(folder / vision::kTrainingFile)));
  }
  return text;
}

std::string in_words(const ordered_json& value) {
  if (value.is_boolean()) return value.get<bool>() ? "on" : "off";
  return shown(value.is_string() ? value.get<std::string>() : value.dump());
}

// Whether two values of an option are the same: JSON texts may be written in several ways.
bool same_value(const ordered_json& a, const ordered_json& b) {
  if (a == b) return true;
  if (!a.is_string() || !b.is_string()) return false;
  const auto parsed = [](const ordered_json& text) {
    return nlohmann::json::parse(text.get<std::string>(), nullptr, /*allow_exceptions=*/false);
  };
  const nlohmann::json x = parsed(a), y = parsed(b);
  return !x.is_discarded() && x == y;
}

template <class Names>
bool is_one_of(const Names& names, std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

std::string joined(const std::vector<std::string>& parts, size_t most) {
  std::string out;
  for (size_t i = 0; i < std::min(most, parts.size()); ++i) out += (i == 0 ? "" : ", ") + parts[i];
  if (parts.size() > most) out += fmt::format(", and {} more", parts.size() - most);
  return out;
}

// How the pictures differ from those that a run began with.
std::string changes(const fs::path& folder, const std::string& fingerprint,
                    const vision::FolderRecord& now) {
  constexpr size_t kShown = 5;
  const fs::path file = folder / kPicturesFile;
  std::string unknown = "in what, cannot be told without " + shown(file);
  try {
    const vision::FolderRecord then = vision::folder_record_from_text(read_file(file), shown(file));
    if (then.fingerprint() == fingerprint) {
      const std::vector<std::string> all = vision::differences(then, now);
      if (!all.empty()) return joined(all, kShown);
    }
    unknown = shown(file) + " does not tell in what";
  } catch (const Error&) {
    // Told below.
  }
  return unknown;
}

}  // namespace

void check_same_options(const std::string& folder, const std::string& then, const std::string& now,
                        const Call& given) {
  const ordered_json before = ordered_json::parse(then), after = ordered_json::parse(now);
  std::vector<std::string> problems;
  for (const auto& [name, value] : after.items()) {
    const auto old = before.find(name);
    if (old == before.end()) {
      const bool may = is_one_of(kMayChange, name) && name != "data";
      if (!may && given.gives("--" + name)) {
        problems.push_back(fmt::format("--{} was not given when this run began", name));
      }
    } else if (!is_one_of(kMayChange, name) && !same_value(*old, value)) {
      problems.push_back(value.is_boolean()
                             ? fmt::format("--{} was not given when this run began", name)
                             : fmt::format("--{} is {} in this run, {} was given", name,
                                           in_words(*old), in_words(value)));
    }
  }
  if (!problems.empty()) {
    throw UsageError(
        fmt::format("--resume: {}: {}", shown(folder), joined(problems, problems.size())));
  }
}

std::string settings_of_run(const std::string& folder, const std::string& verb) {
  const Record record = parse_record(text_of_run(folder), folder);
  if (record.verb != verb) {
    throw UsageError(
        fmt::format("--resume: {} holds a run of foci {}; go on with: foci {} --out {} "
                    "--resume",
                    shown(folder), shown(record.verb), shown(record.verb), shell_quoted(folder)));
  }
  return record.options.dump();
}

std::string resume_command(const Call& call, const Common& common, const std::string& verb,
                           const std::string& folder) {
  std::string out = fmt::format("{} {} --out{}{} --resume", shell_quoted(call.program), verb,
                                folder.starts_with('-') ? "=" : " ", shell_quoted(folder));
  if (common.threads > 0) out += fmt::format(" --threads {}", common.threads);
  if (common.json) out += " --json";
  return out;
}

RunFolder::RunFolder(const std::string& folder, const std::string& verb, Use use,
                     const CLI::App& app, const Call& call)
    : folder_(folder), verb_(verb) {
  if (folder.empty()) throw UsageError("--out: an empty text given, a folder is needed");
  ordered_json options = ordered_json::parse(settings_json(app, kOfThisCall));
  for (const char* path : {"data", "report"}) {  // it may be resumed from another place
    const auto it = options.find(path);
    if (it != options.end()) *it = fs::absolute(it->get<std::string>()).string();
  }
  options_ = options.dump();
  if (use == Use::resume) {
    (void)text_of_run(folder_);
  } else if (!is_there(folder_ / kModelFile)) {
    fresh_ = true;
    for (const char* name : kFiles) {
      if (!is_there(folder_ / name)) files_.push_back(folder_ / name);
    }
    // The folders that are missing too, the deepest first.
    for (fs::path p = folder_; !p.empty() && !is_there(p); p = p.parent_path()) made_.push_back(p);
    std::error_code failed;
    fs::create_directories(folder_, failed);
    require<IoError>(!failed, "--out: {}: cannot make the folder: {}", shown(folder_),
                     failed.message());
  }
  try {
    lock_.emplace(folder_);
  } catch (const FolderBusy& e) {
    throw UsageError(fmt::format("--out: {}; one run a folder is right", e.what()));
  }
  for (const char* name : kFiles) remove_abandoned(folder_ / name);
  if (use == Use::resume) {
    check_same_options(folder, settings_of_run(folder, verb), options_, call);
    earlier_ = text_of_run(folder_);
    return;
  }
  for (const char* name : {vision::kTrainingFile, kModelFile}) {
    if (!is_there(folder_ / name)) continue;
    std::string owner;
    try {
      owner = parse_record(vision::read_record(folder_), folder_).verb;
    } catch (const std::exception&) {
      // None that can be told.
    }
    if (owner == verb && use == Use::replace) break;
    const std::string what = owner.empty() ? std::string(name) : "a run of foci " + shown(owner);
    throw UsageError(fmt::format("--out: {} holds {} already; {}give another folder",
                                 shown(folder_), what,
                                 owner == verb ? "go on with it (--resume), or " : ""));
  }
}

RunFolder::~RunFolder() {
  lock_.reset();
  if (!fresh_ || is_there(folder_ / kModelFile)) return;
  std::error_code ignored;
  for (const fs::path& file : files_) fs::remove(file, ignored);
  for (const fs::path& folder : made_) fs::remove(folder, ignored);  // only where empty
}

std::string RunFolder::record(const vision::Dataset& data,
                              const vision::FolderRecord* pictures) const {
  const ordered_json options = ordered_json::parse(options_);
  const std::string fingerprint = data.fingerprint();
  if (!earlier_.empty()) {
    const Record then = parse_record(earlier_, folder_);
    if (then.data != fingerprint && pictures) {
      throw UsageError(fmt::format("--resume: {}: the pictures changed: {}",
                                   in_words(options.value("data", ordered_json())),
                                   changes(folder_, then.data, *pictures)));
    }
    if (then.data != fingerprint) {
      throw UsageError(
          fmt::format("--resume: the data are others than those that the run in {} "
                      "began with",
                      shown(folder_)));
    }
  }
  return json_text({{"verb", verb_}, {"options", options}, {"data", fingerprint}});
}

void RunFolder::keep_pictures(const vision::FolderRecord* pictures) const {
  if (!pictures) return;
  const fs::path file = folder_ / kPicturesFile;
  if (!earlier_.empty() && is_there(file)) return;  // the same, as has been found
  write_file(file, vision::folder_record_to_text(*pictures));
}

}  // namespace foci::cli
