// Cutting a problem into sequences and strips.
#include <algorithm>
#include <unordered_map>

#include "foci/attention/fused.h"
#include "foci/core/rng.h"

namespace foci::fused {

std::vector<Sequence> sequences_of(const Problem& p) {
  const int64_t B = p.shape.B, N = p.shape.N, M = p.shape.M;
  std::vector<Sequence> list;
  struct Keys {
    int64_t first, count;
    bool read;  // by an earlier run of queries
  };
  std::unordered_map<int32_t, Keys> keys;
  const bool segmented = has_mask<Segments>(p.spec);
  for (int64_t b = 0; b < B; ++b) {
    // A batch entry's cuts depend on itself alone.
    if (!segmented || p.mask.scattered_batch[b]) {
      list.push_back({b, 0, N, 0, M});
      continue;
    }
    const Tensor q = p.in.q_segments.select(0, b).contiguous();
    const Tensor k = p.in.k_segments.select(0, b).contiguous();
    const auto qs = q.span<int32_t>(), ks = k.span<int32_t>();
    keys.clear();
    for (int64_t j = 0; j < M; ++j)
      ++keys.try_emplace(ks[j], Keys{j, 0, false}).first->second.count;
    const size_t before = list.size();
    for (int64_t i = 0; i < N;) {
      int64_t end = i + 1;
      while (end < N && qs[end] == qs[i]) ++end;
      const auto found = keys.find(qs[i]);
      const Keys own = found == keys.end() ? Keys{0, 0, false} : found->second;
      if (own.read) {
        // Queries that do not lie together would each take partial sums over all of their keys.
        list.resize(before);
        list.push_back({b, 0, N, 0, M});
        break;
      }
      if (found != keys.end()) found->second.read = true;
      list.push_back({b, i, end - i, own.first, own.count});
      i = end;
    }
  }
  return list;
}

kernels::RowMap row_map_of(const AttentionSpec& spec, int64_t head) {
  using kernels::RowMap;
  using kernels::RowNormalizer;
  return std::visit(
      overloaded{
          [](const Softmax&) { return RowMap{}; },
          [](const Sparsemax&) {
            return RowMap{RowNormalizer::sparsemax, 2};
          },
          [&](const Entmax& e) {
            const double alpha =
                e.per_head.empty() ? e.alpha : e.per_head[static_cast<size_t>(head)];
            return RowMap{alpha == 2 ? RowNormalizer::sparsemax : RowNormalizer::entmax, alpha};
          },
          [](const TopK& t) {
            return RowMap{RowNormalizer::top_k, 0, t.k};
          }},
      spec.normalizer);
}

kernels::RowMap largest_row_map(const AttentionSpec& spec) {
  const auto* e = std::get_if<Entmax>(&spec.normalizer);
  if (e == nullptr || e->per_head.empty()) return row_map_of(spec, 0);
  // Above 2 more is kept of a row than below.
  const auto largest = std::max_element(e->per_head.begin(), e->per_head.end());
  return row_map_of(spec, largest - e->per_head.begin());
}

namespace {

kernels::StripBias strip_bias(const Problem& p, int64_t b, int64_t h, int64_t row, int64_t key) {
  const Dims& s = p.bias.strides();
  kernels::StripBias bias;
  bias.dtype = p.bias.dtype();
  bias.query_stride = s[2];
  bias.key_stride = s[3];
  bias.data =
      static_cast<const std::byte*>(p.bias.raw()) +
      (b * s[0] + h * s[1] + row * s[2] + key * s[3]) * static_cast<int64_t>(size_of(bias.dtype));
  return bias;
}

kernels::StripPositions strip_positions(const Problem& p, const Operands& o, const Sequence& s,
                                        int64_t h, int64_t row) {
  const int64_t b = s.batch, N = p.shape.N, M = p.shape.M;
  kernels::StripPositions x;
  if (!o.query_position.empty() || !o.key_position.empty()) {
    x.query = o.query_position.data() + b * N + row;
    x.key = o.key_position.data() + b * M + s.key_begin;
  }
  if (find_bias<Alibi>(p.spec)) {
    x.alibi = true;
    x.slope = p.in.slopes.data<float>()[h];
  }
  if (const auto* r = find_bias<Relative1D>(p.spec)) {
    x.table1d = p.in.table1d.data<float>() + h * p.in.table1d.stride(0);
    x.max_distance = static_cast<int32_t>(r->max_distance);
  }
  if (const auto* r = find_bias<Relative2D>(p.spec)) {
    x.table2d = p.in.table2d.data<float>() + h * p.in.table2d.stride(0);
    x.query_cell = o.query_cell.data() + b * N + row;
    x.key_cell = o.key_cell.data() + s.key_begin;
    x.centre = static_cast<int32_t>((r->height - 1) * (2 * r->width - 1) + r->width - 1);
  }
  return x;
}

}  // namespace

void make_strip(const Problem& p, const Operands& o, const Sequence& s, int64_t h, int64_t first,
                int64_t count, kernels::Strip& strip) {
  const int64_t N = p.shape.N, M = p.shape.M;
  const int64_t b = s.batch, hk = h / (p.shape.H / p.shape.Hk), row = s.query_begin + first;
  strip.D = p.shape.D;
  strip.Dv = p.shape.Dv;
  std::visit(overloaded{[&](const Dot&) { strip.score = kernels::ScoreKind::dot; },
                        [&](const Cosine&) { strip.score = kernels::ScoreKind::dot; },
                        [&](const L2& l2) {
                          strip.score = kernels::ScoreKind::l2;
                          strip.gamma = static_cast<float>(l2.gamma);
                        },
                        [&](const Additive&) {
                          strip.score = kernels::ScoreKind::additive;
                          strip.score_w = p.in.score_w.data<float>();
                          const int64_t D = p.shape.D, q = (b * p.shape.H + h) * N + row;
                          const int64_t k = (b * p.shape.Hk + hk) * M + s.key_begin;
                          strip.q_exp = o.q_exp.data<float>() + q * D;
                          strip.k_exp = o.k_exp.data<float>() + k * D;
                          strip.q_size = o.q_size.data() + q;
                          strip.k_size = o.k_size.data() + k;
                        }},
             p.spec.score);
  strip.scale = p.scale[h];
  strip.softcap = static_cast<float>(p.spec.softcap.value_or(0));
  strip.careful = o.careful;
  strip.q = o.q.data<float>() + b * o.q.stride(0) + h * o.q.stride(1) + row * o.q.stride(2);
  strip.q_stride = o.q.stride(2);
  strip.k =
      o.k.data<float>() + b * o.k.stride(0) + hk * o.k.stride(1) + s.key_begin * o.k.stride(2);
  strip.k_stride = o.k.stride(2);
  strip.v =
      o.v.data<float>() + b * o.v.stride(0) + hk * o.v.stride(1) + s.key_begin * o.v.stride(2);
  strip.v_stride = o.v.stride(2);
  strip.boxes = nullptr;
  strip.box_skew = 0;
  if (o.boxes.defined()) {
    strip.boxes = o.boxes.data<float>() + b * o.boxes.stride(0) + hk * o.boxes.stride(1) +
                  s.key_begin / kernels::kBoxKeys * o.boxes.stride(2);
    strip.box_skew = s.key_begin % kernels::kBoxKeys;
  }
  kernels::LaneMask& mask = strip.mask;
  mask = {};
  mask.lanes = static_cast<int>(count);
  const int64_t at = b * N + row;
  for (int64_t lane = 0; lane < count; ++lane) {
    // An empty range may stand anywhere; at the sequence's start it stays inside.
    const bool empty = p.mask.begin[at + lane] >= p.mask.end[at + lane];
    mask.begin[lane] = empty ? 0 : p.mask.begin[at + lane] - s.key_begin;
    mask.end[lane] = empty ? 0 : p.mask.end[at + lane] - s.key_begin;
  }
  if (p.mask.keep.defined()) {
    const Dims& strides = p.mask.keep.strides();
    mask.keep = reinterpret_cast<const uint8_t*>(p.mask.keep.data<bool>()) + b * strides[0] +
                h * strides[1] + row * strides[2] + s.key_begin * strides[3];
    mask.keep_query_stride = strides[2];
    mask.keep_key_stride = strides[3];
  }
  if (p.mask.scattered && p.mask.scattered_batch[b]) {
    mask.key_segment = p.mask.k_segment.data() + b * M;
    mask.key_local = p.mask.k_local.data() + b * M;
    mask.query_segment = p.mask.q_segment.data() + at;
    mask.local_begin = p.mask.local_begin.data() + at;
    mask.local_end = p.mask.local_end.data() + at;
  }
  if (p.bias.defined()) {
    strip.bias = strip_bias(p, b, h, row, s.key_begin);
    if (o.bias_masks) mask.bias = strip.bias;
  }
  strip.positions = strip_positions(p, o, s, h, row);
  strip.dropout = {};
  if (p.spec.dropout) {
    kernels::StripDropout drop{.threshold = dropout_threshold(p.spec.dropout->p),
                               .seed = p.spec.dropout->seed,
                               .batch = b,
                               .head = h,
                               .query = row,
                               .key = s.key_begin};
    (p.spec.dropout->place == DropoutPlace::keys ? mask.drop_key : strip.dropout) = drop;
  }
}

}  // namespace foci::fused
