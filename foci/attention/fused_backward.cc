// Fused backward: tiles of strips into partial dK and dV, summed in a fixed order.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>

#include "foci/attention/fused.h"
#include "foci/core/threads.h"
#include "foci/kernels/scratch.h"

namespace foci {
namespace {

using fused::Chunk;
using fused::Operands;
using fused::Sequence;
using fused::Wave;

// dx of x̂ = x/‖x‖ from dx̂, in place: (dx̂ − x̂ (x̂·dx̂))/‖x‖.
void project_rows(const Tensor& unit, const Tensor& inverse, const Tensor& grad) {
  const int64_t rows = inverse.numel(), depth = unit.dim(3), N = unit.dim(2), heads = unit.dim(1);
  parallel_for((rows + 255) / 256, [&](int64_t block) {
    for (int64_t r = block * 256; r < std::min(rows, (block + 1) * 256); ++r) {
      const float* u = unit.data<float>() + r * depth;
      float* g = grad.data<float>() + r / N / heads * grad.stride(0) +
                 r / N % heads * grad.stride(1) + r % N * grad.stride(2);
      // A key without a gradient keeps none, whatever it holds: it may be masked and NaN.
      if (std::all_of(g, g + depth, [](float x) { return x == 0; })) continue;
      double dot = 0;
      for (int64_t i = 0; i < depth; ++i) dot += double{u[i]} * g[i];
      const double inv = inverse.data<double>()[r];
      for (int64_t i = 0; i < depth; ++i) {
        g[i] = inv == 0 ? 0 : static_cast<float>((g[i] - u[i] * dot) * inv);
      }
    }
  });
}

// What backward adds up beside dQ, dK and dV, before it is reduced to the gradients' own shapes.
struct Sums {
  Tensor scale, slope, alpha;   // [B,H,N], where wanted
  std::vector<double> keys;     // per chunk and head of the group: [keys of the sequence]
  std::vector<double> tables;   // likewise: [size of table1d + table2d], of one wave of chunks
  std::vector<double> score_w;  // per chunk: [D]
};

double sum_of(const float* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}

// Chunks whose tables are held at once: their partial sums must not grow with the batch.
constexpr int64_t kTableWave = 32;
// Keys whose partial sums are added up by one task.
constexpr int64_t kAddKeys = 1024;
// Rows at a multiple of this distance, 2 KB, fall into one or two groups of L1 cache sets.
constexpr int64_t kBadStride = 512;
// Strips that leave parts at once.
constexpr int64_t kMostParts = 256;

class Backward {
 public:
  Backward(const Problem& problem, const AttentionOutputs& saved, const AttentionUpstream& up,
           const AttentionWanted& wanted, AttentionGradients& grads)
      : p_(problem),
        saved_(saved),
        up_(up),
        grads_(grads),
        kernels_(kernels::attention_kernels(problem.target)),
        map_(fused::largest_row_map(problem.spec)),
        B_(problem.shape.B),
        H_(problem.shape.H),
        Hk_(problem.shape.Hk),
        N_(problem.shape.N),
        M_(problem.shape.M),
        D_(problem.shape.D),
        Dv_(problem.shape.Dv),
        group_(H_ / Hk_),
        operands_(fused::operands_of(problem, up.dy, false, saved.ordinary)),
        sequences_(fused::sequences_of(problem)),
        bias_(fused::bias_gradient_of(problem, wanted)),
        wants_score_w_(wanted.score_w && grads.dscore_w.defined()),
        products_(wanted.qkv || wants_score_w_),
        dk_stride_(round(D_)),
        dv_stride_(round(Dv_)) {
    const Dims rows{B_, H_, N_};
    if (wanted.scale && grads.dscale.defined()) sums_.scale = Tensor::zeros(rows);
    if (wanted.slopes && grads.dslopes.defined()) sums_.slope = Tensor::zeros(rows);
    if (wanted.alpha && grads.dalpha.defined()) sums_.alpha = Tensor::zeros(rows);
    table1d_ = wanted.tables && grads.dtable1d.defined() ? p_.in.table1d.dim(1) : 0;
    table2d_ =
        wanted.tables && grads.dtable2d.defined() ? p_.in.table2d.dim(1) * p_.in.table2d.dim(2) : 0;
    // A NaN row has NaN weights at masked keys too, which must be stepped over.
    operands_.careful = operands_.careful || (!saved.ordinary && any_nan(saved.row_stat));
    cut();
  }

