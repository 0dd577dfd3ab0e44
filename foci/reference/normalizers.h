// Normalisers: from the scores of the keys that one query sees to their weights, and back.
#pragma once

#include <vector>

#include "foci/spec/spec.h"

namespace foci::reference {

struct RowWeights {
  std::vector<double> p;  // one a score
  // Which keys reach the output and the gradients: all (softmax), the chosen (top-k), those with
  // p > 0 (sparse maps).
  std::vector<bool> takes_part;
  double statistic = 0;  // log-sum-exp of the scores that take part, or τ
  // Sparse maps: ln p^(2−α) of keys that take part, from the score's distance to τ, since neither
  // p^(2−α) nor p itself need have the digits. Empty: not known, from p.
  std::vector<double> log_factor;
};

// `s` has at least one score. A NaN among them, or a largest score that is infinite, makes the
// whole row NaN.
RowWeights normalize(const Normalizer& normalizer, const std::vector<double>& s);

// The gradient for the scores, from those for p and for the statistic. Entries of dp at keys that
// do not take part are not read.
std::vector<double> normalize_backward(const Normalizer& normalizer, const RowWeights& row,
                                       const std::vector<double>& dp, double dstatistic);

// The gradient for entmax's α at fixed scores, from the same. 0 where no weight can move (one key).
double entmax_alpha_gradient(double alpha, const std::vector<double>& s, const RowWeights& row,
                             const std::vector<double>& dp, double dstatistic);

}  // namespace foci::reference
