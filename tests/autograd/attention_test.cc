// Attention on the tape against the oracle: self, cross, grouped heads, packed segments, shared
// values, statistics with their gradients; and its double form against finite differences.
#include <gtest/gtest.h>

#include "autograd/gradient_check.h"
#include "foci/autograd/ops.h"
#include "foci/reference/attention.h"

namespace foci {
namespace {

using testing::check_finite_differences;
using testing::difference;
using testing::random_tensor;

struct Case {
  std::string name;
  AttentionSpec spec;
  int64_t B = 2, H = 2, Hk = 2, N = 5, M = 5, D = 3, Dv = 4;
  int64_t value_heads = 0;
};

constexpr Statistics kAsked = {Statistic::entropy, Statistic::coverage, Statistic::max_weight,
                               Statistic::support};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  all.push_back({"self", {.statistics = kAsked}});
  all.push_back({"causal", {.masks = {Causal{}}}});
  all.push_back({"cross", {.masks = {KeyLengths{}}, .statistics = kAsked}, 2, 2, 2, 3, 6});
  all.push_back({"grouped", {.statistics = kAsked}, 1, 4, 2, 4, 4});
  all.push_back({"one_kv_head", {.masks = {Window{1, 1}}}, 1, 3, 1, 6, 6});
  all.push_back(
      {"segments", {.masks = {Segments{}, Causal{}}, .statistics = kAsked}, 1, 2, 2, 7, 7});
  all.push_back({"keep", {.masks = {Keep{}}, .statistics = kAsked}});
  all.push_back({"shared_values", {}, 2, 3, 3, 4, 5, 3, 2, 1});
  all.push_back({"cosine", {.score = Cosine{}, .scale = 4.0}});
  all.push_back({"sparsemax", {.normalizer = Sparsemax{}, .statistics = kAsked}});
  all.push_back({"dropout", {.dropout = Dropout{0.4, 9}}});
  all.push_back({"no_keys", {}, 1, 2, 2, 3, 0});
  return all;
}

// Options that only the double form and the unfused engine need to know.
std::vector<Case> wide_cases() {
  std::vector<Case> all = cases();
  all.push_back({"l2", {.score = L2{0.7}}});
  all.push_back({"additive", {.score = Additive{}}});
  all.push_back({"entmax", {.normalizer = Entmax{1.5}, .statistics = {Statistic::entropy}}});
  all.push_back({"entmax_steep", {.normalizer = Entmax{5}, .statistics = {Statistic::entropy}}});
  all.push_back({"topk", {.normalizer = TopK{2}, .statistics = {Statistic::coverage}}});
  all.push_back({"softcap", {.softcap = 1.5}});
  all.push_back({"bias", {.biases = {TensorBias{}}}});
  all.push_back({"alibi", {.biases = {Alibi{}}}, 1, 2, 2, 3, 5});
  all.push_back(
      {"alibi_past", {.masks = {Causal{Align::past}}, .biases = {Alibi{}}}, 2, 2, 1, 3, 7});
  all.push_back({"relative1d", {.biases = {Relative1D{2}}}, 1, 4, 2, 4, 6});
  all.push_back({"relative2d", {.biases = {Relative2D{2, 3}, TensorBias{}}}, 1, 2, 2, 6, 6});
  all.push_back({"biases_in_segments",
                 {.masks = {Segments{}}, .biases = {Alibi{}, Relative1D{1}}},
                 1,
                 2,
                 2,
                 7,
                 7});
  all.push_back({"drop_key", {.dropout = Dropout{0.3, 4, DropoutPlace::keys}}});
  return all;
}

// q, k, v as the operator takes them, then bias, slopes, tables, score_w where the spec reads them.
std::vector<Tensor> inputs_of(const Case& c) {
  const int64_t value_heads = c.value_heads ? c.value_heads : c.Hk;
  std::vector<Tensor> in = {random_tensor({c.B, c.N, c.H * c.D}, 1),
                            random_tensor({c.B, c.M, c.Hk * c.D}, 2),
                            random_tensor({c.B, c.M, value_heads * c.Dv}, 3)};
  if (find_bias<TensorBias>(c.spec)) in.push_back(random_tensor({c.H, 1, c.M}, 4));
  if (find_bias<Alibi>(c.spec)) in.push_back(random_tensor({c.H}, 6));
  if (const auto* r = find_bias<Relative1D>(c.spec)) {
    in.push_back(random_tensor({c.H, 2 * r->max_distance + 1}, 7));
  }
  if (const auto* r = find_bias<Relative2D>(c.spec)) {
    in.push_back(random_tensor({c.H, 2 * r->height - 1, 2 * r->width - 1}, 8));
  }
  if (std::holds_alternative<Additive>(c.spec.score)) in.push_back(random_tensor({c.D}, 5));
  return in;
}

AttentionInputs masks_of(const Case& c) {
  AttentionInputs in;
  if (has_mask<KeyLengths>(c.spec)) in.key_lengths = Tensor::from<int64_t>({4, 0}, {c.B});
  if (bias_align(c.spec) == Align::past) in.past_lengths = Tensor::from<int64_t>({4, 1}, {c.B});
  if (has_mask<Segments>(c.spec)) {
    in.q_segments = Tensor::from<int32_t>({0, 0, 1, 1, 1, 2, 3}, {1, 7});
    in.k_segments = Tensor::from<int32_t>({0, 0, 1, 1, 1, 3, 3}, {1, 7});
  }
  if (has_mask<Keep>(c.spec)) {
    in.keep = Tensor::full({c.N, c.M}, 1, DType::boolean);
    for (int64_t i = 0; i < c.N; ++i) in.keep.at<bool>(i, (i * 2) % c.M) = false;
    for (int64_t j = 0; j < c.M; ++j) in.keep.at<bool>(1, j) = false;  // an empty row
  }
  return in;
}

template <class T>
ops::AttentionResult<T> attend(const Case& c, Tape<T>& tape, const std::vector<Var<T>>& v) {
  ops::AttentionArguments<T> a;
  a.spec = c.spec;
  a.heads = c.H;
  a.kv_heads = c.Hk;
  a.value_heads = c.value_heads;
  a.masks = masks_of(c);
  size_t next = 3;
  if (find_bias<TensorBias>(c.spec)) a.bias = v[next++];
  if (find_bias<Alibi>(c.spec)) a.slopes = v[next++];
  if (find_bias<Relative1D>(c.spec)) a.table1d = v[next++];
  if (find_bias<Relative2D>(c.spec)) a.table2d = v[next++];
  if (std::holds_alternative<Additive>(c.spec.score)) a.score_w = v[next++];
  return ops::attention(tape, v[0], v[1], v[2], a);
}

// The differentiable results of a case, in the order that upstream gradients are drawn. The row
// statistic of an empty row is infinite, so it is left out where a case has one.
template <class T>
std::vector<Var<T>> results_of(const Case& c, const ops::AttentionResult<T>& r) {
  std::vector<Var<T>> all = {r.y};
  if (r.entropy.defined()) all.push_back(r.entropy);
  if (r.coverage.defined()) all.push_back(r.coverage);
  if (r.max_weight.defined()) all.push_back(r.max_weight);
  if (c.M > 0 && !has_mask<KeyLengths>(c.spec) && !has_mask<Keep>(c.spec) &&
      !has_mask<Segments>(c.spec)) {
    all.push_back(r.row_stat);
  }
  return all;
}

Tensor heads_first(const Tensor& x, int64_t heads) {
  return x.reshape({x.dim(0), x.dim(1), heads, x.dim(2) / heads}).transpose(1, 2);
}

struct Oracle {
  reference::Forward forward;
  std::vector<Tensor> grads;  // of inputs_of(c), in the operator's layout
};

Oracle oracle_of(const Case& c, const std::vector<Tensor>& in) {
  AttentionInputs a = masks_of(c);
  a.q = heads_first(in[0], c.H);
  a.k = heads_first(in[1], c.Hk);
  a.v = c.value_heads == 1 ? heads_first(in[2], 1).broadcast_to({c.B, c.Hk, c.M, c.Dv})
                           : heads_first(in[2], c.Hk);
  size_t next = 3;
  if (find_bias<TensorBias>(c.spec)) a.bias = in[next++];
  if (find_bias<Alibi>(c.spec)) a.slopes = in[next++];
  if (find_bias<Relative1D>(c.spec)) a.table1d = in[next++];
  if (find_bias<Relative2D>(c.spec)) a.table2d = in[next++];
  if (std::holds_alternative<Additive>(c.spec.score)) a.score_w = in[next++];
  Oracle o{reference::attention_forward(c.spec, a), {}};

  // The same upstream gradients as run_forward_backward draws, in the same order.
  AttentionUpstream up;
  uint64_t seed = 1000;
  up.dy = heads_first(random_tensor({c.B, c.N, c.H * c.Dv}, seed++), c.H);
  if (c.spec.statistics.has(Statistic::entropy)) {
    up.dentropy = random_tensor({c.B, c.H, c.N}, seed++);
  }
  if (c.spec.statistics.has(Statistic::coverage)) {
    up.dcoverage = random_tensor({c.B, c.H, c.M}, seed++);
  }
  if (c.spec.statistics.has(Statistic::max_weight)) {
    up.dmax_weight = random_tensor({c.B, c.H, c.N}, seed++);
  }
  if (c.M > 0 && !has_mask<KeyLengths>(c.spec) && !has_mask<Keep>(c.spec) &&
      !has_mask<Segments>(c.spec)) {
    up.drow_stat = random_tensor({c.B, c.H, c.N}, seed++);
  }
  const AttentionGradients g = reference::attention_backward(c.spec, a, up);
  const auto heads_last = [](const Tensor& t) {
    const Tensor x = t.transpose(1, 2).contiguous();
    return x.reshape({x.dim(0), x.dim(1), x.dim(2) * x.dim(3)});
  };
  Tensor dv = g.dv;
  if (c.value_heads == 1) {
    dv = Tensor::zeros({c.B, 1, c.M, c.Dv}, DType::f64);
    for (int64_t h = 0; h < c.Hk; ++h) {
      const Tensor head = g.dv.slice(1, h, h + 1).contiguous();
      for (int64_t i = 0; i < dv.numel(); ++i) dv.span<double>()[i] += head.span<double>()[i];
    }
  }
  o.grads = {heads_last(g.dq), heads_last(g.dk), heads_last(dv)};
  if (g.dbias.defined()) o.grads.push_back(g.dbias);
  if (g.dslopes.defined()) o.grads.push_back(g.dslopes);
  if (g.dtable1d.defined()) o.grads.push_back(g.dtable1d);
  if (g.dtable2d.defined()) o.grads.push_back(g.dtable2d);
  if (g.dscore_w.defined()) o.grads.push_back(g.dscore_w);
  return o;
}

class AttentionOp : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionOp, DoubleAgainstFiniteDifferences) {
  const Case c = GetParam();
  const std::vector<Tensor> in = inputs_of(c);
  check_finite_differences(in, [&](Tape<double>& tape, const std::vector<Var<double>>& v) {
    return results_of(c, attend(c, tape, v));
  });
}