  void run() {
    zeros_.assign(std::max(dk_stride_, dv_stride_), 0.0f);
    const kernels::Scratch partial(chunks_.most_partial), joined(chunks_.most_joined);
    partial_ = partial.get();
    joined_ = joined.get();
    dq_ =
        grads_.dq.defined() ? grads_.dq : (products_ ? Tensor::empty({B_, H_, N_, D_}) : Tensor());
    // Keys that no query's sequence has.
    int64_t read = 0;
    for (const Sequence& s : sequences_) read += s.keys;
    if (grads_.dk.defined() && (N_ == 0 || read < B_ * M_)) {
      grads_.dk.fill(0);
      grads_.dv.fill(0);
    }
    const fused::TileContext context{p_, operands_, saved_, up_};
    const bool tables = table1d_ + table2d_ > 0;
    for (const Wave& wave : chunks_.waves) {
      if (tables) sums_.tables.assign(wave.at_once * group_ * (table1d_ + table2d_), 0.0);
      if (wave.panel < wave.keys) {
        constants_.resize(chunks_.list[wave.end - 1].end * group_);
      }
      for (int64_t key = 0; key == 0 || key < wave.keys; key += wave.panel) {
        for (int64_t at = wave.begin; at < wave.end; at += wave.at_once) {
          const int64_t end = std::min(at + wave.at_once, wave.end);
          if (wave.parts) {
            chunk_by_parts(context, wave);
          } else {
            parallel_for(end - at, [&](int64_t n) { chunk(context, wave, at + n, n, key); });
          }
          if (!grads_.dk.defined()) continue;
          wave.joins ? join_keys(wave, at, end, key) : add_keys(wave, key);
        }
        if (wave.panel == 0) break;
      }
      if (tables) add_tables(wave);
    }
    if (operands_.q_inverse_norm.defined() && grads_.dq.defined()) {
      project_rows(operands_.q, operands_.q_inverse_norm, grads_.dq);
      project_rows(operands_.k, operands_.k_inverse_norm, grads_.dk);
    }
    reduce();
    if (bias_ == fused::BiasGradient::shared) {
      fused::add_shared_bias_gradient(context, sequences_, grads_.dbias);
    }
  }

 private:
  int64_t round(int64_t n) const {
    return (n + kernels_.lanes - 1) / kernels_.lanes * kernels_.lanes;
  }

  static bool any_nan(const Tensor& t) {
    const Tensor flat = t.contiguous();
    const float* x = flat.data<float>();
    return std::any_of(x, x + flat.numel(), [](float v) { return std::isnan(v); });
  }

  // Whether the first chunks may add to dK and dV themselves: rows as the kernels want them, and
  // not so far apart that they fight for few cache sets. Parts are added to dense rows alone.
  bool adds_in_place(bool parts) const {
    const auto serves = [&](const Tensor& t, int64_t depth) {
      const int64_t row = t.stride(2);
      return reinterpret_cast<uintptr_t>(t.raw()) % (kernels_.lanes * sizeof(float)) == 0 &&
             t.stride(0) % kernels_.lanes == 0 && t.stride(1) % kernels_.lanes == 0 &&
             row % kernels_.lanes == 0 && (row == depth || (!parts && row % kBadStride != 0));
    };
    return grads_.dk.defined() && D_ == dk_stride_ && Dv_ == dv_stride_ && serves(grads_.dk, D_) &&
           serves(grads_.dv, Dv_);
  }

