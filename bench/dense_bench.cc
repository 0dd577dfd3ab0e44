// Linear layers, forward and both backward products, against oneDNN's sgemm and the multiply-add
// peak, in one run; one thread by its CPU time, more by the wall clock. Prints a table:
// `dense_bench [seconds a measurement]`.
#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>

#include "foci/core/rng.h"
#include "foci/core/simd_target.h"
#include "foci/core/tensor.h"
#include "foci/core/threads.h"
#include "foci/kernels/dense.h"
#include "foci/measure/fma_peak.h"
#include "foci/measure/interleaved.h"

namespace foci {
using kernels::Activation;
namespace {

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

void bench_shape(int64_t rows, int64_t inputs, int64_t outputs, SimdTarget target, int threads,
                 double peak, double seconds) {
  const Floats x(rows * inputs, 1), w(outputs * inputs, 2), bias(outputs, 3), dy(rows * outputs, 4);
  const Floats y(rows * outputs), pre(rows * outputs), dx(rows * inputs), dw(outputs * inputs);
  const double flops = 2.0 * static_cast<double>(rows * inputs * outputs);
  const auto forward = [&](const float* b, float* before, Activation activation) {
    kernels::linear_forward(target, {.rows = rows,
                                     .inputs = inputs,
                                     .outputs = outputs,
                                     .x = x.data(),
                                     .ldx = inputs,
                                     .w = w.data(),
                                     .bias = b,
                                     .y = y.data(),
                                     .ldy = outputs,
                                     .pre = before,
                                     .activation = activation});
  };
  const auto dnnl_forward = [&] {
    dnnl_sgemm('N', 'T', rows, outputs, inputs, 1, x.data(), inputs, w.data(), inputs, 0, y.data(),
               outputs);
  };
  struct Pair {
    const char* name;
    std::function<void()> dnnl, own;
  };
  const Pair pairs[] = {
      {"forward", dnnl_forward, [&] { forward(nullptr, nullptr, Activation::none); }},
      {"+bias+gelu", dnnl_forward, [&] { forward(bias.data(), pre.data(), Activation::gelu); }},
      {"d input",
       [&] {
         dnnl_sgemm('N', 'N', rows, inputs, outputs, 1, dy.data(), outputs, w.data(), inputs, 0,
                    dx.data(), inputs);
       },
       [&] {
         kernels::linear_backward_input(target, rows, inputs, outputs, dy.data(), outputs, w.data(),
                                        dx.data(), inputs, false);
       }},
      {"d weight",
       [&] {
         dnnl_sgemm('T', 'N', outputs, inputs, rows, 1, dy.data(), outputs, x.data(), inputs, 0,
                    dw.data(), inputs);
       },
       [&] {
         kernels::linear_backward_weight(target, rows, inputs, outputs, dy.data(), outputs,
                                         x.data(), inputs, dw.data(), nullptr, false);
       }}};
  const auto clock = threads == 1 ? measure::ClockKind::thread_cpu : measure::ClockKind::wall;
  for (const Pair& p : pairs) {
    const auto t = measure::interleaved({{"oneDNN", p.dnnl}, {"foci", p.own}},
                                        {.seconds = seconds, .clock = clock});
    const double own = flops / t[1].seconds * 1e-9;
    std::printf("%5ld %4ld %4ld  %d  %-10s %8.1f %8.1f   %5.1f %%   %.2f  [%.2f, %.2f]\n",
                static_cast<long>(rows), static_cast<long>(inputs), static_cast<long>(outputs),
                threads, p.name, flops / t[0].seconds * 1e-9, own, 100 * own / peak, t[1].speedup,
                t[1].speedup_low, t[1].speedup_high);
    std::fflush(stdout);
  }
}

int run(double seconds) {
  const SimdTarget target = current_target();
  std::printf("target %s\n", std::string(name_of(target)).c_str());
  std::printf(
      " rows   in  out  threads        oneDNN     foci   of peak   foci/oneDNN [quartiles]\n"
      "                                  GF/s     GF/s\n");
  struct Shape {
    int64_t rows, inputs, outputs;
  };
  for (const int threads : {1, 2}) {
    set_num_threads(threads);
    set_openmp_threads(threads);
    const double peak = measure::fma_peak_gflops(target, threads);
    std::printf("multiply-add peak, %d thread%s: %.0f GF/s\n", threads, threads > 1 ? "s" : "",
                peak);
    for (const Shape& s :
         {Shape{2300, 64, 64}, Shape{2300, 64, 192}, Shape{2300, 64, 256}, Shape{2300, 256, 64},
          Shape{500, 64, 64}, Shape{10000, 64, 64}, Shape{2300, 192, 192}, Shape{1000, 768, 768}}) {
      bench_shape(s.rows, s.inputs, s.outputs, target, threads, peak, seconds);
    }
  }
  return 0;
}

}  // namespace
}  // namespace foci

int main(int argc, char** argv) {
  try {
    return foci::run(argc > 1 ? std::atof(argv[1]) : 0.3);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "dense_bench: %s\n", e.what());
    return 1;
  }
}
