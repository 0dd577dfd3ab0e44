// From masks to key ranges: per (batch, query) the keys [begin, end) that every mask but Keep
// allows, and the positions that ALiBi and Relative1D count from.
//
// Segments are sorted once a batch by (id, index); a segment's keys then stand in one stretch of
// `order`, the local ranges of causal and window masks cut a piece out of it, and the piece's ends
// bound the keys. Where each segment's keys lie together that is the whole truth; otherwise the
// local numbers are kept too (KeyMask::scattered).
#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_map>

#include "foci/attention/state.h"

namespace foci {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

int64_t saturating_add(int64_t a, int64_t b) {
  int64_t sum;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  return b > 0 ? kMax : kMin;
}

int64_t saturating_subtract(int64_t a, int64_t b) {
  int64_t difference;
  if (!__builtin_sub_overflow(a, b, &difference)) return difference;
  return b > 0 ? kMin : kMax;
}

struct Range {
  int64_t begin, end;
};

// Position of local query i of n, against m keys.
int64_t position(Align align, int64_t i, int64_t n, int64_t m, int64_t past) {
  switch (align) {
    case Align::bottom_right:
      return i + m - n;
    case Align::top_left:
      return i;
    case Align::past:
      return saturating_add(i, past);
  }
  return i;
}

// The keys of [0, m) that causal and window masks let query i of n see, in local numbers.
Range local_range(const AttentionSpec& spec, int64_t i, int64_t n, int64_t m, int64_t past) {
  Range r{0, m};
  // Keys first … last, both included.
  const auto cut = [&](int64_t first, int64_t last) {
    r.begin = std::max(r.begin, first);
    r.end = std::min(r.end, saturating_add(last, 1));
  };
  for (const Mask& mask : spec.masks) {
    std::visit(overloaded{[&](const Causal& c) { cut(0, position(c.align, i, n, m, past)); },
                          [&](const Window& w) {
                            const int64_t p = position(w.align, i, n, m, past);
                            cut(w.left ? saturating_subtract(p, *w.left) : 0,
                                w.right ? saturating_add(p, *w.right) : m - 1);
                          },
                          [](const KeyLengths&) {}, [](const Segments&) {}, [](const Keep&) {}},
               mask);
  }
  if (r.begin >= r.end) r = {0, 0};
  return r;
}

struct Segment {
  int64_t queries = 0, keys = 0;
  int64_t first = 0;       // where its keys start in `order`
  int64_t next_query = 0;  // local number of the next query, while walking
  bool together = true;    // keys are neighbours
};

}  // namespace

void fill_ranges(Problem& problem) {
  const AttentionSpec& spec = problem.spec;
  const AttentionInputs& in = problem.in;
  const int64_t B = problem.shape.B, N = problem.shape.N, M = problem.shape.M;
  KeyMask& mask = problem.mask;
  mask.B = B;
  mask.N = N;
  mask.M = M;
  mask.begin.assign(B * N, 0);
  mask.end.assign(B * N, 0);
  mask.scattered_batch.assign(B, 0);
  const bool segmented = has_mask<Segments>(spec);
  const bool positioned = find_bias<Alibi>(spec) || find_bias<Relative1D>(spec);
  if (positioned) {
    problem.positions.q.resize(B * N);
    problem.positions.k.resize(B * M);
  }
  const Align align = bias_align(spec);

  std::vector<int64_t> order(segmented ? M : 0);
  std::unordered_map<int32_t, Segment> segments;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t past =
        align == Align::past ? in.past_lengths.data<int64_t>()[b * in.past_lengths.stride(0)] : 0;
    const int64_t length = has_mask<KeyLengths>(spec)
                               ? in.key_lengths.data<int64_t>()[b * in.key_lengths.stride(0)]
                               : M;
    const auto put = [&](int64_t i, Range r) {
      r.end = std::min(r.end, length);
      if (r.begin >= r.end) r = {0, 0};
      mask.begin[b * N + i] = r.begin;
      mask.end[b * N + i] = r.end;
    };
    if (!segmented) {
      for (int64_t i = 0; i < N; ++i) {
        put(i, local_range(spec, i, N, M, past));
        if (positioned) problem.positions.q[b * N + i] = position(align, i, N, M, past);
      }
      if (positioned) {
        std::iota(problem.positions.k.begin() + b * M, problem.positions.k.begin() + (b + 1) * M,
                  int64_t{0});
      }
      continue;
    }
    const int32_t* qs = in.q_segments.data<int32_t>() + b * in.q_segments.stride(0);
    const int32_t* ks = in.k_segments.data<int32_t>() + b * in.k_segments.stride(0);
    std::iota(order.begin(), order.end(), int64_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t x, int64_t y) { return ks[x] < ks[y]; });
    segments.clear();
    for (int64_t i = 0; i < N; ++i) ++segments[qs[i]].queries;
    for (int64_t at = 0; at < M; ++at) {
      Segment& s = segments[ks[order[at]]];
      if (s.keys == 0) {
        s.first = at;
      } else {
        s.together = s.together && order[at] == order[at - 1] + 1;
      }
      ++s.keys;
    }
    bool scattered = false;
    for (const auto& [id, s] : segments) scattered = scattered || (s.queries > 0 && !s.together);
    mask.scattered_batch[b] = scattered;
    if (!mask.scattered) {
      mask.scattered = scattered;
      if (mask.scattered) {
        mask.q_segment.assign(B * N, 0);
        mask.k_segment.assign(B * M, 0);
        mask.k_local.assign(B * M, 0);
        mask.local_begin.assign(B * N, 0);
        mask.local_end.assign(B * N, 0);
        b = -1;  // the earlier batches too: start over, now keeping local numbers
        continue;
      }
    }
    for (int64_t i = 0; i < N; ++i) {
      Segment& s = segments[qs[i]];
      const int64_t local = s.next_query++;
      Range r = local_range(spec, local, s.queries, s.keys, past);
      // key_lengths hides a tail of the segment's keys, which ascend.
      const auto first_key = order.begin() + s.first;
      r.end = std::min<int64_t>(
          r.end, std::lower_bound(first_key, first_key + s.keys, length) - first_key);
      if (r.begin >= r.end) r = {0, 0};
      if (r.begin < r.end) {
        put(i, {order[s.first + r.begin], order[s.first + r.end - 1] + 1});
      } else {
        put(i, {0, 0});
      }
      if (mask.scattered) {
        mask.q_segment[b * N + i] = qs[i];
        mask.local_begin[b * N + i] = r.begin;
        mask.local_end[b * N + i] = r.end;
      }
      if (positioned) {
        problem.positions.q[b * N + i] = position(align, local, s.queries, s.keys, past);
      }
    }
    for (int64_t at = 0; at < M; ++at) {
      const int64_t j = order[at];
      const int64_t local = at - segments[ks[j]].first;
      if (mask.scattered) {
        mask.k_segment[b * M + j] = ks[j];
        mask.k_local[b * M + j] = local;
      }
      if (positioned) problem.positions.k[b * M + j] = local;
    }
  }
}

}  // namespace foci
