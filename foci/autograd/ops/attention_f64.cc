// One query row at a time: scores, normaliser, and their gradients by the textbook.
//
// Backward through a row, with g_j the gradient that reaches weight p_j:
//   softmax, top-k  ds_j = p_j (g_j − Σ p g)
//   entmax α        ds_j = u_j (g_j − Σ u g / Σ u), u = p^(2−α) on the support (sparsemax: α = 2)
// and to ds is added the row statistic's share: p_j for the log-sum-exp, (α−1) u_j / Σ u for τ.
// The entropy −Σ p log p adds −(log p_j + 1) to g_j, the coverage its upstream as it is.
#include "foci/autograd/ops/attention_f64.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "foci/core/rng.h"

namespace foci::ops {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Row {
  int64_t b, h, i;
  std::vector<double> raw;    // score(q, k) before scale
  std::vector<double> s;      // after scale, softcap, bias
  std::vector<double> slope;  // ds/d(scale · raw): the softcap's slope
  std::vector<char> allowed;
  std::vector<double> p;
  double stat = -kInf;
  bool empty = true;
  std::vector<double> log_factor{};  // ln p^(2−α), of sparsemax and entmax
};

// Where each token stands in its segment, and how many tokens each segment has.
struct Places {
  std::vector<int64_t> place;  // [B, tokens]
  std::map<std::pair<int64_t, int32_t>, int64_t> size;

  explicit Places(const Tensor& segments) {
    if (!segments.defined()) return;
    for (int64_t b = 0; b < segments.dim(0); ++b) {
      for (int64_t i = 0; i < segments.dim(1); ++i) {
        place.push_back(size[{b, segments.at<int32_t>(b, i)}]++);
      }
    }
  }
  int64_t size_of(int64_t b, int32_t segment) const {
    const auto it = size.find({b, segment});
    return it == size.end() ? 0 : it->second;
  }
};

class Attention {
 public:
  Attention(const AttentionSpec& spec, const AttentionInputs& in)
      : spec_(spec),
        in_(in),
        queries_(in.q_segments),
        keys_(in.k_segments),
        B(in.q.dim(0)),
        H(in.q.dim(1)),
        Hk(in.k.dim(1)),
        N(in.q.dim(2)),
        M(in.k.dim(2)),
        D(in.q.dim(3)),
        Dv(in.v.dim(3)) {
    for (const Bias& bias : spec.biases) {
      std::visit(
          overloaded{
              [&](TensorBias) {
                require(in.bias.defined(),
                        "bias: no tensor was given, but the bias tensor reads it");
                bias_ = in.bias.broadcast_to({B, H, N, M});
              },
              [&](Alibi) { slopes_ = table(in.slopes, "slopes", {H}); },
              [&](Relative1D r) {
                table1d_ = table(in.table1d, "table1d", {H, 2 * r.max_distance + 1});
              },
              [&](Relative2D r) {
                require(r.height * r.width == M && N <= M,
                        "attention in double: a grid of {} × {} positions for {} "
                        "keys and {} queries",
                        r.height, r.width, M, N);
                table2d_ = table(in.table2d, "table2d", {H, 2 * r.height - 1, 2 * r.width - 1});
              }},
          bias);
    }
    for (const Mask& mask : spec.masks) {
      std::visit(overloaded{[](Causal) {}, [](const Window&) {},
                            [&](KeyLengths) {
                              check_mask(in.key_lengths, "key_lengths", DType::i64, {B});
                            },
                            [&](Segments) {
                              check_mask(in.q_segments, "q_segments", DType::i32, {B, N});
                              check_mask(in.k_segments, "k_segments", DType::i32, {B, M});
                            },
                            [&](Keep) {
                              require(in.keep.defined() && in.keep.dtype() == DType::boolean,
                                      "keep: the mask keep reads a tensor of bool, none was given");
                              keep_ = in.keep.broadcast_to({B, H, N, M});
                            }},
                 mask);
    }
    if (bias_align(spec) == Align::past) {
      check_mask(in.past_lengths, "past_lengths", DType::i64, {B});
    }
  }

