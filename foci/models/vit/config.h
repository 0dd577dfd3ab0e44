// What a vision transformer is made of, and its config.json.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "foci/core/api.h"
#include "foci/spec/spec.h"

namespace foci {

// How the tokens of a picture become one vector.
enum class Pooling : uint8_t {
  mean,         // of all patches
  class_token,  // a learned token that stands before the patches in every layer
  attention     // a learned query that attends to the patches after the last layer
};
FOCI_API std::string_view name_of(Pooling pooling);  // "mean", "class_token", "attention"

struct VitConfig {
  // Pictures: patches of patch × patch pixels with `channels` values each; the model sees
  // (pixel/255 − mean) / deviation. Longer sides than max_side are shrunk by whoever prepares them.
  int64_t patch = 4;
  int64_t channels = 1;
  int64_t max_side = 32;
  double mean = 0.5;
  double deviation = 0.25;
  std::vector<std::string> classes;  // names, by label

  int64_t width = 64;
  int64_t layers = 4;
  int64_t heads = 4;
  int64_t feed_forward = 256;
  Pooling pooling = Pooling::class_token;
  // The learned position table's own grid; pictures of other grids read it bilinearly.
  int64_t position_rows = 8;
  int64_t position_cols = 8;
  double dropout = 0;
  double eps = 1e-5;
  AttentionSpec attention;  // segments are added by the model

  int64_t patch_values() const { return patch * patch * channels; }
  bool operator==(const VitConfig&) const = default;
};

// Throws ArgumentError naming the field that makes no sense.
FOCI_API void validate(const VitConfig& config);

// A longer config.json is not read: a million labels fit.
inline constexpr uint64_t kMaxConfigBytes = uint64_t{32} << 20;

// config.json, with the names that Hugging Face uses where it has one (hidden_size, patch_size,
// id2label …). Reading throws FormatError with `name`, the key, what stands there and what is
// right.
FOCI_API std::string vit_config_to_json(const VitConfig& config);
FOCI_API VitConfig vit_config_from_json(std::string_view text, const std::string& name);

}  // namespace foci