  void cut() {
    const bool tables = table1d_ + table2d_ > 0;
    const bool row_sums = sums_.scale.defined() || sums_.slope.defined();
    // A strip that finds no room for its part is solved again: nothing else may be added to twice.
    const bool shared_sums =
        tables || bias_ == fused::BiasGradient::keys || bias_ == fused::BiasGradient::matrix;
    fused::ChunkRules rules = fused::chunk_rules(p_.spec, group_, row_sums, shared_sums);
    if (tables) rules.wave = kTableWave;
    const int64_t row = products_ ? dk_stride_ + dv_stride_ : 0;
    chunks_.cut(sequences_, Hk_, kernels_.width, rules, row, adds_in_place(rules.parts));
    for (const Sequence& s : sequences_) most_keys_ = std::max(most_keys_, s.keys);
    if (bias_ == fused::BiasGradient::keys) {
      int64_t at = 0;
      for (const Wave& wave : chunks_.waves) {
        for (int64_t k = wave.begin; k < wave.end; ++k) {
          Chunk& c = chunks_.list[k];
          if (!c.opens) {
            c.keys_at = chunks_.list[k - wave.at_once].keys_at;
            continue;
          }
          c.keys_at = at;
          at += group_ * sequences_[c.sequence].keys;
        }
      }
      sums_.keys.assign(at, 0.0);
    }
    if (wants_score_w_) sums_.score_w.assign(chunks_.list.size() * D_, 0.0);
  }

  // dK's and dV's rows from key `key` of the chunk's sequence on, in place or partial.
  struct KeyRows {
    float* dk;
    int64_t dk_stride;
    float* dv;
    int64_t dv_stride;
    int64_t count;  // of the panel
  };
  KeyRows rows_in_place(const Chunk& c, int64_t key, const Wave& wave) const {
    const Sequence& s = sequences_[c.sequence];
    const auto at = [&](const Tensor& t) {
      return t.data<float>() + s.batch * t.stride(0) + c.kv_head * t.stride(1) +
             (s.key_begin + key) * t.stride(2);
    };
    return {at(grads_.dk), grads_.dk.stride(2), at(grads_.dv), grads_.dv.stride(2),
            std::min(wave.panel, s.keys - key)};
  }
  KeyRows rows_of(const Chunk& c, int64_t key, const Wave& wave) const {
    if (c.partial_at < 0) return rows_in_place(c, key, wave);
    const int64_t count = std::min(wave.panel, sequences_[c.sequence].keys - key);
    float* dk = partial_ + c.partial_at;
    return {dk, dk_stride_, dk + count * dk_stride_, dv_stride_, count};
  }
  void clear(const KeyRows& rows, int64_t begin, int64_t end) const {
    const auto fill = [&](float* x, int64_t stride, int64_t depth) {
      if (stride == depth) {
        std::fill(x + begin * stride, x + end * stride, 0.0f);
        return;
      }
      // Short rows, for which calls of memset cost more than what they do.
      kernels_.add_rows(end - begin, depth, zeros_.data(), 0, x + begin * stride, stride, false);
    };
    fill(rows.dk, rows.dk_stride, dk_stride_);
    fill(rows.dv, rows.dv_stride, dv_stride_);
  }

  // Chunk `index` of a wave, task `place`, over the panel of keys from `key` on.
  void chunk(const fused::TileContext& context, const Wave& wave, int64_t index, int64_t place,
             int64_t key) {
    const Chunk& c = chunks_.list[index];
    const Sequence& s = sequences_[c.sequence];
    const int64_t tile_size = int64_t{kernels::kMaxStrips} * kernels_.width;
    const kernels::Scratch scratch(
        static_cast<int64_t>(kernels_.backward_scratch(map_, most_keys_, D_, Dv_) / sizeof(float)));
    KeyRows rows{};
    if (products_) {
      rows = rows_of(c, key, wave);
      clear(rows, 0, rows.count);
    }
    fused::Tile tile;
    for (int64_t h = c.kv_head * group_; h < (c.kv_head + 1) * group_; ++h) {
      const int64_t in_group = h - c.kv_head * group_;
      const kernels::RowMap map = fused::row_map_of(p_.spec, h);
      for (int64_t first = c.begin; first < c.end; first += tile_size) {
        load(context, s, h, first, std::min(tile_size, c.end - first), tile);
        kernels::TileGradients& g = tile.gradients;
        g.many_queries = wave.joins;
        if (products_) {
          g.dk = rows.dk;
          g.dk_stride = rows.dk_stride;
          g.dv = rows.dv;
          g.dv_stride = rows.dv_stride;
        }
        if (wave.panel < wave.keys) {
          g.key_begin = key;
          g.key_end = key + rows.count;
          g.constants = constants_.data() + in_group * s.queries + first;
          g.later_panel = key > 0;
        }
        if (bias_ == fused::BiasGradient::keys) {
          g.key_sums = sums_.keys.data() + c.keys_at + in_group * s.keys;
        }
        if (table1d_ + table2d_ > 0) {
          double* tables =
              sums_.tables.data() + (place * group_ + in_group) * (table1d_ + table2d_);
          if (table1d_ > 0) g.dtable1d = tables;
          if (table2d_ > 0) g.dtable2d = tables + table1d_;
        }
        if (wants_score_w_) g.dscore_w = sums_.score_w.data() + index * D_;
        tile.run(kernels_, map, reinterpret_cast<std::byte*>(scratch.get()));
      }
    }
  }

