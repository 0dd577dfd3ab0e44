// Memory of tensors: how much there is, and how to keep it from one training step to the next.
//
//   const KeepMemory keep;
//   for (…) step();             // from the second step on, tensors come from what the first one
//   left
//
// Fresh memory costs a page fault every 4 KB, which for activations is as much as the work done on
// them. While a KeepMemory lives, the memory of tensors that go is kept for those that come; when
// the last one goes, what is not in use goes back to the system. Before more is asked of the
// system, what has been free longest goes, until all is at most half as much again as was once in
// use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "foci/core/api.h"

namespace foci {

class FOCI_API KeepMemory {
 public:
  KeepMemory();
  ~KeepMemory();
  KeepMemory(const KeepMemory&) = delete;
  KeepMemory& operator=(const KeepMemory&) = delete;
};

// Of tensors alone; a piece of memory counts with its size rounded up.
struct TensorMemory {
  int64_t in_use = 0;       // bytes
  int64_t most_in_use = 0;  // since reset_tensor_memory_peak()
  int64_t kept = 0;         // bytes free for tensors to come
  int64_t allocations = 0;  // asked of the system, ever
  int64_t reuses = 0;       // served from what was kept, ever
};
FOCI_API TensorMemory tensor_memory();
FOCI_API void reset_tensor_memory_peak();

// For Tensor: 64-byte aligned, with 64 bytes more behind it that may be read. Throws bad_alloc.
std::shared_ptr<void> allocate_storage(size_t bytes);

}  // namespace foci
