// Fused backward: tiles of strips into partial dK and dV, summed in a fixed order.
#include <algorithm>
#include <cmath>
#include <limits>

#include "foci/attention/fused.h"
#include "foci/core/threads.h"
#include "foci/kernels/scratch.h"

namespace foci {
namespace {

using fused::Operands;
using fused::Sequence;

// One task: queries [begin, end) of a sequence, every query head of one key/value head.
struct Chunk {
  int32_t sequence;
  int32_t kv_head;
  int64_t begin, end;
  int64_t dk_at, dv_at;  // partial sums
  int64_t keys_at;       // sums over queries
};

// dx of x̂ = x/‖x‖ from dx̂, in place: (dx̂ − x̂ (x̂·dx̂))/‖x‖.
void project_rows(const Tensor& unit, const Tensor& inverse, const Tensor& grad) {
  const int64_t rows = inverse.numel(), depth = unit.dim(3);
  const float* u = unit.data<float>();
  float* g = grad.data<float>();
  parallel_for((rows + 255) / 256, [&](int64_t block) {
    for (int64_t r = block * 256; r < std::min(rows, (block + 1) * 256); ++r) {
      // A key without a gradient keeps none, whatever it holds: it may be masked and NaN.
      if (std::all_of(g + r * depth, g + (r + 1) * depth, [](float x) { return x == 0; })) continue;
      double dot = 0;
      for (int64_t i = 0; i < depth; ++i) dot += double{u[r * depth + i]} * g[r * depth + i];
      const double inv = inverse.data<double>()[r];
      for (int64_t i = 0; i < depth; ++i) {
        float& x = g[r * depth + i];
        x = inv == 0 ? 0 : static_cast<float>((x - u[r * depth + i] * dot) * inv);
      }
    }
  });
}

// What backward adds up beside dQ, dK and dV, before it is reduced to the gradients' own shapes.
struct Sums {
  Tensor scale, slope;          // [B,H,N], where wanted
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

class Backward {
 public:
  Backward(const Problem& problem, const AttentionOutputs& saved, const AttentionUpstream& up,
           const AttentionWanted& wanted, AttentionGradients& grads)
      : p_(problem),
        saved_(saved),
        up_(up),
        grads_(grads),
        kernels_(kernels::attention_kernels(problem.target)),
        map_(fused::row_map_of(problem.spec)),
        B_(problem.shape.B),
        H_(problem.shape.H),
        Hk_(problem.shape.Hk),
        N_(problem.shape.N),
        M_(problem.shape.M),
        D_(problem.shape.D),
        Dv_(problem.shape.Dv),
        group_(H_ / Hk_),
        operands_(fused::operands_of(problem, up.dy)),
        sequences_(fused::sequences_of(problem)),
        bias_(fused::bias_gradient_of(problem, wanted)),
        wants_score_w_(wanted.score_w && grads.dscore_w.defined()),
        products_(wanted.qkv || wants_score_w_),
        dk_stride_(round(D_)),
        dv_stride_(round(Dv_)) {
    const Dims rows{B_, H_, N_};
    if (wanted.scale && grads.dscale.defined()) sums_.scale = Tensor::zeros(rows);
    if (wanted.slopes && grads.dslopes.defined()) sums_.slope = Tensor::zeros(rows);
    table1d_ = wanted.tables && grads.dtable1d.defined() ? p_.in.table1d.dim(1) : 0;
    table2d_ =
        wanted.tables && grads.dtable2d.defined() ? p_.in.table2d.dim(1) * p_.in.table2d.dim(2) : 0;
    // A NaN row has NaN weights at masked keys too, which must be stepped over.
    operands_.careful = operands_.careful || any_nan(saved.row_stat);
    cut();
  }

