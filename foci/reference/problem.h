// One attention call as the oracle works on it: shapes checked, every floating tensor in double.
#pragma once

#include <cstdint>
#include <vector>

#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"

namespace foci::reference {

struct Problem {
  AttentionSpec spec;
  int64_t B = 0, H = 0, Hk = 0, N = 0, M = 0, D = 0, Dv = 0;
  Tensor q, k, v;                            // double, contiguous
  Tensor key_lengths, past_lengths;          // int64, contiguous
  Tensor q_segments, k_segments;             // int32, contiguous
  Tensor keep;                               // viewed as [B,H,N,M]
  Tensor bias;                               // double, viewed as [B,H,N,M]
  Tensor slopes, table1d, table2d, score_w;  // double, contiguous
  std::vector<double> scale;                 // [H]

  // Rows of the operands; k and v are asked for by *query* head.
  const double* q_row(int64_t b, int64_t h, int64_t i) const {
    return q.data<double>() + ((b * H + h) * N + i) * D;
  }
  const double* k_row(int64_t b, int64_t h, int64_t j) const {
    return k.data<double>() + kv_row(b, h, j) * D;
  }
  const double* v_row(int64_t b, int64_t h, int64_t j) const {
    return v.data<double>() + kv_row(b, h, j) * Dv;
  }
  // Heads share by repetition: query heads 0,1,2,3 read key/value heads 0,0,1,1.
  int64_t kv_row(int64_t b, int64_t h, int64_t j) const { return (b * Hk + h / (H / Hk)) * M + j; }
};

// Throws ArgumentError, naming the argument, where a tensor is missing or does not fit.
Problem make_problem(const AttentionSpec& spec, const AttentionInputs& in);

// An upstream gradient as contiguous doubles; undefined stays undefined.
Tensor upstream(const Tensor& t, const char* name, const Dims& shape);

// An element of a tensor viewed as [B,H,N,M] (strides may be 0).
template <class T>
T& element(const Tensor& t, int64_t b, int64_t h, int64_t i, int64_t j) {
  const Dims& s = t.strides();
  return t.data<T>()[b * s[0] + h * s[1] + i * s[2] + j * s[3]];
}

}  // namespace foci::reference