  double scale(int64_t h) const {
    return std::visit(
        overloaded{[&](AutoScale) {
                     return std::holds_alternative<Dot>(spec_.score)
                                ? 1 / std::sqrt(static_cast<double>(D))
                                : 1.0;
                   },
                   [](double s) { return s; },
                   [&](const std::vector<double>& s) { return s[static_cast<size_t>(h)]; }},
        spec_.scale);
  }

  const double* q(int64_t b, int64_t h, int64_t i) const { return at(in_.q, b, h, i); }
  const double* k(int64_t b, int64_t h, int64_t j) const { return at(in_.k, b, h / (H / Hk), j); }
  const double* v(int64_t b, int64_t h, int64_t j) const { return at(in_.v, b, h / (H / Hk), j); }

  Row row(int64_t b, int64_t h, int64_t i) const {
    Row r{b, h, i, {}, {}, {}, {}, {}};
    const auto m = static_cast<size_t>(M);
    r.raw.assign(m, 0);
    r.s.assign(m, -kInf);
    r.slope.assign(m, 0);
    r.allowed.assign(m, 0);
    r.p.assign(m, 0);
    for (int64_t j = 0; j < M; ++j) {
      if (!allows(b, h, i, j)) continue;
      double bias = bias_.defined() ? bias_.item({b, h, i, j}) : 0;
      if (bias == -kInf) continue;
      for_each_table_entry(b, h, i, j, [&](const Tensor& t, auto, int64_t at, double factor) {
        bias += factor * t.data<double>()[at];
      });
      r.allowed[j] = 1;
      r.empty = false;
      r.raw[j] = score(q(b, h, i), k(b, h, j));
      double s = scale(h) * r.raw[j];
      r.slope[j] = 1;
      if (spec_.softcap) {
        const double t = std::tanh(s / *spec_.softcap);
        s = *spec_.softcap * t;
        r.slope[j] = 1 - t * t;
      }
      r.s[j] = s + bias;
    }
    const bool threshold = is_threshold();
    if (r.empty) {
      r.stat = threshold ? kInf : -kInf;
      return r;
    }
    std::visit(
        overloaded{[&](Softmax) { softmax(r, r.allowed); }, [&](Sparsemax) { entmax(r, 2); },
                   [&](const Entmax&) { entmax(r, alpha(h)); }, [&](TopK t) { topk(r, t.k); }},
        spec_.normalizer);
    return r;
  }

  // 1/(1−p) or 0 for each weight.
  double dropout(const Row& r, int64_t j) const {
    if (!spec_.dropout || spec_.dropout->place != DropoutPlace::weights) return 1;
    const uint32_t threshold = dropout_threshold(spec_.dropout->p);
    return dropout_bits(spec_.dropout->seed, r.b, r.h, r.i, j) < threshold
               ? 0
               : 65536.0 / (65536.0 - threshold);
  }

  // d loss / d s from d loss / d p (g) and d loss / d stat.
  std::vector<double> backward(const Row& r, const std::vector<double>& g, double dstat) const {
    const auto m = static_cast<size_t>(M);
    std::vector<double> u(m, 0), ds(m, 0);
    const bool threshold = is_threshold();
    if (threshold) return threshold_backward(r, g, dstat);
    double sum = 0, mean = 0;
    for (size_t j = 0; j < m; ++j) {
      if (r.p[j] > 0) u[j] = r.p[j];
      sum += u[j];
    }
    if (sum == 0) return ds;
    for (size_t j = 0; j < m; ++j) {
      if (u[j] > 0) mean += u[j] * g[j] / sum;
    }
    for (size_t j = 0; j < m; ++j) {
      if (u[j] > 0) ds[j] = u[j] * (g[j] - mean) + dstat * u[j] / sum;
    }
    return ds;
  }

