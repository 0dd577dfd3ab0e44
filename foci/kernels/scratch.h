// Scratch: memory that one call needs and gives back.
//
// Fresh pages cost a fault each, which for matrices of a few megabytes is as much as a fifth of the
// work done on them. So large pieces go back to a pool shared by all threads, which keeps at most
// kKeptBytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace foci::kernels {

inline constexpr size_t kKeptBytes = size_t{64} << 20;

// 64-byte aligned floats, not initialised. Throws std::bad_alloc.
class Scratch {
 public:
  explicit Scratch(int64_t floats);
  ~Scratch();
  Scratch(Scratch&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Scratch& operator=(Scratch&&) = delete;
  float* get() const { return data_; }

 private:
  float* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace foci::kernels
