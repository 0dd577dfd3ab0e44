// config.json of a vision transformer, read strictly and written.
#include "foci/models/vit/config.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "foci/core/error.h"
#include "foci/core/json.h"
#include "foci/io/file.h"
#include "foci/spec/json_value.h"

namespace foci {
namespace {

using nlohmann::json;

// Pictures and models beyond these are surely mistakes, and would only exhaust memory.
constexpr int64_t kMaxSize = int64_t{1} << 20;
constexpr int64_t kMaxClasses = int64_t{1} << 20;

// Reads keys of one object, naming file and key where something is wrong.
class Reader {
 public:
  Reader(const json& object, const std::string& name) : object_(object), name_(name) {
    require<FormatError>(object.is_object(), "{}: a JSON object is needed", name);
  }
  const json& at(const char* key) const {
    const auto it = object_.find(key);
    require<FormatError>(it != object_.end(), "{}: {} is missing", name_, key);
    return *it;
  }
  int64_t integer(const char* key) const {
    const json& v = at(key);
    require<FormatError>(v.is_number_integer(), "{}: {} holds {}, a whole number is needed", name_,
                         key, shown_json(v));
    return whole(v);
  }
  // One beyond 64 bits is as much too large as the largest.
  static int64_t whole(const json& v) {
    const bool huge = v.is_number_unsigned() && v.get<uint64_t>() > uint64_t(INT64_MAX);
    return huge ? INT64_MAX : v.get<int64_t>();
  }
  double number(const char* key) const {
    const json& v = at(key);
    require<FormatError>(v.is_number(), "{}: {} holds {}, a number is needed", name_, key,
                         shown_json(v));
    return v.get<double>();
  }
  std::string text(const char* key) const {
    const json& v = at(key);
    require<FormatError>(v.is_string(), "{}: {} holds {}, text is needed", name_, key,
                         shown_json(v));
    return v.get<std::string>();
  }
  // The same, from a list with one entry a channel, or one for all.
  double first_number(const char* key) const {
    const json& v = at(key);
    if (v.is_array()) {
      require<FormatError>(!v.empty() && v[0].is_number(), "{}: {} holds no numbers", name_, key);
      return v[0].get<double>();
    }
    return number(key);
  }

