// The measure that the tolerances stand on: attention written down plainly in float32, in the order
// in which one would read the formula, against the oracle in double, over a few hundred random
// cases; and fused against both. Fused may err twice as much.
//
// Errors are largest differences of a tensor, over its largest element. Single cases are compared
// by nobody (one error may happen to be 0): medians and root mean squares over all cases are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "attention/fairness.h"
#include "attention/generate.h"
#include "attention/tolerance.h"
#include "foci/reference/attention.h"

namespace foci::testing {
namespace {

struct Naive {
  Tensor y, dq, dk, dv;
};

float score(const AttentionSpec& spec, const float* q, const float* k, const float* w, int64_t D,
            float scale) {
  float dot = 0, qq = 0, kk = 0, square = 0, additive = 0;
  for (int64_t d = 0; d < D; ++d) {
    dot += q[d] * k[d];
    qq += q[d] * q[d];
    kk += k[d] * k[d];
    square += (q[d] - k[d]) * (q[d] - k[d]);
    if (w != nullptr) additive += w[d] * std::tanh(q[d] + k[d]);
  }
  if (std::holds_alternative<Cosine>(spec.score))
    return scale * dot / (std::sqrt(qq) * std::sqrt(kk));
  if (const auto* l2 = std::get_if<L2>(&spec.score)) return -scale * float(l2->gamma) * square;
  return scale * (w != nullptr ? additive : dot);
}

// What the score's gradient ds gives q and k.
void score_backward(const AttentionSpec& spec, const float* q, const float* k, const float* w,
                    int64_t D, float scale, float ds, float* dq, float* dk) {
  float dot = 0, qq = 0, kk = 0;
  for (int64_t d = 0; d < D; ++d) dot += q[d] * k[d], qq += q[d] * q[d], kk += k[d] * k[d];
  const float norms = std::sqrt(qq) * std::sqrt(kk), cosine = dot / norms;
  for (int64_t d = 0; d < D; ++d) {
    float by_q = scale * k[d], by_k = scale * q[d];
    if (std::holds_alternative<Cosine>(spec.score)) {
      by_q = scale * (k[d] / norms - cosine * q[d] / qq);
      by_k = scale * (q[d] / norms - cosine * k[d] / kk);
    } else if (const auto* l2 = std::get_if<L2>(&spec.score)) {
      by_q = -scale * 2 * float(l2->gamma) * (q[d] - k[d]);
      by_k = -by_q;
    } else if (w != nullptr) {
      const float t = std::tanh(q[d] + k[d]);
      by_q = by_k = scale * w[d] * (1 - t * t);
    }
    dq[d] += ds * by_q;
    dk[d] += ds * by_k;
  }
}

double alpha_of(const Normalizer& normalizer) {
  if (std::holds_alternative<Sparsemax>(normalizer)) return 2;
  if (const auto* e = std::get_if<Entmax>(&normalizer)) return e->alpha;
  return 1;
}

std::vector<float> weights_of(const Normalizer& normalizer, const std::vector<float>& s) {
  std::vector<float> p(s.size(), 0.0F);
  const float most = *std::max_element(s.begin(), s.end());
  const auto alpha = static_cast<float>(alpha_of(normalizer));
  float sum = 0;
  if (alpha > 1) {
    // Bisection for τ, as far as floats go.
    float low = (alpha - 1) * most - 1, high = (alpha - 1) * most;
    const auto weight = [&](float x, float tau) {
      const float over = (alpha - 1) * x - tau;
      return over > 0 ? std::pow(over, 1 / (alpha - 1)) : 0.0F;
    };
    for (int step = 0; step < 32; ++step) {
      const float tau = low + (high - low) / 2;
      sum = 0;
      for (float x : s) sum += weight(x, tau);
      (sum >= 1 ? low : high) = tau;
    }
    for (size_t j = 0; j < s.size(); ++j) p[j] = weight(s[j], low);
    return p;
  }
  float least = -std::numeric_limits<float>::infinity();
  if (const auto* t = std::get_if<TopK>(&normalizer); t && t->k < int64_t(s.size())) {
    std::vector<float> sorted = s;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    least = sorted[t->k - 1];
  }
  for (size_t j = 0; j < s.size(); ++j) {
    if (s[j] >= least) sum += p[j] = std::exp(s[j] - most);
  }
  for (float& x : p) x /= sum;
  return p;
}

Naive naive_attention(const AttentionSpec& spec, const AttentionInputs& in, const Tensor& dy) {
  const AttentionShape s = shape_of(in);
  Naive n{Tensor::zeros({s.B, s.H, s.N, s.Dv}), Tensor::zeros(in.q.shape()),
          Tensor::zeros(in.k.shape()), Tensor::zeros(in.v.shape())};
  const float scale = std::holds_alternative<Dot>(spec.score) ? 1 / std::sqrt(float(s.D)) : 1;
  const float* w = in.score_w.defined() ? in.score_w.data<float>() : nullptr;
  const auto alpha = static_cast<float>(alpha_of(spec.normalizer));
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t h = 0; h < s.H; ++h) {
      const int64_t g = b * s.Hk + h / (s.H / s.Hk);
      const float *k = in.k.data<float>() + g * s.M * s.D, *v = in.v.data<float>() + g * s.M * s.Dv;
      float *dk = n.dk.data<float>() + g * s.M * s.D, *dv = n.dv.data<float>() + g * s.M * s.Dv;
      for (int64_t i = 0; i < s.N; ++i) {
        const int64_t row = (b * s.H + h) * s.N + i;
        const float *q = in.q.data<float>() + row * s.D, *up = dy.data<float>() + row * s.Dv;
        std::vector<float> scores(s.M), dp(s.M, 0.0F);
        for (int64_t j = 0; j < s.M; ++j) scores[j] = score(spec, q, k + j * s.D, w, s.D, scale);
        const std::vector<float> p = weights_of(spec.normalizer, scores);
        float sum = 0, mean = 0;
        std::vector<float> slope(s.M, 0.0F);  // p^(2−α)
        for (int64_t j = 0; j < s.M; ++j) {
          if (p[j] == 0) continue;
          for (int64_t d = 0; d < s.Dv; ++d) {
            n.y.data<float>()[row * s.Dv + d] += p[j] * v[j * s.Dv + d];
            dp[j] += up[d] * v[j * s.Dv + d];
            dv[j * s.Dv + d] += p[j] * up[d];
          }
          slope[j] = alpha > 1 ? std::pow(p[j], 2 - alpha) : p[j];
          sum += slope[j];
          mean += slope[j] * dp[j];
        }
        mean /= sum;
        for (int64_t j = 0; j < s.M; ++j) {
          if (p[j] == 0) continue;
          score_backward(spec, q, k + j * s.D, w, s.D, scale, slope[j] * (dp[j] - mean),
                         n.dq.data<float>() + row * s.D, dk + j * s.D);
        }
      }
    }
  }
  return n;
}

