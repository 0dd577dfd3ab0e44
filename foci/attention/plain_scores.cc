// From q and k to final scores, and the way back: score, scale, softcap, biases, masks.
#include <algorithm>
#include <cmath>
#include <limits>

#include "foci/attention/plain.h"
#include "foci/core/rng.h"

namespace foci::plain {
namespace {

// score(q, k) of one pair by its definition; for rows with NaN or infinity.
float pair_score(const Problem& p, const float* q, const float* k) {
  const int64_t D = p.shape.D;
  return std::visit(overloaded{[&](const L2& l2) {
                                 float sum = 0;
                                 for (int64_t d = 0; d < D; ++d)
                                   sum += (q[d] - k[d]) * (q[d] - k[d]);
                                 return -static_cast<float>(l2.gamma) * sum;
                               },
                               [&](const Additive&) {
                                 const float* w = p.in.score_w.data<float>();
                                 float sum = 0;
                                 for (int64_t d = 0; d < D; ++d)
                                   sum += w[d] * std::tanh(q[d] + k[d]);
                                 return sum;
                               },
                               [&](const auto&) {  // dot; cosine of normalised rows
                                 float sum = 0;
                                 for (int64_t d = 0; d < D; ++d) sum += q[d] * k[d];
                                 return sum;
                               }},
                    p.spec.score);
}

// Of the differences: 2q·k − ‖q‖² − ‖k‖² loses what is left where both are far from 0.
void l2_scores(const Site& site, const Operand& q, const Operand& k, float gamma, float* raw,
               int64_t ld) {
  const int64_t padded = k.rows.ld, width = site.width();
  std::vector<const float*> keys(width);
  for (int64_t j = 0; j < width; ++j) keys[j] = k.rows.true_row(site.packed(j));
  for (size_t r = 0; r < site.entries.size(); ++r) {
    const float* x = q.rows.true_row(static_cast<int64_t>(r));
    for (int64_t j = 0; j < width; ++j) {
      const float* y = keys[j];
      float lanes[kLanes] = {};
      for (int64_t d = 0; d < padded; d += kLanes) {
        for (int64_t l = 0; l < kLanes; ++l) {
          const float difference = x[d + l] - y[d + l];
          lanes[l] += difference * difference;
        }
      }
      for (int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
      }
      raw[r * ld + j] = -gamma * lanes[0];
    }
  }
}

void additive_scores(const Site& site, const Operand& q, const Operand& k, float* raw, int64_t ld) {
  const Problem& p = *site.problem;
  const int64_t padded = k.rows.ld;
  std::vector<float> w(padded, 0.0f);
  std::copy_n(p.in.score_w.data<float>(), p.shape.D, w.begin());
  const float* eq = q.exponential.data<float>();
  const float* ek = k.exponential.data<float>();
  for (size_t r = 0; r < site.entries.size(); ++r) {
    for (int64_t j = 0; j < site.width(); ++j) {
      const int64_t at = site.packed(j);
      if (takes_tanh(q.size[r], k.size[at])) {
        raw[r * ld + j] = pair_score(p, q.rows.true_row(r), k.rows.true_row(at));
        continue;
      }
      const float* x = eq + r * padded;
      const float* y = ek + at * padded;
      float lanes[kLanes] = {};
      for (int64_t d = 0; d < padded; d += kLanes) {
        for (int64_t l = 0; l < kLanes; ++l) {
          lanes[l] += w[d + l] * (1 - 2 / (1 + x[d + l] * y[d + l]));
        }
      }
      for (int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
      }
      raw[r * ld + j] = lanes[0];
    }
  }
}

// Calls f with the element type of a floating tensor and a pointer to its row of keys, so that key
// column j of the site stands at row[site.key(j) · stride].
template <class F>
void with_key_row(const Tensor& t, const Site& site, int64_t r, F&& f) {
  const Dims& s = t.strides();
  const int64_t at = site.piece->batch * s[0] + site.head * s[1] + site.query(r) * s[2];
  switch (t.dtype()) {
    case DType::f32:
      return f(t.data<float>() + at, s[3]);
    case DType::f16:
      return f(t.data<f16>() + at, s[3]);
    case DType::bf16:
      return f(t.data<bf16>() + at, s[3]);
    default:
      throw Error("bias: bind leaves float32, float16 or bfloat16");
  }
}

// Distance k − q of a positional bias for column j of row r, and where Relative1D/2D read.
struct Distances {
  const Site& site;
  int64_t r;
  int64_t q;  // position of the query
  const int64_t* k;

