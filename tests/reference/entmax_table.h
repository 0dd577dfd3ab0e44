// Right values of entmax and its gradient for rows of all kinds and α from 1.01 to 1e6, read from
// entmax_table.txt, which entmax_table.py makes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace foci::testing {

struct EntmaxKey {
  int64_t j;
  double p;   // weight
  double ds;  // gradient of Σ entmax_upstream(j)·p_j for score j; may be ±inf
  double dtau;
};

struct EntmaxCase {
  std::string name;  // "ROW alpha ALPHA"
  double alpha;
  std::vector<float> scores;
  double tau, entropy, largest;
  int64_t support;              // keys with weight
  std::vector<EntmaxKey> keys;  // those, ascending; of more than 48 the first and last 24
};

const std::vector<EntmaxCase>& entmax_table();
inline float entmax_upstream(int64_t j) {
  return static_cast<float>(7 * j % 11 - 5) / 8;
}

}  // namespace foci::testing