template <class T>
void against_oracle(const Case& c, double tolerance) {
  const std::vector<Tensor> in = inputs_of(c);
  const Oracle o = oracle_of(c, in);
  Tape<T> none(false);
  std::vector<Var<T>> constants;
  for (const Tensor& t : in) constants.push_back(none.constant(t.to(dtype_v<T>)));
  const ops::AttentionResult<T> r = attend(c, none, constants);
  EXPECT_LT(difference(heads_first(r.y.value(), c.H), o.forward.out.y), tolerance);
  EXPECT_LT(difference(r.row_stat.value(), o.forward.out.row_stat), tolerance);
  EXPECT_EQ(r.entropy.defined(), c.spec.statistics.has(Statistic::entropy));
  if (r.entropy.defined()) {
    EXPECT_LT(difference(r.entropy.value(), o.forward.out.entropy), tolerance);
  }
  if (r.coverage.defined()) {
    EXPECT_LT(difference(r.coverage.value(), o.forward.out.coverage), tolerance);
  }
  if (r.max_weight.defined()) {
    EXPECT_LT(difference(r.max_weight.value(), o.forward.out.max_weight), tolerance);
    for (int64_t i = 0; i < r.max_key.numel(); ++i) {
      EXPECT_EQ(r.max_key.template span<int64_t>()[i], o.forward.out.max_key.span<int64_t>()[i]);
    }
  }
  if (r.support.defined()) {
    EXPECT_EQ(difference(r.support, o.forward.out.support), 0);
  }
  const std::vector<int64_t> rows = {c.N - 1, 0}, heads = {c.H - 1};
  const Tensor w = r.weights(rows, heads);
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t i = 0; i < 2; ++i) {
      for (int64_t j = 0; j < c.M; ++j) {
        EXPECT_NEAR(w.item({b, 0, i, j}),
                    o.forward.weights.item({b, heads[0], rows[static_cast<size_t>(i)], j}),
                    tolerance);
      }
    }
  }
  const auto run =
      testing::run_forward_backward<T>(in, [&](Tape<T>& tape, const std::vector<Var<T>>& v) {
        return results_of(c, attend(c, tape, v));
      });
  for (size_t n = 0; n < in.size(); ++n) {
    EXPECT_LT(difference(run.grads[n], o.grads[n]), tolerance) << "gradient of input " << n;
  }
}

