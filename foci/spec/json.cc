// Specs as JSON: reads and writes the schema, one pair of functions a type.
//
//   score       {"kind":"dot"} · {"kind":"cosine"} · {"kind":"l2","gamma":g} · {"kind":"additive"}
//   scale       "auto" · a number · an array with one number a query head
//   softcap     null · a number > 0
//   normalizer  {"kind":"softmax"} · {"kind":"sparsemax"} · {"kind":"entmax","alpha":a} ·
//               {"kind":"topk","k":k}; a is a number, or an array with one a query head
//   masks       array of {"kind":"causal","align":A} · {"kind":"key_lengths"} · {"kind":"keep"} ·
//               {"kind":"window","left":n|null,"right":n|null,"align":A} · {"kind":"segments"}
//               where A is "bottom-right" (the default), "top-left" or "past"
//   biases      array of {"kind":"tensor"} · {"kind":"alibi"} ·
//               {"kind":"relative1d","max_distance":n} · {"kind":"relative2d","grid":[h,w]}
//   dropout     null · {"p":p,"seed":n,"place":"weights"|"keys"}; seed 0 and "weights" by default
//   statistics  array of "entropy" · "max_weight" · "support" · "coverage"
//
// Every key is optional at the top; inside an option, what has no default above is needed.
#include "foci/spec/json_value.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "foci/core/error.h"
#include "foci/core/json.h"

namespace foci {
namespace {

using Json = nlohmann::json;

// ---- reading --------------------------------------------------------------------------------

std::string joined(const std::vector<std::string_view>& names) {
  std::string text;
  for (std::string_view n : names) text += (text.empty() ? "" : ", ") + std::string(n);
  return text;
}

// One value of the document and where it stands ("masks[1].left").
struct Value {
  const Json& json;
  std::string path;

  [[noreturn]] void refuse(std::string_view wanted) const {
    throw ArgumentError(fmt::format("{}: {} given, {} is needed", path, shown_json(json), wanted));
  }

  double number() const {
    if (!json.is_number()) refuse("a number");
    return json.get<double>();
  }
  int64_t integer(std::string_view wanted = "an integer") const {
    if (!json.is_number_integer()) refuse(wanted);
    if (json.is_number_unsigned() &&
        json.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()}) {
      refuse("an integer below 2^63");
    }
    return json.get<int64_t>();
  }
  uint64_t unsigned_integer() const {
    if (!json.is_number_unsigned() && !(json.is_number_integer() && json.get<int64_t>() >= 0)) {
      refuse("an integer in [0, 2^64)");
    }
    return json.get<uint64_t>();
  }
  std::optional<int64_t> integer_or_null() const {
    if (json.is_null()) return std::nullopt;
    return integer("an integer or null");
  }
  // The index of a string among `names`.
  size_t one_of(const std::vector<std::string_view>& names) const {
    if (json.is_string()) {
      const auto it = std::find(names.begin(), names.end(), json.get_ref<const std::string&>());
      if (it != names.end()) return static_cast<size_t>(it - names.begin());
    }
    refuse("one of " + joined(names));
  }
  size_t size() const { return json.size(); }
  Value operator[](size_t i) const { return {json.at(i), fmt::format("{}[{}]", path, i)}; }
  void want_array() const {
    if (!json.is_array()) refuse("an array");
  }
};

// An object of the document.
class Object {
 public:
  explicit Object(Value value) : value_(std::move(value)) {
    if (!value_.json.is_object()) value_.refuse("an object");
  }

  // Refuses every key that is not among `known`.
  void only(const std::vector<std::string_view>& known) const {
    for (const auto& item : value_.json.items()) {
      require(std::find(known.begin(), known.end(), item.key()) != known.end(),
              "{}: unknown key, the keys here are {}", path_of(shown_key(item.key())),
              joined(known));
    }
  }
  bool has(const char* key) const { return value_.json.contains(key); }
  Value at(const char* key) const {
    require(has(key), "{}: missing", path_of(key));
    return {value_.json.at(key), path_of(key)};
  }
  size_t kind(const std::vector<std::string_view>& names) const { return at("kind").one_of(names); }

