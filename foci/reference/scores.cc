// Each score with its derivative under it, and where the tables of positional biases are read.
#include "foci/reference/scores.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace foci::reference {
namespace {

double dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t d = 0; d < n; ++d) sum += x[d] * y[d];
  return sum;
}

double raw_score(const Problem& p, const double* q, const double* k) {
  return std::visit(overloaded{[&](const Dot&) { return dot(q, k, p.D); },
                               [&](const Cosine&) {
                                 const double lengths =
                                     std::sqrt(dot(q, q, p.D)) * std::sqrt(dot(k, k, p.D));
                                 return lengths == 0 ? 0 : dot(q, k, p.D) / lengths;
                               },
                               [&](const L2& l2) {
                                 double square = 0;
                                 for (int64_t d = 0; d < p.D; ++d)
                                   square += (q[d] - k[d]) * (q[d] - k[d]);
                                 return -l2.gamma * square;
                               },
                               [&](const Additive&) {
                                 const double* w = p.score_w.data<double>();
                                 double sum = 0;
                                 for (int64_t d = 0; d < p.D; ++d)
                                   sum += w[d] * std::tanh(q[d] + k[d]);
                                 return sum;
                               }},
                    p.spec.score);
}

// Adds r · ∂raw/∂q, ∂raw/∂k and ∂raw/∂w.
void raw_score_backward(const Problem& p, const double* q, const double* k, double r, double* dq,
                        double* dk, double* dw) {
  std::visit(overloaded{[&](const Dot&) {
                          for (int64_t d = 0; d < p.D; ++d) {
                            dq[d] += r * k[d];
                            dk[d] += r * q[d];
                          }
                        },
                        [&](const Cosine&) {
                          // c = q·k / (‖q‖‖k‖), so ∂c/∂q = k / (‖q‖‖k‖) − c q / ‖q‖².
                          const double qq = dot(q, q, p.D), kk = dot(k, k, p.D);
                          if (qq == 0 || kk == 0) return;
                          const double lengths = std::sqrt(qq) * std::sqrt(kk);
                          const double c = dot(q, k, p.D) / lengths;
                          for (int64_t d = 0; d < p.D; ++d) {
                            dq[d] += r * (k[d] / lengths - c * q[d] / qq);
                            dk[d] += r * (q[d] / lengths - c * k[d] / kk);
                          }
                        },
                        [&](const L2& l2) {
                          for (int64_t d = 0; d < p.D; ++d) {
                            dq[d] += r * -2 * l2.gamma * (q[d] - k[d]);
                            dk[d] += r * 2 * l2.gamma * (q[d] - k[d]);
                          }
                        },
                        [&](const Additive&) {
                          const double* w = p.score_w.data<double>();
                          for (int64_t d = 0; d < p.D; ++d) {
                            const double t = std::tanh(q[d] + k[d]);
                            dq[d] += r * w[d] * (1 - t * t);
                            dk[d] += r * w[d] * (1 - t * t);
                            dw[d] += r * t;
                          }
                        }},
             p.spec.score);
}

// Where the tables of the positional biases are read for one pair.
int64_t index1d(const Masks& masks, const Relative1D& r, int64_t b, int64_t h, int64_t i,
                int64_t j) {
  const int64_t clipped = std::clamp(masks.distance(b, i, j), -r.max_distance, r.max_distance);
  return h * (2 * r.max_distance + 1) + clipped + r.max_distance;
}

int64_t index2d(const Masks& masks, const Relative2D& r, int64_t b, int64_t h, int64_t i,
                int64_t j) {
  const int64_t at = masks.grid_position(b, i);
  const int64_t dy = j / r.width - at / r.width;
  const int64_t dx = j % r.width - at % r.width;
  return (h * (2 * r.height - 1) + dy + r.height - 1) * (2 * r.width - 1) + dx + r.width - 1;
}

double biases(const Problem& p, const Masks& masks, int64_t b, int64_t h, int64_t i, int64_t j) {
  double sum = 0;
  for (const Bias& bias : p.spec.biases) {
    sum += std::visit(
        overloaded{[&](const TensorBias&) { return element<double>(p.bias, b, h, i, j); },
                   [&](const Alibi&) {
                     const double far = static_cast<double>(std::abs(masks.distance(b, i, j)));
                     return -p.slopes.data<double>()[h] * far;
                   },
                   [&](const Relative1D& r) {
                     return p.table1d.data<double>()[index1d(masks, r, b, h, i, j)];
                   },
                   [&](const Relative2D& r) {
                     return p.table2d.data<double>()[index2d(masks, r, b, h, i, j)];
                   }},
        bias);
  }
  return sum;
}

}  // namespace

PairScore pair_score(const Problem& p, const Masks& masks, int64_t b, int64_t h, int64_t i,
                     int64_t j) {
  PairScore s;
  s.raw = raw_score(p, p.q_row(b, h, i), p.k_row(b, h, j));
  s.scaled = p.scale[h] * s.raw;
  s.capped = p.spec.softcap ? *p.spec.softcap * std::tanh(s.scaled / *p.spec.softcap) : s.scaled;
  s.biased = s.capped + biases(p, masks, b, h, i, j);
  return s;
}

void pair_score_backward(const Problem& p, const Masks& masks, int64_t b, int64_t h, int64_t i,
                         int64_t j, double d, Gradients& g) {
  for (const Bias& bias : p.spec.biases) {
    std::visit(
        overloaded{[&](const TensorBias&) { element<double>(g.dbias_view, b, h, i, j) += d; },
                   [&](const Alibi&) {
                     const int64_t far = std::abs(masks.distance(b, i, j));
                     g.dslopes.data<double>()[h] -= d * static_cast<double>(far);
                   },
                   [&](const Relative1D& r) {
                     g.dtable1d.data<double>()[index1d(masks, r, b, h, i, j)] += d;
                   },
                   [&](const Relative2D& r) {
                     g.dtable2d.data<double>()[index2d(masks, r, b, h, i, j)] += d;
                   }},
        bias);
  }
  const double* q = p.q_row(b, h, i);
  const double* k = p.k_row(b, h, j);
  const double raw = raw_score(p, q, k);
  double dscaled = d;
  if (p.spec.softcap) {
    const double t = std::tanh(p.scale[h] * raw / *p.spec.softcap);
    dscaled *= 1 - t * t;
  }
  g.dscale.data<double>()[g.dscale.numel() == 1 ? 0 : h] += dscaled * raw;
  raw_score_backward(p, q, k, dscaled * p.scale[h],
                     g.dq.data<double>() + ((b * p.H + h) * p.N + i) * p.D,
                     g.dk.data<double>() + p.kv_row(b, h, j) * p.D,
                     g.dscore_w.defined() ? g.dscore_w.data<double>() : nullptr);
}

}  // namespace foci::reference
