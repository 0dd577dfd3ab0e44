// Files: limits hold, writes are all or nothing, and every refusal says which file and why.
#include "foci/io/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>

#include "foci/io/lock.h"
#include "io/damage.h"

namespace foci {
namespace {

using testing::message_of;
using testing::TemporaryFolder;

TEST(File, ComesBackAsItWasWritten) {
  const TemporaryFolder folder;
  std::string bytes(200'001, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 >> 3);
  for (const size_t n : {size_t{0}, size_t{1}, size_t{4096}, size_t{65536}, bytes.size()}) {
    write_file(folder / "a", std::string_view(bytes).substr(0, n));
    EXPECT_EQ(read_file(folder / "a"), bytes.substr(0, n));
    const MappedFile mapped = map_file(folder / "a");
    ASSERT_EQ(mapped.size, n);
    ASSERT_NE(mapped.data, nullptr);
    EXPECT_EQ(std::memcmp(mapped.data, bytes.data(), n), 0);
    for (size_t i = 0; i < 64; ++i) EXPECT_EQ(mapped.data[n + i], std::byte{0});
  }
  EXPECT_EQ(folder.count(), 1);
}

TEST(File, WritingIntoAMappingLeavesTheFile) {
  const TemporaryFolder folder;
  write_file(folder / "a", "abc");
  const MappedFile mapped = map_file(folder / "a");
  mapped.data[0] = std::byte{'x'};
  EXPECT_EQ(read_file(folder / "a"), "abc");
}

TEST(File, ReadingRefusesWhatItCannotTake) {
  const TemporaryFolder folder;
  write_file(folder / "a", "0123456789");
  EXPECT_EQ(read_file(folder / "a", 10).size(), 10u);
  EXPECT_NE(message_of([&] { read_file(folder / "a", 9); }).find("9 bytes"), std::string::npos);
  // A device has no size: the limit must hold all the same.
  EXPECT_NE(message_of([&] { read_file("/dev/zero", 100'000); }).find("100000 bytes"),
            std::string::npos);
  const auto io = [](const std::function<void()>& f) { return message_of<IoError>(f); };
  EXPECT_NE(io([&] { read_file(folder / "b"); }).find("No such file"), std::string::npos);
  EXPECT_NE(io([&] { read_file(folder.path()); }).find("is a folder"), std::string::npos);
  EXPECT_NE(io([&] { map_file(folder.path()); }).find("is a folder"), std::string::npos);
  EXPECT_NE(io([&] { map_file("/dev/null"); }).find("not a regular"), std::string::npos);
}

TEST(File, WritingKeepsPermissionsAndFollowsLinks) {
  const TemporaryFolder folder;
  write_file(folder / "a", "old");
  ASSERT_EQ(::chmod((folder / "a").c_str(), 0640), 0);
  std::filesystem::create_symlink("a", folder / "link");
  write_file(folder / "link", "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(read_file(folder / "a"), "new");
  struct stat info {};
  ASSERT_EQ(::stat((folder / "a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
  EXPECT_EQ(folder.count(), 2);
}

TEST(File, DevicesAreWrittenToAndNotReplaced) {
  write_file("/dev/null", "gone");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  EXPECT_NE(message_of<IoError>([] { write_file("/dev/full", "x"); }).find("No space left"),
            std::string::npos);
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/full"));
}

TEST(File, UncommittedAndImpossibleWritesLeaveNothing) {
  const TemporaryFolder folder;
  write_file(folder / "a", "old");
  {
    AtomicFile file(folder / "a");
    file.write("half");
    EXPECT_EQ(folder.count(), 2);
  }
  EXPECT_EQ(read_file(folder / "a"), "old");
  EXPECT_EQ(folder.count(), 1);
  message_of<IoError>([&] { write_file(folder / "none/a", "x"); });
  message_of<IoError>([&] { write_file(folder.path(), "x"); });
  EXPECT_EQ(folder.count(), 1);
}

// Stands in for a full disk: the process may write files of 4096 bytes, not more. In a child, since
// the limit and the ignored signal belong to the whole process.
TEST(File, AWriteCutShortLeavesTheOldFile) {
  const TemporaryFolder folder;
  write_file(folder / "a", "old");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      write_file(folder / "a", std::string(10'000, 'x'));
    } catch (const IoError& e) {
      ::_exit(std::string(e.what()).find("File too large") != std::string::npos ? 7 : 8);
    } catch (...) {
      ::_exit(9);
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7);
  EXPECT_EQ(read_file(folder / "a"), "old");
  EXPECT_EQ(folder.count(), 1);
}

// The number of a process that has ended.
pid_t ended_process() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  int status = 0;
  ::waitpid(child, &status, 0);
  return child;
}

void set_changed(const std::filesystem::path& path, time_t seconds) {
  const timespec times[2] = {{seconds, 0}, {seconds, 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

TEST(Abandoned, WhatAKilledWriterLeftIsRemovedAndNothingElse) {
  const TemporaryFolder folder;
  const std::string gone = std::to_string(ended_process());
  const std::string alive = std::to_string(::getppid());
  const auto put = [&](const std::string& name) { write_file(folder / name, "x"); };
  const std::vector<std::string> others = {"a",
                                           "b.tmp-" + gone + "-0",
                                           "a.tmp",
                                           "a.tmp-",
                                           "a.tmp-" + gone,
                                           "a.tmp-" + gone + "-",
                                           "a.tmp-" + gone + "-x",
                                           "a.tmp-x-0",
                                           "a.tmp-" + gone + "-0.bak",
                                           "a.tmp--" + gone + "-0",
                                           "a.tmp-0-0",
                                           "xa.tmp-" + gone + "-0",
                                           "a.tmp-99999999999999-0",
                                           "a.tmp-" + alive + "-0"};  // its process lives
  for (const std::string& name : others) put(name);
  std::filesystem::create_directory(folder / ("a.tmp-" + gone + "-7"));
  std::filesystem::create_symlink("a", folder / ("a.tmp-" + gone + "-8"));
  const int64_t before = folder.count();
  put("a.tmp-" + gone + "-0");
  put("a.tmp-" + gone + "-12");
  // A living process that began after the file was written: its number was another's.
  put("a.tmp-" + std::to_string(::getpid()) + "-9999");
  set_changed(folder / ("a.tmp-" + std::to_string(::getpid()) + "-9999"), 1'000'000'000);
  remove_abandoned(folder / "a");
  EXPECT_EQ(folder.count(), before);
  for (const std::string& name : others)
    EXPECT_TRUE(std::filesystem::exists(folder / name)) << name;
  remove_abandoned(folder / "nothing there");
  remove_abandoned(folder / "no folder/a");
  remove_abandoned("");
  EXPECT_EQ(folder.count(), before);
}

TEST(Abandoned, AFileThatIsHeldStays) {
  const TemporaryFolder folder;
  const std::string name = "a.tmp-" + std::to_string(ended_process()) + "-0";
  write_file(folder / name, "x");
  const int fd = ::open((folder / name).c_str(), O_RDWR);
  ASSERT_EQ(::flock(fd, LOCK_EX), 0);
  remove_abandoned(folder / "a");
  EXPECT_EQ(folder.count(), 1);
  ::close(fd);
  remove_abandoned(folder / "a");
  EXPECT_EQ(folder.count(), 0);
}

TEST(Abandoned, AKilledWriterHoldsNothingAndALivingOneDoes) {
  const TemporaryFolder folder;
  write_file(folder / "a", "old");
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    AtomicFile file(folder / "a");
    file.write("half");
    (void)!::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  remove_abandoned(folder / "a");
  EXPECT_EQ(folder.count(), 2);
  ::kill(child, SIGKILL);
  siginfo_t info;
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(folder.count(), 2);
  // While it has not been waited for, too.
  // By a link to the file as well.
  const TemporaryFolder elsewhere;
  std::filesystem::create_symlink(folder / "a", elsewhere / "link");
  remove_abandoned(elsewhere / "link");
  EXPECT_EQ(folder.count(), 1);
  EXPECT_EQ(read_file(folder / "a"), "old");
  int status = 0;
  ::waitpid(child, &status, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(Abandoned, ANameThatStandsThereIsNotTaken) {
  const TemporaryFolder folder;
  // The next numbers are taken, by a process of another host with our number.
  int next = 0;
  {
    const AtomicFile file(folder / "z");
    const std::string name = std::filesystem::directory_iterator(folder.path())->path().string();
    next = std::stoi(name.substr(name.rfind('-') + 1)) + 1;
  }
  for (int i = next; i < next + 5; ++i) {
    std::ofstream(folder / ("z.tmp-" + std::to_string(::getpid()) + "-" + std::to_string(i))) << i;
  }
  write_file(folder / "z", "new");
  EXPECT_EQ(folder.count(), 6);
  EXPECT_EQ(read_file(folder / "z"), "new");
}

TEST(FolderLock, OneAtATimeAndNoneAfterAKill) {
  const TemporaryFolder folder;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const FolderLock lock(folder.path());
    (void)!::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const std::string message = message_of<FolderBusy>([&] { const FolderLock lock(folder.path()); });
  testing::expect_one_line(message);
  EXPECT_NE(message.find("process " + std::to_string(child)), std::string::npos) << message;
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  {
    const FolderLock lock(folder.path());
    EXPECT_EQ(folder.count(), 1);
    message_of<IoError>([&] { const FolderLock second(folder.path()); });
  }
  EXPECT_EQ(folder.count(), 0);
  { const FolderLock lock(folder.path()); }
  message_of<IoError>([&] { const FolderLock lock(folder / "none"); });
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(File, QuotedTextFitsALine) {
  EXPECT_EQ(in_quotes("layers.0.weight"), "\"layers.0.weight\"");
  EXPECT_EQ(in_quotes("a\nb\x1b[2J"), "\"a\\x0ab\\x1b[2J\"");
  EXPECT_LT(in_quotes(std::string(1'000'000, '\n')).size(), 400u);
}

TEST(File, ShownPathsKeepTheirLettersAndTheirLine) {
  EXPECT_EQ(shown("bilder/größe.png"), "bilder/größe.png");
  EXPECT_EQ(shown("a\nb\x1b.png"), "a\\x0ab\\x1b.png");
}

}  // namespace
}  // namespace foci
