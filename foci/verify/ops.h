// Operators of case files: each turns a case into one request and the results to compare.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "foci/verify/case_file.h"
#include "foci/verify/engines.h"

namespace foci::verify {

struct Expected {
  std::string name;  // as in the file, without "out."
  Tensor want;
  std::function<Tensor(const Answer&)> got;
  double tolerance = 0;
};

struct Prepared {
  Request request;
  std::vector<Expected> expected;
};

// Each throws FormatError where the file is no such case, ArgumentError where spec or shapes are
// to be refused.
Prepared prepare_attention(const CaseFile& c);         // ONNX Attention
Prepared prepare_rotary_embedding(const CaseFile& c);  // ONNX RotaryEmbedding
Prepared prepare_foci_attention(const CaseFile& c);

// The tolerance that an ONNX case of this dtype is checked with (conformance README).
double onnx_tolerance(const CaseFile& c, DType dtype);

// [B,N,H·D] viewed as [B,H,N,D], and back (a copy).
Tensor split_heads(const Tensor& t, int64_t heads, const char* name);
Tensor merge_heads(const Tensor& t);

}  // namespace foci::verify