  // With u as exponents, of which those of a small weight can outgrow every number (α > 2), and g
  // against that of the largest u, whose gradient is what the others leave.
  std::vector<double> threshold_backward(const Row& r, const std::vector<double>& g,
                                         double dstat) const {
    std::vector<double> ds(r.p.size(), 0);
    const std::vector<double>& log_u = r.log_factor;
    size_t first = ds.size();
    for (size_t j = 0; j < ds.size(); ++j) {
      if (r.p[j] > 0 && (first == ds.size() || log_u[j] > log_u[first])) first = j;
    }
    if (first == ds.size()) return ds;
    double sum = 0, mean = 0, most = -kInf;  // most: of log_u where g is not that of `first`
    for (size_t j = 0; j < ds.size(); ++j) {
      if (!(r.p[j] > 0)) continue;
      sum += std::exp(log_u[j] - log_u[first]);
      if (g[j] != g[first]) most = std::max(most, log_u[j]);
    }
    for (size_t j = 0; j < ds.size(); ++j) {
      if (r.p[j] > 0 && g[j] != g[first]) {
        mean += std::exp(log_u[j] - most) * (g[j] - g[first]) / sum;
      }
    }
    for (size_t j = 0; j < ds.size(); ++j) {
      if (!(r.p[j] > 0)) continue;
      const double below = log_u[j] - log_u[first];
      if (g[j] != g[first]) {
        const double x = g[j] - g[first] - std::exp(most - log_u[first]) * mean;
        if (x != 0) ds[j] = std::exp(log_u[j]) * x;
      } else if (mean != 0) {
        ds[j] = -std::exp(below + most) * mean;
      }
      ds[j] += dstat * (alpha(r.h) - 1) * std::exp(below) / sum;
    }
    return ds;
  }

  // Adds the gradients of raw score (b, h, i, j), which received g.
  void score_backward(const Row& r, int64_t j, double g, double* dq, double* dk, double* dw) const {
    const double *a = q(r.b, r.h, r.i), *c = k(r.b, r.h, j);
    std::visit(overloaded{[&](Dot) {
                            for (int64_t d = 0; d < D; ++d) {
                              dq[d] += g * c[d];
                              dk[d] += g * a[d];
                            }
                          },
                          [&](Cosine) {
                            const double na = norm(a), nc = norm(c), cosine = r.raw[j];
                            if (na == 0 || nc == 0) return;
                            for (int64_t d = 0; d < D; ++d) {
                              dq[d] += g * (c[d] / nc - cosine * a[d] / na) / na;
                              dk[d] += g * (a[d] / na - cosine * c[d] / nc) / nc;
                            }
                          },
                          [&](L2 l2) {
                            for (int64_t d = 0; d < D; ++d) {
                              const double x = -2 * l2.gamma * (a[d] - c[d]) * g;
                              dq[d] += x;
                              dk[d] -= x;
                            }
                          },
                          [&](Additive) {
                            for (int64_t d = 0; d < D; ++d) {
                              const double t = std::tanh(a[d] + c[d]);
                              const double x = g * in_.score_w.item({d}) * (1 - t * t);
                              dq[d] += x;
                              dk[d] += x;
                              dw[d] += g * t;
                            }
                          }},
               spec_.score);
  }

  // What positional biases add to score (b, h, i, j): calls f(table, its gradient's member, index,
  // factor) for each table, of which factor · table[index] is added.
  template <class F>
  void for_each_table_entry(int64_t b, int64_t h, int64_t i, int64_t j, F&& f) const {
    const Align align = bias_align(spec_);
    const auto distance = [&] {
      const Pair pair = pair_at(b, i, j);
      return pair.key - position(align, b, pair);
    };
    for (const Bias& bias : spec_.biases) {
      std::visit(overloaded{[](TensorBias) {},
                            [&](Alibi) {
                              f(slopes_, &AttentionGradients::dslopes, h,
                                -static_cast<double>(std::abs(distance())));
                            },
                            [&](Relative1D r) {
                              const int64_t most = r.max_distance;
                              f(table1d_, &AttentionGradients::dtable1d,
                                h * (2 * most + 1) + most + std::clamp(distance(), -most, most), 1);
                            },
                            [&](Relative2D r) {  // the grid knows no segments
                              const int64_t p = position(align, b, {N, M, i, j});
                              require(p >= 0 && p < M, "past_lengths: query {} leaves the grid", i);
                              const int64_t y = j / r.width - p / r.width + r.height - 1;
                              const int64_t x = j % r.width - p % r.width + r.width - 1;
                              const int64_t rows = 2 * r.height - 1, columns = 2 * r.width - 1;
                              f(table2d_, &AttentionGradients::dtable2d,
                                (h * rows + y) * columns + x, 1);
                            }},
                 bias);
    }
  }

  double alpha(int64_t h) const {
    const auto* e = std::get_if<Entmax>(&spec_.normalizer);
    if (e == nullptr) return 2;
    return e->per_head.empty() ? e->alpha : e->per_head[static_cast<size_t>(h)];
  }

