// A lock file: flock(2) on it, and the number of the process that holds it inside.
#include "foci/io/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "foci/io/file.h"

namespace foci {
namespace {

// "process 17 on host", as the one that holds it wrote.
std::string holder(int fd) {
  char text[256];
  const ssize_t length = ::pread(fd, text, sizeof text, 0);
  if (length <= 0) return "another process";
  return shown(std::string(text, static_cast<size_t>(length)));
}

std::string own_name() {
  char host[128] = "";
  (void)!::gethostname(host, sizeof host - 1);
  return fmt::format("process {} on {}", ::getpid(), host);
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder) : file_(folder / ".lock") {
  for (;;) {
    fd_ = ::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    require<IoError>(fd_ >= 0, "{}: cannot be written: {}", shown(file_),
                     std::generic_category().message(errno));
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return;  // no locks here
      const std::string who = holder(fd_);
      ::close(fd_);
      throw FolderBusy(fmt::format("{}: {} is at work there", shown(folder), who));
    }
    // The one before may have removed the name between our two calls.
    struct stat held {
    }, named{};
    if (::fstat(fd_, &held) == 0 && ::stat(file_.c_str(), &named) == 0 &&
        held.st_ino == named.st_ino && held.st_dev == named.st_dev) {
      break;
    }
    ::close(fd_);
  }
  // Only for the message: a full disk does not matter here.
  const std::string who = own_name();
  if (::ftruncate(fd_, 0) == 0) (void)!::pwrite(fd_, who.data(), who.size(), 0);
}

FolderLock::~FolderLock() {
  ::unlink(file_.c_str());
  ::close(fd_);
}

}  // namespace foci
