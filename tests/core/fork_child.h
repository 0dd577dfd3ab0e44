// A child of fork() and what becomes of it, for tests.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#define FOCI_TEST_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FOCI_TEST_ADDRESS_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define FOCI_TEST_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define FOCI_TEST_THREAD_SANITIZER 1
#endif
#endif

namespace foci::testing {

// Forks, runs `f` in the child, which ends by _exit or, with `by_exit`, runs what exit() runs.
// Empty where f gave true, else what became of the child. One that hangs is killed by its alarm.
inline std::string in_child(const std::function<bool()>& f, bool by_exit = false) {
  std::fflush(nullptr);  // or the child writes it again
  const pid_t child = fork();
  if (child < 0) return "fork failed";
  if (child == 0) {
    alarm(60);
    int code = 2;
    try {
      code = f() ? 0 : 1;
    } catch (...) {
      code = 3;
    }
    if (by_exit) std::exit(code);
    _exit(code);
  }
  int status = 0;
  if (waitpid(child, &status, 0) != child) return "waitpid failed";
  if (WIFSIGNALED(status)) {
    return "ended by signal " + std::to_string(WTERMSIG(status)) +
           (WTERMSIG(status) == SIGALRM ? ", it hung" : "");
  }
  if (WEXITSTATUS(status) == 0) return "";
  return "exit code " + std::to_string(WEXITSTATUS(status));
}

}  // namespace foci::testing