  Distances(const Site& s, int64_t row) : site(s), r(row) {
    const Problem& p = *s.problem;
    q = p.positions.q[s.piece->batch * p.shape.N + s.query(row)];
    k = p.positions.k.data() + s.piece->batch * p.shape.M;
  }
  int64_t operator()(int64_t j) const { return k[site.key(j)] - q; }
};

struct Grid {
  const Relative2D& bias;
  int64_t y, x;  // of the query

  Grid(const Relative2D& b, const Site& site, int64_t r) : bias(b) {
    const Problem& p = *site.problem;
    const int64_t i = site.query(r);
    const bool past = bias_align(p.spec) == Align::past;
    const int64_t at =
        past ? i + p.in.past_lengths.at<int64_t>(site.piece->batch) : i + p.shape.M - p.shape.N;
    y = at / b.width;
    x = at % b.width;
  }
  // Index into one head's table for key j of the batch.
  int64_t operator()(int64_t j) const {
    return (j / bias.width - y + bias.height - 1) * (2 * bias.width - 1) + j % bias.width - x +
           bias.width - 1;
  }
};

int64_t clipped(int64_t distance, const Relative1D& r) {
  return std::clamp(distance, -r.max_distance, r.max_distance) + r.max_distance;
}

}  // namespace

void raw_scores(const Site& site, const Operand& q, const Operand& k, float* raw, int64_t ld) {
  const Problem& p = *site.problem;
  const int64_t count = static_cast<int64_t>(site.entries.size()), width = site.width();
  if (std::holds_alternative<Additive>(p.spec.score)) return additive_scores(site, q, k, raw, ld);
  if (const auto* l2 = std::get_if<L2>(&p.spec.score)) {
    return l2_scores(site, q, k, static_cast<float>(l2->gamma), raw, ld);
  }
  const int64_t first = site.packed(0);
  gemm_nt(padded_rows(count), width, p.shape.D, q.rows.view(0), k.rows.view(first), raw, ld);
  for (int64_t r : q.rows.odd) {
    if (r >= count) continue;
    for (int64_t j = 0; j < width; ++j) {
      raw[r * ld + j] = pair_score(p, q.rows.true_row(r), k.rows.true_row(first + j));
    }
  }
  for (int64_t row : k.rows.odd) {
    if (row < first || row >= first + width) continue;
    for (int64_t r = 0; r < count; ++r) {
      raw[r * ld + row - first] = pair_score(p, q.rows.true_row(r), k.rows.true_row(row));
    }
  }
}

Sight look(const Site& site, int64_t r, uint8_t* seen) {
  const Problem& p = *site.problem;
  const int64_t entry = site.entries[r];
  Sight sight;
  if (site.layout->begin[entry] >= site.layout->end[entry]) return sight;
  sight.begin = site.layout->begin[entry] - site.lo;
  sight.end = site.layout->end[entry] - site.lo;
  sight.count = sight.end - sight.begin;
  const auto mask = [&](auto&& allowed) {
    if (!sight.seen) {
      std::fill_n(seen, site.width(), uint8_t{0});
      std::fill(seen + sight.begin, seen + sight.end, uint8_t{1});
      sight.seen = seen;
    }
    for (int64_t j = sight.begin; j < sight.end; ++j) seen[j] &= allowed(j) ? 1 : 0;
  };
  if (p.mask.keep.defined()) {
    const Dims& s = p.mask.keep.strides();
    // As bytes: a host's may be any number but 0 where true is meant.
    const uint8_t* row = reinterpret_cast<const uint8_t*>(p.mask.keep.raw()) +
                         site.piece->batch * s[0] + site.head * s[1] + site.query(r) * s[2];
    mask([&](int64_t j) { return row[site.key(j) * s[3]] != 0; });
  }
  if (p.bias.defined()) {
    with_key_row(p.bias, site, r, [&](const auto* row, int64_t stride) {
      const auto value = [&](int64_t j) { return static_cast<float>(row[site.key(j) * stride]); };
      bool any = false;
      for (int64_t j = sight.begin; j < sight.end && !any; ++j) {
        any = value(j) == -std::numeric_limits<float>::infinity();
      }
      if (any) {
        mask([&](int64_t j) { return value(j) != -std::numeric_limits<float>::infinity(); });
      }
    });
  }
  if (p.spec.dropout && p.spec.dropout->place == DropoutPlace::keys) {
    const Dropout& d = *p.spec.dropout;
    const uint32_t threshold = dropout_threshold(d.p);
    DropoutBits bits(site, r);
    mask([&](int64_t j) { return bits(site.key(j)) >= threshold; });
  }
  if (sight.seen) {
    sight.count = std::count(seen + sight.begin, seen + sight.end, uint8_t{1});
    if (sight.count == 0) sight = Sight{};
  }
  return sight;
}

void finish_scores(const Site& site, int64_t r, const Sight& sight, float* row, float* capped) {
  const Problem& p = *site.problem;
  const int64_t begin = sight.begin, end = sight.end;
  const float scale = p.scale[site.head];
  for (int64_t j = begin; j < end; ++j) row[j] *= scale;
  if (p.spec.softcap) {
    const float cap = static_cast<float>(*p.spec.softcap);
    for (int64_t j = begin; j < end; ++j) row[j] = cap * std::tanh(row[j] / cap);
  }
  if (capped) std::copy(row + begin, row + end, capped + begin);
  for (const Bias& bias : p.spec.biases) {
    std::visit(overloaded{[&](const TensorBias&) {
                            with_key_row(p.bias, site, r, [&](const auto* from, int64_t stride) {
                              if (site.piece->neighbours && stride == 1 && begin < end) {
                                const auto* near = from + site.key(begin) - begin;
                                for (int64_t j = begin; j < end; ++j)
                                  row[j] += static_cast<float>(near[j]);
                              } else {
                                for (int64_t j = begin; j < end; ++j) {
                                  row[j] += static_cast<float>(from[site.key(j) * stride]);
                                }
                              }
                            });
                          },
                          [&](const Alibi&) {
                            const float slope = p.in.slopes.data<float>()[site.head];
                            const Distances distance(site, r);
                            for (int64_t j = begin; j < end; ++j) {
                              row[j] -= slope * static_cast<float>(std::abs(distance(j)));
                            }
                          },
                          [&](const Relative1D& rel) {
                            const float* table =
                                p.in.table1d.data<float>() + site.head * p.in.table1d.stride(0);
                            const Distances distance(site, r);
                            for (int64_t j = begin; j < end; ++j)
                              row[j] += table[clipped(distance(j), rel)];
                          },
                          [&](const Relative2D& rel) {
                            const float* table =
                                p.in.table2d.data<float>() + site.head * p.in.table2d.stride(0);
                            const Grid grid(rel, site, r);
                            for (int64_t j = begin; j < end; ++j)
                              row[j] += table[grid(site.key(j))];
                          }},
               bias);
  }
}

void finish_scores_backward(const Site& site, int64_t r, const Sight& part, const float* raw,
                            const float* capped, const AttentionWanted& wanted, float* ds,
                            HeadGradients& grads, const Tensor* dbias) {
  const Problem& p = *site.problem;
  for (const Bias& bias : p.spec.biases) {
    std::visit(
        overloaded{[&](const TensorBias&) {
                     if (!dbias) return;
                     const Dims& s = dbias->strides();
                     double* to = dbias->data<double>() + site.piece->batch * s[0] +
                                  site.head * s[1] + site.query(r) * s[2];
                     part.for_each([&](int64_t j) { to[site.key(j) * s[3]] += ds[j]; });
                   },
                   [&](const Alibi&) {
                     if (!wanted.slopes) return;
                     const Distances distance(site, r);
                     part.for_each([&](int64_t j) {
                       grads.slope -=
                           static_cast<double>(ds[j]) * static_cast<double>(std::abs(distance(j)));
                     });
                   },
                   [&](const Relative1D& rel) {
                     if (!wanted.tables) return;
                     const Distances distance(site, r);
                     part.for_each(
                         [&](int64_t j) { grads.table1d[clipped(distance(j), rel)] += ds[j]; });
                   },
                   [&](const Relative2D& rel) {
                     if (!wanted.tables) return;
                     const Grid grid(rel, site, r);
                     part.for_each([&](int64_t j) { grads.table2d[grid(site.key(j))] += ds[j]; });
                   }},
        bias);
  }
  if (p.spec.softcap) {
    const float cap = static_cast<float>(*p.spec.softcap);
    part.for_each([&](int64_t j) {
      const float t = capped[j] / cap;
      ds[j] *= 1 - t * t;
    });
  }
  if (wanted.scale) {
    part.for_each([&](int64_t j) { grads.scale += static_cast<double>(ds[j]) * raw[j]; });
  }
  const float scale = p.scale[site.head];
  for (int64_t j = part.begin; j < part.end; ++j) ds[j] *= scale;
}

}  // namespace foci::plain
