// What an option costs: attention with it over the same attention without it (or, of a normaliser,
// over softmax; of the additive score, over dot), on the same q, k and v, interleaved, forward and
// backward. And a packed batch of mixed lengths over the same sequences padded to the longest.
//
// Plan is made once, bind is outside: what masks and biases cost there (a pass over the tensor) is
// a matter of reading it. Backward takes upstream gradients for the statistics that are on.
#include <numeric>

#include "foci/attention/plan.h"
#include "foci/core/error.h"
#include "inputs.h"
#include "rows.h"
#include "timing.h"

namespace foci::bench {
namespace {

// One side of a comparison, ready to be called.
struct Side {
  Bound bound;
  AttentionOutputs saved;
  AttentionUpstream up;
  AttentionWanted wanted;
  measure::Candidate candidate(const std::string& name, bool backward) const {
    measure::Candidate c;
    c.name = name;
    if (backward) {
      c.run = [side = *this, gradients = bound.backward(saved, up, wanted)]() mutable {
        side.bound.backward(side.saved, side.up, side.wanted, gradients);
      };
    } else {
      c.run = [side = *this]() mutable { side.bound.forward(side.saved); };
    }
    return c;
  }
};

Side ready(const AttentionSpec& spec, const AttentionShape& shape, const AttentionInputs& in,
           const std::vector<std::string>& gradients) {
  const Bound bound = Plan::make(spec, shape).bind(in);
  return {bound, bound.forward(), upstream(spec, shape), wanted(gradients)};
}

void compare(const Definition& d, const Side& without, const Side& with, double seconds,
             Report& report) {
  for (bool backward : {false, true}) {
    const auto t =
        timed({without.candidate(d.over, backward), with.candidate(d.row, backward)}, seconds);
    report.add(d, (backward ? "backward / " : "forward / ") + d.over, slowdown(t[1]),
               backward ? "" : skipped_note(with.bound, with.saved));
  }
}

// [B,H,N,D] of sequences with lengths[b] tokens each, padded; and the same tokens side by side.
Tensor packed(const Tensor& padded, const std::vector<int64_t>& lengths, int64_t total) {
  Tensor t = Tensor::empty({1, padded.dim(1), total, padded.dim(3)});
  int64_t at = 0;
  for (int64_t b = 0; b < padded.dim(0); ++b) {
    const int64_t n = lengths[static_cast<size_t>(b)];
    t.select(0, 0).slice(1, at, at + n).copy_from(padded.select(0, b).slice(1, 0, n));
    at += n;
  }
  return t;
}

void compare_packed(const Definition& d, double seconds, Report& report) {
  const AttentionShape& s = d.shape;
  require<Error>(static_cast<int64_t>(d.lengths.size()) == s.B, "rows.json, {}: {} lengths, B {}",
                 d.row, d.lengths.size(), s.B);
  const int64_t total = std::accumulate(d.lengths.begin(), d.lengths.end(), int64_t{0});
  AttentionInputs in = inputs(d, s);
  AttentionInputs tight = {.q = packed(in.q, d.lengths, total),
                           .k = packed(in.k, d.lengths, total),
                           .v = packed(in.v, d.lengths, total)};
  in.key_lengths = Tensor::from(d.lengths, {s.B});
  tight.q_segments = Tensor::empty({1, total}, DType::i32);
  int64_t at = 0;
  for (size_t b = 0; b < d.lengths.size(); ++b) {
    for (int64_t i = 0; i < d.lengths[b]; ++i) {
      tight.q_segments.at<int32_t>(0, at++) = static_cast<int32_t>(b);
    }
  }
  tight.k_segments = tight.q_segments;
  AttentionSpec lengths = d.spec, segments = d.spec;
  lengths.masks.push_back(KeyLengths{});
  segments.masks.push_back(Segments{});
  const AttentionShape flat = {1, s.H, s.Hk, total, total, s.D, s.Dv};
  compare(d, ready(lengths, s, in, {}), ready(segments, flat, tight, {}), seconds, report);
}

void body(const Options& options, Report& report) {
  const double seconds = options.quick ? 0.3 : 1.2;
  for (const Definition& d : definitions("ratios", options)) {
    if (!d.lengths.empty()) {
      compare_packed(d, seconds, report);
      continue;
    }
    const AttentionInputs in = inputs(d, d.shape);
    compare(d, ready({}, d.shape, in, {}), ready(d.spec, d.shape, in, d.wanted), seconds, report);
  }
}

}  // namespace
}  // namespace foci::bench

int main(int argc, char** argv) {
  return foci::bench::run(argc, argv, "ratios_bench", foci::bench::body);
}
