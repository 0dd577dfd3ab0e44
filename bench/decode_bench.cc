// Decoding: one query against many cached keys, as a share of the bandwidth that a plain read of
// the very same keys and values reaches on the same threads, interleaved. Bind is inside: every
// token of a generated text binds anew.
#include <span>

#include "foci/attention/plan.h"
#include "foci/measure/read_rate.h"
#include "inputs.h"
#include "rows.h"
#include "timing.h"

namespace foci::bench {
namespace {

void body(const Options& options, Report& report) {
  for (const Definition& d : definitions("decode", options)) {
    const AttentionInputs in = inputs(d, d.shape);
    const Plan plan = Plan::make(d.spec, d.shape);
    AttentionOutputs out = plan.bind(in).forward();
    const auto bytes = [](const Tensor& t) {
      return std::span(static_cast<const std::byte*>(t.raw()), t.nbytes());
    };
    const std::span<const std::byte> blocks[] = {bytes(in.k), bytes(in.v)};
    volatile uint32_t sink = 0;
    const auto t = timed({{"plain read", [&] { sink = measure::read_all(plan.target(), blocks); }},
                          {"foci", [&] { plan.bind(in).forward(out); }}},
                         options.quick ? 0.5 : 2);
    const double total = 1e-9 * static_cast<double>(in.k.nbytes() + in.v.nbytes());
    report.add(
        d, "of a plain read", speedup(t[1]),
        fmt::format("{:.1f} MB, a plain read {:.1f} GB/s", 1e3 * total, total / t[0].seconds));
  }
}

}  // namespace
}  // namespace foci::bench

int main(int argc, char** argv) {
  return foci::bench::run(argc, argv, "decode_bench", foci::bench::body);
}
