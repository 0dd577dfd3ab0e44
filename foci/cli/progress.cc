// Writing to stderr, on a terminal and elsewhere.
#include "foci/cli/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace foci::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kTerminalPause = std::chrono::milliseconds(100);
constexpr auto kPlainPause = std::chrono::seconds(5);

// Columns of the terminal; a longer line would wrap and could not be rewritten.
size_t columns() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 20) return 80;
  return size.ws_col;
}

// Cut to `limit` characters (not bytes).
std::string cut(const std::string& line, size_t limit) {
  size_t characters = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if ((static_cast<unsigned char>(line[i]) & 0xC0) == 0x80) continue;
    if (characters++ == limit) return line.substr(0, i);
  }
  return line;
}

}  // namespace

Progress::Progress(bool quiet) : quiet_(quiet), terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() {
  finish();
}

void Progress::write(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

void Progress::update(const std::string& line) {
  if (quiet_) return;
  const auto now = Clock::now();
  pending_ = line;
  if (now - last_ < (terminal_ ? Clock::duration(kTerminalPause) : Clock::duration(kPlainPause))) {
    return;
  }
  last_ = now;
  pending_.clear();
  if (terminal_) {
    write("\r" + cut(line, columns() - 1) + "\x1b[K");
    open_ = true;
  } else {
    write(line + "\n");
  }
}

void Progress::say(const std::string& line) {
  if (quiet_) return;
  finish();
  write(line + "\n");
}

void Progress::finish() {
  if (quiet_) return;
  if (!pending_.empty()) {
    write(terminal_ ? "\r" + cut(pending_, columns() - 1) + "\x1b[K" : pending_ + "\n");
    open_ = terminal_;
    pending_.clear();
  }
  if (open_) write("\n");
  open_ = false;
  last_ = {};
}

std::string clock_text(double seconds) {
  if (!std::isfinite(seconds)) return "?";
  const long long s = std::llround(std::clamp(seconds, 0.0, 3e9));
  if (s >= 3600) return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

}  // namespace foci::cli