  // A tile with the gradients that belong to its rows alone.
  void load(const fused::TileContext& context, const Sequence& s, int64_t h, int64_t first,
            int64_t count, fused::Tile& tile) const {
    tile.load(context, s, h, first, count);
    kernels::TileGradients& g = tile.gradients;
    const int64_t i0 = s.query_begin + first;
    const int64_t row = (s.batch * H_ + h) * N_ + i0;
    const auto at = [&](const Tensor& t) { return t.defined() ? t.data<float>() + row : nullptr; };
    if (products_) {
      g.dq = dq_.data<float>() + s.batch * dq_.stride(0) + h * dq_.stride(1) + i0 * dq_.stride(2);
      g.dq_stride = dq_.stride(2);
    }
    if (bias_ == fused::BiasGradient::matrix) {
      const Tensor view = grads_.dbias.broadcast_to({B_, H_, N_, M_});
      const Dims& stride = view.strides();
      g.dbias = view.data<float>() + s.batch * stride[0] + h * stride[1] + i0 * stride[2] +
                s.key_begin * stride[3];
      g.dbias_query_stride = stride[2];
      g.dbias_key_stride = stride[3];
    }
    g.row_scale = at(sums_.scale);
    g.row_slope = at(sums_.slope);
    g.row_alpha = at(sums_.alpha);
  }

  // A long chunk of a sparse map: some strips at a time are solved, each on its own, and what they
  // add to dK and dV is kept, no more than their weights ask for; then every block of keys takes
  // its share of it, strip by strip in order. How many strips are taken at a time changes no bit.
  void chunk_by_parts(const fused::TileContext& context, const Wave& wave) {
    const Chunk& c = chunks_.list[wave.begin];
    const Sequence& s = sequences_[c.sequence];
    const int64_t width = kernels_.width, strips = (c.end - c.begin + width - 1) / width;
    const KeyRows rows = rows_of(c, 0, wave);
    const int64_t blocks = (s.keys + kAddKeys - 1) / kAddKeys;
    parallel_for(blocks, [&](int64_t block) {
      clear(rows, block * kAddKeys, std::min((block + 1) * kAddKeys, s.keys));
    });
    const int64_t least = fused::least_parts();
    // What roundings leave of dK's and then dV's rows.
    std::vector<int16_t> low(static_cast<size_t>(s.keys * (dk_stride_ + dv_stride_)));
    int16_t* const dv_low = low.data() + s.keys * dk_stride_;
    std::vector<Part> parts;
    int64_t at_once = least;
    for (int64_t at = 0; at < strips * group_; at += static_cast<int64_t>(parts.size())) {
      parts.clear();
      parts.resize(std::min(at_once, strips * group_ - at));
      std::atomic<int64_t> room = fused::kPartFloats;
      parallel_for(static_cast<int64_t>(parts.size()), [&](int64_t n) {
        const int64_t h = c.kv_head * group_ + (at + n) / strips;
        const int64_t first = c.begin + (at + n) % strips * width;
        solve_part(context, s, h, first, std::min(width, c.end - first), n < least, room, parts[n]);
      });
      int64_t largest = 1;
      for (const Part& part : parts) largest = std::max(largest, part.floats);
      at_once = std::clamp(fused::kPartFloats / largest, least, std::max(least, kMostParts));
      // Those that found no room, and what stands behind them, are solved again.
      const auto full =
          std::find_if(parts.begin(), parts.end(), [](const Part& part) { return !part.memory; });
      parts.resize(full - parts.begin());
      parallel_for(blocks, [&](int64_t block) {
        const int64_t from = block * kAddKeys, to = std::min(from + kAddKeys, s.keys);
        for (const Part& part : parts) {
          kernels_.add_part(part.part, operands_.careful, from, to, D_, Dv_, rows.dk, rows.dv,
                            low.data(), dv_low);
        }
      });
      for (size_t n = 0; n < parts.size(); ++n) {
        if (parts[n].part.broken == 0) continue;
        const int64_t strip = at + static_cast<int64_t>(n);
        const int64_t first = c.begin + strip % strips * width;
        kernels::Strip broken;
        fused::make_strip(p_, operands_, s, c.kv_head * group_ + strip / strips, first,
                          std::min(width, c.end - first), broken);
        kernels_.break_keys(broken, parts[n].part.broken, up_.dy.defined(), rows.dk, rows.dv);
      }
    }
  }

