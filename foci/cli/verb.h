// Verb: one thing that the program does; one file each, named like the verb.
//
// To add one: write a file with a make_NAME below, and a line in the list of verb.cc.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "foci/core/error.h"

namespace CLI {
class App;
}

namespace foci::cli {

// What the shell is told. 130 is the shell's own number for a program ended by Ctrl-C.
inline constexpr int kOk = 0, kFailure = 1, kUsage = 2, kInterrupted = 130;

// The person asked for something that cannot be, or named a file that cannot be read: ends with
// kUsage.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  // With a list below it, one line each: all that is wrong, where that is more than one thing.
  UsageError(const std::string& what, std::vector<std::string> lines)
      : std::runtime_error(what), lines_(std::move(lines)) {}
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  std::vector<std::string> lines_;
};

// How the program was called.
struct Call {
  std::string program = "foci";    // as it was typed
  std::vector<std::string> words;  // behind the verb, without those of a config file

  // Whether an option ("--lr") stands among the words.
  bool gives(std::string_view option) const;
};

// The same of a file that the system does not give or take: Python's callers get an OSError.
class FileError : public UsageError {
 public:
  using UsageError::UsageError;
};

class Verb {
 public:
  virtual ~Verb() = default;
  // Declares options and arguments, bound to members of the verb.
  virtual void declare(CLI::App& app) = 0;
  // Settings of an earlier call that this one goes on from, as one JSON object; empty for none.
  // Asked once the words are parsed; then they are parsed again, behind these settings.
  virtual std::string settings_to_go_on_from() { return {}; }
  // Does it and returns the exit code. Results go to stdout, everything else to stderr; failures
  // are thrown.
  virtual int run() = 0;

  Call call;
};

struct VerbEntry {
  const char* name;  // "demo", or "train vit" for a verb with an object
  const char* about;
  std::unique_ptr<Verb> (*make)();
};
std::span<const VerbEntry> verbs();

// All settings of a declared verb as a config file holds them, but for those of these names. Throws
// UsageError where one is not UTF-8, which JSON must be.
std::string settings_json(const CLI::App& app, std::span<const std::string_view> without = {});

// Parses the command line, runs the verb, and turns failures into one line on stderr.
int run_program(int argc, const char* const* argv);

// ---- options that several verbs share (common.cc) ----

struct Common {
  bool quiet = false;
  bool json = false;
  uint64_t seed = 1;
  int threads = 0;  // 0: as many as the process may run on
};
void declare_quiet(CLI::App& app, Common& common);
void declare_json(CLI::App& app, Common& common);
void declare_seed(CLI::App& app, Common& common);
void declare_threads(CLI::App& app, Common& common);
// --seconds of the verbs that measure: a number above 0.
void declare_seconds(CLI::App& app, double& seconds, const std::string& about);
// For CLI::Option::check: CLI11 alone would take a number beyond 64 bits for the largest, and one
// with a 0 before it as octal. The empty text if the argument is a whole number of 64 bits
// (natural: from 0 on), or a finite number; else what is wrong with it.
std::string check_whole(const std::string& text);
std::string check_natural(const std::string& text);
std::string check_number(const std::string& text);
// Hands the choice of threads to the library. More than a few times what the machine has would only
// wait for each other: then it is fewer, which is said on stderr.
void apply_threads(const Common& common);

// Throws FileError naming `option` unless a file can be made at this path: told before the work,
// not after. Takes away what a killed process left of writing it. An empty path is none and fine.
void check_writable(const char* option, const std::string& path);

// One line on stderr, "foci: …", whatever the message holds.
void complain(const std::string& message);

// A word as a shell takes it.
std::string shell_quoted(const std::string& word);

// Runs `read` and turns errors about files into UsageErrors.
template <class F>
auto reading(F&& read) {
  try {
    return read();
  } catch (const IoError& e) {
    throw FileError(e.what());
  } catch (const FormatError& e) {
    throw UsageError(e.what());
  }
}

// ---- Ctrl-C (common.cc) ----

// From now on the first Ctrl-C (or SIGTERM) only sets a flag, a second one ends the program.
void catch_interrupts();
bool interrupted();
const std::atomic<bool>& interrupt_flag();

}  // namespace foci::cli