TEST_P(AttentionOp, DoubleAgainstOracle) {
  against_oracle<double>(GetParam(), 1e-10);
}
TEST_P(AttentionOp, FloatAgainstOracle) {
  against_oracle<float>(GetParam(), 2e-5);
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionOp, ::testing::ValuesIn(wide_cases()),
                         [](const auto& one) { return one.param.name; });

TEST(AttentionOpViews, OneProjectionSlicedInThree) {
  // q, k and v as views of one [B, N, 3·C] tensor give the same as three tensors, and the
  // gradient lands in the one.
  testing::check_operator(
      {random_tensor({2, 4, 18}, 1)}, [&]<class T>(Tape<T>& tape, const std::vector<Var<T>>& v) {
        ops::AttentionArguments<T> a;
        a.heads = a.kv_heads = 2;
        return std::vector<Var<T>>{ops::attention(tape, ops::slice(tape, v[0], 2, 0, 6),
                                                  ops::slice(tape, v[0], 2, 6, 12),
                                                  ops::slice(tape, v[0], 2, 12, 18), a)
                                       .y};
      });
}

TEST(AttentionOpScale, IsLearned) {
  for (int64_t count : {1, 2}) {
    testing::check_operator(
        {random_tensor({1, 3, 4}, 1), random_tensor({1, 3, 4}, 2), random_tensor({1, 3, 4}, 3),
         random_tensor({count}, 4)},
        [&]<class T>(Tape<T>& tape, const std::vector<Var<T>>& v) {
          ops::AttentionArguments<T> a;
          a.heads = a.kv_heads = 2;
          a.scale = v[3];
          return std::vector<Var<T>>{ops::attention(tape, v[0], v[1], v[2], a).y};
        });
  }
}