 private:
  std::string path_of(const std::string& key) const {
    return value_.path.empty() ? key : value_.path + "." + key;
  }
  Value value_;
};

Score read_score(const Value& value) {
  const Object o(value);
  switch (o.kind({"dot", "cosine", "l2", "additive"})) {
    case 0:
      return o.only({"kind"}), Dot{};
    case 1:
      return o.only({"kind"}), Cosine{};
    case 2:
      return o.only({"kind", "gamma"}), L2{o.at("gamma").number()};
    default:
      return o.only({"kind"}), Additive{};
  }
}

Scale read_scale(const Value& value) {
  if (value.json.is_number()) return value.number();
  if (value.json.is_array()) {
    std::vector<double> per_head;
    for (size_t i = 0; i < value.size(); ++i) per_head.push_back(value[i].number());
    return per_head;
  }
  if (value.json != "auto") value.refuse("\"auto\", a number or an array of numbers");
  return AutoScale{};
}

std::optional<double> read_softcap(const Value& value) {
  if (value.json.is_null()) return std::nullopt;
  if (!value.json.is_number()) value.refuse("a number or null");
  return value.number();
}

Entmax read_entmax(const Value& alpha) {
  if (alpha.json.is_number()) return {alpha.number()};
  if (!alpha.json.is_array() || alpha.size() == 0) alpha.refuse("a number or an array of numbers");
  Entmax e;
  for (size_t h = 0; h < alpha.size(); ++h) e.per_head.push_back(alpha[h].number());
  return e;
}

Normalizer read_normalizer(const Value& value) {
  const Object o(value);
  switch (o.kind({"softmax", "sparsemax", "entmax", "topk"})) {
    case 0:
      return o.only({"kind"}), Softmax{};
    case 1:
      return o.only({"kind"}), Sparsemax{};
    case 2:
      return o.only({"kind", "alpha"}), read_entmax(o.at("alpha"));
    default:
      return o.only({"kind", "k"}), TopK{o.at("k").integer()};
  }
}

Align read_align(const Object& o) {
  if (!o.has("align")) return Align::bottom_right;
  switch (o.at("align").one_of({"bottom-right", "top-left", "past"})) {
    case 0:
      return Align::bottom_right;
    case 1:
      return Align::top_left;
    default:
      return Align::past;
  }
}

Mask read_mask(const Value& value) {
  const Object o(value);
  switch (o.kind({"causal", "window", "key_lengths", "segments", "keep"})) {
    case 0:
      return o.only({"kind", "align"}), Causal{read_align(o)};
    case 1: {
      o.only({"kind", "left", "right", "align"});
      Window w;
      if (o.has("left")) w.left = o.at("left").integer_or_null();
      if (o.has("right")) w.right = o.at("right").integer_or_null();
      w.align = read_align(o);
      return w;
    }
    case 2:
      return o.only({"kind"}), KeyLengths{};
    case 3:
      return o.only({"kind"}), Segments{};
    default:
      return o.only({"kind"}), Keep{};
  }
}

Bias read_bias(const Value& value) {
  const Object o(value);
  switch (o.kind({"tensor", "alibi", "relative1d", "relative2d"})) {
    case 0:
      return o.only({"kind"}), TensorBias{};
    case 1:
      return o.only({"kind"}), Alibi{};
    case 2:
      return o.only({"kind", "max_distance"}), Relative1D{o.at("max_distance").integer()};
    default: {
      o.only({"kind", "grid"});
      const Value grid = o.at("grid");
      if (!grid.json.is_array() || grid.size() != 2) grid.refuse("[height, width]");
      return Relative2D{grid[0].integer(), grid[1].integer()};
    }
  }
}

std::optional<Dropout> read_dropout(const Value& value) {
  if (value.json.is_null()) return std::nullopt;
  const Object o(value);
  o.only({"p", "seed", "place"});
  Dropout d;
  d.p = o.at("p").number();
  if (o.has("seed")) d.seed = o.at("seed").unsigned_integer();
  if (o.has("place") && o.at("place").one_of({"weights", "keys"}) == 1) {
    d.place = DropoutPlace::keys;
  }
  return d;
}

constexpr Statistic kStatistics[] = {Statistic::entropy, Statistic::max_weight, Statistic::support,
                                     Statistic::coverage};
const std::vector<std::string_view> kStatisticNames = {"entropy", "max_weight", "support",
                                                       "coverage"};

Statistics read_statistics(const Value& value) {
  value.want_array();
  Statistics s;
  for (size_t i = 0; i < value.size(); ++i) s.add(kStatistics[value[i].one_of(kStatisticNames)]);
  return s;
}

// ---- writing --------------------------------------------------------------------------------

const char* name_of(Align a) {
  switch (a) {
    case Align::bottom_right:
      return "bottom-right";
    case Align::top_left:
      return "top-left";
    case Align::past:
      return "past";
  }
  return "";
}

Json kind_only(const char* kind) {
  return {{"kind", kind}};
}

Json written(const Score& score) {
  return std::visit(overloaded{[](const Dot&) { return kind_only("dot"); },
                               [](const Cosine&) { return kind_only("cosine"); },
                               [](const L2& l2) {
                                 return Json{{"kind", "l2"}, {"gamma", l2.gamma}};
                               },
                               [](const Additive&) { return kind_only("additive"); }},
                    score);
}

Json written(const Scale& scale) {
  return std::visit(
      overloaded{[](const AutoScale&) { return Json("auto"); }, [](double s) { return Json(s); },
                 [](const std::vector<double>& per_head) { return Json(per_head); }},
      scale);
}

Json written(const Normalizer& normalizer) {
  return std::visit(
      overloaded{[](const Softmax&) { return kind_only("softmax"); },
                 [](const Sparsemax&) { return kind_only("sparsemax"); },
                 [](const Entmax& e) {
                   return Json{{"kind", "entmax"},
                               {"alpha", e.per_head.empty() ? Json(e.alpha) : Json(e.per_head)}};
                 },
                 [](const TopK& t) {
                   return Json{{"kind", "topk"}, {"k", t.k}};
                 }},
      normalizer);
}

Json written(const Mask& mask) {
  const auto side = [](const std::optional<int64_t>& n) { return n ? Json(*n) : Json(nullptr); };
  return std::visit(overloaded{[](const Causal& c) {
                                 return Json{{"kind", "causal"}, {"align", name_of(c.align)}};
                               },
                               [&](const Window& w) {
                                 return Json{{"kind", "window"},
                                             {"left", side(w.left)},
                                             {"right", side(w.right)},
                                             {"align", name_of(w.align)}};
                               },
                               [](const KeyLengths&) { return kind_only("key_lengths"); },
                               [](const Segments&) { return kind_only("segments"); },
                               [](const Keep&) { return kind_only("keep"); }},
                    mask);
}

Json written(const Bias& bias) {
  return std::visit(
      overloaded{[](const TensorBias&) { return kind_only("tensor"); },
                 [](const Alibi&) { return kind_only("alibi"); },
                 [](const Relative1D& r) {
                   return Json{{"kind", "relative1d"}, {"max_distance", r.max_distance}};
                 },
                 [](const Relative2D& r) {
                   return Json{{"kind", "relative2d"}, {"grid", Json::array({r.height, r.width})}};
                 }},
      bias);
}

}  // namespace