  // d loss / d α of the row. At fixed scores (α−1) dp_j = u_j (s_j − dτ) − p_j log p_j, where
  // Σ dp = 0 gives dτ = (Σ u s − Σ p log p) / Σ u; scores count from τ/(α−1), so that none is
  // large.
  double alpha_backward(const Row& r, const std::vector<double>& g, double dstat) const {
    const double a = alpha(r.h), base = r.stat / (a - 1);
    double sum = 0, moment = 0;
    for (size_t j = 0; j < r.p.size(); ++j) {
      if (r.p[j] == 0) continue;
      const double u = std::pow(r.p[j], 2 - a);
      sum += u;
      moment += u * (r.s[j] - base) - r.p[j] * std::log(r.p[j]);
    }
    if (sum == 0) return 0;
    const double dtau = moment / sum;
    double total = dstat * (base + dtau);
    for (size_t j = 0; j < r.p.size(); ++j) {
      if (r.p[j] == 0) continue;
      const double u = std::pow(r.p[j], 2 - a);
      total += g[j] * (u * (r.s[j] - base - dtau) - r.p[j] * std::log(r.p[j])) / (a - 1);
    }
    return total;
  }

  bool is_threshold() const {
    return std::holds_alternative<Sparsemax>(spec_.normalizer) ||
           std::holds_alternative<Entmax>(spec_.normalizer);
  }

 private:
  static const double* at(const Tensor& t, int64_t b, int64_t h, int64_t i) {
    return t.data<double>() + b * t.stride(0) + h * t.stride(1) + i * t.stride(2);
  }
  double norm(const double* x) const {
    double s = 0;
    for (int64_t d = 0; d < D; ++d) s += x[d] * x[d];
    return std::sqrt(s);
  }

  // Where a query and a key stand, among how many. Inside a segment all four count from its own
  // queries and keys.
  struct Pair {
    int64_t queries, keys, query, key;
  };
  Pair pair_at(int64_t b, int64_t i, int64_t j) const {
    if (!has_mask<Segments>(spec_)) return {N, M, i, j};
    const int32_t segment = in_.q_segments.at<int32_t>(b, i);
    return {queries_.size_of(b, segment), keys_.size_of(b, segment),
            queries_.place[static_cast<size_t>(b * N + i)],
            keys_.place[static_cast<size_t>(b * M + j)]};
  }
  int64_t position(Align align, int64_t b, const Pair& pair) const {
    switch (align) {
      case Align::bottom_right:
        return pair.query + pair.keys - pair.queries;
      case Align::top_left:
        return pair.query;
      case Align::past:
        return pair.query + in_.past_lengths.at<int64_t>(b);
    }
    return pair.query;
  }

  static void check_mask(const Tensor& given, const char* name, DType dtype, const Dims& shape) {
    require(
        given.defined() && given.dtype() == dtype && given.shape() == shape,
        "{}: {} given, a tensor of {} and shape {} is needed", name,
        given.defined() ? fmt::format("{} {}", name_of(given.dtype()), given.shape()) : "nothing",
        name_of(dtype), shape);
  }

  static Tensor table(const Tensor& given, const char* name, const Dims& shape) {
    require(given.defined() && given.shape() == shape,
            "{}: {} given, a tensor of shape {} is needed", name,
            given.defined() ? given.shape().str() : "nothing", shape);
    return given.contiguous();
  }

  bool allows(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (has_mask<Segments>(spec_) &&
        in_.k_segments.at<int32_t>(b, j) != in_.q_segments.at<int32_t>(b, i)) {
      return false;
    }
    const Pair pair = pair_at(b, i, j);
    bool seen = true;
    for (const Mask& mask : spec_.masks) {
      seen = seen &&
             std::visit(overloaded{[&](Causal c) { return pair.key <= position(c.align, b, pair); },
                                   [&](const Window& w) {
                                     const int64_t p = position(w.align, b, pair);
                                     return (!w.left || pair.key >= p - *w.left) &&
                                            (!w.right || pair.key <= p + *w.right);
                                   },
                                   [&](KeyLengths) { return j < in_.key_lengths.at<int64_t>(b); },
                                   [](Segments) { return true; },
                                   [&](Keep) { return keep_.at<bool>(b, h, i, j); }},
                        mask);
    }
    if (spec_.dropout && spec_.dropout->place == DropoutPlace::keys) {
      seen = seen &&
             dropout_bits(spec_.dropout->seed, b, h, i, j) >= dropout_threshold(spec_.dropout->p);
    }
    return seen;
  }

