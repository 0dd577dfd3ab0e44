// ONNX Attention (opsets 23 to 25) as a spec of foci.
//
// Where ONNX says things differently: queries start after the cached keys (past_k), or end at the
// last valid key (kv_lengths), or start at key 0; a mask with fewer columns than keys hides the
// rest; three dimensions are heads laid side by side; `scores` shows the scores at one stage.
#include <algorithm>
#include <functional>
#include <limits>
#include <optional>

#include "foci/verify/attributes.h"
#include "foci/verify/ops.h"

namespace foci::verify {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

Tensor joined(const Tensor& past, const Tensor& now, const char* name) {
  require(past.rank() == 4 && past.dtype() == now.dtype() && past.dim(0) == now.dim(0) &&
              past.dim(1) == now.dim(1) && past.dim(3) == now.dim(3),
          "{}: shape {} of {} given, it does not continue in {} of {}", name, past.shape(),
          name_of(past.dtype()), now.shape(), name_of(now.dtype()));
  Tensor all =
      Tensor::empty({now.dim(0), now.dim(1), past.dim(2) + now.dim(2), now.dim(3)}, now.dtype());
  all.slice(2, 0, past.dim(2)).copy_from(past);
  all.slice(2, past.dim(2), all.dim(2)).copy_from(now);
  return all;
}

// Columns that the mask lacks are masked.
Tensor padded(const Tensor& mask, int64_t keys) {
  require(mask.rank() >= 1 && mask.rank() <= 4, "mask: shape {} given, 1 to 4 dimensions are right",
          mask.shape());
  require(mask.dtype() == DType::boolean || is_floating(mask.dtype()),
          "mask: {} given, bool or a floating type is needed", name_of(mask.dtype()));
  const int64_t columns = mask.shape().back();
  require(columns <= keys, "mask: shape {} given, but there are only {} keys", mask.shape(), keys);
  if (columns == keys) return mask;
  Dims shape = mask.shape();
  shape[shape.size() - 1] = keys;
  require_small("the padded mask", shape, kMostElements);
  Tensor wide = mask.dtype() == DType::boolean ? Tensor::zeros(shape, DType::boolean)
                                               : Tensor::full(shape, -kInf, mask.dtype());
  wide.slice(mask.rank() - 1, 0, columns).copy_from(mask);
  return wide;
}

Tensor heads_apart(Tensor t, int64_t heads, const char* name) {
  require(t.defined(), "{}: no tensor given", name);
  if (t.rank() == 3) return split_heads(t, heads, name);
  require(t.rank() == 4, "{}: shape {} given, 3 or 4 dimensions are needed", name, t.shape());
  require(heads == 0 || t.dim(1) == heads, "{}: {} heads given, the attributes say {}", name,
          t.dim(1), heads);
  return t;
}

// The positions p = offset + i that causal and windows count from.
struct Offsets {
  Align align = Align::top_left;
  Tensor past;  // for Align::past
  // A batch with fewer valid keys than queries starts before its first key, which no past length
  // says; its causal and window masks are written out instead.
  bool negative = false;
  std::vector<int64_t> each;  // [B]
};

Offsets offsets_of(const AttentionRequest& r, const Tensor& past_k) {
  Offsets o;
  const int64_t B = r.in.q.dim(0), N = r.in.q.dim(2);
  o.each.assign(B, past_k.defined() ? past_k.dim(2) : 0);
  if (!past_k.defined() && r.in.key_lengths.defined()) {
    for (int64_t b = 0; b < B; ++b) o.each[b] = r.in.key_lengths.at<int64_t>(b) - N;
  }
  for (int64_t x : o.each) o.negative = o.negative || x < 0;
  if (past_k.defined() || r.in.key_lengths.defined()) {
    o.align = Align::past;
    o.past = Tensor::from(o.each, {B});
  }
  return o;
}

void add_positional_masks(AttentionRequest& r, const Offsets& offsets, bool causal,
                          std::optional<int64_t> left, std::optional<int64_t> right) {
  if (!causal && !left && !right) return;
  if (!offsets.negative) {
    if (causal) r.spec.masks.push_back(Causal{offsets.align});
    if (left || right) r.spec.masks.push_back(Window{left, right, offsets.align});
    r.in.past_lengths = offsets.past;
    return;
  }
  const int64_t B = r.in.q.dim(0), H = r.in.q.dim(1), N = r.in.q.dim(2), M = r.in.k.dim(2);
  require_small("queries and keys [B, H, N, M]", {B, H, N, M}, kMostElements);
  const bool had_keep = r.in.keep.defined();
  Tensor all = Tensor::zeros({B, had_keep ? H : 1, N, M}, DType::boolean);
  if (had_keep) {
    all.copy_from(r.in.keep.broadcast_to({B, H, N, M}));
  } else {
    all.fill(1);
  }
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < N; ++i) {
      for (int64_t j = 0; j < M; ++j) {
        const int64_t ahead = j - (offsets.each[b] + i);
        const bool seen =
            (!causal || ahead <= 0) && (!left || -ahead <= *left) && (!right || ahead <= *right);
        if (!seen) all.slice(0, b, b + 1).slice(2, i, i + 1).slice(3, j, j + 1).fill(0);
      }
    }
  }
  r.in.keep = all;
  if (!has_mask<Keep>(r.spec)) r.spec.masks.push_back(Keep{});
}

}  // namespace

