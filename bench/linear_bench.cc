// Linear layers, forward and both backward products, against oneDNN's sgemm and the multiply-add
// peak, in one run on the same inputs and threads, interleaved.
//
//   linear_bench [--quick] [--json] [--threads N] [--seconds S] [--only TEXT]
//
// The shapes are those of the training workloads and of single tokens. One thread is measured by
// its CPU time, more by the wall clock. "gelu" rows stand against the bare product: what oneDNN
// would still have to do for bias, activation and slope is not counted against it.
#include <dlfcn.h>
#include <fmt/format.h>
#include <oneapi/dnnl/dnnl.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "foci/core/rng.h"
#include "foci/core/simd_target.h"
#include "foci/core/tensor.h"
#include "foci/core/threads.h"
#include "foci/kernels/dense.h"
#include "foci/measure/fma_peak.h"
#include "foci/measure/interleaved.h"

namespace foci::bench {
namespace {

using kernels::Activation;

struct Options {
  bool quick = false, json = false;
  int threads = 0;  // 0: one, and all
  double seconds = 0.25;
  std::string only;
};

struct Shape {
  const char* workload;
  int64_t rows, inputs, outputs;
  bool gelu = false;  // the first half of a feed-forward part
};

std::vector<Shape> shapes(bool quick) {
  std::vector<Shape> list = {{"demo", 2300, 64, 64},
                             {"demo", 2300, 64, 256, true},
                             {"demo", 2300, 256, 64},
                             {"vit d192", 2048, 192, 192},
                             {"vit d192", 2048, 192, 768, true},
                             {"vit d192", 2048, 768, 192},
                             {"lm d256", 2048, 256, 256},
                             {"lm d256", 2048, 256, 1024, true},
                             {"lm d256", 2048, 1024, 256}};
  if (quick) return list;
  const std::vector<Shape> more = {
      {"vit d192", 2048, 192, 576}, {"lm d256", 2048, 256, 768},  {"lm head", 2048, 256, 4096},
      {"vit-s", 1576, 384, 384},    {"vit-s", 1576, 384, 1152},   {"vit-s", 1576, 384, 1536, true},
      {"vit-s", 1576, 1536, 384},   {"768 wide", 1000, 768, 768}, {"1 token", 1, 768, 3072},
      {"4 tokens", 4, 768, 3072},   {"16 tokens", 16, 768, 3072}, {"1 token", 1, 4096, 4096}};
  list.insert(list.end(), more.begin(), more.end());
  return list;
}

// 64-byte aligned, as every tensor is.
struct Floats {
  explicit Floats(int64_t n, uint64_t seed = 0) : tensor(Tensor::zeros({n})) {
    Rng rng(seed);
    for (float& x : tensor.span<float>()) x = static_cast<float>(2 * rng.uniform() - 1);
  }
  float* data() const { return tensor.data<float>(); }
  Tensor tensor;
};

// oneDNN runs on OpenMP, whichever runtime it was linked with.
void set_openmp_threads(int n) {
  if (void* f = dlsym(RTLD_DEFAULT, "omp_set_num_threads")) reinterpret_cast<void (*)(int)>(f)(n);
}

struct Pair {
  const char* name;
  std::function<void()> dnnl, own;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), target_(current_target()) {
    // Both sides use the same instructions.
    if (target_ == SimdTarget::avx2) dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
    out_ = {
        {"benchmark", "linear"}, {"target", name_of(target_)}, {"rows", nlohmann::json::array()}};
  }

  int run() {
    if (!options_.json) {
      fmt::print("SIMD target {}\n{:<10}{:>6}{:>6}{:>6} {:<9}{:>8}{:>14}{:>11}{:>9}   {}\n",
                 name_of(target_), "workload", "rows", "in", "out", "product", "threads",
                 "oneDNN GF/s", "foci GF/s", "of peak", "foci : oneDNN (quartiles)");
    }
    const int all = num_threads();
    std::vector<int> counts = {1};
    if (all > 1) counts.push_back(all);
    if (options_.threads > 0) counts = {options_.threads};
    for (const int threads : counts) {
      set_num_threads(threads);
      set_openmp_threads(threads);
      peak_ = measure::fma_peak_gflops(target_, threads);
      if (!options_.json) {
        fmt::print("multiply-add peak with {} threads: {:.0f} GF/s\n", threads, peak_);
      }
      for (const Shape& s : shapes(options_.quick)) measure(s, threads);
    }
    if (options_.json) {
      fmt::print("{}\n", out_.dump(2));
    } else {
      fmt::print("more than 5 % slower than oneDNN in {} rows\n", slower_);
    }
    return 0;
  }

