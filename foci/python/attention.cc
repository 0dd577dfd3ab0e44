// attention, attention_backward and weights on arrays.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <optional>

#include "foci/attention/plan.h"
#include "foci/core/error.h"
#include "foci/python/arrays.h"
#include "foci/python/bindings.h"
#include "foci/python/host_pool.h"
#include "foci/python/interrupt.h"
#include "foci/python/names.h"
#include "foci/python/spec.h"

namespace foci::python {
namespace {

// ---- names ----------------------------------------------------------------------------------

// A tensor of a struct, by the name that Python gives it.
template <class Owner>
struct Field {
  const char* name;
  Tensor Owner::*member;
};

// The one of that name; throws naming `what`, which lacks it. `kind`: what it is no one of.
template <class Fields>
const auto& field_named(const Fields& fields, const std::string& name, const char* what,
                        const char* kind) {
  for (const auto& field : fields) {
    if (name == field.name) return field;
  }
  throw nb::value_error(fmt::format("{}: '{}' arrived, which is no {}", what, name, kind).c_str());
}

// ---- inputs ---------------------------------------------------------------------------------

struct Input : Field<AttentionInputs> {
  std::optional<DType> integer{};  // what other integers become
};
constexpr size_t kInputs = 10;
const std::array<Input, kInputs>& input_names() {
  static const std::array<Input, kInputs> names = {{
      {{"key_lengths", &AttentionInputs::key_lengths}, DType::i64},
      {{"past_lengths", &AttentionInputs::past_lengths}, DType::i64},
      {{"q_segments", &AttentionInputs::q_segments}, DType::i32},
      {{"k_segments", &AttentionInputs::k_segments}, DType::i32},
      {{"keep", &AttentionInputs::keep}, {}},
      {{"bias", &AttentionInputs::bias}, {}},
      {{"slopes", &AttentionInputs::slopes}, {}},
      {{"table1d", &AttentionInputs::table1d}, {}},
      {{"table2d", &AttentionInputs::table2d}, {}},
      {{"score_w", &AttentionInputs::score_w}, {}},
  }};
  return names;
}

// A dictionary of arrays by name; None is an empty one. Calls f(name, value).
template <class F>
void for_items(const char* what, nb::handle given, const F& f) {
  if (given.is_none()) return;
  if (!nb::isinstance<nb::dict>(given)) {
    throw nb::type_error(
        fmt::format("{}: {} arrived, a dictionary of arrays is right", what, kind_of(given))
            .c_str());
  }
  for (const auto& [key, value] : nb::borrow<nb::dict>(given)) {
    if (!nb::isinstance<nb::str>(key)) {
      throw nb::type_error(
          fmt::format("{}: a name that is {} arrived, str is right", what, kind_of(key)).c_str());
    }
    f(nb::cast<std::string>(key), value);
  }
}

// q, k or v. A row that a broadcast repeats over its last dimension is copied too.
Tensor operand(const char* name, nb::handle array) {
  const Tensor t = dense_tensor_of(name, array);
  return t.defined() && t.rank() > 0 && t.dim(-1) > 1 && t.stride(-1) != 1 ? t.contiguous() : t;
}

AttentionInputs inputs_of(nb::handle q, nb::handle k, nb::handle v, nb::handle tensors) {
  AttentionInputs in;
  in.q = operand("q", q);
  in.k = operand("k", k);
  in.v = operand("v", v);
  for_items("tensors", tensors, [&](const std::string& name, nb::handle value) {
    const Input& input = field_named(input_names(), name, "tensors", "tensor of a spec");
    Tensor t = dense_tensor_of(input.name, value);
    // A copy: backward relies on what forward saw, whatever the caller's array holds by then.
    if (input.integer) t = integers(input.name, t, *input.integer).clone();
    in.*input.member = t;
  });
  return in;
}

void refuse_gradients(nb::handle q, nb::handle k, nb::handle v, nb::handle tensors) {
  refuse_gradient("q", q);
  refuse_gradient("k", k);
  refuse_gradient("v", v);
  for_items("tensors", tensors, [](const std::string& name, nb::handle value) {
    refuse_gradient(name.c_str(), value);
  });
}

AttentionShape checked_shape(const AttentionInputs& in) {
  const auto check = [](const char* name, const Tensor& t, const char* letters) {
    require(t.defined(), "{}: None arrived, an array {} is right", name, letters);
    require(t.rank() == 4, "{}: shape {} arrived, four dimensions {} are right", name, t.shape(),
            letters);
  };
  check("q", in.q, "[B, H, N, D]");
  const DType type = in.q.dtype();
  require(type == DType::f32 || type == DType::f16 || type == DType::bf16,
          "q: {} arrived, float32, float16 or bfloat16 is right", name_of(type));
  check("k", in.k, "[B, Hk, M, D]");
  check("v", in.v, "[B, Hk, M, Dv]");
  const int64_t heads = in.q.dim(1), key_heads = in.k.dim(1);
  require(key_heads == heads || (key_heads > 0 && heads > 0 && heads % key_heads == 0),
          "k: {} heads arrived beside {} of q; a number Hk that divides them is right", key_heads,
          heads);
  return shape_of(in);
}

// Pairs of query and key over batch and heads, visible or not.
double pairs_of(const AttentionInputs& in) {
  double n = static_cast<double>(in.k.dim(2));
  for (int d = 0; d < 3; ++d) n *= static_cast<double>(in.q.dim(d));
  return n;
}

// ---- outputs --------------------------------------------------------------------------------

constexpr size_t kOutputs = 7;
constexpr std::array<Field<AttentionOutputs>, kOutputs> kOutputNames = {{
    {"y", &AttentionOutputs::y},
    {"row_stat", &AttentionOutputs::row_stat},
    {"entropy", &AttentionOutputs::entropy},
    {"max_weight", &AttentionOutputs::max_weight},
    {"max_key", &AttentionOutputs::max_key},
    {"support", &AttentionOutputs::support},
    {"coverage", &AttentionOutputs::coverage},
}};

AttentionOutputs outputs_in(const char* what, nb::handle given) {
  AttentionOutputs out;
  for_items(what, given, [&](const std::string& name, nb::handle value) {
    const auto& output = field_named(kOutputNames, name, what, "result");
    out.*output.member = writable_tensor_of(output.name, value);
  });
  return out;
}

// What a call gave. Holds the inputs, for exact weights and backward.
struct Outputs {
  Bound bound;
  AttentionOutputs out;
  double pairs;                               // of query and key, as of pairs_of
  std::array<nb::object, kOutputs> arrays{};  // made when asked for

