// Spec: what attention computes. Its options come as the JSON of docs/attention.md, which
// python/foci/spec.py writes.
#include "foci/python/spec.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "foci/core/error.h"
#include "foci/core/simd_target.h"
#include "foci/python/bindings.h"
#include "foci/python/names.h"
#include "foci/spec/json.h"

namespace foci::python {

namespace nb = nanobind;

Statistics statistics_of(unsigned bits) {
  Statistics s;
  for (const Statistic one :
       {Statistic::entropy, Statistic::max_weight, Statistic::support, Statistic::coverage}) {
    if (bits >> static_cast<unsigned>(one) & 1u) s.add(one);
  }
  return s;
}

Plan HeldSpec::plan(const AttentionShape& shape, Statistics statistics) const {
  const SimdTarget target = current_target();
  const std::lock_guard lock(mutex_);
  for (auto made = plans_.rbegin(); made != plans_.rend(); ++made) {
    if (made->shape == shape && made->statistics == statistics && made->target == target) {
      return made->plan;
    }
  }
  AttentionSpec spec = spec_;
  spec.statistics = statistics;
  Plan plan = with_python_names([&] { return Plan::make(spec, shape); });
  if (plans_.size() == kMostPlans) plans_.erase(plans_.begin());
  plans_.push_back({shape, statistics, target, plan});
  return plan;
}

namespace {

// The tensors beside q, k and v that a spec reads, by the names of AttentionInputs.
std::vector<std::string> tensors_of(const HeldSpec& held) {
  const AttentionSpec& spec = held.spec();
  std::vector<std::string> names;
  const auto add = [&](const char* name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.emplace_back(name);
  };
  if (std::holds_alternative<Additive>(spec.score)) add("score_w");
  for (const Mask& mask : spec.masks) {
    std::visit(overloaded{[&](const Causal& m) {
                            if (m.align == Align::past) add("past_lengths");
                          },
                          [&](const Window& m) {
                            if (m.align == Align::past) add("past_lengths");
                          },
                          [&](const KeyLengths&) { add("key_lengths"); },
                          [&](const Segments&) {
                            add("q_segments");
                            add("k_segments");
                          },
                          [&](const Keep&) { add("keep"); }},
               mask);
  }
  for (const Bias& bias : spec.biases) {
    std::visit(
        overloaded{[&](const TensorBias&) { add("bias"); }, [&](const Alibi&) { add("slopes"); },
                   [&](const Relative1D&) { add("table1d"); },
                   [&](const Relative2D&) { add("table2d"); }},
        bias);
  }
  return names;
}

// The same with numbers that a call brings: a learned scale and entmax's alpha (one, or one a head),
// a drawn seed.
HeldSpec* with_numbers(const HeldSpec& held, const std::optional<std::vector<double>>& scale,
                       std::optional<uint64_t> seed,
                       const std::optional<std::vector<double>>& alpha) {
  AttentionSpec spec = held.spec();
  if (scale) {
    if (scale->size() == 1) {
      spec.scale = scale->front();
    } else {
      spec.scale = *scale;
    }
  }
  if (alpha) {
    auto* entmax = std::get_if<Entmax>(&spec.normalizer);
    require(entmax != nullptr,
            "alpha: a tensor arrived, but nothing reads it without normalizer='entmax'");
    require(!alpha->empty(), "alpha: an empty tensor arrived, one number or [H] is right");
    *entmax = alpha->size() == 1 ? Entmax{alpha->front()} : Entmax{.per_head = *alpha};
  }
  if (seed && spec.dropout) spec.dropout->seed = *seed;
  with_python_names([&] {
    validate(spec);
    return 0;
  });
  return new HeldSpec(std::move(spec));
}

}  // namespace

void bind_spec(nb::module_& m) {
  nb::class_<HeldSpec>(m, "Spec")
      .def(
          "__init__",
          [](HeldSpec* self, const std::string& json) {
            new (self) HeldSpec(spec_from_json_text(json));
          },
          nb::arg("json"))
      .def("to_json", [](const HeldSpec& s) { return spec_to_json_text(s.spec()); })
      .def("tensors", &tensors_of, "Names of the tensors beside q, k and v that this spec reads.")
      .def("with_numbers", &with_numbers, nb::arg("scale").none(), nb::arg("seed").none(),
           nb::arg("alpha") = nb::none(),
           nb::rv_policy::take_ownership);
}

}  // namespace foci::python
