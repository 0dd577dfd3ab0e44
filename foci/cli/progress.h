// Progress and remarks on stderr: one line that is rewritten on a terminal, plain lines elsewhere.
#pragma once

#include <chrono>
#include <string>

namespace foci::cli {

class Progress {
 public:
  // Where `quiet`, nothing is ever written.
  explicit Progress(bool quiet);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // The state of things now. Rewritten about ten times a second on a terminal; elsewhere a line
  // every few seconds, so that a log stays short.
  void update(const std::string& line);
  // A line that stays.
  void say(const std::string& line);
  // Ends the line that is being rewritten, leaving its last state.
  void finish();

 private:
  void write(const std::string& text);

  bool quiet_;
  bool terminal_;
  bool open_ = false;  // a rewritten line stands on the terminal
  std::string pending_;
  std::chrono::steady_clock::time_point last_{};
};

// 75 → "1:15", 3675 → "1:01:15"
std::string clock_text(double seconds);

}  // namespace foci::cli
