// The row maps on their own: softmax, sparsemax, entmax and top-k of somebody else's scores.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "foci/attention/normalize.h"
#include "foci/core/error.h"
#include "foci/python/arrays.h"
#include "foci/python/bindings.h"
#include "foci/python/host_pool.h"
#include "foci/python/interrupt.h"
#include "foci/python/spec.h"

namespace foci::python {
namespace {

// Into `to` where it is given (of the result's shape and dtype), else a new array.
nb::object result(const Tensor& made, nb::handle to) {
  if (to.is_none()) return array_of(made);
  const Tensor given = writable_tensor_of("into", to);
  require(given.shape() == made.shape(), "into: shape {} arrived, {} is right", given.shape(),
          made.shape());
  given.copy_from(made);
  return nb::borrow(to);
}

Tensor asked(const char* name, nb::handle array) {
  Tensor t = tensor_of(name, array);
  require(t.defined(), "{}: None arrived, an array [..., M] is right", name);
  return t;
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def(
      "normalize",
      [](const HeldSpec& spec, nb::handle scores, nb::handle into) {
        const HostPoolScope host(scores);
        if (into.is_none()) refuse_gradient("scores", scores);
        const Tensor s = asked("scores", scores);
        Tensor weights;
        without_gil(static_cast<double>(s.numel()),
                    [&] { weights = normalize(spec.spec().normalizer, s); });
        return result(weights, into);
      },
      nb::arg("spec"), nb::arg("scores").none(), nb::arg("into") = nb::none());
  m.def(
      "normalize_backward",
      [](const HeldSpec& spec, nb::handle weights, nb::handle dweights, nb::handle into,
         nb::handle scores) {
        const HostPoolScope host(weights);
        if (into.is_none()) {
          refuse_gradient("weights", weights);
          refuse_gradient("dweights", dweights);
          refuse_gradient("scores", scores);
        }
        const Tensor p = asked("weights", weights), up = asked("dweights", dweights);
        const Tensor s = scores.is_none() ? Tensor() : asked("scores", scores);
        Tensor g;
        without_gil(static_cast<double>(p.numel()),
                    [&] { g = normalize_backward(spec.spec().normalizer, p, up, s); });
        return result(g, into);
      },
      nb::arg("spec"), nb::arg("weights").none(), nb::arg("dweights").none(),
      nb::arg("into") = nb::none(), nb::arg("scores") = nb::none());
  m.def(
      "entmax_backward",
      [](const HeldSpec& spec, nb::handle weights, nb::handle dweights, nb::handle into) {
        const HostPoolScope host(weights);
        if (into.is_none()) {
          refuse_gradient("weights", weights);
          refuse_gradient("dweights", dweights);
        }
        const Tensor p = asked("weights", weights), up = asked("dweights", dweights);
        Tensor g;
        double dalpha = 0;
        without_gil(static_cast<double>(p.numel()),
                    [&] { g = normalize_backward(spec.spec().normalizer, p, up, {}, &dalpha); });
        return std::pair(result(g, into), dalpha);
      },
      nb::arg("spec"), nb::arg("weights").none(), nb::arg("dweights").none(),
      nb::arg("into") = nb::none());
}

}  // namespace foci::python
