// One row from scores to weights and back, with its statistics.
//
// Sums run over partial sums tied to the column's place in its piece (sites start at multiples of
// kLanes), and masked columns add exact zeros, so a row's bits do not depend on what surrounds it.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "foci/attention/plain.h"

namespace foci::plain {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// [begin, end) widened to whole groups of lanes.
struct Span {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
Span whole_lanes(const Sight& s) {
  return {s.begin / kLanes * kLanes, round_up(s.end, kLanes)};
}

// Sets everything that is not seen: `value` inside the whole lanes, 0 in the rest of the row.
void clear_unseen(const Sight& sight, int64_t width, float value, float* row) {
  const Span span = whole_lanes(sight);
  std::fill(row, row + span.begin, 0.0f);
  std::fill(row + span.begin, row + sight.begin, value);
  if (sight.seen) {
    for (int64_t j = sight.begin; j < sight.end; ++j) row[j] = sight.seen[j] ? row[j] : value;
  }
  std::fill(row + sight.end, row + span.end, value);
  std::fill(row + span.end, row + width, 0.0f);
}

void set_part(const Sight& sight, int64_t width, uint8_t* part) {
  if (!part) return;
  std::fill_n(part, width, uint8_t{0});
  sight.for_each([&](int64_t j) { part[j] = 1; });
}

int64_t first_equal(const Span& span, const float* row, float value) {
  for (int64_t j = span.begin; j < span.end; ++j) {
    if (row[j] == value) return j;
  }
  return -1;
}

// A NaN that is seen, or a largest score that is infinite: no weight means anything.
RowStatistics undefined_row(const Sight& sight, int64_t width, const Statistics& want, float* row,
                            uint8_t* part) {
  set_part(sight, width, part);
  std::fill_n(row, width, 0.0f);
  RowStatistics s{.row_stat = kNan};
  sight.for_each([&](int64_t j) {
    row[j] = kNan;
    if (s.max_column < 0) s.max_column = j;
  });
  if (want.has(Statistic::entropy)) s.entropy = kNan;
  s.max_weight = kNan;
  s.support = static_cast<float>(sight.count);
  return s;
}

// Softmax of a row whose unseen (or not chosen) columns are −inf.
RowStatistics softmax(const kernels::RowKernels& kernels, const Sight& sight, int64_t width,
                      const Statistics& want, float max, float* row, uint8_t* part) {
  const Span span = whole_lanes(sight);
  RowStatistics s;
  if (want.has(Statistic::max_weight)) s.max_column = first_equal(span, row, max);
  float sum, products = 0;
  if (want.has(Statistic::entropy)) {
    sum = kernels.exponentials_and_products(span.size(), max, row + span.begin, &products);
    // log l − (1/l) Σ e·(s − m): no large numbers cancel.
    s.entropy = static_cast<float>(std::log(double(sum)) - double(products) / sum);
  } else {
    sum = kernels.exponentials(span.size(), max, row + span.begin);
  }
  if (std::isnan(sum)) return undefined_row(sight, width, want, row, part);
  const float inverse = 1 / sum;
  kernels.scale(span.size(), inverse, row + span.begin);
  s.row_stat = static_cast<float>(double(max) + std::log(double(sum)));
  s.max_weight = inverse;
  s.support = static_cast<float>(sight.count);
  return s;
}

// Leaves the k best of a row as they are, the lowest column first among equals; the rest become
// −inf. count > k, and no score is NaN.
void choose(const Sight& sight, int64_t k, float* row, uint8_t* chosen, RowScratch& scratch) {
  std::vector<float>& values = scratch.values;
  values.clear();
  sight.for_each([&](int64_t j) { values.push_back(row[j]); });
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<>());
  const float least = values[k - 1];
  int64_t ties =
      k - std::count_if(values.begin(), values.end(), [&](float x) { return x > least; });
  sight.for_each([&](int64_t j) {
    bool take = row[j] > least;
    if (row[j] == least && ties > 0) {
      take = true;
      --ties;
    }
    if (chosen) chosen[j] = take;
    if (!take) row[j] = -kInf;
  });
}

}  // namespace