AttentionSpec spec_from_json(const Json& json) {
  if (!json.is_object()) Value{json, "spec"}.refuse("an object");
  const Object o(Value{json, ""});
  o.only({"score", "scale", "softcap", "normalizer", "masks", "biases", "dropout", "statistics"});
  AttentionSpec spec;
  if (o.has("score")) spec.score = read_score(o.at("score"));
  if (o.has("scale")) spec.scale = read_scale(o.at("scale"));
  if (o.has("softcap")) spec.softcap = read_softcap(o.at("softcap"));
  if (o.has("normalizer")) spec.normalizer = read_normalizer(o.at("normalizer"));
  if (o.has("masks")) {
    const Value masks = o.at("masks");
    masks.want_array();
    for (size_t i = 0; i < masks.size(); ++i) spec.masks.push_back(read_mask(masks[i]));
  }
  if (o.has("biases")) {
    const Value biases = o.at("biases");
    biases.want_array();
    for (size_t i = 0; i < biases.size(); ++i) spec.biases.push_back(read_bias(biases[i]));
  }
  if (o.has("dropout")) spec.dropout = read_dropout(o.at("dropout"));
  if (o.has("statistics")) spec.statistics = read_statistics(o.at("statistics"));
  validate(spec);
  return spec;
}

AttentionSpec spec_from_json_text(std::string_view text) {
  Json json;
  try {
    json = parse_json(text, "spec");
  } catch (const FormatError& e) {  // to a caller the text is an argument
    throw ArgumentError(e.what());
  }
  return spec_from_json(json);
}

Json spec_to_json(const AttentionSpec& spec) {
  validate(spec);
  Json masks = Json::array(), biases = Json::array();
  for (const Mask& mask : spec.masks) masks.push_back(written(mask));
  for (const Bias& bias : spec.biases) biases.push_back(written(bias));
  Json json{{"score", written(spec.score)},
            {"scale", written(spec.scale)},
            {"softcap", spec.softcap ? Json(*spec.softcap) : Json(nullptr)},
            {"normalizer", written(spec.normalizer)},
            {"masks", std::move(masks)},
            {"biases", std::move(biases)},
            {"dropout", nullptr}};
  if (spec.dropout) {
    json["dropout"] = {{"p", spec.dropout->p},
                       {"seed", spec.dropout->seed},
                       {"place", spec.dropout->place == DropoutPlace::keys ? "keys" : "weights"}};
  }
  // What to report beside the output is no part of what is computed: left out where nothing is.
  if (!spec.statistics.empty()) {
    Json& list = json["statistics"] = Json::array();
    for (size_t i = 0; i < kStatisticNames.size(); ++i) {
      if (spec.statistics.has(kStatistics[i])) list.push_back(kStatisticNames[i]);
    }
  }
  return json;
}

std::string spec_to_json_text(const AttentionSpec& spec) {
  return spec_to_json(spec).dump(2);
}

}  // namespace foci
