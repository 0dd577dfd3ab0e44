// Plan: checks a spec against shapes and picks an implementation from the ordered list.
#include "foci/attention/plan.h"

#include <cmath>
#include <limits>
#include <utility>

#include "foci/attention/fused.h"
#include "foci/attention/plain.h"
#include "foci/attention/state.h"

namespace foci {
namespace {

const ImplementationEntry* find(Implementation id) {
  for (const ImplementationEntry& e : implementations()) {
    if (e.id == id) return &e;
  }
  return nullptr;
}

std::string_view name_of(Implementation id) {
  switch (id) {
    case Implementation::plain:
      return "plain";
    case Implementation::fused:
      return "fused";
  }
  return "?";
}

}  // namespace

std::span<const ImplementationEntry> implementations() {
  static const std::vector<ImplementationEntry> list = {
      {Implementation::fused, "fused", fused_refuses, fused_workspace_bytes, fused_forward,
       fused_backward, fused_weights},
      {Implementation::plain, "plain",
       [](const AttentionSpec&, const AttentionShape&) -> std::optional<std::string> {
         return std::nullopt;  // everything
       },
       plain::workspace_bytes, plain_forward, plain_backward, plain_weights},
  };
  return list;
}

void check_product(const char* what, const Dims& dims) {
  int64_t bytes = 1;
  bool fits = true;
  for (int64_t n : dims) {
    if (n == 0) return;
  }
  for (int64_t n : dims) fits = fits && !__builtin_mul_overflow(bytes, n, &bytes);
  // The widest element has 8 bytes; twice that leaves room for padding.
  fits = fits && !__builtin_mul_overflow(bytes, int64_t{16}, &bytes);
  require(fits, "shape: {} of sizes {} has more elements than memory can be addressed", what, dims);
}

void check_shape(const AttentionSpec& spec, const AttentionShape& s) {
  const std::pair<const char*, int64_t> sizes[] = {{"B", s.B}, {"H", s.H}, {"Hk", s.Hk}, {"N", s.N},
                                                   {"M", s.M}, {"D", s.D}, {"Dv", s.Dv}};
  for (const auto& [name, n] : sizes) {
    require(n >= 0, "shape.{}: {} arrived, a size is >= 0", name, n);
  }
  require(
      s.H >= 1 || s.Hk == 0,
      "shape.H: no query heads arrived for {} key/value heads; as few, or at least 1, are right",
      s.Hk);
  require(s.Hk >= 1 || s.H == 0,
          "shape.Hk: no key/value heads arrived for {} query heads, at least 1 is right", s.H);
  require(s.H == 0 || s.H % s.Hk == 0,
          "shape.Hk: {} key/value heads do not divide {} query heads; H must be a multiple of Hk",
          s.Hk, s.H);
  require(s.dtype == DType::f32 || s.dtype == DType::f16 || s.dtype == DType::bf16,
          "shape.dtype: {} arrived, attention computes in float32, float16 or bfloat16",
          foci::name_of(s.dtype));
  check_product("q [B, H, N, D]", {s.B, s.H, s.N, s.D});
  check_product("k [B, Hk, M, D]", {s.B, s.Hk, s.M, s.D});
  check_product("v [B, Hk, M, Dv]", {s.B, s.Hk, s.M, s.Dv});
  check_product("y [B, H, N, Dv]", {s.B, s.H, s.N, s.Dv});
  check_product("rows [B, H, N]", {s.B, s.H, s.N});
  check_product("keys [B, H, M]", {s.B, s.H, s.M});
  check_product("scores [N, M]", {s.N, s.M});
  // What is kept for each head and batch entry, however empty the tensors are.
  require(s.H < int64_t{1} << 24, "shape.H: {} query heads arrived, there may be fewer than 2^24",
          s.H);
  require(s.B < int64_t{1} << 32, "shape.B: {} batch entries arrived, there may be fewer than 2^32",
          s.B);
  // Positions and distances are kept in 32 bits.
  require(s.N < (int64_t{1} << 30) && s.M < (int64_t{1} << 30),
          "shape: {} queries and {} keys arrived, each must be below 2^30", s.N, s.M);
  // Kernels compute in float32, where these numbers must not become 0 or infinite.
  const auto require_float = [](const std::string& what, double x) {
    require(std::abs(x) <= std::numeric_limits<float>::max(),
            "{}: {} arrived, which float32 cannot hold", what, x);
  };
  if (const auto* one = std::get_if<double>(&spec.scale)) require_float("scale", *one);
  if (const auto* l2 = std::get_if<L2>(&spec.score)) require_float("score.gamma", l2->gamma);
  if (const auto* e = std::get_if<Entmax>(&spec.normalizer)) {
    // (α−1)·s must keep the digits of s, and α = 10⁶ leaves weight to the largest scores alone.
    require(e->alpha <= 1e6, "normalizer.alpha: {} arrived, attention in float32 takes up to 1e6",
            e->alpha);
    require(e->per_head.empty() || static_cast<int64_t>(e->per_head.size()) == s.H,
            "normalizer.alpha: {} numbers arrived for {} query heads; give one number, or one per "
            "query head",
            e->per_head.size(), s.H);
    for (size_t h = 0; h < e->per_head.size(); ++h) {
      require(e->per_head[h] <= 1e6,
              "normalizer.alpha[{}]: {} arrived, attention in float32 takes up to 1e6", h,
              e->per_head[h]);
    }
  }
  if (spec.softcap) {
    require_float("softcap", *spec.softcap);
    require(*spec.softcap >= std::numeric_limits<float>::min(),
            "softcap: {} arrived, which float32 cannot hold", *spec.softcap);
  }
  if (const auto* per_head = std::get_if<std::vector<double>>(&spec.scale)) {
    require(static_cast<int64_t>(per_head->size()) == s.H,
            "scale: {} numbers arrived for {} query heads; give one number, or one per query head",
            per_head->size(), s.H);
    for (int64_t h = 0; h < s.H; ++h) require_float(fmt::format("scale[{}]", h), (*per_head)[h]);
  }
  if (const auto* r = find_bias<Relative1D>(spec)) {
    require(r->max_distance < int64_t{1} << 30,
            "relative1d.max_distance: {} arrived, it must be below 2^30", r->max_distance);
    check_product("table1d [H, 2*max_distance+1]", {s.H, 2 * r->max_distance + 1});
  }
  if (const auto* r = find_bias<Relative2D>(spec)) {
    check_product("table2d [H, 2*height-1, 2*width-1]", {s.H, 2 * r->height - 1, 2 * r->width - 1});
    require(r->height * r->width == s.M,
            "relative2d.grid: [{}, {}] holds {} positions, but there are M = {} keys", r->height,
            r->width, r->height * r->width, s.M);
    require(s.N <= s.M, "relative2d.grid: N = {} queries do not fit the grid's {} positions", s.N,
            s.M);
  }
}

AttentionShape shape_of(const AttentionInputs& in) {
  const auto check = [](const Tensor& t, const char* name, const char* letters) {
    require(t.defined(), "{}: no tensor was given", name);
    require(t.rank() == 4, "{}: shape {} arrived, {} is right", name, t.shape(), letters);
  };
  check(in.q, "q", "[B, H, N, D]");
  check(in.k, "k", "[B, Hk, M, D]");
  check(in.v, "v", "[B, Hk, M, Dv]");
  return {.B = in.q.dim(0),
          .H = in.q.dim(1),
          .Hk = in.k.dim(1),
          .N = in.q.dim(2),
          .M = in.k.dim(2),
          .D = in.q.dim(3),
          .Dv = in.v.dim(3),
          .dtype = in.q.dtype()};
}

Plan Plan::make(const AttentionSpec& spec, const AttentionShape& shape,
                const PlanOptions& options) {
  validate(spec);
  check_shape(spec, shape);
  auto state = std::make_shared<PlanState>();
  state->spec = spec;
  state->shape = shape;
  // parse_target refuses what the machine does not run, and names what it does.
  state->target = options.target ? parse_target(foci::name_of(*options.target)) : current_target();
  std::string refusals;
  if (options.implementation) {
    const ImplementationEntry* e = find(*options.implementation);
    require(e != nullptr, "implementation: {} is not built into this library",
            name_of(*options.implementation));
    const auto reason = e->refuses(spec, shape);
    require(!reason, "implementation: {} was asked for, but does not serve this: {}", e->name,
            reason.value_or(""));
    state->picked = e;
  } else {
    for (const ImplementationEntry& e : implementations()) {
      const auto reason = e.refuses(spec, shape);
      if (!reason) {
        state->picked = &e;
        break;
      }
      refusals += fmt::format("; {} refused: {}", e.name, *reason);
    }
    require(state->picked != nullptr, "no implementation serves this spec{}", refusals);
  }
  state->explanation = fmt::format("{}{} on SIMD target {}{}", state->picked->name,
                                   options.implementation ? " (asked for)" : "",
                                   foci::name_of(state->target), refusals);
  if (state->picked->id == Implementation::fused && std::holds_alternative<TopK>(spec.normalizer)) {
    const auto all = fused::top_k_scores_all(spec, shape);
    state->explanation +=
        all ? fmt::format("; top-k scores every key: {}", *all)
            : fmt::format(
                  "; top-k leaves blocks of {} keys out by bounds on their scores, where "
                  "keys lie in clusters",
                  kernels::kBoxKeys);
  }
  Plan plan;
  plan.state_ = std::move(state);
  return plan;
}

std::string Plan::explain() const {
  return state_->explanation;
}
Implementation Plan::implementation() const {
  return state_->picked->id;
}
SimdTarget Plan::target() const {
  return state_->target;
}
const AttentionSpec& Plan::spec() const {
  return state_->spec;
}
const AttentionShape& Plan::shape() const {
  return state_->shape;
}

size_t Plan::workspace_bytes(bool backward) const {
  return state_->picked->workspace_bytes(state_->spec, state_->shape, state_->target, backward);
}

Bound Plan::bind(const AttentionInputs& inputs) const {
  auto bound = std::make_shared<BoundState>();
  bound->plan = state_;
  bound->problem = make_problem(state_->spec, state_->shape, state_->target, inputs);
  return Bound(std::move(bound));
}

}  // namespace foci