double onnx_tolerance(const CaseFile& c, DType dtype) {
  return c.tolerance.value_or(dtype == DType::f16 ? 2e-3 : dtype == DType::bf16 ? 1.6e-2 : 1e-5);
}

Tensor split_heads(const Tensor& t, int64_t heads, const char* name) {
  require(heads >= 1, "{}: shape {} given, 3 dimensions need a number of heads >= 1", name,
          t.shape());
  require(t.dim(2) % heads == 0, "{}: {} channels given, {} heads do not divide them", name,
          t.dim(2), heads);
  return t.contiguous()
      .reshape({t.dim(0), t.dim(1), heads, t.dim(2) / heads})
      .transpose(1, 2)
      .contiguous();
}

Tensor merge_heads(const Tensor& t) {
  return t.transpose(1, 2).contiguous().reshape({t.dim(0), t.dim(2), t.dim(1) * t.dim(3)});
}

Prepared prepare_attention(const CaseFile& c) {
  c.only_inputs({"q", "k", "v", "mask", "past_k", "past_v", "kv_lengths"});
  c.only_outputs({"y", "present_k", "present_v", "scores"});
  const Attributes attributes(
      c.attributes,
      {"is_causal", "q_num_heads", "kv_num_heads", "scale", "softcap", "softmax_precision",
       "qk_matmul_output_mode", "left_window_size", "right_window_size"});
  Prepared p;
  auto& r = p.request.emplace<AttentionRequest>();
  const int64_t kv_heads = attributes.integer("kv_num_heads", 0);
  r.in.q = heads_apart(c.input("q"), attributes.integer("q_num_heads", 0), "q");
  r.in.k = heads_apart(c.input("k"), kv_heads, "k");
  r.in.v = heads_apart(c.input("v"), kv_heads, "v");
  require_small("queries [B, H, N]", {r.in.q.dim(0), r.in.q.dim(1), r.in.q.dim(2)}, kMostElements);
  require_small("keys [B, Hk, M]", {r.in.k.dim(0), r.in.k.dim(1), r.in.k.dim(2)}, kMostElements);
  const Tensor past_k = c.input("past_k"), past_v = c.input("past_v");
  require(past_k.defined() == past_v.defined(), "past_k, past_v: one is given without the other");
  if (past_k.defined()) {
    r.in.k = joined(past_k, r.in.k, "past_k");
    r.in.v = joined(past_v, r.in.v, "past_v");
  }
  if (const auto scale = attributes.number("scale")) r.spec.scale = *scale;
  const double softcap = attributes.number("softcap").value_or(0);
  if (softcap != 0) r.spec.softcap = softcap;

  if (const Tensor mask = c.input("mask"); mask.defined()) {
    const Tensor wide = padded(mask, r.in.k.dim(2));
    if (mask.dtype() == DType::boolean) {
      r.in.keep = wide;
      r.spec.masks.push_back(Keep{});
    } else {
      r.in.bias = wide;
      r.spec.biases.push_back(TensorBias{});
    }
  }
  if (const Tensor lengths = c.input("kv_lengths"); lengths.defined()) {
    require(lengths.dtype() == DType::i64 && lengths.shape() == Dims({r.in.q.dim(0)}),
            "kv_lengths: shape {} of {} given, an int64 [{}] is needed", lengths.shape(),
            name_of(lengths.dtype()), r.in.q.dim(0));
    for (int64_t b = 0; b < lengths.dim(0); ++b) {
      const int64_t n = lengths.at<int64_t>(b);
      require(n >= 0 && n <= r.in.k.dim(2), "kv_lengths[{}]: {} given, it must lie in [0, {}]", b,
              n, r.in.k.dim(2));
    }
    r.in.key_lengths = lengths;
    r.spec.masks.push_back(KeyLengths{});
  }
  const auto side = [&](const char* name) -> std::optional<int64_t> {
    const int64_t n = attributes.integer(name, -1);
    return n < 0 ? std::nullopt : std::optional(n);
  };
  add_positional_masks(r, offsets_of(r, past_k), attributes.integer("is_causal", 0) != 0,
                       side("left_window_size"), side("right_window_size"));

  const int64_t mode = attributes.integer("qk_matmul_output_mode", 0);
  require(mode >= 0 && mode <= 3, "qk_matmul_output_mode: {} given, it lies in [0, 3]", mode);
  const double tolerance = onnx_tolerance(c, r.in.q.dtype());
  const auto expect = [&](const char* name, std::function<Tensor(const Answer&)> got) {
    if (c.output(name).defined()) {
      p.expected.push_back({name, c.output(name), std::move(got), tolerance});
    }
  };
  const bool merged = c.input("q").rank() == 3;
  expect("y", [merged](const Answer& a) { return merged ? merge_heads(a.out.y) : a.out.y; });
  expect("present_k", [k = r.in.k](const Answer&) { return k; });
  expect("present_v", [v = r.in.v](const Answer&) { return v; });
  if (c.output("scores").defined()) {
    constexpr ScoreStage kStages[] = {ScoreStage::scaled, ScoreStage::capped, ScoreStage::masked};
    r.weights = mode == 3;  // from the implementation that computes y
    if (mode < 3) r.scores = kStages[mode];
    expect("scores", [mode](const Answer& a) { return mode == 3 ? a.weights : a.scores; });
  }
  return p;
}

}  // namespace foci::verify
