// ONNX RotaryEmbedding (opset 23).
#include "foci/verify/attributes.h"
#include "foci/verify/ops.h"

namespace foci::verify {
namespace {

// cos or sin: the angles of each row, or, with position_ids [B,N], a table of them.
Tensor angles(const Tensor& cache, const Tensor& ids, const char* name) {
  require(cache.defined(), "{}: no tensor given", name);
  require(cache.rank() == (ids.defined() ? 2 : 3) && is_floating(cache.dtype()),
          "{}: shape {} of {} given, a floating {} is needed {} position_ids", name, cache.shape(),
          name_of(cache.dtype()), ids.defined() ? "[positions, R/2]" : "[B, N, R/2]",
          ids.defined() ? "with" : "without");
  return cache;
}

void check_positions(const Tensor& ids, const Tensor& x, const Tensor& cos) {
  require(ids.dtype() == DType::i64 && ids.shape() == Dims({x.dim(0), x.dim(2)}),
          "position_ids: shape {} of {} given, an int64 [{}, {}] is needed", ids.shape(),
          name_of(ids.dtype()), x.dim(0), x.dim(2));
  require_small("angles [B, N, R/2]", {ids.dim(0), ids.dim(1), cos.dim(1)}, kMostElements);
  for (int64_t b = 0; b < ids.dim(0); ++b) {
    for (int64_t n = 0; n < ids.dim(1); ++n) {
      const int64_t position = ids.at<int64_t>(b, n);
      require(position >= 0 && position < cos.dim(0),
              "position_ids[{}, {}]: {} given, cos has {} positions", b, n, position, cos.dim(0));
    }
  }
}

}  // namespace

Prepared prepare_rotary_embedding(const CaseFile& c) {
  c.only_inputs({"x", "cos", "sin", "position_ids"});
  c.only_outputs({"y"});
  Attributes attributes(c.attributes, {"interleaved", "num_heads", "rotary_embedding_dim"});
  Tensor x = c.input("x");
  require(x.defined(), "x: no tensor given");
  require_small("x", x.shape(), kMostElements);
  const bool merged = x.rank() == 3;
  if (merged) x = split_heads(x, attributes.integer("num_heads", 0), "x");
  require(x.rank() == 4, "x: shape {} given, 3 or 4 dimensions are needed", x.shape());
  const Tensor ids = c.input("position_ids");
  Prepared p;
  auto& r = p.request.emplace<RotaryRequest>();
  r.x = x;
  r.angles.cosine = angles(c.input("cos"), ids, "cos");
  r.angles.sine = angles(c.input("sin"), ids, "sin");
  r.angles.position_ids = ids;
  r.angles.pairs = attributes.integer("interleaved", 0) != 0 ? RotaryPairs::interleaved
                                                             : RotaryPairs::half_split;
  require(r.angles.sine.shape() == r.angles.cosine.shape(), "sin: shape {} given, {} is needed",
          r.angles.sine.shape(), r.angles.cosine.shape());
  if (ids.defined()) check_positions(ids, x, r.angles.cosine);
  const int64_t turned = attributes.integer("rotary_embedding_dim", 0);
  const int64_t wanted = turned == 0 ? x.dim(3) : turned, given = r.angles.cosine.dim(-1);
  require(wanted % 2 == 0 && given == wanted / 2, "cos: {} angles given, {} channels turn", given,
          wanted);
  if (const Tensor want = c.output("y"); want.defined()) {
    p.expected.push_back(
        {"y", want, [merged](const Answer& a) { return merged ? merge_heads(a.turned) : a.turned; },
         onnx_tolerance(c, x.dtype())});
  }
  return p;
}

}  // namespace foci::verify
