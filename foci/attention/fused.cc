// Fused forward of float32 problems, exact weights of chosen rows, and what fused serves.
#include "foci/attention/fused.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "foci/core/threads.h"
#include "foci/kernels/scratch.h"

namespace foci {
namespace {

using fused::Operands;
using fused::Sequence;

// Multiply-adds below which a task is not worth a thread's attention: about 20 µs.
constexpr int64_t kTaskWork = int64_t{1} << 19;

// Queries [begin, end) of one sequence, of `heads` heads from `head` on.
struct Unit {
  int32_t sequence;
  int32_t head, heads;
  int64_t begin, end;  // queries of the sequence
};

}  // namespace

std::optional<std::string> fused_refuses(const AttentionSpec&, const AttentionShape& shape) {
  if (shape.H == 0) return "there are no heads";
  return std::nullopt;  // everything else
}

namespace {

// What a strip, or a lane of it, writes: of query `row` of the sequence, head h.
kernels::StripOutputs outputs_at(const Problem& p, const AttentionOutputs& out, const Sequence& s,
                                 int64_t h, int64_t row) {
  const int64_t at = (s.batch * p.shape.H + h) * p.shape.N + s.query_begin + row;
  const auto of = [&](const Tensor& t) { return t.defined() ? t.data<float>() + at : nullptr; };
  kernels::StripOutputs o;
  o.y = out.y.data<float>() + s.batch * out.y.stride(0) + h * out.y.stride(1) +
        (s.query_begin + row) * out.y.stride(2);
  o.y_stride = out.y.stride(2);
  o.row_stat = of(out.row_stat);
  o.entropy = of(out.entropy);
  o.max_weight = of(out.max_weight);
  o.max_key = out.max_key.defined() ? out.max_key.data<int64_t>() + at : nullptr;
  o.support = of(out.support);
  return o;
}

class Forward {
 public:
  Forward(const Problem& problem, AttentionOutputs& out)
      : p_(problem),
        out_(out),
        kernels_(kernels::attention_kernels(problem.target)),
        map_(fused::largest_row_map(problem.spec)),
        coverage_(out.coverage.defined()),
        narrow_(fused::serves_narrow(problem.spec) && !coverage_),
        operands_(fused::operands_of(problem, {}, narrow_)),
        sequences_(fused::sequences_of(problem)) {
    cut();
  }

  void run() {
    partial_.assign(partial_size_, 0.0);
    const int64_t D = p_.shape.D, Dv = p_.shape.Dv;
    const size_t bytes = std::max(kernels_.forward_scratch(map_, most_keys_, D, Dv, coverage_),
                                  narrow_ ? kernels_.narrow_scratch(D, Dv) : size_t{0});
    parallel_for(static_cast<int64_t>(tasks_.size()) - 1, [&](int64_t task) {
      const kernels::Scratch scratch(static_cast<int64_t>(bytes / sizeof(float)));
      std::vector<kernels::Strip> strips(narrow_ ? kernels::kNarrowRows : 1);
      for (int64_t u = tasks_[task]; u < tasks_[task + 1]; ++u) {
        unit(u, strips, reinterpret_cast<std::byte*>(scratch.get()));
      }
    });
    if (coverage_) add_coverage();
    out_.skipped_pairs = skipped_pairs_;
    out_.ordinary = !operands_.careful;
  }

 private:
  // Units are cut at strips; with coverage at chunks, each with a partial sum of its own; where a
  // sequence has few queries they are those of all heads that share K and V.
  void cut() {
    const int64_t H = p_.shape.H, D = p_.shape.D, Dv = p_.shape.Dv, width = kernels_.width;
    const int64_t group = H / p_.shape.Hk;
    int64_t work = 0;
    const auto add = [&](size_t q, int64_t h, int64_t heads, int64_t begin, int64_t end,
                         int64_t lanes) {
      units_.push_back({static_cast<int32_t>(q), static_cast<int32_t>(h),
                        static_cast<int32_t>(heads), begin, end});
      if (coverage_) {
        partial_at_.push_back(partial_size_);
        partial_size_ += sequences_[q].keys;
      }
      work += lanes * (sequences_[q].keys + 1) * (D + Dv + 1);
      if (work < kTaskWork) return;
      tasks_.push_back(static_cast<int64_t>(units_.size()));
      work = 0;
    };
    for (size_t q = 0; q < sequences_.size(); ++q) {
      const Sequence& s = sequences_[q];
      most_keys_ = std::max(most_keys_, s.keys);
      if (narrow_ && s.queries > 0 && s.queries <= kernels::kNarrowRows) {
        const int64_t heads = std::min(group, kernels::kNarrowRows / s.queries);
        for (int64_t h = 0; h < H; h += group) {
          for (int64_t g = 0; g < group; g += heads) {
            const int64_t n = std::min(heads, group - g);
            // Reading K and V is most of it.
            add(q, h + g, n, 0, s.queries, 8 + n * s.queries);
          }
        }
        continue;
      }
      const int64_t step = coverage_ ? fused::queries_per_chunk(s.queries, width) : width;
      for (int64_t h = 0; h < H; ++h) {
        for (int64_t at = 0; at < s.queries; at += step) {
          const int64_t end = std::min(at + step, s.queries);
          add(q, h, 1, at, end, (end - at + width - 1) / width * width);
        }
      }
    }
    if (tasks_.back() != static_cast<int64_t>(units_.size())) {
      tasks_.push_back(static_cast<int64_t>(units_.size()));
    }
  }