  // What one strip adds to dK and dV, in memory of its own.
  struct Part {
    kernels::SparsePart part;
    std::optional<kernels::Scratch> memory;
    int64_t floats = 0;
  };

  // Without memory where there is no room for it, unless it is granted in any case.
  void solve_part(const fused::TileContext& context, const Sequence& s, int64_t h, int64_t first,
                  int64_t count, bool granted, std::atomic<int64_t>& room, Part& to) const {
    const kernels::Scratch scratch(
        static_cast<int64_t>(kernels_.backward_scratch(map_, most_keys_, D_, Dv_) / sizeof(float)));
    fused::Tile tile;
    load(context, s, h, first, count, tile);
    kernels::SparsePart made;
    tile.gradients.part = &made;
    tile.run(kernels_, fused::row_map_of(p_.spec, h), reinterpret_cast<std::byte*>(scratch.get()));
    const int64_t width = kernels_.width;
    to.floats = fused::part_floats(made.count, width, dk_stride_ + dv_stride_);
    if (!granted && room.fetch_sub(to.floats) < to.floats) return;
    to.memory.emplace(to.floats);
    float* at = to.memory->get();
    const auto keep = [&](const auto*& piece, int64_t n) {
      if (piece == nullptr) return;
      std::memcpy(at, piece, static_cast<size_t>(n) * sizeof(float));
      piece = reinterpret_cast<std::remove_reference_t<decltype(piece)>>(at);
      at += fused::whole_lines(n);
    };
    keep(made.dscores, made.count * width);
    keep(made.weights, made.count * width);
    keep(made.q_rows, width * dk_stride_);
    keep(made.dy_rows, width * dv_stride_);
    keep(made.index, made.count);
    to.part = made;
  }

  // The partial sums of a panel, chunk by chunk in order, whatever thread made them.
  void add_keys(const Wave& wave, int64_t key) {
    const int64_t blocks = (wave.panel + kAddKeys - 1) / kAddKeys;
    parallel_for((wave.end - wave.begin) * blocks, [&](int64_t task) {
      const int64_t index = wave.begin + task / blocks, from = task % blocks * kAddKeys;
      const Chunk& first = chunks_.list[index];
      if (!first.first) return;
      const KeyRows to = rows_in_place(first, key, wave);
      const int64_t count = std::min(kAddKeys, to.count - from);
      if (count <= 0) return;
      for (int64_t n = index; n < wave.end; ++n) {
        const Chunk& c = chunks_.list[n];
        if (n > index && c.first) break;
        if (c.partial_at < 0) continue;
        const KeyRows part = rows_of(c, key, wave);
        kernels_.add_rows(count, D_, part.dk + from * part.dk_stride, part.dk_stride,
                          to.dk + from * to.dk_stride, to.dk_stride, n > index);
        kernels_.add_rows(count, Dv_, part.dv + from * part.dv_stride, part.dv_stride,
                          to.dv + from * to.dv_stride, to.dv_stride, n > index);
      }
    });
  }

