// ONNX RotaryEmbedding (opset 23). foci has no fast form of it yet: the oracle runs it.
#include <nlohmann/json.hpp>

#include "foci/reference/rotary.h"
#include "foci/verify/attributes.h"
#include "foci/verify/ops.h"

namespace foci::verify {
namespace {

// cos or sin as [B,N,R/2]: already so, or rows of a table chosen by position_ids [B,N].
Tensor angles(const Tensor& cache, const Tensor& ids, const char* name) {
  require(cache.defined(), "{}: no tensor given", name);
  if (!ids.defined()) return cache;
  require(cache.rank() == 2 && is_floating(cache.dtype()),
          "{}: shape {} of {} given, a floating [positions, R/2] is needed with position_ids", name,
          cache.shape().str(), name_of(cache.dtype()));
  require(ids.rank() == 2 && ids.dtype() == DType::i64,
          "position_ids: shape {} of {} given, an int64 [B, N] is needed", ids.shape().str(),
          name_of(ids.dtype()));
  require_small("angles [B, N, R/2]", {ids.dim(0), ids.dim(1), cache.dim(1)}, kMostElements);
  Tensor rows = Tensor::empty({ids.dim(0), ids.dim(1), cache.dim(1)}, DType::f64);
  for (int64_t b = 0; b < ids.dim(0); ++b) {
    for (int64_t n = 0; n < ids.dim(1); ++n) {
      const int64_t position = ids.at<int64_t>(b, n);
      require(position >= 0 && position < cache.dim(0),
              "position_ids[{}, {}]: {} given, {} has {} positions", b, n, position, name,
              cache.dim(0));
      rows.select(0, b).select(0, n).copy_from(cache.select(0, position));
    }
  }
  return rows;
}

}  // namespace

Prepared prepare_rotary_embedding(const CaseFile& c) {
  c.only_inputs({"x", "cos", "sin", "position_ids"});
  c.only_outputs({"y"});
  Attributes attributes(c.attributes, {"interleaved", "num_heads", "rotary_embedding_dim"});
  const auto pairs = attributes.integer("interleaved", 0) != 0 ? reference::RotaryPairs::interleaved
                                                               : reference::RotaryPairs::half_split;
  Tensor x = c.input("x");
  require(x.defined(), "x: no tensor given");
  require_small("x", x.shape(), kMostElements);
  const bool merged = x.rank() == 3;
  if (merged) x = split_heads(x, attributes.integer("num_heads", 0), "x");
  const Tensor cos = angles(c.input("cos"), c.input("position_ids"), "cos");
  const Tensor sin = angles(c.input("sin"), c.input("position_ids"), "sin");
  Tensor y = reference::rotary(x, cos, sin, pairs);
  const int64_t turned = attributes.integer("rotary_embedding_dim", 0);
  const int64_t wanted = turned == 0 ? x.dim(3) : turned;
  require(2 * cos.dim(2) == wanted, "cos: {} angles given, {} channels turn", cos.dim(2), wanted);
  if (merged) y = merge_heads(y);

  Prepared p;
  if (const Tensor want = c.output("y"); want.defined()) {
    p.expected.push_back(
        {"y", want, [y](const Answer&) { return y; }, onnx_tolerance(c, x.dtype())});
  }
  return p;
}

}  // namespace foci::verify