 private:
  const json& object_;
  const std::string& name_;
};

Pooling pooling_of(const std::string& text, const std::string& name) {
  for (Pooling p : {Pooling::mean, Pooling::class_token, Pooling::attention}) {
    if (text == name_of(p)) return p;
  }
  throw FormatError(fmt::format("{}: pooling holds {}, mean, class_token or attention is right",
                                name, in_quotes(text)));
}

// The model has no tensors for what such a spec reads.
void check_attention(const AttentionSpec& spec, int64_t heads) {
  const auto refuse = [](const char* what) {
    throw ArgumentError(
        fmt::format("vit attention: {} reads a tensor that this model does not have", what));
  };
  const auto check_align = [&](Align align) {
    if (align == Align::past) refuse("a mask aligned to \"past\"");
  };
  for (const Mask& mask : spec.masks) {
    std::visit(overloaded{[&](const Causal& m) { check_align(m.align); },
                          [&](const Window& m) { check_align(m.align); },
                          [&](const KeyLengths&) { refuse("the mask key_lengths"); },
                          [](const Segments&) {}, [&](const Keep&) { refuse("the mask keep"); }},
               mask);
  }
  for (const Bias& bias : spec.biases) {
    std::visit(overloaded{[&](const TensorBias&) { refuse("the bias tensor"); },
                          [&](const Alibi&) { refuse("the bias alibi"); },
                          [&](const Relative1D&) { refuse("the bias relative1d"); },
                          [&](const Relative2D&) { refuse("the bias relative2d"); }},
               bias);
  }
  if (std::holds_alternative<Additive>(spec.score)) refuse("the score additive");
  if (const auto* scale = std::get_if<std::vector<double>>(&spec.scale)) {
    require(static_cast<int64_t>(scale->size()) == heads,
            "vit attention: scale holds {} numbers for {} heads", scale->size(), heads);
  }
}

}  // namespace

std::string_view name_of(Pooling pooling) {
  switch (pooling) {
    case Pooling::mean:
      return "mean";
    case Pooling::class_token:
      return "class_token";
    case Pooling::attention:
      return "attention";
  }
  return "?";
}

void validate(const VitConfig& c) {
  const std::pair<const char*, int64_t> sizes[] = {{"patch", c.patch},
                                                   {"channels", c.channels},
                                                   {"max_side", c.max_side},
                                                   {"width", c.width},
                                                   {"heads", c.heads},
                                                   {"feed_forward", c.feed_forward},
                                                   {"position_rows", c.position_rows},
                                                   {"position_cols", c.position_cols}};
  for (const auto& [name, n] : sizes) {
    require(n >= 1 && n <= kMaxSize, "vit {}: {} given, 1 to {} is right", name, n, kMaxSize);
  }
  require(c.patch <= 1024 && c.channels <= 1024, "vit: a patch of {} pixels and {} channels",
          c.patch, c.channels);
  require(c.layers >= 0 && c.layers <= 4096, "vit layers: {} given", c.layers);
  require(c.width % c.heads == 0, "vit heads: {} do not divide the width {}", c.heads, c.width);
  require(!c.classes.empty(), "vit classes: at least one is needed");
  require(c.dropout >= 0 && c.dropout < 1, "vit dropout: {} given, it lies in [0, 1)", c.dropout);
  require(c.eps > 0 && std::isfinite(c.eps), "vit eps: {} given, a finite number above 0 is right",
          c.eps);
  require(c.deviation > 0 && std::isfinite(c.mean) && std::isfinite(c.deviation),
          "vit: pictures of mean {} and deviation {}", c.mean, c.deviation);
  validate(c.attention);
  check_attention(c.attention, c.heads);
}

std::string vit_config_to_json(const VitConfig& c) {
  json labels = json::object();
  for (size_t i = 0; i < c.classes.size(); ++i) labels[std::to_string(i)] = c.classes[i];
  const json j = {{"model_type", "foci-vit"},
                  {"patch_size", c.patch},
                  {"num_channels", c.channels},
                  {"max_side", c.max_side},
                  {"image_mean", c.mean},
                  {"image_std", c.deviation},
                  {"hidden_size", c.width},
                  {"num_hidden_layers", c.layers},
                  {"num_attention_heads", c.heads},
                  {"intermediate_size", c.feed_forward},
                  {"hidden_act", "gelu"},
                  {"hidden_dropout_prob", c.dropout},
                  {"layer_norm_eps", c.eps},
                  {"pooling", std::string(name_of(c.pooling))},
                  {"position_grid", {c.position_rows, c.position_cols}},
                  {"attention", spec_to_json(c.attention)},
                  {"id2label", labels}};
  // Labels are a person's folder names: whatever is not UTF-8 in them is replaced, not thrown at.
  std::string text = j.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
  require(text.size() <= kMaxConfigBytes,
          "vit classes: {} of them make a config.json of {} bytes, which is more than the {} that "
          "are read again",
          c.classes.size(), text.size(), kMaxConfigBytes);
  return text;
}

VitConfig vit_config_from_json(std::string_view text, const std::string& name) {
  // Labels are all that could make a config long.
  const json j = parse_json(
      text, name, {.bytes = kMaxConfigBytes, .values = static_cast<size_t>(kMaxClasses) + 10'000});
  const Reader r(j, name);
  const std::string type = r.text("model_type");
  require<FormatError>(type == "foci-vit", "{}: model_type is {}, \"foci-vit\" is what this reads",
                       name, in_quotes(type));
  VitConfig c;
  c.patch = r.integer("patch_size");
  c.channels = r.integer("num_channels");
  c.max_side = r.integer("max_side");
  c.mean = r.first_number("image_mean");
  c.deviation = r.first_number("image_std");
  c.width = r.integer("hidden_size");
  c.layers = r.integer("num_hidden_layers");
  c.heads = r.integer("num_attention_heads");
  c.feed_forward = r.integer("intermediate_size");
  const std::string activation = r.text("hidden_act");
  require<FormatError>(activation == "gelu", "{}: hidden_act is {}, \"gelu\" is what this reads",
                       name, in_quotes(activation));
  c.dropout = r.number("hidden_dropout_prob");
  c.eps = r.number("layer_norm_eps");
  c.pooling = pooling_of(r.text("pooling"), name);
  const json& grid = r.at("position_grid");
  require<FormatError>(grid.is_array() && grid.size() == 2 && grid[0].is_number_integer() &&
                           grid[1].is_number_integer(),
                       "{}: position_grid holds {}, [rows, columns] is right", name,
                       shown_json(grid));
  c.position_rows = Reader::whole(grid[0]);
  c.position_cols = Reader::whole(grid[1]);
  const json& labels = r.at("id2label");
  require<FormatError>(labels.is_object() && static_cast<int64_t>(labels.size()) <= kMaxClasses,
                       "{}: id2label is no object of labels", name);
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto it = labels.find(std::to_string(i));
    require<FormatError>(it != labels.end() && it->is_string(),
                         "{}: id2label has {} entries, but no text at \"{}\"", name, labels.size(),
                         i);
    c.classes.push_back(it->get<std::string>());
  }
  try {
    c.attention = spec_from_json(r.at("attention"));
    validate(c);
  } catch (const ArgumentError& e) {
    throw FormatError(fmt::format("{}: {}", name, e.what()));
  }
  return c;
}

}  // namespace foci
