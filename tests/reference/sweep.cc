#include "reference/sweep.h"

#include <limits>

#include "foci/core/rng.h"
#include "foci/spec/json.h"

namespace foci::testing {
namespace {

class Maker {
 public:
  Maker(uint64_t n, DType dtype, const SweepLimits& limits) : rng_(n, 77), dtype_(dtype) {
    B = 1 + rng_.below(limits.batch);
    Hk = 1 + rng_.below(limits.kv_heads);
    H = Hk * (1 + rng_.below(limits.group));
    N = 1 + rng_.below(limits.queries);
    M = 1 + rng_.below(limits.keys);
    D = 1 + rng_.below(limits.head);
    Dv = 1 + rng_.below(limits.value);
  }

  SweepCase make() {
    choose_score();
    choose_normalizer();
    choose_masks();
    choose_biases();
    if (one_in(3)) {
      const bool keys = one_in(2);
      c_.spec.dropout =
          Dropout{0.3, rng_.next_u64() % 1000, keys ? DropoutPlace::keys : DropoutPlace::weights};
    }
    c_.spec.statistics = Statistics::all();
    c_.in.q = normal({B, H, N, D});
    c_.in.k = normal({B, Hk, M, D});
    c_.in.v = normal({B, Hk, M, Dv});
    fill_tensors();
    // Statistics are float32 in the engine, whatever the inputs; so are their gradients.
    const DType wide = dtype_ == DType::f64 ? DType::f64 : DType::f32;
    c_.up.dy = normal({B, H, N, Dv});
    c_.up.drow_stat = normal({B, H, N}).to(wide);
    c_.up.dentropy = normal({B, H, N}).to(wide);
    c_.up.dmax_weight = normal({B, H, N}).to(wide);
    c_.up.dcoverage = normal({B, H, M}).to(wide);
    c_.text = fmt::format("B{} H{} Hk{} N{} M{} D{} Dv{} {}", B, H, Hk, N, M, D, Dv,
                          spec_to_json_text(c_.spec));
    return std::move(c_);
  }

 private:
  bool one_in(int64_t n) { return rng_.below(n) == 0; }
  int64_t between(int64_t low, int64_t high) { return low + rng_.below(high - low + 1); }

  Tensor normal(const Dims& shape, double spread = 1) {
    Tensor t = Tensor::empty(shape, DType::f64);
    for (double& x : t.span<double>()) x = spread * rng_.normal();
    return t.to(dtype_);
  }

  // A shape that broadcasts to [B,H,N,M]: fewer dimensions, some of them 1.
  Dims broadcast_shape() {
    const int64_t full[] = {B, H, N, M};
    const int rank = static_cast<int>(rng_.below(5));
    Dims shape;
    for (int d = 4 - rank; d < 4; ++d) shape.push_back(one_in(3) ? 1 : full[d]);
    return shape;
  }

  void choose_score() {
    AttentionSpec& s = c_.spec;
    switch (rng_.below(5)) {
      case 0:
        s.score = Cosine{};
        break;
      case 1:
        s.score = L2{0.3};
        break;
      case 2:
        s.score = Additive{};
        break;
      default:
        s.score = Dot{};
    }
    switch (rng_.below(4)) {
      case 0:
        s.scale = -0.7;
        break;
      case 1: {
        std::vector<double> per_head;
        for (int64_t h = 0; h < H; ++h) per_head.push_back(1.5 - 0.5 * static_cast<double>(h));
        s.scale = per_head;
        break;
      }
      default:
        s.scale = AutoScale{};
    }
    if (one_in(3)) s.softcap = 1.5;
  }

  void choose_normalizer() {
    switch (rng_.below(6)) {
      case 0:
      case 1:
        c_.spec.normalizer = Softmax{};
        break;
      case 2:
        c_.spec.normalizer = Sparsemax{};
        break;
      case 3:
        c_.spec.normalizer = Entmax{1.5};
        break;
      case 4: {
        const double alphas[] = {1.1, 1.25, 1.75, 2, 2.5};
        c_.spec.normalizer = Entmax{alphas[rng_.below(5)]};
        break;
      }
      default:
        c_.spec.normalizer = TopK{between(1, M + 1)};
    }
  }