  // Chunks [begin, end) of one head, likewise: the sums of a group of chunks join dK and dV, and
  // what their roundings leave is kept for the next group's.
  void join_keys(const Wave& wave, int64_t begin, int64_t end, int64_t key) {
    const int64_t blocks = (wave.panel + kAddKeys - 1) / kAddKeys;
    parallel_for(blocks, [&](int64_t block) {
      const Chunk& first = chunks_.list[begin];
      const KeyRows to = rows_in_place(first, key, wave), sum = rows_of(first, key, wave);
      const int64_t from = block * kAddKeys, count = std::min(kAddKeys, to.count - from);
      if (count <= 0) return;
      const auto join = [&](float* own, int64_t own_stride, float* all, int64_t all_stride,
                            int64_t depth, float* low, auto&& rows) {
        for (int64_t n = begin + 1; n < end; ++n) {
          kernels_.add_rows(count, depth, rows(rows_of(chunks_.list[n], key, wave)), own_stride,
                            own, own_stride, true);
        }
        if (begin == wave.begin) {
          kernels_.add_rows(count, depth, own, own_stride, all, all_stride, false);
          std::fill(low, low + count * own_stride, 0.0f);
        } else {
          kernels_.join_rows(count, depth, own, own_stride, all, all_stride, low, own_stride);
        }
      };
      join(sum.dk + from * sum.dk_stride, sum.dk_stride, to.dk + from * to.dk_stride, to.dk_stride,
           D_, joined_ + from * dk_stride_,
           [&](const KeyRows& r) { return r.dk + from * r.dk_stride; });
      join(sum.dv + from * sum.dv_stride, sum.dv_stride, to.dv + from * to.dv_stride, to.dv_stride,
           Dv_, joined_ + wave.panel * dk_stride_ + from * dv_stride_,
           [&](const KeyRows& r) { return r.dv + from * r.dv_stride; });
    });
  }

  void add_tables(const Wave& wave) {
    if (table_sums_.empty()) table_sums_.assign(H_ * (table1d_ + table2d_), 0.0);
    const int64_t size = table1d_ + table2d_;
    for (int64_t place = 0; place < wave.at_once; ++place) {
      const double* from = sums_.tables.data() + place * group_ * size;
      double* to = table_sums_.data() + chunks_.list[wave.begin + place].kv_head * group_ * size;
      for (int64_t n = 0; n < group_ * size; ++n) to[n] += from[n];
    }
  }

  // Rows of one head in order, in double.
  std::vector<double> by_head(const Tensor& rows) const {
    std::vector<double> sums(H_, 0.0);
    for (int64_t b = 0; b < B_; ++b) {
      for (int64_t h = 0; h < H_; ++h) {
        sums[h] += sum_of(rows.data<float>() + (b * H_ + h) * N_, N_);
      }
    }
    return sums;
  }

  // A number a head, or one for all.
  void store_by_head(const Tensor& rows, const Tensor& to) const {
    if (!rows.defined()) return;
    const std::vector<double> per_head = by_head(rows);
    if (to.numel() == H_) {
      for (int64_t h = 0; h < H_; ++h) to.at<float>(h) = static_cast<float>(per_head[h]);
      return;
    }
    double sum = 0;
    for (double x : per_head) sum += x;
    to.at<float>(0) = static_cast<float>(sum);
  }

  void reduce() {
    store_by_head(sums_.scale, grads_.dscale);
    store_by_head(sums_.slope, grads_.dslopes);
    store_by_head(sums_.alpha, grads_.dalpha);
    for (int64_t h = 0; h < H_ && !table_sums_.empty(); ++h) {
      const double* from = table_sums_.data() + h * (table1d_ + table2d_);
      const auto store = [&](const Tensor& to, int64_t size) {
        float* row = to.data<float>() + h * size;
        for (int64_t n = 0; n < size; ++n) row[n] = static_cast<float>(from[n]);
        from += size;
      };
      if (table1d_ > 0) store(grads_.dtable1d, table1d_);
      if (table2d_ > 0) store(grads_.dtable2d, table2d_);
    }
    if (wants_score_w_) {
      for (int64_t d = 0; d < D_; ++d) {
        double sum = 0;
        for (size_t c = 0; c < chunks_.list.size(); ++c) sum += sums_.score_w[c * D_ + d];
        grads_.dscore_w.at<float>(d) = static_cast<float>(sum);
      }
    }
    if (bias_ == fused::BiasGradient::keys) reduce_key_sums();
    if (bias_ == fused::BiasGradient::rows) reduce_row_sums();
  }

