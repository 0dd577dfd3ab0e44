// Damerau's distance (neighbours may be swapped, each letter once) and what is near enough.
#include "foci/cli/suggest.h"

#include <algorithm>

namespace foci::cli {

int edit_distance(std::string_view a, std::string_view b) {
  // Rows of the table of Damerau's distance: the last two and the one being filled.
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int change = a[i - 1] == b[j - 1] ? 0 : 1;
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  int best_distance = 1 + static_cast<int>(std::max<size_t>(2, word.size() / 3));
  for (const std::string& candidate : candidates) {
    const bool prefix = word.size() >= 3 && candidate.starts_with(word);
    const int distance = prefix ? 0 : edit_distance(word, candidate);
    // A word of which nothing is left is another word.
    if (distance < best_distance && distance < static_cast<int>(candidate.size())) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string best = nearest(word, candidates);
  return best.empty() ? "" : "; did you mean " + best + "?";
}

}  // namespace foci::cli
