// Helpers for tests of readers: a folder that goes away, and a reader fed with damaged bytes.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "foci/core/error.h"
#include "foci/core/rng.h"

namespace foci::testing {

// A fresh folder, removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "foci-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw IoError("no temporary folder: " + name);
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }
  int64_t count() const {
    const std::filesystem::directory_iterator files(path_);
    return std::distance(begin(files), end(files));
  }

 private:
  std::filesystem::path path_;
};

// The message of the E that f throws; another exception or none fails the test.
template <class E = FormatError>
std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    ADD_FAILURE() << "another kind of error: " << e.what();
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

// f throws an E whose message holds all of these parts.
template <class E>
void expect_error(const std::function<void()>& f, const std::vector<std::string>& parts) {
  const std::string message = message_of<E>(f);
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " in " << message;
  }
}

// One line, short enough to read, with only what belongs on a terminal.
inline void expect_one_line(std::string_view message) {
  EXPECT_FALSE(message.empty());
  EXPECT_LE(message.size(), 600u) << message;
  for (const char c : message) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << message;
}

struct Outcome {
  int accepted = 0;
  int refused = 0;
};

// Reads damaged bytes: FormatError with one line, or success, and nothing else. Each try gets its
// bytes in an allocation of exactly that size, so that the address sanitiser sees the first byte
// read too far.
inline void try_damaged(std::string_view bytes, const std::function<void(std::string_view)>& read,
                        Outcome& outcome, const std::string& what) {
  const std::unique_ptr<char[]> exact(new char[bytes.size()]);
  std::copy(bytes.begin(), bytes.end(), exact.get());
  try {
    read({exact.get(), bytes.size()});
    ++outcome.accepted;
  } catch (const FormatError& e) {
    ++outcome.refused;
    expect_one_line(e.what());
  } catch (const std::exception& e) {
    ADD_FAILURE() << what << ": another kind of error: " << e.what();
  }
}

// Every proper prefix (every `step`-th one where step > 1).
inline Outcome truncate_everywhere(std::string_view bytes, size_t step,
                                   const std::function<void(std::string_view)>& read) {
  Outcome outcome;
  for (size_t n = 0; n < bytes.size(); n += step) {
    try_damaged(bytes.substr(0, n), read, outcome, "first " + std::to_string(n) + " bytes");
  }
  return outcome;
}

// Single flipped bits: all of them, or every `step`-th.
inline Outcome flip_bits(std::string_view bytes, size_t step,
                         const std::function<void(std::string_view)>& read) {
  Outcome outcome;
  std::string damaged(bytes);
  for (size_t bit = 0; bit < bytes.size() * 8; bit += step) {
    const char mask = static_cast<char>(1 << (bit % 8));
    damaged[bit / 8] ^= mask;
    try_damaged(damaged, read, outcome, "bit " + std::to_string(bit));
    damaged[bit / 8] ^= mask;
  }
  return outcome;
}

// Several random bytes at once, which single flips do not reach.
inline Outcome scramble(std::string_view bytes, int tries,
                        const std::function<void(std::string_view)>& read) {
  Outcome outcome;
  Rng rng(20240229);
  for (int i = 0; i < tries; ++i) {
    std::string damaged(bytes);
    for (int64_t n = 1 + rng.below(8); n > 0; --n) {
      damaged[rng.below(static_cast<int64_t>(damaged.size()))] = static_cast<char>(rng.next_u32());
    }
    try_damaged(damaged, read, outcome, "scramble " + std::to_string(i));
  }
  return outcome;
}

}  // namespace foci::testing
