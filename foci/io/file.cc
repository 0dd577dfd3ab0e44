// Files through the system's own calls, every failure as one line.
#include "foci/io/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <optional>
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

namespace {

constexpr std::string_view kTemporary = ".tmp-";

// The process that a temporary file's name tells, where it is one of `target`'s.
std::optional<pid_t> writer_of(std::string_view name, std::string_view target) {
  if (!name.starts_with(target)) return std::nullopt;
  name.remove_prefix(target.size());
  if (!name.starts_with(kTemporary)) return std::nullopt;
  name.remove_prefix(kTemporary.size());
  const auto dash = name.find('-');
  if (dash == std::string_view::npos) return std::nullopt;
  const auto whole = [](std::string_view text, auto& value) {
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
    return parsed.ec == std::errc() && parsed.ptr == text.data() + text.size() && value >= 0;
  };
  pid_t pid = 0;
  int number = 0;
  if (!whole(name.substr(0, dash), pid) || !whole(name.substr(dash + 1), number)) {
    return std::nullopt;
  }
  return pid > 0 ? std::optional(pid) : std::nullopt;
}

struct Process {
  char state = '?';
  double start = 0;  // in seconds since 1970
};

// What /proc tells of a process; nothing where there is no such thing. proc(5): behind the name,
// which ends with the last parenthesis, stands field 3 of stat, the state; field 22 is the start.
std::optional<Process> look_up(pid_t pid) {
  std::string stat, machine;
  try {
    constexpr uint64_t kLimit = 16 << 20;
    stat = read_file(fmt::format("/proc/{}/stat", pid), kLimit);
    machine = read_file("/proc/stat", kLimit);
  } catch (const Error&) {
    return std::nullopt;
  }
  const auto number = [](const std::string& text, size_t at) {
    int64_t value = -1;
    if (at < text.size()) std::from_chars(text.data() + at, text.data() + text.size(), value);
    return static_cast<double>(value);
  };
  constexpr std::string_view kBoot = "btime ";
  const size_t name_end = stat.rfind(") "), boot_at = machine.find(kBoot);
  if (name_end == std::string::npos || boot_at == std::string::npos) return std::nullopt;
  Process process;
  size_t at = name_end + 2;
  if (at < stat.size()) process.state = stat[at];
  for (int field = 3; field < 22 && at != 0; ++field) at = stat.find(' ', at) + 1;
  const double boot = number(machine, boot_at + kBoot.size()), ticks = number(stat, at);
  if (at == 0 || boot < 0 || ticks < 0) return std::nullopt;
  process.start = boot + ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
  return process;
}

// Whether the process of this number may have written what was last changed at `changed`: it lives,
// and did not begin after that.
bool may_have_written(pid_t pid, const timespec& changed) {
  if (::kill(pid, 0) != 0 && errno == ESRCH) return false;
  const std::optional<Process> process = look_up(pid);
  if (!process) return true;
  if (process->state == 'Z' || process->state == 'X') return false;  // dead, and not yet waited for
  constexpr double kClocks = 2;  // seconds; btime is whole seconds
  return process->start <= static_cast<double>(changed.tv_sec) + kClocks;
}

// Opens a file made anew and holds it, so that others see that its writer lives. File systems
// without locks do without. -1 where it cannot be opened.
int create_held(const std::string& path) {
  for (int tries = 0; tries < 10; ++tries) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) return -1;
    struct stat info {};
    if (::flock(fd, LOCK_EX) != 0 || ::fstat(fd, &info) != 0 || info.st_nlink > 0) return fd;
    ::close(fd);  // somebody took it for an abandoned one, before it was held
  }
  errno = EAGAIN;
  return -1;
}

// Removes the file unless somebody holds it.
void remove_unheld(const std::string& path) {
  int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  const Descriptor file(fd);
  if (fd < 0 || ::flock(fd, LOCK_EX | LOCK_NB) != 0) return;
  struct stat held {
  }, named{};
  // What stands there now must be what is held.
  if (::fstat(fd, &held) == 0 && ::lstat(path.c_str(), &named) == 0 &&
      held.st_ino == named.st_ino && held.st_dev == named.st_dev) {
    ::unlink(path.c_str());
  }
}

// A link's target: that is what gets replaced.
std::filesystem::path real_target(const std::filesystem::path& path) {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::canonical(path, error);
  return error ? path : target;
}

}  // namespace

void remove_abandoned(const std::filesystem::path& path) noexcept {
  try {
    const std::filesystem::path target = real_target(path);
    const std::string name = target.filename().string();
    if (name.empty()) return;
    const std::string folder = target.has_parent_path() ? target.parent_path().string() : ".";
    std::error_code error;
    std::filesystem::directory_iterator at(folder, error);
    for (; !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
      const std::optional<pid_t> writer = writer_of(at->path().filename().string(), name);
      struct stat info {};
      if (!writer || ::lstat(at->path().c_str(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
      if (!may_have_written(*writer, info.st_mtim)) remove_unheld(at->path().string());
    }
  } catch (const std::exception&) {
    // Out of memory: they stay until the next time.
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
  path_ = real_target(path_);
  static std::atomic<int> count = 0;  // two threads may write the same path
  do {
    temporary_ = path_;
    temporary_ += fmt::format("{}{}-{}", kTemporary, ::getpid(), count++);
    fd_ = create_held(temporary_.string());
    // One of our number may stand there: a killed process's, or one of another host.
  } while (fd_ < 0 && errno == EEXIST);
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
  const Descriptor held(temporary_.empty() ? -1 : ::dup(fd_));  // until it has its own name
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