TEST(AttentionOpAlpha, IsLearned) {
  for (const std::vector<double>& alphas :
       {std::vector<double>{1.25}, std::vector<double>{1.5, 1.75}}) {
    const Tensor alpha = Tensor::from(alphas, {static_cast<int64_t>(alphas.size())});
    testing::check_operator({random_tensor({1, 3, 4}, 1), random_tensor({1, 3, 4}, 2),
                             random_tensor({1, 3, 4}, 3), alpha},
                            [&]<class T>(Tape<T>& tape, const std::vector<Var<T>>& v) {
                              ops::AttentionArguments<T> a;
                              a.heads = a.kv_heads = 2;
                              a.spec.normalizer = Entmax{};
                              a.spec.statistics = {Statistic::entropy, Statistic::max_weight};
                              a.alpha = v[3];
                              const ops::AttentionResult<T> r =
                                  ops::attention(tape, v[0], v[1], v[2], a);
                              return std::vector<Var<T>>{r.y, r.row_stat, r.entropy, r.max_weight};
                            });
  }
  Tape<float> tape;
  const Var<float> x = tape.leaf(Tensor::zeros({1, 2, 6}));
  ops::AttentionArguments<float> a;
  a.alpha = tape.leaf(Tensor::full({1}, 1.5));
  EXPECT_THROW(ops::attention(tape, x, x, x, a), ArgumentError);  // softmax reads none
  a.spec.normalizer = Entmax{};
  a.alpha = tape.leaf(Tensor::full({3}, 1.5));
  EXPECT_THROW(ops::attention(tape, x, x, x, a), ArgumentError);
}

TEST(AttentionOpErrors, HeadsThatDoNotDivide) {
  Tape<float> tape;
  const Var<float> x = tape.leaf(Tensor::zeros({1, 2, 6}));
  ops::AttentionArguments<float> a;
  a.heads = 3;
  a.kv_heads = 2;
  EXPECT_THROW(ops::attention(tape, x, x, x, a), ArgumentError);
  a.kv_heads = 3;
  EXPECT_THROW(ops::attention(tape, x, x, tape.leaf(Tensor::zeros({1, 3, 6})), a), ArgumentError);
}

}  // namespace
}  // namespace foci
