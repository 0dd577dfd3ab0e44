// Whole files: read with a size limit, mapped, or written to a temporary name and renamed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "foci/core/api.h"

namespace foci {

// Throws IoError if it cannot be opened or read, FormatError where it is longer than `limit` bytes.
FOCI_API std::string read_file(const std::filesystem::path& path,
                               uint64_t limit = uint64_t{1} << 30);

// All or nothing: write to PATH.tmp-PID-N, fsync, rename. On any failure (a full disk) the
// temporary file is removed, the old file stays, and IoError says what happened. A process that is
// killed meanwhile leaves its temporary file, for remove_abandoned.
FOCI_API void write_file(const std::filesystem::path& path, std::string_view bytes);

// Removes what killed processes left of writing `path`: each PATH.tmp-PID-N beside it that nobody
// holds and whose process is gone. A live writer holds its file (flock), whichever host it runs on;
// a number that another process got since is told by that one's start. Everything else stays, and
// nothing is thrown: what cannot be removed does no harm.
FOCI_API void remove_abandoned(const std::filesystem::path& path) noexcept;

// The same in pieces. What was not committed is removed by the destructor. A symbolic link is
// followed, so that its target is replaced. A device or pipe (/dev/null, /dev/stdout) is written to
// directly, since a rename would replace it.
class FOCI_API AtomicFile {
 public:
  explicit AtomicFile(std::filesystem::path path);  // throws IoError
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::string_view bytes);  // throws IoError
  void commit();                       // throws IoError; at most once, nothing is written after it

 private:
  void discard() noexcept;

  std::filesystem::path path_;
  std::filesystem::path temporary_;  // empty where the path is written to directly
  int fd_ = -1;
};

// A regular file's bytes, paged in when touched. Private to this process: a write into them changes
// memory, not the file. At least 64 further readable bytes follow the last one. Whoever truncates
// the file meanwhile takes the bytes away (SIGBUS), so replace mapped files by renaming over them.
struct MappedFile {
  std::shared_ptr<void> owner;  // unmaps
  std::byte* data = nullptr;    // never null
  uint64_t size = 0;
};
FOCI_API MappedFile map_file(const std::filesystem::path& path);  // throws IoError

// For messages: quoted, at most 80 characters, and nothing in it that could break a line or a
// terminal. Names from files are untrusted too.
FOCI_API std::string in_quotes(std::string_view text);
// A path as messages show it: as it is, but for characters that could break a line or a terminal.
FOCI_API std::string shown(const std::filesystem::path& path);

}  // namespace foci
