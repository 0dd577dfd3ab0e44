// Large pieces of scratch are kept in a pool, by size, until it holds too much.
#include "foci/kernels/scratch.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#include "foci/core/fork.h"

namespace foci::kernels {
namespace {

// Smaller pieces are left to malloc, which keeps them itself.
constexpr size_t kPooledBytes = size_t{4} << 10;

struct Pool {
  struct Piece {
    float* data;
    size_t bytes;
  };
  std::mutex mutex;
  std::vector<Piece> free;
  size_t free_bytes = 0;
};

Pool& pool() {
  // Never destroyed: a thread may outlive the statics of this file.
  static Pool* p = new Pool;
  return *p;
}

[[maybe_unused]] const bool forks = hold_over_fork(pool().mutex);

}  // namespace

Scratch::Scratch(int64_t floats) {
  if (floats <= 0) return;
  if (static_cast<uint64_t>(floats) > SIZE_MAX / (4 * sizeof(float))) throw std::bad_alloc();
  bytes_ = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
  if (bytes_ >= kPooledBytes) {
    // An eighth of its size is the step, so that pieces of nearly the same size serve each other.
    size_t step = kPooledBytes / 8;
    while (step * 8 < bytes_) step *= 2;
    bytes_ = (bytes_ + step - 1) / step * step;
    Pool& p = pool();
    const std::lock_guard lock(p.mutex);
    const auto fits = std::find_if(p.free.begin(), p.free.end(),
                                   [&](const Pool::Piece& f) { return f.bytes == bytes_; });
    if (fits != p.free.end()) {
      data_ = fits->data;
      p.free_bytes -= bytes_;
      p.free.erase(fits);
      return;
    }
  }
  data_ = static_cast<float*>(std::aligned_alloc(64, bytes_));
  if (!data_) throw std::bad_alloc();
}

Scratch::~Scratch() {
  if (!data_) return;
  if (bytes_ >= kPooledBytes && bytes_ <= kKeptBytes) {
    Pool& p = pool();
    const std::lock_guard lock(p.mutex);
    try {
      p.free.push_back({data_, bytes_});
      data_ = nullptr;
      p.free_bytes += bytes_;
      // The longest unused go first.
      while (p.free_bytes > kKeptBytes) {
        p.free_bytes -= p.free.front().bytes;
        std::free(p.free.front().data);
        p.free.erase(p.free.begin());
      }
    } catch (const std::bad_alloc&) {
      // No room to remember it: let it go.
    }
  }
  std::free(data_);
}

}  // namespace foci::kernels
