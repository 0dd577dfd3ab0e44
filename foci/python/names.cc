// The library's names of arguments and Python's.
#include "foci/python/names.h"

#include <array>
#include <string_view>
#include <utility>

namespace foci::python {

std::string in_python_names(const std::string& message) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 19> kNames = {{
      {"normalizer.alpha", "alpha"},
      {"normalizer.k", "top_k"},
      {"score.gamma", "gamma"},
      {"dropout.p", "dropout"},
      {"dropout.seed", "dropout_seed"},
      {"spec.dropout", "dropout"},
      {"relative1d.max_distance", "relative1d"},
      {"relative2d.grid", "relative2d"},
      {"shape", "q, k, v"},
      {"shape.B", "q"},
      {"shape.H", "q"},
      {"shape.N", "q"},
      {"shape.M", "k"},
      {"shape.Hk", "kv_heads"},
      {"shape.D", "head_size"},
      {"shape.Dv", "value_size"},
      {"shape.sequences", "sequences"},
      {"rows.sequences", "sequences"},
      {"rows.counts", "counts"},
  }};
  const std::string_view all = message;
  if (all.starts_with("upstream.")) return message.substr(std::string_view("upstream.").size());
  for (const char* statistic : {"entropy", "max_key"}) {
    if (!all.starts_with(std::string("saved.") + statistic + ": no tensor")) continue;
    const std::string_view asked =
        std::string_view(statistic) == "max_key" ? "max_weight" : statistic;
    return fmt::format("d{}: given, but the call did not ask for the statistic {}", asked, asked);
  }
  const std::string_view name = all.substr(0, all.find_first_of(":["));
  for (const auto& [own, python] : kNames) {
    if (name == own) return std::string(python) + message.substr(name.size());
  }
  return message;
}

}  // namespace foci::python
