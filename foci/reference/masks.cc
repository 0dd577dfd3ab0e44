// Positions counted inside segments, and every mask asked about one pair.
#include "foci/reference/masks.h"

#include <cmath>
#include <limits>
#include <map>

#include "foci/core/rng.h"

namespace foci::reference {

Masks::Masks(const Problem& problem) : p_(problem) {
  const bool segmented = has_mask<Segments>(p_.spec);
  for (int64_t b = 0; b < p_.B; ++b) {
    const auto segment = [&](const Tensor& ids, int64_t x, int64_t n) {
      return segmented ? ids.data<int32_t>()[b * n + x] : 0;
    };
    std::map<int32_t, Place> seen;  // index: unused; how many of each segment came so far
    for (int64_t j = 0; j < p_.M; ++j) {
      key_index_.push_back(seen[segment(p_.k_segments, j, p_.M)].keys++);
    }
    for (int64_t i = 0; i < p_.N; ++i) {
      queries_.push_back({.index = seen[segment(p_.q_segments, i, p_.N)].queries++});
    }
    for (int64_t i = 0; i < p_.N; ++i) {
      const Place& whole = seen[segment(p_.q_segments, i, p_.N)];
      queries_[b * p_.N + i].queries = whole.queries;
      queries_[b * p_.N + i].keys = whole.keys;
    }
  }
}

int64_t Masks::position(Align align, int64_t b, const Place& place) const {
  switch (align) {
    case Align::bottom_right:
      return place.index + place.keys - place.queries;
    case Align::top_left:
      return place.index;
    case Align::past:
      return place.index + p_.past_lengths.data<int64_t>()[b];
  }
  return 0;
}

bool Masks::allow(int64_t b, int64_t h, int64_t i, int64_t j) const {
  const Place& place = queries_[b * p_.N + i];
  const int64_t key = key_index_[b * p_.M + j];
  for (const Mask& mask : p_.spec.masks) {
    const bool allowed = std::visit(
        overloaded{[&](const Causal& c) { return key <= position(c.align, b, place); },
                   [&](const Window& w) {
                     const int64_t ahead = key - position(w.align, b, place);
                     return (!w.left || -ahead <= *w.left) && (!w.right || ahead <= *w.right);
                   },
                   [&](const KeyLengths&) { return j < p_.key_lengths.data<int64_t>()[b]; },
                   [&](const Segments&) {
                     return p_.q_segments.data<int32_t>()[b * p_.N + i] ==
                            p_.k_segments.data<int32_t>()[b * p_.M + j];
                   },
                   [&](const Keep&) { return element<bool>(p_.keep, b, h, i, j); }},
        mask);
    if (!allowed) return false;
  }
  return true;
}

bool Masks::sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
  if (!allow(b, h, i, j)) return false;
  if (p_.bias.defined() &&
      element<double>(p_.bias, b, h, i, j) == -std::numeric_limits<double>::infinity()) {
    return false;
  }
  if (p_.spec.dropout && p_.spec.dropout->place == DropoutPlace::keys) {
    const Dropout& d = *p_.spec.dropout;
    return dropout_bits(d.seed, b, h, i, j) >= dropout_threshold(d.p);
  }
  return true;
}

int64_t Masks::distance(int64_t b, int64_t i, int64_t j) const {
  return key_index_[b * p_.M + j] - position(bias_align(p_.spec), b, queries_[b * p_.N + i]);
}

int64_t Masks::grid_position(int64_t b, int64_t i) const {
  return position(bias_align(p_.spec), b, {.index = i, .queries = p_.N, .keys = p_.M});
}

}  // namespace foci::reference