  double score(const double* a, const double* c) const {
    return std::visit(overloaded{[&](Dot) {
                                   double s = 0;
                                   for (int64_t d = 0; d < D; ++d) s += a[d] * c[d];
                                   return s;
                                 },
                                 [&](Cosine) {
                                   const double na = norm(a), nc = norm(c);
                                   if (na == 0 || nc == 0) return 0.0;
                                   double s = 0;
                                   for (int64_t d = 0; d < D; ++d) s += a[d] / na * (c[d] / nc);
                                   return s;
                                 },
                                 [&](L2 l2) {
                                   double s = 0;
                                   for (int64_t d = 0; d < D; ++d) {
                                     s += (a[d] - c[d]) * (a[d] - c[d]);
                                   }
                                   return -l2.gamma * s;
                                 },
                                 [&](Additive) {
                                   double s = 0;
                                   for (int64_t d = 0; d < D; ++d) {
                                     s += in_.score_w.item({d}) * std::tanh(a[d] + c[d]);
                                   }
                                   return s;
                                 }},
                      spec_.score);
  }

  void softmax(Row& r, const std::vector<char>& taking_part) const {
    double top = -kInf, sum = 0;
    for (size_t j = 0; j < r.s.size(); ++j) {
      if (taking_part[j]) top = std::max(top, r.s[j]);
    }
    for (size_t j = 0; j < r.s.size(); ++j) {
      if (taking_part[j]) sum += r.p[j] = std::exp(r.s[j] - top);
    }
    for (double& p : r.p) p /= sum;
    r.stat = top + std::log(sum);
  }

  // α ≤ 2: bisection on the gap t between the largest score and τ, in units of which
  // Σ [(α−1)(s − max) + t]₊^(1/(α−1)) grows from 0 at 0 to ≥ 1 at 1. Above, the threshold lies
  // too near to a score for that, and the smallest weight w is the unknown: v is its score, and
  // p_j = ((α−1)(s_j − v) + w^(α−1))^(1/(α−1)).
  void entmax(Row& r, double alpha) const {
    const double c = alpha - 1, power = 1 / c;
    double top = -kInf;
    std::vector<double> scores;
    for (size_t j = 0; j < r.s.size(); ++j) {
      if (!r.allowed[j]) continue;
      if (std::isnan(r.s[j])) {
        std::fill(r.p.begin(), r.p.end(), r.s[j]);
        r.stat = r.s[j];
        return;
      }
      top = std::max(top, r.s[j]);
      scores.push_back(r.s[j]);
    }
    const bool steep = alpha > 2;
    double v = top;
    // The distance of a score to τ, and its weight, if the unknown is x.
    const auto over = [&](double s, double x) {
      if (!steep) return c * (s - top) + x;
      return s >= v ? c * (s - v) + std::pow(x, c) : -1.0;
    };
    const auto weight = [&](double s, double x) {
      if (steep && s == v) return x;
      const double distance = over(s, x);
      return distance > 0 ? std::pow(distance, power) : 0;
    };
    const auto sum = [&](double x) {
      double all = 0;
      for (double s : scores) all += weight(s, x);
      return all;
    };
    if (steep) {
      // The lowest score for which those above it do not add to 1 yet.
      std::vector<double> order = scores;
      std::sort(order.begin(), order.end(), std::greater<>());
      size_t in = 0, out = order.size();
      while (out - in > 1) {
        const size_t middle = in + (out - in) / 2;
        v = order[middle];
        (sum(0) < 1 ? in : out) = middle;
      }
      v = order[in];
    }
    double low = 0, high = 1;
    for (double middle = 0.5; middle > low && middle < high; middle = low + (high - low) / 2) {
      (sum(middle) >= 1 ? high : low) = middle;
    }
    r.log_factor.assign(r.s.size(), 0);
    for (size_t j = 0; j < r.s.size(); ++j) {
      if (!r.allowed[j]) continue;
      r.p[j] = weight(r.s[j], high);
      const bool last = steep && r.s[j] == v;
      if (r.p[j] > 0) {
        r.log_factor[j] =
            last ? (1 - c) * std::log(high) : (power - 1) * std::log(over(r.s[j], high));
      }
    }
    r.stat = steep ? c * v - std::pow(high, c) : c * top - high;
  }

