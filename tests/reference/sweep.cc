// Draws case n: its options, sizes, tensors and upstream gradients.
#include "reference/sweep.h"

#include <limits>

#include "foci/core/rng.h"
#include "foci/spec/json.h"

namespace foci::testing {
namespace {

class Maker {
 public:
  explicit Maker(const Recipe& recipe)
      : rng_(recipe.seed, 77),
        r_(recipe),
        B(recipe.batch),
        Hk(recipe.kv_heads),
        H(recipe.kv_heads * recipe.group),
        N(recipe.queries),
        M(recipe.keys),
        D(recipe.head),
        Dv(recipe.value) {}

  SweepCase make() {
    choose_score();
    choose_normalizer();
    choose_masks();
    choose_biases();
    if (r_.dropout > 0) {
      c_.spec.dropout = Dropout{0.3, rng_.next_u64() % 1000,
                                r_.dropout > 1 ? DropoutPlace::keys : DropoutPlace::weights};
    }
    c_.spec.statistics = Statistics::all();
    c_.in.q = normal({B, H, N, D});
    c_.in.k = normal({B, Hk, M, D});
    c_.in.v = normal({B, Hk, M, Dv});
    if (r_.ties > 0) make_ties();
    fill_tensors();
    // Statistics are float32 in the engine, whatever the inputs; so are their gradients.
    const DType wide = r_.dtype == DType::f64 ? DType::f64 : DType::f32;
    c_.up.dy = normal({B, H, N, Dv});
    c_.up.drow_stat = normal({B, H, N}).to(wide);
    c_.up.dentropy = normal({B, H, N}).to(wide);
    c_.up.dmax_weight = normal({B, H, N}).to(wide);
    c_.up.dcoverage = normal({B, H, M}).to(wide);
    if (r_.poison > 0 && M > 0) poison();
    c_.text = fmt::format("B{} H{} Hk{} N{} M{} D{} Dv{} seed {}{} {}", B, H, Hk, N, M, D, Dv,
                          r_.seed, c_.poisoned ? " poisoned" : "", spec_to_json_text(c_.spec));
    return std::move(c_);
  }

 private:
  bool one_in(int64_t n) { return rng_.below(n) == 0; }
  int64_t between(int64_t low, int64_t high) { return low + rng_.below(high - low + 1); }

  Tensor normal(const Dims& shape, double spread = 1) {
    Tensor t = Tensor::empty(shape, DType::f64);
    for (double& x : t.span<double>()) x = spread * rng_.normal();
    return t.to(r_.dtype);
  }

  // Number `place` of the shapes that broadcast to [B,H,N,M], by rank.
  Dims broadcast_shape(int64_t place) const {
    const int64_t full[] = {B, H, N, M};
    int rank = 0;
    for (; place >= int64_t{1} << rank; ++rank) place -= int64_t{1} << rank;
    Dims shape;
    for (int d = 4 - rank; d < 4; ++d) shape.push_back(place >> (3 - d) & 1 ? full[d] : 1);
    return shape;
  }

  void choose_score() {
    AttentionSpec& s = c_.spec;
    switch (r_.score) {
      case 1:
        s.score = Cosine{};
        break;
      case 2:
        s.score = L2{0.3};
        break;
      case 3:
        s.score = Additive{};
        break;
      default:
        s.score = Dot{};
    }
    switch (r_.scale) {
      case 1:
        s.scale = -0.7;
        break;
      case 2: {
        std::vector<double> per_head;
        for (int64_t h = 0; h < H; ++h) per_head.push_back(1.5 - 0.5 * static_cast<double>(h));
        s.scale = per_head;
        break;
      }
      case 3:
        s.scale = rng_.normal();
        break;
      default:
        s.scale = AutoScale{};
    }
    if (r_.softcap > 0) s.softcap = 1.5;
  }

  void choose_normalizer() {
    switch (r_.normalizer) {
      case 1:
        c_.spec.normalizer = Sparsemax{};
        break;
      case 2:
        c_.spec.normalizer = Entmax{1.5};
        break;
      case 3:
        c_.spec.normalizer = Entmax{kAlphas[r_.alpha]};
        break;
      case 4:
        c_.spec.normalizer = TopK{r_.k};
        break;
      case 5: {
        Entmax entmax;
        for (int64_t h = 0; h < H; ++h) {
          entmax.per_head.push_back(
              kAlphas[static_cast<size_t>(r_.alpha + h) % std::size(kAlphas)]);
        }
        c_.spec.normalizer = entmax;
        break;
      }
      default:
        c_.spec.normalizer = Softmax{};
    }
  }

  void choose_masks() {
    std::vector<Mask>& masks = c_.spec.masks;
    if (r_.causal > 0) masks.push_back(Causal{static_cast<Align>(r_.causal - 1)});
    if (r_.window > 0) {
      Window w;
      if (r_.left >= 0) w.left = r_.left;
      if (r_.right >= 0) w.right = r_.right;
      w.align = static_cast<Align>(r_.window - 1);
      masks.push_back(w);
    }
    if (r_.lengths > 0) masks.push_back(KeyLengths{});
    if (r_.segments > 0) masks.push_back(Segments{});
    if (r_.keep > 0) masks.push_back(Keep{});
  }

  void choose_biases() {
    std::vector<Bias>& biases = c_.spec.biases;
    if (r_.bias > 0) biases.push_back(TensorBias{});
    if (r_.alibi > 0) biases.push_back(Alibi{});
    if (r_.relative1d > 0) biases.push_back(Relative1D{r_.relative1d - 1});
    if (r_.relative2d > 0 && N <= M && M > 0) {
      biases.push_back(M % 2 ? Relative2D{1, M} : Relative2D{M / 2, 2});
    }
  }

