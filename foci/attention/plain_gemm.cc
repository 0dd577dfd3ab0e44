// Matrix products of the unfused implementation, through oneDNN's sgemm on this thread alone.
#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <vector>

#include "foci/attention/plain.h"

namespace foci::plain {
namespace {

// oneDNN runs on OpenMP (on Debian, GCC's), whose thread count is a property of the calling
// thread. Looked up by name, so that foci needs no OpenMP of its own, and none is fine too.
struct OpenMp {
  void (*set)(int) = nullptr;
  int (*get)() = nullptr;
  OpenMp() {
    set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    get = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    if (!set || !get) set = nullptr, get = nullptr;
  }
};

const OpenMp& openmp() {
  static const OpenMp o;
  return o;
}

void sgemm(char transpose_a, char transpose_b, int64_t rows, int64_t columns, int64_t inner,
           const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* out,
           int64_t ldo) {
  const dnnl_status_t status = dnnl_sgemm(transpose_a, transpose_b, rows, columns, inner, 1.0f, a,
                                          lda, b, ldb, beta, out, ldo);
  require<Error>(status == dnnl_success, "oneDNN's sgemm failed with status {}",
                 static_cast<int>(status));
}

}  // namespace

OneThread::OneThread() {
  if (!openmp().set || !openmp().get) return;
  before_ = openmp().get();
  if (before_ != 1) openmp().set(1);
}

OneThread::~OneThread() {
  if (before_ > 1 && openmp().set) openmp().set(before_);
}

void gemm_nt(int64_t rows, int64_t columns, int64_t inner, View a, View b, float* out, int64_t ld) {
  if (rows == 0 || columns == 0) return;
  if (inner == 0) {
    for (int64_t r = 0; r < rows; ++r) std::fill_n(out + r * ld, columns, 0.0f);
    return;
  }
  for (int64_t at = 0; at < inner; at += kInner) {
    sgemm('N', 'T', rows, columns, std::min(kInner, inner - at), a.data + at, a.ld, b.data + at,
          b.ld, at == 0 ? 0.0f : 1.0f, out, ld);
  }
}

void gemm_nn(int64_t rows, int64_t columns, int64_t inner, View a, View b, float* out, int64_t ld) {
  if (rows == 0 || columns == 0) return;
  const auto block = [&](int64_t at, float beta, float* to, int64_t ld_to) {
    sgemm('N', 'N', rows, columns, std::min(kInner, inner - at), a.data + at, a.ld,
          b.data + at * b.ld, b.ld, beta, to, ld_to);
  };
  if (inner <= kInner) {
    if (inner > 0) block(0, 1.0f, out, ld);
    return;
  }
  // Blocks are joined in double, so that the error does not grow with their number.
  std::vector<double> sum(rows * columns);
  std::vector<float> part(rows * columns);
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(out + r * ld, columns, sum.data() + r * columns);
  }
  for (int64_t at = 0; at < inner; at += kInner) {
    block(at, 0.0f, part.data(), columns);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<double>(part[i]);
  }
  for (int64_t r = 0; r < rows; ++r) {
    std::transform(sum.data() + r * columns, sum.data() + (r + 1) * columns, out + r * ld,
                   [](double x) { return static_cast<float>(x); });
  }
}

void gemm_tn(int64_t rows, int64_t columns, int64_t inner, View a, View b, float* out, int64_t ld) {
  if (rows == 0 || columns == 0 || inner == 0) return;
  sgemm('T', 'N', rows, columns, inner, a.data, a.ld, b.data, b.ld, 1.0f, out, ld);
}

}  // namespace foci::plain
