// Files through the system's own calls, every failure as one line.
#include "foci/io/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>

#include "foci/core/error.h"

namespace foci {
namespace {

std::string reason(int error) {
  return std::generic_category().message(error);
}

// Closes on every way out.
struct Descriptor {
  explicit Descriptor(int value) : fd(value) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd;
};

// Opens for reading; a folder is refused here, since open(2) accepts it and read(2) does not.
int open_to_read(const std::filesystem::path& path, struct stat& info, int flags = 0) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
  require<IoError>(fd >= 0, "{}: cannot be opened: {}", shown(path), reason(errno));
  const bool known = ::fstat(fd, &info) == 0;
  if (!known || S_ISDIR(info.st_mode)) {
    const std::string why = known ? "is a folder, not a file" : reason(errno);
    ::close(fd);
    throw IoError(fmt::format("{}: {}", shown(path), why));
  }
  return fd;
}

}  // namespace

std::string read_file(const std::filesystem::path& path, uint64_t limit) {
  struct stat info {};
  const Descriptor file(open_to_read(path, info));
  const auto too_long = [&] {
    throw FormatError(fmt::format("{}: longer than the {} bytes allowed", shown(path), limit));
  };
  std::string bytes;
  if (S_ISREG(info.st_mode)) {
    if (static_cast<uint64_t>(info.st_size) > limit) too_long();
    bytes.reserve(static_cast<size_t>(info.st_size));
  }
  // The size is only a hint: a pipe has none, and a file may grow while it is read.
  constexpr size_t kPiece = 1 << 16;
  while (true) {
    const size_t had = bytes.size();
    const size_t want = static_cast<size_t>(std::min<uint64_t>(kPiece, limit - had + 1));
    bytes.resize(had + want);
    const ssize_t got = ::read(file.fd, bytes.data() + had, want);
    if (got < 0 && errno == EINTR) {
      bytes.resize(had);
      continue;
    }
    require<IoError>(got >= 0, "{}: cannot be read: {}", shown(path), reason(errno));
    bytes.resize(had + static_cast<size_t>(got));
    if (got == 0) return bytes;
    if (bytes.size() > limit) too_long();
  }
}

void write_file(const std::filesystem::path& path, std::string_view bytes) {
  AtomicFile file(path);
  file.write(bytes);
  file.commit();
}

AtomicFile::AtomicFile(std::filesystem::path path) : path_(std::move(path)) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::status(path_, error);
  require<IoError>(status.type() != fs::file_type::directory,
                   "{}: is a folder, a file was to be written there", shown(path_));
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    require<IoError>(fd_ >= 0, "{}: cannot be written: {}", shown(path_), reason(errno));
    return;
  }
  if (fs::exists(status)) {
    const fs::path target = fs::canonical(path_, error);
    if (!error) path_ = target;
  }
  static std::atomic<int> count = 0;  // two threads may write the same path
  temporary_ = path_;
  temporary_ += fmt::format(".tmp-{}-{}", ::getpid(), count++);
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  fd_ = ::open(temporary_.c_str(), flags, 0666);
  if (fd_ < 0 && errno == EEXIST) {  // left by a killed process that had our number
    ::unlink(temporary_.c_str());
    fd_ = ::open(temporary_.c_str(), flags, 0666);
  }
  require<IoError>(fd_ >= 0, "{}: cannot be written: {}", shown(path_), reason(errno));
  // A file that is replaced keeps its permissions.
  struct stat old {};
  if (::stat(path_.c_str(), &old) == 0) (void)!::fchmod(fd_, old.st_mode & 07777);
}

AtomicFile::~AtomicFile() {
  discard();
}

void AtomicFile::discard() noexcept {
  if (fd_ < 0) return;
  ::close(fd_);
  fd_ = -1;
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::string_view bytes) {
  require(fd_ >= 0, "AtomicFile::write: {} was already committed", shown(path_));
  while (!bytes.empty()) {
    // Linux writes at most 0x7ffff000 bytes at once.
    const ssize_t put = ::write(fd_, bytes.data(), std::min<size_t>(bytes.size(), 1 << 30));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      const int error = errno;
      discard();
      throw IoError(fmt::format("{}: cannot be written: {}", shown(path_), reason(error)));
    }
    bytes.remove_prefix(static_cast<size_t>(put));
  }
}

void AtomicFile::commit() {
  require(fd_ >= 0, "AtomicFile::commit: {} was already committed", shown(path_));
  const auto fail = [&](int error) {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
    throw IoError(fmt::format("{}: cannot be written: {}", shown(path_), reason(error)));
  };
  int error = 0;
  if (!temporary_.empty() && ::fsync(fd_) != 0) error = errno;
  // Network file systems report a full disk only here.
  if (::close(fd_) != 0 && error == 0 && errno != EINTR) error = errno;
  fd_ = -1;
  if (error != 0) fail(error);
  if (temporary_.empty()) return;
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail(errno);
  // The new name must survive a crash too. Some file systems cannot sync a folder: no harm done.
  const std::filesystem::path parent = path_.has_parent_path() ? path_.parent_path() : ".";
  const Descriptor folder(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.fd >= 0) (void)!::fsync(folder.fd);
}

MappedFile map_file(const std::filesystem::path& path) {
  struct stat info {};
  // A pipe without a writer must not make this wait: it is refused below.
  const Descriptor file(open_to_read(path, info, O_NONBLOCK));
  require<IoError>(S_ISREG(info.st_mode), "{}: is not a regular file", shown(path));
  const auto size = static_cast<size_t>(info.st_size);
  // One page of zeros behind the file: kernels may read a whole vector at a row's end, and a file
  // may end where a page does.
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t length = (size + page - 1) / page * page + page;
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  void* base = ::mmap(nullptr, length, kAccess, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require<IoError>(base != MAP_FAILED, "{}: cannot be mapped: {}", shown(path), reason(errno));
  MappedFile mapped;
  mapped.owner = std::shared_ptr<void>(base, [length](void* p) { ::munmap(p, length); });
  mapped.data = static_cast<std::byte*>(base);
  mapped.size = size;
  if (size > 0) {
    const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    require<IoError>(::mmap(base, size, kAccess, flags, file.fd, 0) != MAP_FAILED,
                     "{}: cannot be mapped: {}", shown(path), reason(errno));
  }
  return mapped;
}

std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 80;
  std::string out = "\"";
  for (const char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + (text.size() > kLongest ? "…\"" : "\"");
}

std::string shown(const std::filesystem::path& path) {
  std::string out;
  for (const char c : path.string()) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace foci
