// Pieces of memory for tensors, each with a header that holds its owner's reference count while it
// is in use and a link while it is free: neither costs an allocation of its own.
#include "foci/core/memory.h"

#include <algorithm>
#include <array>
#include <bit>
#include <mutex>
#include <new>

#include "foci/core/fork.h"

#if defined(__SANITIZE_ADDRESS__)
#define FOCI_ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FOCI_ADDRESS_SANITIZER
#endif
#endif
#ifdef FOCI_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

namespace foci {
namespace {

constexpr size_t kAlignment = 64;  // one cache line, and the widest vector of any x86 target
// Kernels may read a whole vector at a row's end; the padding keeps that inside the piece.
constexpr size_t kPadding = 64;

// Sizes are rounded up in eight steps from one power of two to the next.
constexpr int kClasses = 64 * 8;
constexpr size_t kLeast = 128;

int class_of(size_t bytes) {
  bytes = std::max(bytes, kLeast);
  const int top = std::bit_width(bytes - 1) - 1;  // 2^top < bytes ≤ 2^(top+1)
  const size_t step = size_t{1} << (top - 3);
  return top * 8 + static_cast<int>((bytes - (size_t{1} << top) + step - 1) / step) - 1;
}
size_t size_of_class(int c) {
  const int top = c / 8;
  return (size_t{1} << top) + static_cast<size_t>(c % 8 + 1) * (size_t{1} << (top - 3));
}

struct Piece {
  // The header's room: a reference count while in use.
  struct Free {
    Piece* newer;
    Piece* older;  // of the same class
    uint64_t since;
  };
  union {
    std::byte count[48];
    Free free;
  };
  int64_t bytes;   // behind the header, with the padding
  int size_class;  // the largest one that it can serve

  void* data() { return this + 1; }
};
static_assert(sizeof(Piece) == kAlignment);

void poison([[maybe_unused]] Piece* p, [[maybe_unused]] size_t from) {
#ifdef FOCI_ADDRESS_SANITIZER
  __asan_unpoison_memory_region(p->data(), from);
  __asan_poison_memory_region(static_cast<std::byte*>(p->data()) + from,
                              static_cast<size_t>(p->bytes) - from);
#endif
}

class Pool {
 public:
  Piece* take(size_t bytes) {
    const int c = class_of(bytes + kPadding);
    const std::lock_guard lock(mutex_);
    Piece* p = find(c);
    if (!p) {
      // What nobody will use again need not be rounded up to a class.
      const size_t size = keepers_ > 0 ? size_of_class(c) : std::max(bytes + kPadding, kLeast);
      make_room(static_cast<int64_t>(size));
      p = static_cast<Piece*>(::operator new (sizeof(Piece) + size, std::align_val_t{kAlignment}));
      p->bytes = static_cast<int64_t>(size);
      p->size_class = size == size_of_class(c) ? c : c - 1;
      ++memory_.allocations;
    }
    memory_.in_use += p->bytes;
    memory_.most_in_use = std::max(memory_.most_in_use, memory_.in_use);
    most_ever_ = std::max(most_ever_, memory_.in_use);
    poison(p, bytes + kPadding);
    return p;
  }

  void give(Piece* p) noexcept {
    const std::lock_guard lock(mutex_);
    memory_.in_use -= p->bytes;
    if (keepers_ == 0) {
      release(p);
      return;
    }
    List& list = lists_[static_cast<size_t>(p->size_class)];
    p->free = {nullptr, list.newest, ++clock_};
    (list.newest ? list.newest->free.newer : list.oldest) = p;
    list.newest = p;
    memory_.kept += p->bytes;
    poison(p, 0);
  }

  void keep() {
    const std::lock_guard lock(mutex_);
    if (keepers_++ == 0) most_ever_ = memory_.in_use;
  }
  void keep_no_more() noexcept {
    const std::lock_guard lock(mutex_);
    if (--keepers_ > 0) return;
    for (List& list : lists_) {
      while (list.oldest) release(unlink(list, list.oldest));
    }
  }

  std::mutex& mutex() { return mutex_; }

  TensorMemory memory() {
    const std::lock_guard lock(mutex_);
    return memory_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    memory_.most_in_use = memory_.in_use;
  }

 private:
  struct List {
    Piece* newest = nullptr;
    Piece* oldest = nullptr;
  };

  // The newest piece of this class, which is the likeliest to lie in a cache, or of the next larger
  // ones up to half as large again.
  Piece* find(int c) {
    if (memory_.kept == 0) return nullptr;
    for (int i = c; i < std::min(c + 5, kClasses); ++i) {
      List& list = lists_[static_cast<size_t>(i)];
      if (!list.newest) continue;
      ++memory_.reuses;
      return unlink(list, list.newest);
    }
    return nullptr;
  }

  Piece* unlink(List& list, Piece* p) {
    const Piece::Free links = p->free;
    (links.newer ? links.newer->free.older : list.newest) = links.older;
    (links.older ? links.older->free.newer : list.oldest) = links.newer;
    memory_.kept -= p->bytes;
    return p;
  }

  // Before memory is asked for that no kept piece could serve: the longest unused go, until all
  // together is at most half as much again as was once in use.
  void make_room(int64_t bytes) {
    const int64_t most = std::max(most_ever_, memory_.in_use + bytes);
    while (memory_.kept > 0 && memory_.in_use + bytes + memory_.kept > most + most / 2) {
      List* oldest = nullptr;
      for (List& list : lists_) {
        if (list.oldest && (!oldest || list.oldest->free.since < oldest->oldest->free.since)) {
          oldest = &list;
        }
      }
      release(unlink(*oldest, oldest->oldest));
    }
  }

  void release(Piece* p) {
    poison(p, static_cast<size_t>(p->bytes));
    ::operator delete (p, std::align_val_t{kAlignment});
  }

  std::mutex mutex_;
  std::array<List, kClasses> lists_{};
  TensorMemory memory_;
  int64_t most_ever_ = 0;
  uint64_t clock_ = 0;
  int keepers_ = 0;
};

Pool& pool() {
  // Never destroyed: a tensor may outlive the statics of this file.
  static Pool* p = new Pool;
  return *p;
}

[[maybe_unused]] const bool forks = hold_over_fork(pool().mutex());

// Puts the reference count into the piece's header; when the count is gone, so is the piece.
template <class T>
struct InHeader {
  using value_type = T;
  Piece* piece;
  explicit InHeader(Piece* p) : piece(p) {}
  template <class U>
  InHeader(const InHeader<U>& other) : piece(other.piece) {}
  T* allocate(size_t) {
    static_assert(sizeof(T) <= sizeof(Piece::count));
    static_assert(alignof(T) <= kAlignment);
    return reinterpret_cast<T*>(piece->count);
  }
  void deallocate(T*, size_t) noexcept { pool().give(piece); }
  bool operator==(const InHeader&) const = default;
};

}  // namespace

KeepMemory::KeepMemory() {
  pool().keep();
}
KeepMemory::~KeepMemory() {
  pool().keep_no_more();
}

TensorMemory tensor_memory() {
  return pool().memory();
}
void reset_tensor_memory_peak() {
  pool().reset_peak();
}

std::shared_ptr<void> allocate_storage(size_t bytes) {
  Piece* const p = pool().take(bytes);
  return {p->data(), [](void*) {}, InHeader<std::byte>(p)};
}

}  // namespace foci
