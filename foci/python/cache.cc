// Cache: keys and values of sequences that grow (foci/attention/kv_cache.h).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <type_traits>

#include "foci/attention/kv_cache.h"
#include "foci/core/error.h"
#include "foci/python/arrays.h"
#include "foci/python/bindings.h"
#include "foci/python/interrupt.h"
#include "foci/python/names.h"
#include "foci/python/spec.h"

namespace foci::python {
namespace {

DType dtype_of_name(const std::string& name) {
  for (const DType t : {DType::f32, DType::f16, DType::bf16}) {
    if (name == name_of(t)) return t;
  }
  throw nb::value_error(
      fmt::format("dtype: '{}' arrived, 'float32', 'float16' or 'bfloat16' is right", name)
          .c_str());
}

// A cache that one thread of Python's uses at a time: calls free the GIL.
struct Held {
  KvCache cache;
  std::mutex mutex{};

  // Runs work(cache) without the GIL. (Who waits for the mutex must not hold the GIL, which the one
  // that has it may want.)
  template <class F>
  auto use(const F& work, double pairs = 0) {
    std::invoke_result_t<F, KvCache&> result;
    without_gil(pairs, [&] {
      const std::lock_guard lock(mutex);
      result = with_python_names([&] { return work(cache); });
    });
    return result;
  }
};

KvRows rows_of(const std::vector<int64_t>& sequences, const std::vector<int64_t>& counts) {
  return {.sequences = sequences, .counts = counts};
}

void append(Held& held, nb::handle k, nb::handle v, const std::vector<int64_t>& sequences,
            const std::vector<int64_t>& counts) {
  refuse_gradient("k", k);
  refuse_gradient("v", v);
  const Tensor keys = dense_tensor_of("k", k), values = dense_tensor_of("v", v);
  require(keys.defined(), "k: None arrived, an array [E, Hk, n, D] is right");
  require(values.defined(), "v: None arrived, an array [E, Hk, n, Dv] is right");
  held.use([&](KvCache& cache) {
    cache.append(keys, values, rows_of(sequences, counts));
    return 0;
  });
}

// Tables that a cache takes: those that are not laid out by key.
AttentionInputs tables_of(nb::handle slopes, nb::handle table1d, nb::handle score_w) {
  AttentionInputs in;
  in.slopes = dense_tensor_of("slopes", slopes);
  in.table1d = dense_tensor_of("table1d", table1d);
  in.score_w = dense_tensor_of("score_w", score_w);
  return in;
}

// Pairs of query and key at most.
double pairs_of(const KvCache& cache, const Tensor& q) {
  int64_t longest = 0;
  for (int64_t s = 0; s < cache.shape().sequences; ++s) {
    longest = std::max(longest, cache.length(s));
  }
  const int64_t depth = std::max<int64_t>(1, cache.shape().D);
  const int64_t queries = q.numel() / depth;
  return static_cast<double>(queries) * static_cast<double>(longest);
}

nb::typed<nb::dict, nb::str, nb::object> attend(Held& held, const HeldSpec& spec, nb::handle q,
                                                unsigned statistics,
                                                const std::vector<int64_t>& sequences,
                                                const std::vector<int64_t>& counts,
                                                nb::handle slopes, nb::handle table1d,
                                                nb::handle score_w) {
  refuse_gradient("q", q);
  const Tensor queries = dense_tensor_of("q", q);
  require(queries.defined(), "q: None arrived, an array [E, H, n, D] is right");
  const AttentionInputs tables = tables_of(slopes, table1d, score_w);
  AttentionSpec asked = spec.spec();
  asked.statistics = statistics_of(statistics);
  const double pairs = held.use([&](KvCache& cache) { return pairs_of(cache, queries); });
  const AttentionOutputs out = held.use(
      [&](KvCache& cache) {
        return cache.attend(asked, queries, tables, rows_of(sequences, counts));
      },
      pairs);
  nb::typed<nb::dict, nb::str, nb::object> result;
  const auto put = [&](const char* name, const Tensor& t) {
    if (t.defined()) result[name] = array_of(t);
  };
  put("y", out.y);
  put("row_stat", out.row_stat);
  put("entropy", out.entropy);
  put("max_weight", out.max_weight);
  put("max_key", out.max_key);
  put("support", out.support);
  put("coverage", out.coverage);
  return result;
}

}  // namespace

void bind_cache(nb::module_& m) {
  nb::class_<Held>(m, "Cache")
      .def(
          "__init__",
          [](Held* self, int64_t sequences, int64_t kv_heads, int64_t head_size, int64_t value_size,
             const std::string& dtype, std::optional<int64_t> window) {
            new (self) Held{with_python_names([&] {
              return KvCache({.sequences = sequences,
                              .Hk = kv_heads,
                              .D = head_size,
                              .Dv = value_size,
                              .dtype = dtype_of_name(dtype)},
                             window);
            })};
          },
          nb::arg("sequences"), nb::arg("kv_heads"), nb::arg("head_size"), nb::arg("value_size"),
          nb::arg("dtype"), nb::arg("window").none())
      .def("append", &append, nb::arg("k").none(), nb::arg("v").none(), nb::arg("sequences"),
           nb::arg("counts"))
      .def("attend", &attend, nb::arg("spec"), nb::arg("q").none(), nb::arg("statistics"),
           nb::arg("sequences"), nb::arg("counts"), nb::arg("slopes").none(),
           nb::arg("table1d").none(), nb::arg("score_w").none())
      .def(
          "position",
          [](Held& h, int64_t s) { return h.use([&](KvCache& c) { return c.position(s); }); },
          nb::arg("sequence"))
      .def(
          "first", [](Held& h, int64_t s) { return h.use([&](KvCache& c) { return c.first(s); }); },
          nb::arg("sequence"))
      .def(
          "length",
          [](Held& h, int64_t s) { return h.use([&](KvCache& c) { return c.length(s); }); },
          nb::arg("sequence"))
      .def(
          "truncate",
          [](Held& h, int64_t s, int64_t position) {
            h.use([&](KvCache& c) { return c.truncate(s, position), 0; });
          },
          nb::arg("sequence"), nb::arg("position"))
      .def(
          "reset", [](Held& h, int64_t s) { h.use([&](KvCache& c) { return c.reset(s), 0; }); },
          nb::arg("sequence"))
      // Copies: a view would be left hanging by the next append.
      .def(
          "keys",
          [](Held& h, int64_t s) {
            return array_of(h.use([&](KvCache& c) { return c.keys(s).clone(); }));
          },
          nb::arg("sequence"))
      .def(
          "values",
          [](Held& h, int64_t s) {
            return array_of(h.use([&](KvCache& c) { return c.values(s).clone(); }));
          },
          nb::arg("sequence"))
      .def_prop_ro("bytes", [](Held& h) { return h.use([](KvCache& c) { return c.bytes(); }); });
}

}  // namespace foci::python
