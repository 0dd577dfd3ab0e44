// What verbs share: common options, interrupts.
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <type_traits>

#include "foci/cli/verb.h"
#include "foci/core/threads.h"
#include "foci/io/file.h"

namespace foci::cli {
namespace {

std::atomic<bool> g_interrupted = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // else no signal handler may touch it

extern "C" void on_interrupt(int number) {
  if (g_interrupted) {
    // Asked twice: leave at once, the way the system does it.
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  g_interrupted = true;
}

template <class T>
std::string check_as(const std::string& text, const char* wanted) {
  T value = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, value);
  if (parsed.ec == std::errc::result_out_of_range && parsed.ptr == end) {
    return text + " is beyond the numbers that fit here";
  }
  bool good = parsed.ec == std::errc() && parsed.ptr == end;
  if constexpr (std::is_floating_point_v<T>) {
    good = good && std::isfinite(value);
  } else {
    const size_t digits = text.starts_with('-') ? 1 : 0;
    good = good && (text.size() == digits + 1 || text[digits] != '0');
  }
  return good ? std::string() : text + " given, " + wanted + " is right";
}

}  // namespace

void declare_quiet(CLI::App& app, Common& common) {
  app.add_flag("-q,--quiet", common.quiet, "No progress and no remarks on stderr");
}

void declare_json(CLI::App& app, Common& common) {
  app.add_flag("--json", common.json, "Print the result as one JSON object");
}

std::string check_whole(const std::string& text) {
  return check_as<int64_t>(text, "a whole number");
}
std::string check_natural(const std::string& text) {
  return check_as<uint64_t>(text, "a whole number of 0 or more");
}
std::string check_number(const std::string& text) {
  return check_as<double>(text, "a number");
}

void declare_seed(CLI::App& app, Common& common) {
  app.add_option("--seed", common.seed, "Seed of everything random")
      ->check(check_natural)
      ->type_name("N");
}

void declare_threads(CLI::App& app, Common& common) {
  app.add_option("--threads", common.threads, "Threads to use (default: all that may be used)")
      ->check(check_whole)
      ->check(CLI::Range(1, 4096).description(""))
      ->type_name("N")
      ->default_str("");
}

void declare_seconds(CLI::App& app, double& seconds, const std::string& about) {
  app.add_option("--seconds", seconds, about)
      ->check([](const std::string& text) {
        const bool good = check_number(text).empty() && std::strtod(text.c_str(), nullptr) > 0;
        return good ? std::string() : text + " given, a number above 0 is right";
      })
      ->type_name("X");
}

void complain(const std::string& message) {
  std::string text = message;
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  std::fprintf(stderr, "foci: %s\n", text.c_str());
}

std::string shell_quoted(const std::string& word) {
  constexpr std::string_view kPlain = "_@%+=:,./-";
  const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [&](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || kPlain.find(c) != std::string_view::npos;
  });
  if (plain) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

void apply_threads(const Common& common) {
  if (common.threads < 1) return;
  constexpr int kTimes = 4;  // beyond it a step takes ever longer
  const int processors = num_threads();
  const int most = kTimes * processors;
  if (common.threads > most && !common.quiet) {
    complain(fmt::format("--threads: {} given, {} are used, since this process may run on {} {}",
                         common.threads, most, processors,
                         processors == 1 ? "processor" : "processors"));
  }
  set_num_threads(std::min(common.threads, most));
}

void check_writable(const char* option, const std::string& path) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  std::error_code failed;
  const fs::file_status status = fs::status(path, failed);
  if (status.type() == fs::file_type::directory) {
    throw FileError(fmt::format("{}: {} is a folder, a file is right", option, shown(path)));
  }
  // A file is made anew beside the old one; what is no file (a pipe) is written to.
  const bool special = fs::exists(status) && !fs::is_regular_file(status);
  const fs::path parent = fs::path(path).parent_path() / ".";  // the dot asks for a folder
  if (::access(special ? path.c_str() : parent.c_str(), W_OK) != 0) {
    throw FileError(fmt::format("{}: {} cannot be written: {}", option, shown(path),
                                std::generic_category().message(errno)));
  }
  if (!special) remove_abandoned(path);
}

void catch_interrupts() {
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() {
  return g_interrupted;
}

const std::atomic<bool>& interrupt_flag() {
  return g_interrupted;
}

}  // namespace foci::cli