RowStatistics normalize(const kernels::RowKernels& kernels, const Normalizer& normalizer,
                        const Sight& sight, int64_t width, const Statistics& want, float* row,
                        uint8_t* part, RowScratch& scratch) {
  const bool thresholds =
      std::holds_alternative<Sparsemax>(normalizer) || std::holds_alternative<Entmax>(normalizer);
  if (sight.count == 0) {
    std::fill_n(row, width, 0.0f);
    if (part) std::fill_n(part, width, uint8_t{0});
    return {.row_stat = thresholds ? kInf : -kInf};
  }
  clear_unseen(sight, width, -kInf, row);
  const Span span = whole_lanes(sight);
  const float max = kernels.largest(span.size(), row + span.begin);
  bool undefined = std::isinf(max);
  if (!undefined && !std::holds_alternative<Softmax>(normalizer)) {
    sight.for_each([&](int64_t j) { undefined = undefined || std::isnan(row[j]); });
  }
  if (undefined) return undefined_row(sight, width, want, row, part);
  const auto sparse = [&](double alpha) {
    RowStatistics s;
    if (want.has(Statistic::max_weight)) s.max_column = first_equal(span, row, max);
    if (part) std::fill_n(part, width, uint8_t{0});
    const SparseRow r =
        sparse_map(alpha, sight, max, want.has(Statistic::entropy), row, part, scratch);
    clear_unseen(sight, width, 0.0f, row);
    s.row_stat = static_cast<float>(r.tau);
    s.max = max;
    s.entropy = static_cast<float>(r.entropy);
    s.max_weight = static_cast<float>(r.largest);
    s.support = static_cast<float>(r.support);
    return s;
  };
  return std::visit(overloaded{[&](const Softmax&) {
                                 set_part(sight, width, part);
                                 return softmax(kernels, sight, width, want, max, row, part);
                               },
                               [&](const Sparsemax&) { return sparse(2); },
                               [&](const Entmax& e) { return sparse(e.alpha); },
                               [&](const TopK& t) {
                                 set_part(sight, width, part);
                                 if (sight.count > t.k) choose(sight, t.k, row, part, scratch);
                                 RowStatistics s =
                                     softmax(kernels, sight, width, want, max, row, part);
                                 s.support = static_cast<float>(std::min(t.k, sight.count));
                                 return s;
                               }},
                    normalizer);
}

void normalize_backward(const kernels::RowKernels& kernels, const Normalizer& normalizer,
                        const Sight& part, float drow_stat, float dentropy, const float* p,
                        float* g, const double* log_factors) {
  if (part.count == 0) return;
  // All maps have ∂p_j/∂s_k = f_j (δ_jk − f_k/Σf), with f = p for softmax and top-k (Σp = 1) and
  // f = p^(2−α) on the support for the sparse maps; their statistics have ∂/∂s_k = f_k/Σf, the
  // threshold τ (α−1) times that.
  const double alpha = std::visit(
      overloaded{[](const Softmax&) { return 1.0; }, [](const TopK&) { return 1.0; },
                 [](const Sparsemax&) { return 2.0; }, [](const Entmax& e) { return e.alpha; }},
      normalizer);
  if (dentropy != 0) {
    // ∂(−p log p)/∂p = −log p − 1, and the 1 cancels in the mean.
    part.for_each([&](int64_t j) {
      if (p[j] != 0) g[j] -= dentropy * std::log(p[j]);
    });
  }
  if (alpha == 1) {
    const Span span = whole_lanes(part);
    const float* weights = p + span.begin;
    const float shift = drow_stat - kernels.dot(span.size(), weights, g + span.begin);
    if (std::isfinite(shift)) {
      kernels.weighted_shift(span.size(), shift, weights, g + span.begin);
    } else {
      part.for_each([&](int64_t j) { g[j] = p[j] * (g[j] + shift); });
    }
    return;
  }
  sparse_backward(alpha, part, drow_stat, p, log_factors, g);
}

}  // namespace foci::plain
