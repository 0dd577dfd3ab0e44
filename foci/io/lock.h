// One writer a folder.
#pragma once

#include <filesystem>

#include "foci/core/api.h"
#include "foci/core/error.h"

namespace foci {

// Another process holds it.
class FOCI_API FolderBusy : public IoError {
 public:
  using IoError::IoError;
};

// Holds a folder against other processes that ask for it in the same way, through a file ".lock"
// in it that lives as long. The system lets go of it when a process ends, however it ends: a file
// that a killed one left holds nobody up. File systems that have no locks hold nothing.
class FOCI_API FolderLock {
 public:
  // The folder must be there. Throws FolderBusy at once where another holds it, naming its process;
  // IoError where no file can be made in it.
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  std::filesystem::path file_;
  int fd_ = -1;
};

}  // namespace foci
