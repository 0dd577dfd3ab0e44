// Memory of very long sequences: the peak beside inputs, outputs, upstream gradients and gradients,
// as the kernel counts the pages of a process that does nothing else (VmHWM). Each row runs forward
// and backward in a process of its own.
//
// --quick takes 16,384 keys in place of what the row says.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "foci/attention/plan.h"
#include "foci/core/error.h"
#include "foci/core/threads.h"
#include "inputs.h"
#include "rows.h"

namespace foci::bench {
namespace {

// A line of /proc/self/status, in bytes.
double status(const std::string& name) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name + ":")) return 1024 * std::stod(line.substr(name.size() + 1));
  }
  throw Error("/proc/self/status has no " + name + ": this benchmark needs Linux");
}

// The peak starts again from what is held now. Where the kernel refuses, it keeps counting from the
// start, which can only say too much.
void forget_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

struct Peak {
  double bytes, seconds;
};

// Of one call, beside what is held before it.
template <class F>
Peak peak_of(const F& call) {
  forget_peak();
  const double before = status("VmRSS");
  const auto begin = std::chrono::steady_clock::now();
  call();
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
  return {status("VmHWM") - before, spent.count()};
}

Definition definition(const std::string& row, const Options& options) {
  for (Definition& d : definitions("memory", options)) {
    if (d.row != row) continue;
    if (options.quick) d.shape.N = d.shape.M = 16384;
    return d;
  }
  throw Error("no row '" + row + "'");
}

// What the child says: bytes and seconds, forward and backward.
int child(const std::string& row, const Options& options) {
  const Definition d = definition(row, options);
  const AttentionShape& s = d.shape;
  const AttentionInputs in = inputs(d, s);
  const AttentionUpstream up = upstream(d.spec, s);
  AttentionOutputs out = {.y = Tensor::full({s.B, s.H, s.N, s.Dv}, 1),
                          .row_stat = Tensor::full({s.B, s.H, s.N}, 1)};
  const Plan plan = Plan::make(d.spec, s);
  const Peak forward = peak_of([&] { plan.bind(in).forward(out); });
  AttentionGradients gradients = {.dq = Tensor::full(in.q.shape(), 1),
                                  .dk = Tensor::full(in.k.shape(), 1),
                                  .dv = Tensor::full(in.v.shape(), 1)};
  const Peak backward = peak_of([&] { plan.bind(in).backward(out, up, {}, gradients); });
  fmt::print("{} {} {} {}\n", forward.bytes, forward.seconds, backward.bytes, backward.seconds);
  return 0;
}

std::string output_of(const std::vector<std::string>& words) {
  int ends[2];
  require<Error>(pipe(ends) == 0, "pipe: {}", std::strerror(errno));
  const pid_t pid = fork();
  require<Error>(pid >= 0, "fork: {}", std::strerror(errno));
  if (pid == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
    close(ends[1]);
    std::vector<char*> argv;
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  close(ends[1]);
  std::string text;
  char buffer[256];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  waitpid(pid, &status, 0);
  require<Error>(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the process of a row {}",
                 WIFSIGNALED(status) ? "was killed (too little memory?)" : "failed");
  return text;
}

void body(const Options& options, Report& report) {
  for (const Definition& d : definitions("memory", options)) {
    std::vector<std::string> words = {"memory_bench", "--child", d.row, "--threads",
                                      std::to_string(num_threads())};
    if (options.quick) words.push_back("--quick");
    std::istringstream said(output_of(words));
    Peak forward{}, backward{};
    require<Error>(
        bool(said >> forward.bytes >> forward.seconds >> backward.bytes >> backward.seconds),
        "the process of row '{}' said nothing", d.row);
    const double mb = std::max(forward.bytes, backward.bytes) / (1 << 20);
    report.add(d, "MB beside the tensors", {mb, mb, mb},
               fmt::format("N {}: forward {:.1f} MB in {:.1f} s, backward {:.1f} MB in {:.1f} s",
                           definition(d.row, options).shape.N, forward.bytes / (1 << 20),
                           forward.seconds, backward.bytes / (1 << 20), backward.seconds));
  }
}

}  // namespace
}  // namespace foci::bench

int main(int argc, char** argv) {
  using namespace foci::bench;
  if (argc < 3 || std::strcmp(argv[1], "--child") != 0)
    return run(argc, argv, "memory_bench", body);
  try {
    Options options;
    const std::string row = argv[2];
    if (const auto code = read_options(argc - 2, argv + 2, "memory_bench", options)) return *code;
    return child(row, options);
  } catch (const std::exception& e) {
    fmt::print(stderr, "memory_bench, {}: {}\n", argv[2], e.what());
    return 1;
  }
}