  nb::object array(size_t i) {
    if (!arrays[i].is_valid()) arrays[i] = array_of(out.*kOutputNames[i].member);
    return arrays[i];
  }
};

Outputs attention(const HeldSpec& spec, nb::handle q, nb::handle k, nb::handle v,
                  nb::handle tensors, unsigned statistics, nb::handle into) {
  const HostPoolScope host(q);
  if (into.is_none()) refuse_gradients(q, k, v, tensors);  // what is given back are NumPy's arrays
  const AttentionInputs in = inputs_of(q, k, v, tensors);
  AttentionOutputs out = outputs_in("into", into);
  const Bound bound = spec.plan(checked_shape(in), statistics_of(statistics)).bind(in);
  without_gil(pairs_of(in), [&] { bound.forward(out); });
  return {bound, out, pairs_of(in)};
}

// ---- backward -------------------------------------------------------------------------------

constexpr std::array<Field<AttentionGradients>, 10> kGradientNames = {{
    {"dq", &AttentionGradients::dq},
    {"dk", &AttentionGradients::dk},
    {"dv", &AttentionGradients::dv},
    {"dbias", &AttentionGradients::dbias},
    {"dslopes", &AttentionGradients::dslopes},
    {"dtable1d", &AttentionGradients::dtable1d},
    {"dtable2d", &AttentionGradients::dtable2d},
    {"dscore_w", &AttentionGradients::dscore_w},
    {"dscale", &AttentionGradients::dscale},
    {"dalpha", &AttentionGradients::dalpha},
}};

AttentionUpstream upstream_of(nb::handle given) {
  AttentionUpstream up;
  static constexpr std::array<Field<AttentionUpstream>, 5> kNames = {
      {{"dy", &AttentionUpstream::dy},
       {"drow_stat", &AttentionUpstream::drow_stat},
       {"dentropy", &AttentionUpstream::dentropy},
       {"dmax_weight", &AttentionUpstream::dmax_weight},
       {"dcoverage", &AttentionUpstream::dcoverage}}};
  for_items("upstream", given, [&](const std::string& name, nb::handle value) {
    const auto& field = field_named(kNames, name, "upstream", "gradient of a result");
    Tensor t = tensor_of(field.name, value);
    // Statistics' gradients are small, and sums' are often broadcast views.
    if (t.defined() && field.member != &AttentionUpstream::dy) t = t.contiguous();
    if (t.defined() && t.rank() > 0 && t.dim(-1) > 1 && t.stride(-1) != 1) t = t.contiguous();
    up.*field.member = t;
  });
  return up;
}

using Arrays = nb::typed<nb::dict, nb::str, nb::object>;

AttentionWanted wanted_of(const std::vector<std::string>& names) {
  AttentionWanted w;
  w.qkv = false;
  for (const std::string& name : names) {
    if (name == "dq" || name == "dk" || name == "dv") {
      w.qkv = true;
    } else if (name == "dbias") {
      w.bias = true;
    } else if (name == "dslopes") {
      w.slopes = true;
    } else if (name == "dtable1d" || name == "dtable2d") {
      w.tables = true;
    } else if (name == "dscore_w") {
      w.score_w = true;
    } else if (name == "dscale") {
      w.scale = true;
    } else if (name == "dalpha") {
      w.alpha = true;
    } else {
      throw nb::value_error(
          fmt::format("wanted: '{}' arrived, which is no gradient", name).c_str());
    }
  }
  return w;
}

Arrays gradients_to(const Bound& bound, double pairs, const AttentionOutputs& saved,
                    nb::handle upstream, const std::vector<std::string>& wanted, nb::handle into) {
  const AttentionUpstream up = upstream_of(upstream);
  const AttentionWanted w = wanted_of(wanted);
  AttentionGradients g;
  Arrays result;
  for_items("into", into, [&](const std::string& name, nb::handle value) {
    const auto& gradient = field_named(kGradientNames, name, "into", "gradient");
    g.*gradient.member = writable_tensor_of(gradient.name, value);
    result[gradient.name] = nb::borrow(value);
  });
  with_python_names([&] {
    without_gil(pairs, [&] { bound.backward(saved, up, w, g); });
    return 0;
  });
  for (const std::string& name : wanted) {
    const auto& gradient = field_named(kGradientNames, name, "wanted", "gradient");
    const Tensor& t = g.*gradient.member;
    require(t.defined(), "wanted: '{}' arrived, but the call had no {} that gets a gradient", name,
            name.substr(1));
    if (!result.contains(gradient.name)) result[gradient.name] = array_of(t);
  }
  return result;
}

Arrays attention_backward(const HeldSpec& spec, nb::handle q, nb::handle k, nb::handle v,
                          nb::handle tensors, unsigned statistics, nb::handle saved,
                          nb::handle upstream, const std::vector<std::string>& wanted,
                          nb::handle into) {
  const HostPoolScope host(q);
  const AttentionInputs in = inputs_of(q, k, v, tensors);
  const Bound bound = spec.plan(checked_shape(in), statistics_of(statistics)).bind(in);
  AttentionOutputs out;
  for_items("saved", saved, [&](const std::string& name, nb::handle value) {
    if (name == "ordinary") {
      out.ordinary = value.ptr() == Py_True;
      return;
    }
    const auto& output = field_named(kOutputNames, name, "saved", "result");
    out.*output.member = tensor_of(output.name, value);
  });
  return gradients_to(bound, pairs_of(in), out, upstream, wanted, into);
}

// ---- weights and words ------------------------------------------------------------------------

nb::object weights(const Outputs& o, const std::vector<int64_t>& rows,
                   const std::vector<int64_t>& heads) {
  Tensor w;
  without_gil(o.pairs, [&] { w = o.bound.weights(o.out, rows, heads); });
  return array_of(w);
}

// From what an earlier call saved.
nb::object weights_from(const HeldSpec& spec, nb::handle q, nb::handle k, nb::handle v,
                        nb::handle tensors, nb::handle row_stat, const std::vector<int64_t>& rows,
                        const std::vector<int64_t>& heads) {
  const HostPoolScope host(q);
  const AttentionInputs in = inputs_of(q, k, v, tensors);
  AttentionOutputs saved;
  saved.row_stat = tensor_of("row_stat", row_stat);
  return weights({spec.plan(checked_shape(in), {}).bind(in), saved, pairs_of(in)}, rows, heads);
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<Outputs> outputs(m, "Outputs");
  for (size_t i = 0; i < kOutputs; ++i) {
    outputs.def_prop_ro(kOutputNames[i].name, [i](Outputs& o) { return o.array(i); });
  }
  outputs.def_prop_ro("skipped_pairs", [](const Outputs& o) { return o.out.skipped_pairs; })
      .def_prop_ro("ordinary", [](const Outputs& o) { return o.out.ordinary; })
      .def_prop_ro("visible_pairs", [](const Outputs& o) { return o.bound.visible_pairs(); })
      .def("weights", &weights, nb::arg("rows"), nb::arg("heads"))
      .def(
          "backward",
          [](const Outputs& o, nb::handle upstream, const std::vector<std::string>& wanted,
             nb::handle into) {
            return gradients_to(o.bound, o.pairs, o.out, upstream, wanted, into);
          },
          nb::arg("upstream").none(), nb::arg("wanted"), nb::arg("into") = nb::none());
  m.def("attention", &attention, nb::arg("spec"), nb::arg("q").none(), nb::arg("k").none(),
        nb::arg("v").none(), nb::arg("tensors") = nb::none(), nb::arg("statistics") = 0u,
        nb::arg("into") = nb::none());
  m.def("attention_backward", &attention_backward, nb::arg("spec"), nb::arg("q").none(),
        nb::arg("k").none(), nb::arg("v").none(), nb::arg("tensors").none(), nb::arg("statistics"),
        nb::arg("saved").none(), nb::arg("upstream").none(), nb::arg("wanted"),
        nb::arg("into") = nb::none());
  m.def("weights", &weights_from, nb::arg("spec"), nb::arg("q").none(), nb::arg("k").none(),
        nb::arg("v").none(), nb::arg("tensors").none(), nb::arg("row_stat").none(), nb::arg("rows"),
        nb::arg("heads"));
  m.def(
      "explain",
      [](const HeldSpec& spec, nb::handle q, nb::handle k, nb::handle v) {
        return spec.plan(checked_shape(inputs_of(q, k, v, nb::none())), {}).explain();
      },
      nb::arg("spec"), nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none());
}

}  // namespace foci::python