  void unit(int64_t u, std::vector<kernels::Strip>& strips, std::byte* scratch) {
    const Unit& unit = units_[u];
    const Sequence& s = sequences_[unit.sequence];
    const int64_t width = kernels_.width;
    const kernels::RowMap map = fused::row_map_of(p_.spec, unit.head);
    for (int64_t first = unit.begin; first < unit.end; first += width) {
      const int64_t count = std::min(width, unit.end - first);
      if (narrow_ && count * unit.heads <= kernels::kNarrowRows) {
        few(s, unit.head, unit.heads, first, count, strips, scratch);
        continue;
      }
      fused::make_strip(p_, operands_, s, unit.head, first, count, strips[0]);
      kernels::StripOutputs o = outputs_at(p_, out_, s, unit.head, first);
      o.coverage = coverage_ ? partial_.data() + partial_at_[u] : nullptr;
      int64_t skipped = 0;
      o.skipped_pairs = operands_.boxes.defined() ? &skipped : nullptr;
      kernels_.forward(map, strips[0], o, scratch);
      skipped_pairs_ += skipped;
      number_keys(s, o, count);
    }
  }

  void few(const Sequence& s, int64_t head, int64_t heads, int64_t first, int64_t count,
           std::vector<kernels::Strip>& strips, std::byte* scratch) const {
    kernels::NarrowRow rows[kernels::kNarrowRows];
    int n = 0;
    for (int64_t h = head; h < head + heads; ++h) {
      // A strip for each group of lanes that the width allows; one or more a head.
      for (int64_t at = 0; at < count; at += kernels_.width) {
        const int64_t lanes = std::min<int64_t>(kernels_.width, count - at);
        kernels::Strip& strip = strips[n];
        fused::make_strip(p_, operands_, s, h, first + at, lanes, strip);
        for (int lane = 0; lane < lanes; ++lane, ++n) {
          rows[n] = {&strip, lane, outputs_at(p_, out_, s, h, first + at + lane)};
        }
      }
    }
    kernels_.forward_narrow(rows, n, scratch);
    for (int r = 0; r < n; ++r) number_keys(s, rows[r].out, 1);
  }

  // Kernels count keys from the sequence's first.
  static void number_keys(const Sequence& s, const kernels::StripOutputs& o, int64_t count) {
    if (o.max_key == nullptr) return;
    for (int64_t i = 0; i < count; ++i) o.max_key[i] += o.max_key[i] < 0 ? 0 : s.key_begin;
  }

  // Chunk order within a head, whatever thread computed them.
  void add_coverage() {
    out_.coverage.fill(0);
    for (size_t u = 0, end; u < units_.size(); u = end) {
      const Unit& unit = units_[u];
      for (end = u + 1; end < units_.size() && units_[end].sequence == unit.sequence &&
                        units_[end].head == unit.head;) {
        ++end;
      }
      const Sequence& s = sequences_[unit.sequence];
      float* to = out_.coverage.data<float>() + (s.batch * p_.shape.H + unit.head) * p_.shape.M +
                  s.key_begin;
      for (int64_t j = 0; j < s.keys; ++j) {
        double sum = 0;
        for (size_t n = u; n < end; ++n) sum += partial_[partial_at_[n] + j];
        to[j] = static_cast<float>(sum);
      }
    }
  }

  const Problem& p_;
  AttentionOutputs& out_;
  const kernels::AttentionKernels& kernels_;
  const kernels::RowMap map_;  // of the head that needs the most scratch
  const bool coverage_, narrow_;
  const Operands operands_;
  const std::vector<Sequence> sequences_;
  std::vector<Unit> units_;
  std::vector<int64_t> partial_at_;   // of each unit
  std::vector<int64_t> tasks_ = {0};  // first unit of each task
  int64_t partial_size_ = 0, most_keys_ = 0;
  std::vector<double> partial_;  // coverage of each unit
  std::atomic<int64_t> skipped_pairs_ = 0;
};

}  // namespace

void fused::forward_f32(const Problem& p, AttentionOutputs& out) {
  Forward(p, out).run();
}

void fused::weights_f32(const Problem& p, std::span<const int64_t> rows,
                        std::span<const int64_t> heads, Tensor& weights) {
  const kernels::AttentionKernels& kernels = kernels::attention_kernels(p.target);
  const int64_t M = p.shape.M;
  const Operands operands = fused::operands_of(p);
  const std::vector<Sequence> sequences = fused::sequences_of(p);
  weights.fill(0);
  const auto R = static_cast<int64_t>(rows.size()), G = static_cast<int64_t>(heads.size());
  const size_t scratch_bytes =
      kernels.weights_scratch(fused::largest_row_map(p.spec), M, p.shape.D, p.shape.Dv);
  parallel_for(p.shape.B * G * R, [&](int64_t task) {
    const int64_t b = task / (G * R), g = task / R % G, r = task % R;
    // Sequences lie in order of (batch, first query).
    const auto after = std::upper_bound(sequences.begin(), sequences.end(), std::pair{b, rows[r]},
                                        [](const auto& want, const Sequence& s) {
                                          return want < std::pair{s.batch, s.query_begin};
                                        });
    const Sequence& s = *(after - 1);
    kernels::Strip strip;
    fused::make_strip(p, operands, s, heads[g], rows[r] - s.query_begin, 1, strip);
    float* row = weights.data<float>() + task * M + s.key_begin;
    const kernels::Scratch scratch(static_cast<int64_t>(scratch_bytes / sizeof(float)));
    const kernels::RowMap map = fused::row_map_of(p.spec, heads[g]);
    kernels.weights(map, strip, row, M, reinterpret_cast<std::byte*>(scratch.get()));
  });
}

}  // namespace foci