  void topk(Row& r, int64_t count) const {
    std::vector<size_t> order;
    for (size_t j = 0; j < r.s.size(); ++j) {
      if (r.allowed[j]) order.push_back(j);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return r.s[a] > r.s[b]; });
    if (static_cast<int64_t>(order.size()) > count) order.resize(static_cast<size_t>(count));
    std::vector<char> chosen(r.s.size(), 0);
    for (size_t j : order) chosen[j] = 1;
    softmax(r, chosen);
  }

  const AttentionSpec& spec_;
  const AttentionInputs& in_;
  Tensor bias_, keep_, slopes_, table1d_, table2d_;
  Places queries_, keys_;

 public:
  const int64_t B, H, Hk, N, M, D, Dv;

  template <class F>
  void for_each_row(F&& f) const {
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t i = 0; i < N; ++i) f(row(b, h, i));
      }
    }
  }
};

double* row_of(const Tensor& t, int64_t b, int64_t h, int64_t i) {
  return t.data<double>() + b * t.stride(0) + h * t.stride(1) + i * t.stride(2);
}
double value(const Tensor& t, int64_t b, int64_t h, int64_t i) {
  return t.defined() ? t.at<double>(b, h, i) : 0;
}

}  // namespace

void attention_f64_forward(const AttentionSpec& spec, const AttentionInputs& in,
                           AttentionOutputs& out) {
  const Attention a(spec, in);
  const Dims rows{a.B, a.H, a.N};
  out.row_stat = Tensor::zeros(rows, DType::f64);
  if (spec.statistics.has(Statistic::entropy)) out.entropy = Tensor::zeros(rows, DType::f64);
  if (spec.statistics.has(Statistic::support)) out.support = Tensor::zeros(rows, DType::f64);
  if (spec.statistics.has(Statistic::max_weight)) {
    out.max_weight = Tensor::zeros(rows, DType::f64);
    out.max_key = Tensor::full(rows, -1, DType::i64);
  }
  if (spec.statistics.has(Statistic::coverage)) {
    out.coverage = Tensor::zeros({a.B, a.H, a.M}, DType::f64);
  }
  out.y.fill(0);
  a.for_each_row([&](const Row& r) {
    out.row_stat.at<double>(r.b, r.h, r.i) = r.stat;
    double* y = row_of(out.y, r.b, r.h, r.i);
    double entropy = 0, best = 0, support = 0;
    int64_t key = -1;
    for (int64_t j = 0; j < a.M; ++j) {
      const double p = r.p[j];
      if (out.coverage.defined()) out.coverage.at<double>(r.b, r.h, j) += p;
      if (p > best) {
        best = p;
        key = j;
      }
      const bool softmax = std::holds_alternative<Softmax>(spec.normalizer);
      support += softmax ? r.allowed[j] : p > 0;
      if (p == 0) continue;
      entropy -= p * std::log(p);
      const double* v = a.v(r.b, r.h, j);
      for (int64_t d = 0; d < a.Dv; ++d) y[d] += p * a.dropout(r, j) * v[d];
    }
    if (out.entropy.defined()) out.entropy.at<double>(r.b, r.h, r.i) = entropy;
    if (out.support.defined()) out.support.at<double>(r.b, r.h, r.i) = support;
    if (out.max_weight.defined()) {
      out.max_weight.at<double>(r.b, r.h, r.i) = best;
      out.max_key.at<int64_t>(r.b, r.h, r.i) = key;
    }
  });
}

