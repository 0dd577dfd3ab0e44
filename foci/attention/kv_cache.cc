// The cache: room, appending, rolling, and attention of the newest queries to what it holds.
#include "foci/attention/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "foci/attention/state.h"
#include "foci/core/threads.h"

namespace foci {
namespace {

constexpr int64_t kLeast = 16;                     // tokens a buffer has room for
constexpr int64_t kMostTokens = int64_t{1} << 48;  // as Plan

// Rows [0, n) of each head: from [Hk, …, D] to rows [at, at + n) of another. Rows are dense.
void copy_rows(const Tensor& from, int64_t first, int64_t n, const Tensor& to, int64_t at) {
  const size_t element = size_of(to.dtype()), row = static_cast<size_t>(to.dim(2)) * element;
  if (row == 0) return;
  const auto bytes = [&](const Tensor& t, int64_t h, int64_t r) {
    return static_cast<std::byte*>(t.raw()) +
           static_cast<size_t>(h * t.stride(0) + r * t.stride(1)) * element;
  };
  for (int64_t h = 0; h < to.dim(0); ++h) {
    if (from.stride(1) == to.dim(2)) {
      std::memmove(bytes(to, h, at), bytes(from, h, first), static_cast<size_t>(n) * row);
      continue;
    }
    for (int64_t r = 0; r < n; ++r) {
      std::memcpy(bytes(to, h, at + r), bytes(from, h, first + r), row);
    }
  }
}

void check_rows(const Tensor& t, const char* name, const Dims& shape, const char* letters,
                DType dtype) {
  require(t.defined(), "{}: no tensor was given", name);
  require(t.dtype() == dtype, "{}: {} arrived, the cache holds {}", name, name_of(t.dtype()),
          name_of(dtype));
  require(t.rank() == 4, "{}: shape {} arrived, {} is right", name, t.shape(), letters);
  for (int d : {1, 3}) {
    require(t.dim(d) == shape[d], "{}: shape {} arrived, {} with {} {} is right", name, t.shape(),
            letters, d == 1 ? "heads" : "channels", shape[d]);
  }
  require_dense_rows(t, name);
}

// What a spec may ask of a cache.
void check_spec(const AttentionSpec& spec) {
  const auto refuse = [](const char* what) {
    throw ArgumentError(fmt::format(
        "spec: {} arrived, whose tensor is laid out by key, which a cache keeps to itself", what));
  };
  const auto check_align = [](Align align) {
    require(align != Align::top_left,
            "spec.masks: align top-left arrived, but queries of a cache stand at its end; use "
            "bottom-right or past");
  };
  for (const Mask& mask : spec.masks) {
    std::visit(overloaded{[&](const Causal& m) { check_align(m.align); },
                          [&](const Window& m) { check_align(m.align); },
                          [&](const KeyLengths&) { refuse("the mask key_lengths"); },
                          [&](const Segments&) { refuse("the mask segments"); },
                          [&](const Keep&) { refuse("the mask keep"); }},
               mask);
  }
  for (const Bias& bias : spec.biases) {
    std::visit(overloaded{[&](const TensorBias&) { refuse("the bias tensor"); },
                          [](const Alibi&) {}, [](const Relative1D&) {},
                          [&](const Relative2D&) { refuse("the bias relative2d"); }},
               bias);
  }
  const double p = spec.dropout ? spec.dropout->p : 0;
  require(p == 0, "spec.dropout: p = {} arrived, but a cache is for inference", p);
}

bool is_sparse(const Normalizer& normalizer) {
  return std::visit(
      overloaded{[](const Softmax&) { return false; }, [](const Sparsemax&) { return true; },
                 [](const Entmax&) { return true; }, [](const TopK&) { return false; }},
      normalizer);
}

}  // namespace

// Tokens [begin, begin + position − first) of the buffers k [Hk,capacity,D] and v [Hk,capacity,Dv].
struct KvCache::Sequence {
  Tensor k, v;
  int64_t begin = 0;
  int64_t first = 0, position = 0;
  int64_t length() const { return position - first; }
  int64_t capacity() const { return k.defined() ? k.dim(1) : 0; }
};

// A batch entry of a call.
struct KvCache::Entry {
  int64_t sequence, count;
};

// What was moved from has no sequences, so that using it is refused like any other wrong number.
KvCache::KvCache(KvCache&& other) noexcept
    : shape_(other.shape_), window_(other.window_), sequences_(std::move(other.sequences_)) {
  other.shape_.sequences = 0;
}
KvCache& KvCache::operator=(KvCache&& other) noexcept {
  if (this == &other) return *this;
  shape_ = other.shape_;
  window_ = other.window_;
  sequences_ = std::move(other.sequences_);
  other.shape_.sequences = 0;
  return *this;
}
KvCache::~KvCache() = default;

KvCache::KvCache(const KvCacheShape& shape, std::optional<int64_t> window)
    : shape_(shape), window_(window) {
  const std::pair<const char*, int64_t> sizes[] = {
      {"sequences", shape.sequences}, {"D", shape.D}, {"Dv", shape.Dv}};
  for (const auto& [name, n] : sizes) {
    require(n >= 0, "shape.{}: {} arrived, a size is >= 0", name, n);
  }
  require(shape.Hk >= 1, "shape.Hk: {} key/value heads arrived, at least 1 is needed", shape.Hk);
  require(shape.dtype == DType::f32 || shape.dtype == DType::f16 || shape.dtype == DType::bf16,
          "shape.dtype: {} arrived, a cache holds float32, float16 or bfloat16",
          name_of(shape.dtype));
  require(shape.sequences < int64_t{1} << 32,
          "shape.sequences: {} arrived, there may be fewer than 2^32", shape.sequences);
  check_product("keys [sequences, Hk, D]", {shape.sequences, shape.Hk, shape.D});
  check_product("values [sequences, Hk, Dv]", {shape.sequences, shape.Hk, shape.Dv});
  require(!window || (*window >= 1 && *window <= kMostTokens),
          "window: {} arrived, a token sees at least itself, and at most 2^48", window.value_or(0));
  sequences_.resize(static_cast<size_t>(shape.sequences));
}

const KvCache::Sequence& KvCache::sequence(int64_t s) const {
  require(s >= 0 && s < shape_.sequences, "sequence: {} arrived, the cache has sequences [0, {})",
          s, shape_.sequences);
  return sequences_[static_cast<size_t>(s)];
}

int64_t KvCache::position(int64_t s) const {
  return sequence(s).position;
}
int64_t KvCache::first(int64_t s) const {
  return sequence(s).first;
}

Tensor KvCache::keys(int64_t s) const {
  const Sequence& q = sequence(s);
  if (!q.k.defined()) return Tensor::empty({shape_.Hk, 0, shape_.D}, shape_.dtype);
  return q.k.slice(1, q.begin, q.begin + q.length());
}
Tensor KvCache::values(int64_t s) const {
  const Sequence& q = sequence(s);
  if (!q.v.defined()) return Tensor::empty({shape_.Hk, 0, shape_.Dv}, shape_.dtype);
  return q.v.slice(1, q.begin, q.begin + q.length());
}

size_t KvCache::bytes() const {
  size_t sum = 0;
  for (const Sequence& s : sequences_) {
    if (s.k.defined()) sum += s.k.nbytes() + s.v.nbytes();
  }
  return sum;
}

std::vector<KvCache::Entry> KvCache::entries(const KvRows& rows, int64_t batch, int64_t n,
                                             const char* name) const {
  const auto named = static_cast<int64_t>(rows.sequences.size());
  const auto counted = static_cast<int64_t>(rows.counts.size());
  require(rows.sequences.empty() ? batch == shape_.sequences : batch == named,
          "{}: {} entries arrived for {} sequences", name, batch,
          rows.sequences.empty() ? shape_.sequences : named);
  require(rows.counts.empty() || counted == batch, "rows.counts: {} counts arrived for {} entries",
          counted, batch);
  std::vector<uint8_t> taken(sequences_.size());
  std::vector<Entry> list;
  for (int64_t e = 0; e < batch; ++e) {
    const int64_t s = rows.sequences.empty() ? e : rows.sequences[e];
    require(s >= 0 && s < shape_.sequences,
            "rows.sequences[{}]: {} arrived, the cache has sequences [0, {})", e, s,
            shape_.sequences);
    require(!taken[s], "rows.sequences[{}]: sequence {} arrived a second time", e, s);
    taken[s] = 1;
    const int64_t count = rows.counts.empty() ? n : rows.counts[e];
    require(count >= 0 && count <= n, "rows.counts[{}]: {} arrived, {} has {} rows", e, count, name,
            n);
    list.push_back({s, count});
  }
  return list;
}

void KvCache::append(const Tensor& k, const Tensor& v, const KvRows& rows) {
  check_rows(k, "k", {0, shape_.Hk, 0, shape_.D}, "[E, Hk, n, D]", shape_.dtype);
  check_rows(v, "v", {0, shape_.Hk, 0, shape_.Dv}, "[E, Hk, n, Dv]", shape_.dtype);
  require(v.dim(0) == k.dim(0) && v.dim(2) == k.dim(2),
          "v: shape {} arrived, {} entries of {} rows are right, as for k", v.shape(), k.dim(0),
          k.dim(2));
  const std::vector<Entry> list = entries(rows, k.dim(0), k.dim(2), "k");
  for (const Entry& e : list) {
    const Sequence& s = sequences_[e.sequence];
    require(!s.k.shares_storage(k) && !s.v.shares_storage(v) && !s.k.shares_storage(v) &&
                !s.v.shares_storage(k),
            "k: a view of sequence {} of this cache arrived; append a clone()", e.sequence);
    require(e.count <= kMostTokens - s.position,
            "k: {} rows arrived for sequence {}, which then has more than 2^48 tokens", e.count,
            e.sequence);
  }

  // What each sequence will be; the cache itself is changed when nothing can fail any more.
  std::vector<Sequence> next;
  next.reserve(list.size());
  for (const Entry& e : list) {
    const Sequence& old = sequences_[e.sequence];
    Sequence s = old;
    s.position += e.count;
    if (window_ && e.count > 0) s.first = std::max(s.first, old.position - (*window_ - 1));
    const int64_t needed = s.length();
    const bool wasteful = window_ && old.capacity() / 8 > std::max(needed, kLeast);
    if (needed > old.capacity() || wasteful) {
      const int64_t room = std::max(
          {window_ ? 2 * needed : needed, window_ ? int64_t{0} : 2 * old.capacity(), kLeast});
      check_product("keys [Hk, tokens, D]", {shape_.Hk, room, shape_.D});
      check_product("values [Hk, tokens, Dv]", {shape_.Hk, room, shape_.Dv});
      s.k = Tensor::empty({shape_.Hk, room, shape_.D}, shape_.dtype);
      s.v = Tensor::empty({shape_.Hk, room, shape_.Dv}, shape_.dtype);
      s.begin = 0;
    } else {
      s.begin += s.first - old.first;
      if (s.begin + needed > old.capacity()) s.begin = 0;  // moved to the front
    }
    next.push_back(std::move(s));
  }

  for (size_t e = 0; e < list.size(); ++e) {
    const auto b = static_cast<int64_t>(e);
    Sequence& s = next[e];
    Sequence& old = sequences_[list[e].sequence];
    const int64_t kept = old.position - s.first, from = old.begin + s.first - old.first;
    if (kept > 0 && (!s.k.shares_storage(old.k) || s.begin != from)) {
      copy_rows(old.k, from, kept, s.k, s.begin);
      copy_rows(old.v, from, kept, s.v, s.begin);
    }
    if (list[e].count > 0) {
      copy_rows(k.select(0, b), 0, list[e].count, s.k, s.begin + kept);
      copy_rows(v.select(0, b), 0, list[e].count, s.v, s.begin + kept);
    }
    old = std::move(s);
  }
}

void KvCache::truncate(int64_t number, int64_t position) {
  const Sequence& s = sequence(number);
  require(position >= 0 && position <= s.position,
          "position: {} arrived, sequence {} has {} tokens", position, number, s.position);
  if (window_ && s.first > 0) {
    const int64_t least = s.first + *window_ - 1;
    require(position >= least,
            "position: {} arrived, but sequence {} holds tokens from {} on, and a window of {} "
            "needs {} or more",
            position, number, s.first, *window_, least);
  }
  sequences_[number].position = position;
}

void KvCache::reset(int64_t number) {
  (void)sequence(number);
  sequences_[number] = {};
}

void KvCache::check_whole_windows(const std::vector<Entry>& list) const {
  for (const Entry& e : list) {
    const Sequence& s = sequences_[e.sequence];
    require(e.count <= s.length(), "q: {} queries arrived for sequence {}, which holds {} tokens",
            e.count, e.sequence, s.length());
    if (!window_ || s.first == 0) continue;
    const int64_t whole = s.position - s.first - (*window_ - 1);
    require(e.count <= whole,
            "q: {} queries arrived for sequence {}, but only the last {} tokens have their window "
            "of {} still held",
            e.count, e.sequence, whole, *window_);
  }
}

AttentionOutputs KvCache::attend(const AttentionSpec& spec, const Tensor& q,
                                 const AttentionInputs& tables, const KvRows& rows,
                                 const PlanOptions& options) const {
  require(q.defined() && q.rank() == 4, "q: shape {} arrived, [E, H, n, D] is right",
          q.defined() ? q.shape().str() : "none");
  check_rows(q, "q", {0, q.dim(1), 0, shape_.D}, "[E, H, n, D]", shape_.dtype);
  check_spec(spec);
  const int64_t E = q.dim(0), H = q.dim(1), n = q.dim(2);
  const std::vector<Entry> list = entries(rows, E, n, "q");
  check_whole_windows(list);
  AttentionSpec own = spec;
  if (window_) own.masks.emplace_back(Window{*window_ - 1, std::nullopt, Align::bottom_right});
  const bool past = bias_align(own) == Align::past;

  int64_t longest = 0;
  std::vector<Bound> bound;
  for (int64_t e = 0; e < E; ++e) {
    const Sequence& s = sequences_[list[e].sequence];
    longest = std::max(longest, s.length());
    AttentionInputs in;
    in.q = q.slice(0, e, e + 1).slice(2, 0, list[e].count);
    in.k = keys(list[e].sequence).unsqueeze(0);
    in.v = values(list[e].sequence).unsqueeze(0);
    in.slopes = tables.slopes;
    in.table1d = tables.table1d;
    in.score_w = tables.score_w;
    if (past) in.past_lengths = Tensor::full({1}, double(s.length() - list[e].count), DType::i64);
    const AttentionShape shape{.B = 1,
                               .H = H,
                               .Hk = shape_.Hk,
                               .N = list[e].count,
                               .M = s.length(),
                               .D = shape_.D,
                               .Dv = shape_.Dv,
                               .dtype = shape_.dtype};
    bound.push_back(Plan::make(own, shape, options).bind(in));
  }
  check_product("y [E, H, n, Dv]", {E, H, n, shape_.Dv});
  check_product("keys [E, H, tokens]", {E, H, longest});

  constexpr double kInf = std::numeric_limits<double>::infinity();
  AttentionOutputs out;
  const Statistics& want = spec.statistics;
  out.y = Tensor::zeros({E, H, n, shape_.Dv}, shape_.dtype);
  out.row_stat = Tensor::full({E, H, n}, is_sparse(spec.normalizer) ? kInf : -kInf);
  if (want.has(Statistic::entropy)) out.entropy = Tensor::zeros({E, H, n});
  if (want.has(Statistic::max_weight)) {
    out.max_weight = Tensor::zeros({E, H, n});
    out.max_key = Tensor::full({E, H, n}, -1, DType::i64);
  }
  if (want.has(Statistic::support)) out.support = Tensor::zeros({E, H, n});
  if (want.has(Statistic::coverage)) out.coverage = Tensor::zeros({E, H, longest});

  parallel_for(E, [&](int64_t e) {
    const int64_t count = list[e].count;
    AttentionOutputs one;
    one.y = out.y.slice(0, e, e + 1).slice(2, 0, count);
    bound[e].forward(one);
    const auto put = [&](const Tensor& from, const Tensor& to) {
      if (to.defined()) to.slice(0, e, e + 1).slice(2, 0, from.dim(2)).copy_from(from);
    };
    put(one.row_stat, out.row_stat);
    put(one.entropy, out.entropy);
    put(one.max_weight, out.max_weight);
    put(one.max_key, out.max_key);
    put(one.support, out.support);
    put(one.coverage, out.coverage);
  });
  return out;
}

}  // namespace foci