  void run() {
    const kernels::Scratch partial(partial_size_);
    partial_ = partial.get();
    dq_ =
        grads_.dq.defined() ? grads_.dq : (products_ ? Tensor::empty({B_, H_, N_, D_}) : Tensor());
    const fused::TileContext context{p_, operands_, saved_, up_};
    const auto count = static_cast<int64_t>(chunks_.size());
    const bool tables = table1d_ + table2d_ > 0;
    const int64_t wave = tables ? kTableWave : std::max<int64_t>(count, 1);
    for (int64_t at = 0; at < count; at += wave) {
      const int64_t end = std::min(at + wave, count);
      if (tables) sums_.tables.assign((end - at) * group_ * (table1d_ + table2d_), 0.0);
      parallel_for(end - at, [&](int64_t task) { chunk(context, at + task, task); });
      if (tables) add_tables(at, end);
    }
    if (grads_.dk.defined()) add_keys();
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

  void cut() {
    const int64_t tile = kernels::kMaxStrips * kernels_.width;
    for (size_t q = 0; q < sequences_.size(); ++q) {
      const Sequence& s = sequences_[q];
      most_keys_ = std::max(most_keys_, s.keys);
      const int64_t step = fused::queries_per_chunk(s.queries, tile);
      for (int64_t hk = 0; hk < Hk_; ++hk) {
        for (int64_t at = 0; at < s.queries; at += step) {
          Chunk c{static_cast<int32_t>(q),
                  static_cast<int32_t>(hk),
                  at,
                  std::min(at + step, s.queries),
                  0,
                  0,
                  0};
          if (products_) {
            c.dk_at = partial_size_;
            c.dv_at = partial_size_ + s.keys * dk_stride_;
            partial_size_ += s.keys * (dk_stride_ + dv_stride_);
          }
          if (bias_ == fused::BiasGradient::keys) {
            c.keys_at = static_cast<int64_t>(sums_.keys.size());
            sums_.keys.resize(sums_.keys.size() + group_ * s.keys, 0.0);
          }
          chunks_.push_back(c);
        }
      }
    }
    if (wants_score_w_) sums_.score_w.assign(chunks_.size() * D_, 0.0);
  }

  // `place` is the chunk's place in its wave.
  void chunk(const fused::TileContext& context, int64_t index, int64_t place) {
    const Chunk& c = chunks_[index];
    const Sequence& s = sequences_[c.sequence];
    const int64_t tile_size = kernels::kMaxStrips * kernels_.width;
    const kernels::Scratch scratch(
        static_cast<int64_t>(kernels_.backward_scratch(map_, most_keys_, D_, Dv_) / sizeof(float)));
    if (products_) std::fill_n(partial_ + c.dk_at, s.keys * (dk_stride_ + dv_stride_), 0.0f);
    fused::Tile tile;
    for (int64_t h = c.kv_head * group_; h < (c.kv_head + 1) * group_; ++h) {
      const int64_t in_group = h - c.kv_head * group_;
      for (int64_t first = c.begin; first < c.end; first += tile_size) {
        tile.load(context, s, h, first, std::min(tile_size, c.end - first));
        kernels::TileGradients& g = tile.gradients;
        const int64_t i0 = s.query_begin + first;
        const int64_t row = (s.batch * H_ + h) * N_ + i0;
        const auto at = [&](const Tensor& t) {
          return t.defined() ? t.data<float>() + row : nullptr;
        };
        if (products_) {
          g.dq = dq_.data<float>() + row * D_;
          g.dq_stride = D_;
          g.dk = partial_ + c.dk_at;
          g.dk_stride = dk_stride_;
          g.dv = partial_ + c.dv_at;
          g.dv_stride = dv_stride_;
        }
        if (bias_ == fused::BiasGradient::matrix) {
          const Tensor view = grads_.dbias.broadcast_to({B_, H_, N_, M_});
          const Dims& stride = view.strides();
          g.dbias = view.data<float>() + s.batch * stride[0] + h * stride[1] + i0 * stride[2] +
                    s.key_begin * stride[3];
          g.dbias_query_stride = stride[2];
          g.dbias_key_stride = stride[3];
        }
        if (bias_ == fused::BiasGradient::keys) {
          g.key_sums = sums_.keys.data() + c.keys_at + in_group * s.keys;
        }
        g.row_scale = at(sums_.scale);
        g.row_slope = at(sums_.slope);
        if (table1d_ + table2d_ > 0) {
          double* tables =
              sums_.tables.data() + (place * group_ + in_group) * (table1d_ + table2d_);
          if (table1d_ > 0) g.dtable1d = tables;
          if (table2d_ > 0) g.dtable2d = tables + table1d_;
        }
        if (wants_score_w_) g.dscore_w = sums_.score_w.data() + index * D_;
        tile.run(kernels_, map_, reinterpret_cast<std::byte*>(scratch.get()));
      }
    }
  }

  // Chunks of one (batch, kv head) in order; chunks lie in order of (sequence, kv head, begin).
  void add_keys() {
    grads_.dk.fill(0);
    grads_.dv.fill(0);
    parallel_for(B_ * Hk_, [&](int64_t task) {
      const int64_t b = task / Hk_, hk = task % Hk_;
      for (const Chunk& c : chunks_) {
        const Sequence& s = sequences_[c.sequence];
        if (s.batch != b || c.kv_head != hk) continue;
        float* dk = grads_.dk.data<float>() + (task * M_ + s.key_begin) * D_;
        float* dv = grads_.dv.data<float>() + (task * M_ + s.key_begin) * Dv_;
        for (int64_t j = 0; j < s.keys; ++j) {
          for (int64_t d = 0; d < D_; ++d) dk[j * D_ + d] += partial_[c.dk_at + j * dk_stride_ + d];
          for (int64_t d = 0; d < Dv_; ++d) {
            dv[j * Dv_ + d] += partial_[c.dv_at + j * dv_stride_ + d];
          }
        }
      }
    });
  }

  void add_tables(int64_t begin, int64_t end) {
    if (table_sums_.empty()) table_sums_.assign(H_ * (table1d_ + table2d_), 0.0);
    const int64_t size = table1d_ + table2d_;
    for (int64_t k = begin; k < end; ++k) {
      const double* from = sums_.tables.data() + (k - begin) * group_ * size;
      double* to = table_sums_.data() + chunks_[k].kv_head * group_ * size;
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

  void reduce() {
    if (sums_.scale.defined()) {
      const std::vector<double> per_head = by_head(sums_.scale);
      if (grads_.dscale.numel() == H_ &&
          std::holds_alternative<std::vector<double>>(p_.spec.scale)) {
        for (int64_t h = 0; h < H_; ++h)
          grads_.dscale.at<float>(h) = static_cast<float>(per_head[h]);
      } else {
        double sum = 0;
        for (double x : per_head) sum += x;
        grads_.dscale.at<float>(0) = static_cast<float>(sum);
      }
    }
    if (sums_.slope.defined()) {
      const std::vector<double> per_head = by_head(sums_.slope);
      for (int64_t h = 0; h < H_; ++h)
        grads_.dslopes.at<float>(h) = static_cast<float>(per_head[h]);
    }
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
        for (size_t c = 0; c < chunks_.size(); ++c) sum += sums_.score_w[c * D_ + d];
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
      for (const Chunk& c : chunks_) {
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
      const double unit = map_.kind == kernels::RowNormalizer::sparsemax ||
                                  map_.kind == kernels::RowNormalizer::entmax
                              ? map_.alpha - 1
                              : 1;
      for (int64_t b = 0; b < B_; ++b) {
        for (int64_t h = 0; h < H_; ++h) {
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
  const kernels::RowMap map_;
  const int64_t B_, H_, Hk_, N_, M_, D_, Dv_, group_;
  Operands operands_;
  const std::vector<Sequence> sequences_;
  const fused::BiasGradient bias_;
  const bool wants_score_w_;
  const bool products_;  // dQ, dK and dV are computed
  const int64_t dk_stride_, dv_stride_;
  int64_t table1d_ = 0, table2d_ = 0;  // elements a head, where wanted
  std::vector<Chunk> chunks_;
  int64_t partial_size_ = 0, most_keys_ = 0;
  float* partial_ = nullptr;
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