  Align any_align() { return static_cast<Align>(rng_.below(3)); }

  void choose_masks() {
    std::vector<Mask>& masks = c_.spec.masks;
    if (one_in(3)) masks.push_back(Causal{any_align()});
    if (one_in(3)) {
      Window w;
      if (!one_in(3)) w.left = rng_.below(M + 1);
      if (!one_in(3)) w.right = rng_.below(M + 1);
      w.align = any_align();
      masks.push_back(w);
    }
    if (one_in(3)) masks.push_back(KeyLengths{});
    if (one_in(3)) masks.push_back(Segments{});
    if (one_in(3)) masks.push_back(Keep{});
  }

  void choose_biases() {
    std::vector<Bias>& biases = c_.spec.biases;
    if (one_in(3)) biases.push_back(TensorBias{});
    if (one_in(4)) biases.push_back(Alibi{});
    if (one_in(4)) biases.push_back(Relative1D{between(0, 3)});
    if (one_in(4) && N <= M) biases.push_back(M % 2 ? Relative2D{1, M} : Relative2D{M / 2, 2});
  }

  Tensor segments(int64_t n) {
    Tensor t = Tensor::zeros({B, n}, DType::i32);
    for (int64_t b = 0; b < B; ++b) {
      const bool scattered = one_in(2);
      int32_t id = 5;
      for (int64_t x = 0; x < n; ++x) {
        if (scattered) {
          id = static_cast<int32_t>(between(5, 6));
        } else if (one_in(3)) {
          ++id;
        }
        t.at<int32_t>(b, x) = id;
      }
    }
    return t;
  }

  Tensor lengths(int64_t most) {
    Tensor t = Tensor::zeros({B}, DType::i64);
    for (int64_t b = 0; b < B; ++b) t.at<int64_t>(b) = rng_.below(most + 1);
    return t;
  }

  void fill_tensors() {
    AttentionInputs& in = c_.in;
    const AttentionSpec& s = c_.spec;
    if (std::holds_alternative<Additive>(s.score)) in.score_w = normal({D});
    if (has_mask<KeyLengths>(s)) in.key_lengths = lengths(M);
    if (has_mask<Segments>(s)) {
      in.q_segments = segments(N);
      in.k_segments = segments(M);
    }
    if (bias_align(s) == Align::past) {
      in.past_lengths = lengths(find_bias<Relative2D>(s) ? M - N : M);
    }
    if (has_mask<Keep>(s)) {
      in.keep = Tensor::zeros(broadcast_shape(), DType::boolean);
      for (bool& k : in.keep.span<bool>()) k = !one_in(4);
    }
    if (find_bias<TensorBias>(s)) {
      in.bias = normal(broadcast_shape()).to(DType::f64);
      for (double& x : in.bias.span<double>()) {
        if (one_in(8)) x = -std::numeric_limits<double>::infinity();
      }
      in.bias = in.bias.to(dtype_);
    }
    if (find_bias<Alibi>(s)) in.slopes = normal({H}, 0.3);
    if (const Relative1D* r = find_bias<Relative1D>(s)) {
      in.table1d = normal({H, 2 * r->max_distance + 1});
    }
    if (const Relative2D* r = find_bias<Relative2D>(s)) {
      in.table2d = normal({H, 2 * r->height - 1, 2 * r->width - 1});
    }
  }

  Rng rng_;
  DType dtype_;
  int64_t B, H, Hk, N, M, D, Dv;
  SweepCase c_;
};

}  // namespace

SweepCase sweep_case(uint64_t n, DType dtype, const SweepLimits& limits) {
  return Maker(n, dtype, limits).make();
}

}  // namespace foci::testing
