// Which attention modules an observer watches, and for what.
#include "foci/nn/observe.h"

namespace foci::nn {

bool matches(std::string_view pattern, std::string_view text) {
  // Greedy with one point of return: the last star, and how much text it has eaten.
  size_t p = 0, t = 0, star = std::string_view::npos, eaten = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      eaten = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++eaten;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

Statistics Observer::statistics_of(std::string_view path) const {
  Statistics all;
  for (const AttentionRequest& r : requests_) {
    if (!matches(r.path, path)) continue;
    for (Statistic s :
         {Statistic::entropy, Statistic::max_weight, Statistic::support, Statistic::coverage}) {
      if (r.statistics.has(s)) all.add(s);
    }
  }
  return all;
}

const AttentionRequest* Observer::rows_of(std::string_view path) const {
  for (const AttentionRequest& r : requests_) {
    if (!r.rows.empty() && matches(r.path, path)) return &r;
  }
  return nullptr;
}

bool Observer::watches(std::string_view path) const {
  for (const AttentionRequest& r : requests_) {
    if (matches(r.path, path)) return true;
  }
  return false;
}

}  // namespace foci::nn
