// The oracle's entmax against numbers of mpmath.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "foci/reference/normalizers.h"
#include "reference/entmax_table.h"

namespace foci {
namespace {

using testing::EntmaxCase;

// Off by how much of `want`, where numbers of size `scale` were added up; ±inf must be met.
double off(double got, double want, double scale) {
  if (std::isinf(want)) return got == want ? 0 : INFINITY;
  return std::abs(got - want) / scale;
}

TEST(ReferenceEntmax, IsTheTable) {
  ASSERT_EQ(testing::entmax_table().size() % 18, 0u);
  for (const EntmaxCase& c : testing::entmax_table()) {
    SCOPED_TRACE(c.name);
    const std::vector<double> s(c.scores.begin(), c.scores.end());
    const Normalizer normalizer = Entmax{c.alpha};
    const reference::RowWeights row = reference::normalize(normalizer, s);
    double sum = 0, entropy = 0;
    int64_t support = 0;
    for (size_t j = 0; j < s.size(); ++j) {
      sum += row.p[j];
      support += row.takes_part[j];
      if (row.p[j] > 0) entropy -= row.p[j] * std::log(row.p[j]);
    }
    const double precision = 1e-15 * std::max(1.0, 1 / (c.alpha - 1)) * std::sqrt(s.size());
    EXPECT_NEAR(sum, 1, precision);
    EXPECT_EQ(support, c.support);
    EXPECT_NEAR(entropy, c.entropy, 100 * precision);
    EXPECT_NEAR(*std::max_element(row.p.begin(), row.p.end()), c.largest, precision);
    EXPECT_NEAR(row.statistic, c.tau, 1e-14 * std::max(1.0, std::abs(c.tau)));
    std::vector<double> up(s.size());
    for (size_t j = 0; j < up.size(); ++j) up[j] = testing::entmax_upstream(j);
    const std::vector<double> zero(s.size(), 0.0);
    const std::vector<double> ds = reference::normalize_backward(normalizer, row, up, 0);
    const std::vector<double> dtau = reference::normalize_backward(normalizer, row, zero, 1);
    double scale = 1e-300;
    for (const testing::EntmaxKey& key : c.keys) {
      if (std::isfinite(key.ds)) scale = std::max(scale, std::abs(key.ds));
    }
    for (const testing::EntmaxKey& key : c.keys) {
      EXPECT_NEAR(row.p[key.j], key.p, precision) << key.j;
      EXPECT_LT(off(ds[key.j], key.ds, std::max(std::abs(key.ds), 1e-3 * scale)), 1e-8)
          << key.j << ": " << ds[key.j] << ", right " << key.ds;
      EXPECT_NEAR(dtau[key.j], key.dtau, 1e-9 * (c.alpha - 1)) << key.j;
    }
    if (c.support != static_cast<int64_t>(c.keys.size())) continue;
    for (size_t j = 0; j < s.size(); ++j) {
      const bool listed = std::any_of(c.keys.begin(), c.keys.end(), [&](const auto& key) {
        return key.j == static_cast<int64_t>(j);
      });
      EXPECT_EQ(row.p[j] > 0, listed) << j;
    }
  }
}

}  // namespace
}  // namespace foci
