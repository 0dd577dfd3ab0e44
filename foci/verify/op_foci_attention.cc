// foci.attention: the spec stands in the attributes, the tensors under their own names.
#include <algorithm>
#include <functional>

#include "foci/spec/json.h"
#include "foci/verify/ops.h"

namespace foci::verify {
namespace {

double default_tolerance(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 2e-3;  // results are rounded to 11 bits
    case DType::bf16:
      return 1.6e-2;  // to 8 bits
    default:
      return 2e-5;  // float32 against a float64 oracle
  }
}

bool is_sparse(const Normalizer& normalizer) {
  return std::visit(
      overloaded{[](const Softmax&) { return false; }, [](const Sparsemax&) { return true; },
                 [](const Entmax&) { return true; }, [](const TopK&) { return false; }},
      normalizer);
}

// A spec has one table, or, with both relative biases, two that are told apart by name.
Tensor table(const CaseFile& c, const char* own_name) {
  const Tensor own = c.input(own_name);
  return own.defined() ? own : c.input("table");
}

}  // namespace

Prepared prepare_foci_attention(const CaseFile& c) {
  c.only_inputs(
      {"q",    "k",    "v",      "key_lengths", "past_lengths", "q_segments",  "k_segments",
       "keep", "bias", "slopes", "table",       "table1d",      "table2d",     "score_w",
       "dy",   "dlse", "dtau",   "drow_stat",   "dentropy",     "dmax_weight", "dcoverage"});
  c.only_outputs({"y",        "weights",    "lse",      "tau",     "entropy",
                  "coverage", "max_weight", "max_key",  "support", "dq",
                  "dk",       "dv",         "dbias",    "dslopes", "dtable",
                  "dtable1d", "dtable2d",   "dscore_w", "dscale",  "dalpha"});
  Prepared p;
  auto& r = p.request.emplace<AttentionRequest>();
  r.spec = spec_from_json_text(c.attributes);
  r.in = {.q = c.input("q"),
          .k = c.input("k"),
          .v = c.input("v"),
          .key_lengths = c.input("key_lengths"),
          .past_lengths = c.input("past_lengths"),
          .q_segments = c.input("q_segments"),
          .k_segments = c.input("k_segments"),
          .keep = c.input("keep"),
          .bias = c.input("bias"),
          .slopes = c.input("slopes"),
          .table1d = table(c, "table1d"),
          .table2d = table(c, "table2d"),
          .score_w = c.input("score_w")};
  const bool sparse = is_sparse(r.spec.normalizer);
  for (const char* name : {"drow_stat", sparse ? "dtau" : "dlse"}) {
    if (c.input(name).defined()) r.up.drow_stat = c.input(name);
  }
  require<FormatError>(
      !c.input(sparse ? "dlse" : "dtau").defined() && !c.output(sparse ? "lse" : "tau").defined(),
      "{}: the normaliser of this case has {} instead", sparse ? "lse" : "tau",
      sparse ? "tau" : "lse");
  r.up.dy = c.input("dy");
  r.up.dentropy = c.input("dentropy");
  r.up.dmax_weight = c.input("dmax_weight");
  r.up.dcoverage = c.input("dcoverage");
  r.backward = std::any_of(c.out.begin(), c.out.end(),
                           [](const auto& named) { return named.first[0] == 'd'; });
  r.weights = c.output("weights").defined();

  Statistics& statistics = r.spec.statistics;
  if (c.output("entropy").defined() || r.up.dentropy.defined()) statistics.add(Statistic::entropy);
  if (c.output("coverage").defined()) statistics.add(Statistic::coverage);
  if (c.output("support").defined()) statistics.add(Statistic::support);
  if (c.output("max_weight").defined() || c.output("max_key").defined() ||
      r.up.dmax_weight.defined()) {
    statistics.add(Statistic::max_weight);
  }
  r.wanted = {.qkv = true,
              .bias = c.output("dbias").defined(),
              .slopes = c.output("dslopes").defined(),
              .tables = c.output("dtable").defined() || c.output("dtable1d").defined() ||
                        c.output("dtable2d").defined(),
              .score_w = c.output("dscore_w").defined(),
              .scale = c.output("dscale").defined(),
              .alpha = c.output("dalpha").defined()};

  const double tolerance =
      c.tolerance.value_or(r.in.q.defined() ? default_tolerance(r.in.q.dtype()) : 0);
  const auto expect = [&](const char* name, std::function<Tensor(const Answer&)> got) {
    if (c.output(name).defined()) {
      p.expected.push_back({name, c.output(name), std::move(got), tolerance});
    }
  };
  expect("y", [](const Answer& a) { return a.out.y; });
  expect("weights", [](const Answer& a) { return a.weights; });
  expect("lse", [](const Answer& a) { return a.out.row_stat; });
  expect("tau", [](const Answer& a) { return a.out.row_stat; });
  expect("entropy", [](const Answer& a) { return a.out.entropy; });
  expect("coverage", [](const Answer& a) { return a.out.coverage; });
  expect("max_weight", [](const Answer& a) { return a.out.max_weight; });
  expect("max_key", [](const Answer& a) { return a.out.max_key; });
  expect("support", [](const Answer& a) { return a.out.support; });
  expect("dq", [](const Answer& a) { return a.gradients.dq; });
  expect("dk", [](const Answer& a) { return a.gradients.dk; });
  expect("dv", [](const Answer& a) { return a.gradients.dv; });
  expect("dbias", [](const Answer& a) { return a.gradients.dbias; });
  expect("dslopes", [](const Answer& a) { return a.gradients.dslopes; });
  expect("dtable", [](const Answer& a) {
    return a.gradients.dtable1d.defined() ? a.gradients.dtable1d : a.gradients.dtable2d;
  });
  expect("dtable1d", [](const Answer& a) { return a.gradients.dtable1d; });
  expect("dtable2d", [](const Answer& a) { return a.gradients.dtable2d; });
  expect("dscore_w", [](const Answer& a) { return a.gradients.dscore_w; });
  // One number may be stored as [] or [1].
  const auto expect_numbers = [&](const char* name, Tensor AttentionGradients::*member) {
    expect(name, [want = c.output(name), member](const Answer& a) {
      const Tensor got = a.gradients.*member;
      return got.defined() && got.numel() == want.numel() ? got.reshape(want.shape()) : got;
    });
  };
  expect_numbers("dscale", &AttentionGradients::dscale);
  expect_numbers("dalpha", &AttentionGradients::dalpha);
  return p;
}

}  // namespace foci::verify