struct Errors {
  std::vector<double> naive, fused;
};

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
  return x[x.size() / 2];
}
double root_mean_square(const std::vector<double>& x) {
  double sum = 0;
  for (double e : x) sum += e * e;
  return std::sqrt(sum / static_cast<double>(x.size()));
}
double largest(const std::vector<double>& x) {
  return *std::max_element(x.begin(), x.end());
}

TEST(NaiveFormula, ErrsHalfAsMuchAsFusedOrMore) {
  for (const Score& score : {Score(Dot{}), Score(Cosine{}), Score(L2{0.1}), Score(Additive{})}) {
    for (const Normalizer& normalizer : every_normalizer()) {
      std::map<std::string, Errors> errors;
      for (uint64_t n = 0; n < 30; ++n) {
        Rng rng(n, 90);
        SweepCase c;
        c.spec.score = score;
        c.spec.normalizer = normalizer;
        const int64_t N = 1 + rng.below(12), M = 2 + rng.below(100), D = 2 + rng.below(60);
        c.in.q = random_normal(rng, {1, 2, N, D});
        c.in.k = random_normal(rng, {1, 1, M, D});
        c.in.v = random_normal(rng, {1, 1, M, 12});
        if (std::holds_alternative<Additive>(score)) c.in.score_w = random_normal(rng, {D}, 0.5);
        c.up.dy = random_normal(rng, {1, 2, N, 12});
        const reference::Forward f = reference::attention_forward(c.spec, c.in);
        const Fairness fairness = make_fair(c, f);
        const AttentionGradients e = reference::attention_backward(c.spec, c.in, c.up);
        const Naive naive = naive_attention(c.spec, c.in, c.up.dy);
        for (const SimdTarget target : supported_targets()) {
          const Bound bound =
              Plan::make(c.spec, shape_of(c.in), {Implementation::fused, target}).bind(c.in);
          AttentionOutputs out = bound.forward();
          const AttentionGradients g = bound.backward(out, c.up);
          AttentionOutputs plain{.y = naive.y.clone()}, fast{.y = out.y};
          excuse(fairness, f.out, plain);
          excuse(fairness, f.out, fast);
          const auto add = [&](const char* name, const Tensor& x, const Tensor& y,
                               const Tensor& want) {
            Errors& here = errors[std::string(name_of(target)) + " " + name];
            here.naive.push_back(closeness(x, want, 1e-3).relative());
            here.fused.push_back(closeness(y, want, 1e-3).relative());
          };
          add("y", plain.y, fast.y, f.out.y);
          add("dq", naive.dq, g.dq, e.dq);
          add("dk", naive.dk, g.dk, e.dk);
          add("dv", naive.dv, g.dv, e.dv);
        }
      }
      for (const auto& [name, x] : errors) {
        const std::string where =
            fmt::format("{} score {} {}", name, score.index(), text_of(normalizer));
        EXPECT_LE(median(x.fused), 2 * median(x.naive)) << where;
        EXPECT_LE(root_mean_square(x.fused), 2 * root_mean_square(x.naive)) << where;
        // One case of many, where another may be the plain formula's worst. Additive scores, from
        // products of exponentials, have more in single cases: up to four times the plain one.
        const double most = std::holds_alternative<Additive>(score) ? 5 : 3;
        EXPECT_LE(largest(x.fused), most * largest(x.naive)) << where;
        // What the tolerance grants is within reach of what was measured.
        EXPECT_GE(kTolerance, largest(x.fused)) << where;
      }
    }
  }
}

}  // namespace
}  // namespace foci::testing