  Tensor segments(int64_t n, bool scattered) {
    Tensor t = Tensor::zeros({B, n}, DType::i32);
    const int64_t length = n <= 16 ? 3 : 12;
    for (int64_t b = 0; b < B; ++b) {
      int32_t id = 5;
      for (int64_t x = 0; x < n; ++x) {
        if (scattered) {
          id = static_cast<int32_t>(between(5, 6));
        } else if (one_in(length)) {
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
      in.q_segments = segments(N, r_.segments > 2);
      in.k_segments =
          r_.segments == 2 && N == M ? in.q_segments.clone() : segments(M, r_.segments > 3);
    }
    if (bias_align(s) == Align::past) {
      in.past_lengths = lengths(find_bias<Relative2D>(s) ? M - N : M);
    }
    if (has_mask<Keep>(s)) {
      in.keep = Tensor::zeros(broadcast_shape(r_.keep - 1), DType::boolean);
      for (bool& k : in.keep.span<bool>()) k = !one_in(4);
    }
    if (find_bias<TensorBias>(s)) {
      in.bias = normal(broadcast_shape(r_.bias - 1)).to(DType::f64);
      for (double& x : in.bias.span<double>()) {
        if (one_in(8)) x = -std::numeric_limits<double>::infinity();
      }
      in.bias = in.bias.to(r_.dtype);
    }
    if (find_bias<Alibi>(s)) in.slopes = normal({H}, 0.3);
    if (const Relative1D* r = find_bias<Relative1D>(s)) {
      in.table1d = normal({H, 2 * r->max_distance + 1});
    }
    if (const Relative2D* r = find_bias<Relative2D>(s)) {
      in.table2d = normal({H, 2 * r->height - 1, 2 * r->width - 1});
    }
  }

  // Equal scores, in float32 as in double.
  void make_ties() {
    if (r_.ties == 1 && r_.score == 0) {
      c_.spec.scale = one_in(2) ? 0.5 : -0.5;
      for (Tensor* t : {&c_.in.q, &c_.in.k}) {
        const Tensor coarse = Tensor::empty(t->shape());
        for (float& x : coarse.span<float>()) x = static_cast<float>(between(-1, 1));
        t->copy_from(coarse);
      }
    } else if (r_.ties == 2 && M > 1) {
      for (int64_t n = 0; n < M; ++n) {
        const int64_t from = rng_.below(M), to = rng_.below(M);
        c_.in.k.slice(2, to, to + 1).copy_from(c_.in.k.slice(2, from, from + 1));
      }
    }
  }

  void poison() {
    c_.poisoned = true;
    const double value = one_in(2) ? std::numeric_limits<double>::quiet_NaN()
                                   : std::numeric_limits<double>::infinity();
    const int64_t b = rng_.below(B), h = rng_.below(Hk), j = rng_.below(M);
    if (r_.poison > 1) c_.in.k.select(0, b).select(0, h).select(0, j).fill(value - value);
    c_.in.v.select(0, b).select(0, h).select(0, j).fill(value);
  }

  Rng rng_;
  const Recipe r_;
  const int64_t B, Hk, H, N, M, D, Dv;
  SweepCase c_;
};

}  // namespace

SweepCase make_case(const Recipe& recipe) {
  return Maker(recipe).make();
}

Recipe sweep_recipe(uint64_t n, DType dtype, const SweepLimits& limits) {
  Rng rng(n, 76);
  const auto one_in = [&](int64_t of) { return rng.below(of) == 0; };
  const auto align = [&] { return 1 + rng.below(3); };
  const auto broadcast = [&] {
    const int64_t rank = rng.below(5);
    int64_t place = (int64_t{1} << rank) - 1;
    for (int64_t bit = 0; bit < rank; ++bit) place += one_in(3) ? 0 : int64_t{1} << bit;
    return 1 + place;
  };
  Recipe r;
  r.dtype = dtype;
  r.seed = n;
  r.batch = 1 + rng.below(limits.batch);
  r.kv_heads = 1 + rng.below(limits.kv_heads);
  r.group = 1 + rng.below(limits.group);
  r.queries = 1 + rng.below(limits.queries);
  r.keys = 1 + rng.below(limits.keys);
  r.head = 1 + rng.below(limits.head);
  r.value = 1 + rng.below(limits.value);
  const int64_t scores[] = {1, 2, 3, 0, 0};
  r.score = scores[rng.below(5)];
  const int64_t scales[] = {1, 2, 0, 0};
  r.scale = scales[rng.below(4)];
  r.softcap = one_in(3);
  const int64_t normalizers[] = {0, 0, 1, 2, 3, 4};
  r.normalizer = normalizers[rng.below(6)];
  r.alpha = rng.below(5);
  r.k = 1 + rng.below(r.keys + 1);
  if (one_in(3)) r.causal = align();
  if (one_in(3)) {
    r.window = align();
    if (!one_in(3)) r.left = rng.below(r.keys + 1);
    if (!one_in(3)) r.right = rng.below(r.keys + 1);
  }
  r.lengths = one_in(3);
  if (one_in(3)) r.segments = 1 + rng.below(4);
  if (one_in(3)) r.keep = broadcast();
  if (one_in(3)) r.bias = broadcast();
  r.alibi = one_in(4);
  if (one_in(4)) r.relative1d = 1 + rng.below(4);
  r.relative2d = one_in(4);
  if (one_in(3)) r.dropout = 1 + rng.below(2);
  if (r.normalizer == 3 && one_in(2)) r.normalizer = 5;
  return r;
}

SweepCase sweep_case(uint64_t n, DType dtype, const SweepLimits& limits) {
  return make_case(sweep_recipe(n, dtype, limits));
}

}  // namespace foci::testing
