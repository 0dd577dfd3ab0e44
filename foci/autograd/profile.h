// Where the time of a training step goes, by operator and direction.
//
//   Profile profile;
//   {
//     const Profiling on(profile);
//     … forward, backward, optimiser step …
//   }
//   for (const Profile::Row& row : profile.rows()) …
//
// Operators open a ProfileScope for the time they run; without a Profile on the thread that costs
// one branch. A scope inside another takes its time from the outer one, so the rows add up.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "foci/core/api.h"

namespace foci {

class ProfileScope;

enum class Operator : uint8_t {
  linear,
  attention,
  layer_norm,
  activation,  // apart from linear's epilogue
  add,
  dropout,
  rows,  // embeddings, gathers, pooling
  copy,  // reshape and concat, where they copy
  loss,
  optimiser
};
inline constexpr int kOperators = 10;
FOCI_API const char* name_of(Operator op);

enum class Pass : uint8_t { forward, backward };

class FOCI_API Profile {
 public:
  struct Row {
    Operator op;
    Pass pass;
    double seconds = 0;
    double flops = 0;  // of matrix products and attention, a multiply-add counting two
    int64_t calls = 0;
  };
  // Those that were called, forward before backward.
  std::vector<Row> rows() const;
  void clear() { cells_ = {}; }

 private:
  friend class ProfileScope;
  friend class Profiling;
  struct Cell {
    double seconds = 0, flops = 0;
    int64_t calls = 0;
  };
  std::array<std::array<Cell, kOperators>, 2> cells_{};
};

namespace detail {
struct ProfileState {
  Profile* profile = nullptr;
  ProfileScope* innermost = nullptr;
};
// Of the thread that builds the tape and runs it back.
FOCI_API ProfileState& profile_state();
}  // namespace detail

// While one lives, what its thread runs is written into `profile`.
class FOCI_API Profiling {
 public:
  explicit Profiling(Profile& profile);
  ~Profiling();
  Profiling(const Profiling&) = delete;
  Profiling& operator=(const Profiling&) = delete;

 private:
  Profile* outer_;
};

class FOCI_API ProfileScope {
 public:
  ProfileScope(Operator op, Pass pass, double flops = 0);
  ~ProfileScope() {
    if (profile_) end();
  }
  ProfileScope(const ProfileScope&) = delete;
  ProfileScope& operator=(const ProfileScope&) = delete;

  // Whether anybody looks: flops that cost work to count are counted only then.
  bool on() const { return profile_ != nullptr; }
  void add_flops(double flops) { flops_ += flops; }

 private:
  void end();

  Profile* profile_;
  ProfileScope* outer_ = nullptr;
  std::chrono::steady_clock::time_point start_;
  double inner_seconds_ = 0;
  double flops_;
  Operator op_;
  Pass pass_;
};

}  // namespace foci