  // Adds up in double what falls into one element of the bias, in the order of f's calls.
  template <class F>
  void reduce_bias(F&& each) {
    const Tensor wide = Tensor::zeros(grads_.dbias.shape(), DType::f64);
    const Tensor view = wide.broadcast_to({B_, H_, N_, M_});
    const Dims& s = view.strides();
    each([&](int64_t b, int64_t h, int64_t i, int64_t j) -> double& {
      return view.data<double>()[b * s[0] + h * s[1] + i * s[2] + j * s[3]];
    });
    grads_.dbias.copy_from(wide);
  }

  void reduce_key_sums() {
    reduce_bias([&](auto&& element) {
      for (const Chunk& c : chunks_.list) {
        if (!c.opens) continue;
        const Sequence& s = sequences_[c.sequence];
        for (int64_t g = 0; g < group_; ++g) {
          const double* from = sums_.keys.data() + c.keys_at + g * s.keys;
          for (int64_t j = 0; j < s.keys; ++j) {
            element(s.batch, c.kv_head * group_ + g, 0, s.key_begin + j) += from[j];
          }
        }
      }
    });
  }

  // Whether a row's output, or what arrives for it, is NaN or infinite: so are its scores'
  // gradients.
  bool spoiled(int64_t b, int64_t h, int64_t i) const {
    if (!operands_.careful || !up_.dy.defined()) return false;
    for (const Tensor* t : {&saved_.y, &up_.dy}) {
      const float* x = t->data<float>() + b * t->stride(0) + h * t->stride(1) + i * t->stride(2);
      if (!std::all_of(x, x + Dv_, [](float v) { return std::isfinite(v); })) return true;
    }
    return false;
  }

  // A row's gradients add up to what moving all its scores by one number does: nothing to the
  // weights, and so much to the statistic.
  void reduce_row_sums() {
    reduce_bias([&](auto&& element) {
      const Tensor stat = saved_.row_stat.contiguous();
      const float* row_stat = stat.data<float>();
      const Tensor upstream = up_.drow_stat.defined() ? up_.drow_stat.contiguous() : Tensor();
      for (int64_t b = 0; b < B_; ++b) {
        for (int64_t h = 0; h < H_; ++h) {
          const kernels::RowMap map = fused::row_map_of(p_.spec, h);
          const double unit = map.kind == kernels::RowNormalizer::sparsemax ||
                                      map.kind == kernels::RowNormalizer::entmax
                                  ? map.alpha - 1
                                  : 1;
          for (int64_t i = 0; i < N_; ++i) {
            const int64_t row = (b * H_ + h) * N_ + i;
            double& sum = element(b, h, i, 0);
            const bool seen = !std::isinf(row_stat[row]);
            if (std::isnan(row_stat[row]) || (seen && spoiled(b, h, i))) {
              sum = std::numeric_limits<double>::quiet_NaN();
            } else if (seen && upstream.defined()) {
              sum += unit * upstream.data<float>()[row];
            }
          }
        }
      }
    });
  }

  const Problem& p_;
  const AttentionOutputs& saved_;
  const AttentionUpstream& up_;
  AttentionGradients& grads_;
  const kernels::AttentionKernels& kernels_;
  const kernels::RowMap map_;  // of the head that needs the most scratch
  const int64_t B_, H_, Hk_, N_, M_, D_, Dv_, group_;
  Operands operands_;
  const std::vector<Sequence> sequences_;
  const fused::BiasGradient bias_;
  const bool wants_score_w_;
  const bool products_;  // dQ, dK and dV are computed
  const int64_t dk_stride_, dv_stride_;
  int64_t table1d_ = 0, table2d_ = 0;  // elements a head, where wanted
  fused::Chunks chunks_;
  std::vector<kernels::RowConstants> constants_;  // [group, queries of a sequence], with panels
  int64_t most_keys_ = 0;
  float *partial_ = nullptr, *joined_ = nullptr;
  std::vector<float> zeros_;  // a row of K or V
  Tensor dq_;
  Sums sums_;
  std::vector<double> table_sums_;  // [H, table1d + table2d]
};

}  // namespace

void fused::backward_f32(const Problem& p, const AttentionOutputs& saved,
                         const AttentionUpstream& up, const AttentionWanted& wanted,
                         AttentionGradients& grads) {
  Backward(p, saved, up, wanted, grads).run();
}

}  // namespace foci