 private:
  std::vector<Pair> pairs(const Shape& s) const {
    const int64_t rows = s.rows, inputs = s.inputs, outputs = s.outputs;
    const Floats x(rows * inputs, 1), w(outputs * inputs, 2), bias(outputs, 3),
        dy(rows * outputs, 4);
    const Floats y(rows * outputs), slope(rows * outputs), dx(rows * inputs), dw(outputs * inputs);
    const auto forward = [=, target = target_](bool gelu) {
      kernels::linear_forward(target, {.rows = rows,
                                       .inputs = inputs,
                                       .outputs = outputs,
                                       .x = x.data(),
                                       .ldx = inputs,
                                       .w = w.data(),
                                       .bias = gelu ? bias.data() : nullptr,
                                       .y = y.data(),
                                       .ldy = outputs,
                                       .activation = gelu ? Activation::gelu : Activation::none,
                                       .slope = gelu ? slope.data() : nullptr});
    };
    const auto dnnl_forward = [=] {
      dnnl_sgemm('N', 'T', rows, outputs, inputs, 1, x.data(), inputs, w.data(), inputs, 0,
                 y.data(), outputs);
    };
    std::vector<Pair> list = {{"forward", dnnl_forward, [=] { forward(false); }}};
    if (s.gelu) list.push_back({"gelu", dnnl_forward, [=] { forward(true); }});
    if (rows <= 16) return list;
    list.push_back({"d input",
                    [=] {
                      dnnl_sgemm('N', 'N', rows, inputs, outputs, 1, dy.data(), outputs, w.data(),
                                 inputs, 0, dx.data(), inputs);
                    },
                    [=, target = target_] {
                      kernels::linear_backward_input(target, {.rows = rows,
                                                              .inputs = inputs,
                                                              .outputs = outputs,
                                                              .dy = dy.data(),
                                                              .lddy = outputs,
                                                              .w = w.data(),
                                                              .dx = dx.data(),
                                                              .lddx = inputs});
                    }});
    list.push_back({"d weight",
                    [=] {
                      dnnl_sgemm('T', 'N', outputs, inputs, rows, 1, dy.data(), outputs, x.data(),
                                 inputs, 0, dw.data(), inputs);
                    },
                    [=, target = target_] {
                      kernels::linear_backward_weight(target, rows, inputs, outputs, dy.data(),
                                                      outputs, x.data(), inputs, dw.data(), nullptr,
                                                      false);
                    }});
    return list;
  }

  void measure(const Shape& s, int threads) {
    if (std::string(s.workload).find(options_.only) == std::string::npos) return;
    const double flops = 2e-9 * static_cast<double>(s.rows * s.inputs * s.outputs);
    const auto clock = threads == 1 ? measure::ClockKind::thread_cpu : measure::ClockKind::wall;
    for (const Pair& p : pairs(s)) {
      const auto t = measure::interleaved({{"oneDNN", p.dnnl}, {"foci", p.own}},
                                          {.seconds = options_.seconds, .clock = clock});
      const double own = flops / t[1].seconds, dnnl = flops / t[0].seconds;
      slower_ += t[1].speedup < 0.95;
      if (options_.json) {
        out_["rows"].push_back({{"workload", s.workload},
                                {"rows", s.rows},
                                {"inputs", s.inputs},
                                {"outputs", s.outputs},
                                {"product", p.name},
                                {"threads", threads},
                                {"peak_gflops", peak_},
                                {"onednn_gflops", dnnl},
                                {"foci_gflops", own},
                                {"share_of_peak", own / peak_},
                                {"speedup", t[1].speedup},
                                {"speedup_quartiles", {t[1].speedup_low, t[1].speedup_high}}});
      } else {
        fmt::print(
            "{:<10}{:>6}{:>6}{:>6} {:<9}{:>8}{:>14.1f}{:>11.1f}{:>8.0f}%   {:.2f} "
            "({:.2f}-{:.2f})\n",
            s.workload, s.rows, s.inputs, s.outputs, p.name, threads, dnnl, own, 100 * own / peak_,
            t[1].speedup, t[1].speedup_low, t[1].speedup_high);
        std::fflush(stdout);
      }
    }
  }

  Options options_;
  SimdTarget target_;
  double peak_ = 0;
  int slower_ = 0;
  nlohmann::json out_;
};

constexpr const char* kUsage =
    "usage: linear_bench [--quick] [--only TEXT] [--threads N] [--seconds S] [--json]\n"
    "  --quick      the shapes of three training workloads only\n"
    "  --only TEXT  only rows whose workload holds it\n"
    "  --threads N  default: one, and then all that this process may run on\n"
    "  --seconds S  how long each product is measured; default 0.25\n"
    "  --json       print JSON instead of the table\n";

// The exit code where the program should end now: 0 after --help, 2 for what it cannot take.
std::optional<int> parse(int argc, char** argv, Options& o) {
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : nullptr;
    if (option == "--quick") {
      o.quick = true;
    } else if (option == "--json") {
      o.json = true;
    } else if (option == "--threads" && value && std::atoi(value) > 0) {
      o.threads = std::atoi(argv[++i]);
    } else if (option == "--seconds" && value && std::atof(value) > 0) {
      o.seconds = std::atof(argv[++i]);
    } else if (option == "--only" && value) {
      o.only = argv[++i];
    } else if (option == "--help" || option == "-h") {
      fmt::print("{}", kUsage);
      return 0;
    } else {
      fmt::print(stderr, "linear_bench: '{}' is not understood\n{}", option, kUsage);
      return 2;
    }
  }
  return std::nullopt;
}

}  // namespace
}  // namespace foci::bench

int main(int argc, char** argv) {
  foci::bench::Options options;
  if (const auto code = foci::bench::parse(argc, argv, options)) return *code;
  try {
    return foci::bench::Bench(options).run();
  } catch (const std::exception& e) {
    fmt::print(stderr, "linear_bench: {}\n", e.what());
    return 1;
  }
}