AttentionGradients attention_f64_backward(const AttentionSpec& spec, const AttentionInputs& in,
                                          const AttentionOutputs& saved,
                                          const AttentionUpstream& up) {
  const Attention a(spec, in);
  AttentionGradients g;
  g.dq = Tensor::zeros(in.q.shape(), DType::f64);
  g.dk = Tensor::zeros(in.k.shape(), DType::f64);
  g.dv = Tensor::zeros(in.v.shape(), DType::f64);
  const bool per_head = std::holds_alternative<std::vector<double>>(spec.scale);
  g.dscale = Tensor::zeros({per_head ? a.H : 1}, DType::f64);
  const auto* e = std::get_if<Entmax>(&spec.normalizer);
  if (e) g.dalpha = Tensor::zeros({e->per_head.empty() ? 1 : a.H}, DType::f64);
  const auto zeros_like = [](const Tensor& t) {
    return t.defined() ? Tensor::zeros(t.shape(), DType::f64) : Tensor();
  };
  g.dbias = zeros_like(in.bias);
  g.dslopes = zeros_like(in.slopes);
  g.dtable1d = zeros_like(in.table1d);
  g.dtable2d = zeros_like(in.table2d);
  g.dscore_w = zeros_like(in.score_w);
  Tensor dbias = g.dbias.defined() ? g.dbias.broadcast_to({a.B, a.H, a.N, a.M}) : Tensor();

  a.for_each_row([&](const Row& r) {
    if (r.empty) return;
    const int64_t kv = r.h / (a.H / a.Hk);
    const double* dy = up.dy.defined() ? row_of(up.dy, r.b, r.h, r.i) : nullptr;
    const double dentropy = value(up.dentropy, r.b, r.h, r.i);
    std::vector<double> dp(static_cast<size_t>(a.M), 0);
    for (int64_t j = 0; j < a.M; ++j) {
      if (r.p[j] == 0) continue;
      dp[j] = value(up.dcoverage, r.b, r.h, j) - dentropy * (std::log(r.p[j]) + 1);
      if (saved.max_key.defined() && saved.max_key.at<int64_t>(r.b, r.h, r.i) == j) {
        dp[j] += value(up.dmax_weight, r.b, r.h, r.i);
      }
      if (!dy) continue;
      const double keep = a.dropout(r, j);
      const double* v = a.v(r.b, r.h, j);
      double* dv = row_of(g.dv, r.b, kv, j);
      for (int64_t d = 0; d < a.Dv; ++d) {
        dp[j] += keep * dy[d] * v[d];
        dv[d] += keep * r.p[j] * dy[d];
      }
    }
    const double dstat = value(up.drow_stat, r.b, r.h, r.i);
    const std::vector<double> ds = a.backward(r, dp, dstat);
    if (e) g.dalpha.data<double>()[e->per_head.empty() ? 0 : r.h] += a.alpha_backward(r, dp, dstat);
    for (int64_t j = 0; j < a.M; ++j) {
      if (ds[j] == 0) continue;
      if (dbias.defined()) dbias.at<double>(r.b, r.h, r.i, j) += ds[j];
      a.for_each_table_entry(r.b, r.h, r.i, j,
                             [&](const Tensor&, auto grad, int64_t at, double factor) {
                               (g.*grad).template data<double>()[at] += factor * ds[j];
                             });
      const double inner = ds[j] * r.slope[j];
      g.dscale.data<double>()[per_head ? r.h : 0] += inner * r.raw[j];
      a.score_backward(r, j, inner * a.scale(r.h), row_of(g.dq, r.b, r.h, r.i),
                       row_of(g.dk, r.b, kv, j),
                       g.dscore_w.defined() ? g.dscore_w.data<double>() : nullptr);
    }
  });
  return g;
}

Tensor attention_f64_weights(const AttentionSpec& spec, const AttentionInputs& in,
                             std::span<const int64_t> rows, std::span<const int64_t> heads) {
  const Attention a(spec, in);
  const auto n = static_cast<int64_t>(rows.size()), h = static_cast<int64_t>(heads.size());
  Tensor w = Tensor::zeros({a.B, h, n, a.M}, DType::f64);
  for (int64_t b = 0; b < a.B; ++b) {
    for (int64_t x = 0; x < h; ++x) {
      require(heads[x] >= 0 && heads[x] < a.H, "weights: head {} of {}", heads[x], a.H);
      for (int64_t i = 0; i < n; ++i) {
        require(rows[i] >= 0 && rows[i] < a.N, "weights: row {} of {}", rows[i], a.N);
        const Row r = a.row(b, heads[x], rows[i]);
        for (int64_t j = 0; j < a.M; ++j) w.at<double>(b, x, i, j) = r.p[j];
      }
    }
  }
  return w;
}

}  // namespace foci::ops
