// Products and linear layers against loops in double: odd sizes, strides, threads, rows one by one.
#include "kernels/dense_testing.h"

#include <algorithm>
#include <cmath>

namespace foci::kernels {
namespace {

const std::vector<int64_t> kSizes = {0, 1, 2, 3, 5, 7, 13, 17, 31, 33, 63, 65, 100};

struct Operands {
  int64_t m, n, k, lda, ldb, ldc;
  Floats a, b, c;
};

Operands operands(GemmLayout layout, int64_t m, int64_t n, int64_t k, int64_t pad) {
  const int64_t a_rows = layout == GemmLayout::tn ? k : m, a_cols = m + k - a_rows;
  const int64_t b_rows = layout == GemmLayout::nt ? n : k, b_cols = n + k - b_rows;
  Operands o{.m = m, .n = n, .k = k, .lda = a_cols + pad, .ldb = b_cols + pad, .ldc = n + pad};
  o.a = random_floats(a_rows * o.lda, 1);
  o.b = random_floats(b_rows * o.ldb, 2);
  o.c = random_floats(m * o.ldc, 3);
  return o;
}

Gemm call(GemmLayout layout, const Operands& o, float* c, bool accumulate) {
  return {.layout = layout,
          .m = o.m,
          .n = o.n,
          .k = o.k,
          .a = o.a.data(),
          .lda = o.lda,
          .b = o.b.data(),
          .ldb = o.ldb,
          .c = c,
          .ldc = o.ldc,
          .accumulate = accumulate};
}

void check_gemm(GemmLayout layout, const Operands& o) {
  std::vector<double> sum(static_cast<size_t>(o.m * o.n)), norm(sum.size());
  for (int64_t i = 0; i < o.m; ++i) {
    for (int64_t k = 0; k < o.k; ++k) {
      const double a = o.a[layout == GemmLayout::tn ? k * o.lda + i : i * o.lda + k];
      for (int64_t j = 0; j < o.n; ++j) {
        const double b = o.b[layout == GemmLayout::nt ? j * o.ldb + k : k * o.ldb + j];
        sum[i * o.n + j] += a * b;
        norm[i * o.n + j] += std::abs(a * b);
      }
    }
  }
  on_every_target([&](SimdTarget target) {
    for (const bool accumulate : {false, true}) {
      Floats c = o.c;
      gemm(target, call(layout, o, c.data(), accumulate));
      for (int64_t i = 0; i < o.m; ++i) {
        for (int64_t j = 0; j < o.ldc; ++j) {
          const float before = o.c[i * o.ldc + j], after = c[i * o.ldc + j];
          const bool inside = j < o.n;
          const double was = accumulate || !inside ? before : 0.0;
          const double want = inside ? was + sum[i * o.n + j] : was;
          const double allowed =
              inside ? product_tolerance(o.k, norm[i * o.n + j] + std::abs(was)) : 0.0;
          // Not ASSERT_NEAR: tens of millions of elements pass here.
          if (!(std::abs(after - want) <= allowed)) {
            FAIL() << after << " instead of " << want << " ± " << allowed << ", layout "
                   << static_cast<int>(layout) << " m " << o.m << " n " << o.n << " k " << o.k
                   << " at " << i << "," << j << (inside ? "" : " between the rows");
          }
        }
      }
    }
  });
}

TEST(Gemm, MatchesLoopsInDoubleAtOddSizes) {
  for (const GemmLayout layout : {GemmLayout::nt, GemmLayout::nn, GemmLayout::tn}) {
    for (const int64_t m : kSizes) {
      for (const int64_t n : kSizes) {
        for (const int64_t k : kSizes) {
          check_gemm(layout, operands(layout, m, n, k, (m + n + k) % 4));
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

// Several depth blocks, several column blocks, chunks of rows.
TEST(Gemm, MatchesLoopsInDoubleAtLargerSizes) {
  for (const GemmLayout layout : {GemmLayout::nt, GemmLayout::nn, GemmLayout::tn}) {
    check_gemm(layout, operands(layout, 70, 300, 600, 0));
    check_gemm(layout, operands(layout, 205, 64, 515, 5));
    check_gemm(layout, operands(layout, 64, 64, 1000, 1));
    check_gemm(layout, operands(layout, 3, 530, 257, 0));
    // Rows far apart, and at a power of two.
    check_gemm(layout, operands(layout, 50, 70, 1024, 0));
    check_gemm(layout, operands(layout, 530, 600, 400, 0));
  }
}

TEST(Gemm, ThreadsDoNotChangeBits) {
  on_every_target([&](SimdTarget target) {
    for (const GemmLayout layout : {GemmLayout::nt, GemmLayout::nn, GemmLayout::tn}) {
      for (const Operands& o :
           {operands(layout, 500, 64, 64, 0), operands(layout, 64, 64, 1100, 0),
            operands(layout, 130, 290, 300, 2), operands(layout, 50, 550, 1024, 0)}) {
        expect_same_with_any_threads([&] {
          Floats c = o.c;
          gemm(target, call(layout, o, c.data(), true));
          return c;
        });
      }
    }
  });
}

TEST(Gemm, NaNReachesItsRowAndColumnOnly) {
  on_every_target([&](SimdTarget target) {
    Operands o = operands(GemmLayout::nt, 30, 35, 20, 0);
    o.a[7 * o.lda + 3] = kNaN;
    o.b[34 * o.ldb + 19] = kNaN;
    gemm(target, call(GemmLayout::nt, o, o.c.data(), false));
    for (int64_t i = 0; i < o.m; ++i) {
      for (int64_t j = 0; j < o.n; ++j) {
        ASSERT_EQ(std::isnan(o.c[i * o.ldc + j]), i == 7 || j == 34) << i << "," << j;
      }
    }
  });
}

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::none:
      return x;
    case Activation::relu:
      return std::max(x, 0.0);
    case Activation::gelu:
      return x * 0.5 * std::erfc(-x * std::sqrt(0.5));
  }
  return x;
}

double gelu_slope(double x) {
  return 0.5 * std::erfc(-x * std::sqrt(0.5)) + x * std::exp(-0.5 * x * x) * 0.3989422804014327;
}

struct Layer {
  int64_t rows, inputs, outputs;
  Floats x = random_floats(rows * inputs, 11), w = random_floats(outputs * inputs, 12),
         bias = random_floats(outputs, 13);

  // y, then the slope where wanted, for rows [begin, end).
  Floats forward(SimdTarget target, Activation activation, bool want_slope, int64_t begin,
                 int64_t end, const float* residual = nullptr) const {
    const int64_t n = end - begin;
    Floats out(static_cast<size_t>(n * outputs * (want_slope ? 2 : 1)));
    linear_forward(target, {.rows = n,
                            .inputs = inputs,
                            .outputs = outputs,
                            .x = x.data() + begin * inputs,
                            .ldx = inputs,
                            .w = w.data(),
                            .bias = bias.data(),
                            .y = out.data(),
                            .ldy = outputs,
                            .activation = activation,
                            .slope = want_slope ? out.data() + n * outputs : nullptr,
                            .residual = residual});
    return out;
  }
};

constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::gelu};

TEST(Linear, ForwardMatchesLoopsInDouble) {
  for (const Layer& l :
       {Layer{33, 17, 5}, Layer{50, 64, 64}, Layer{29, 300, 70}, Layer{1, 3, 1}, Layer{5, 0, 7}}) {
    for (const Activation activation : kActivations) {
      on_every_target([&](SimdTarget target) {
        const Floats y = l.forward(target, activation, false, 0, l.rows);
        const bool gelu = activation == Activation::gelu;
        const Floats both = l.forward(target, activation, gelu, 0, l.rows);
        ASSERT_TRUE(same_bits(y.data(), both.data(), l.rows * l.outputs));
        const Floats other = random_floats(l.rows * l.outputs, 15);
        const Floats sum = l.forward(target, activation, false, 0, l.rows, other.data());
        for (int64_t r = 0; r < l.rows; ++r) {
          for (int64_t o = 0; o < l.outputs; ++o) {
            double pre = l.bias[o], norm = std::abs(pre);
            for (int64_t i = 0; i < l.inputs; ++i) {
              const double term = double{l.x[r * l.inputs + i]} * l.w[o * l.inputs + i];
              pre += term;
              norm += std::abs(term);
            }
            const double tolerance = product_tolerance(l.inputs, norm);
            const int64_t at = r * l.outputs + o;
            if (gelu) {
              ASSERT_NEAR(both[l.rows * l.outputs + at], gelu_slope(pre), tolerance + 4e-7);
            }
            ASSERT_EQ(sum[at], y[at] + other[at]);
            // Slopes are below 1.13; Φ is good to 2e-7.
            ASSERT_NEAR(y[at], activate(activation, pre), 1.2 * tolerance + 3e-7 * std::abs(pre));
          }
        }
      });
    }
  }
}

TEST(Linear, ABatchEqualsItsRowsBitForBit) {
  for (const Layer& l : {Layer{61, 64, 64}, Layer{61, 300, 33}, Layer{61, 1024, 50},
                         Layer{21, 800, 70}, Layer{2300, 64, 64}}) {
    on_every_target([&](SimdTarget target) {
      for (const Activation activation : kActivations) {
        const Floats all = l.forward(target, activation, false, 0, l.rows);
        const int64_t step = l.rows > 100 ? 211 : 1;
        for (const int64_t count : {1, 2, 5, 13, 16, 17, 30}) {
          for (int64_t begin = 0; begin + count <= l.rows; begin += step) {
            const Floats part = l.forward(target, activation, false, begin, begin + count);
            ASSERT_TRUE(same_bits(part.data(), all.data() + begin * l.outputs, count * l.outputs))
                << "rows from " << begin << ", " << count << " of them";
          }
        }
      }
      const Floats dy = random_floats(l.rows * l.outputs, 14);
      const auto backward = [&](int64_t begin, int64_t end) {
        Floats dx(static_cast<size_t>((end - begin) * l.inputs));
        linear_backward_input(target, {.rows = end - begin,
                                       .inputs = l.inputs,
                                       .outputs = l.outputs,
                                       .dy = dy.data() + begin * l.outputs,
                                       .lddy = l.outputs,
                                       .w = l.w.data(),
                                       .dx = dx.data(),
                                       .lddx = l.inputs});
        return dx;
      };
      const Floats all = backward(0, l.rows);
      for (int64_t r = 0; r<l.rows; r += l.rows> 100 ? 97 : 1) {
        ASSERT_TRUE(same_bits(backward(r, r + 1).data(), all.data() + r * l.inputs, l.inputs));
      }
    });
  }
}

// The same product with what is multiplied in and added afterwards, for few rows and for many.
TEST(Linear, BackwardInputTakesAFactorAndASum) {
  for (const Layer& l : {Layer{61, 70, 33}, Layer{7, 300, 500}, Layer{40, 64, 64}}) {
    const int64_t n = l.rows * l.inputs;
    const Floats dy = random_floats(l.rows * l.outputs, 14), f = random_floats(n, 16),
                 g = random_floats(n, 17);
    on_every_target([&](SimdTarget target) {
      const auto backward = [&](const float* factor, const float* add, Floats dx) {
        linear_backward_input(target, {.rows = l.rows,
                                       .inputs = l.inputs,
                                       .outputs = l.outputs,
                                       .dy = dy.data(),
                                       .lddy = l.outputs,
                                       .w = l.w.data(),
                                       .dx = dx.data(),
                                       .lddx = l.inputs,
                                       .factor = factor,
                                       .add = add});
        return dx;
      };
      const Floats nothing(f.size());
      const Floats plain = backward(nullptr, nullptr, nothing);
      const Floats times = backward(f.data(), nullptr, nothing);
      const Floats both = backward(f.data(), g.data(), nothing);
      Floats sum = g;
      linear_backward_input(target, {.rows = l.rows,
                                     .inputs = l.inputs,
                                     .outputs = l.outputs,
                                     .dy = dy.data(),
                                     .lddy = l.outputs,
                                     .w = l.w.data(),
                                     .dx = sum.data(),
                                     .lddx = l.inputs,
                                     .add = sum.data()});
      for (size_t i = 0; i < f.size(); ++i) {
        ASSERT_EQ(times[i], plain[i] * f[i]) << i;
        ASSERT_EQ(both[i], plain[i] * f[i] + g[i]) << i;
        // The sums of several depth blocks are then rounded in another order.
        ASSERT_NEAR(sum[i], plain[i] + g[i], 30 * kEps) << i;
      }
    });
  }
}

TEST(Linear, EqualRowsGiveEqualBits) {
  Layer l{131, 70, 45};
  for (int64_t r = 1; r < l.rows; ++r) {
    std::copy_n(l.x.begin(), l.inputs, l.x.begin() + r * l.inputs);
  }
  on_every_target([&](SimdTarget target) {
    const Floats y = l.forward(target, Activation::gelu, false, 0, l.rows);
    for (int64_t r = 1; r < l.rows; ++r) {
      ASSERT_TRUE(same_bits(y.data(), y.data() + r * l.outputs, l.outputs)) << r;
    }
  });
}

TEST(Linear, BackwardWeightMatchesLoopsInDouble) {
  struct Shape {
    int64_t rows, inputs, outputs;
  };
  for (const auto& [rows, inputs, outputs] :
       {Shape{0, 3, 5}, Shape{1, 1, 1}, Shape{40, 17, 33}, Shape{700, 64, 64}, Shape{1500, 40, 10},
        Shape{300, 0, 6}, Shape{700, 270, 200}}) {
    const int64_t lddy = outputs + 3, ldx = inputs + 1;
    const Floats dy = random_floats(rows * lddy, 21), x = random_floats(rows * ldx, 22);
    const Floats dw0 = random_floats(outputs * inputs, 23), db0 = random_floats(outputs, 24);
    std::vector<double> dw(dw0.size()), db(db0.size()), dw_norm(dw0.size()), db_norm(db0.size());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < outputs; ++o) {
        const double d = dy[r * lddy + o];
        db[o] += d;
        db_norm[o] += std::abs(d);
        for (int64_t i = 0; i < inputs; ++i) {
          dw[o * inputs + i] += d * x[r * ldx + i];
          dw_norm[o * inputs + i] += std::abs(d * x[r * ldx + i]);
        }
      }
    }
    on_every_target([&, rows = rows, inputs = inputs, outputs = outputs](SimdTarget target) {
      for (const bool accumulate : {false, true}) {
        const auto run = [&] {
          Floats w = dw0, b = db0;
          linear_backward_weight(target, rows, inputs, outputs, dy.data(), lddy, x.data(), ldx,
                                 w.data(), b.data(), accumulate);
          w.insert(w.end(), b.begin(), b.end());
          return w;
        };
        const Floats got = run();
        for (size_t i = 0; i < got.size(); ++i) {
          const bool bias = i >= dw.size();
          const size_t at = bias ? i - dw.size() : i;
          const double was = accumulate ? (bias ? db0 : dw0)[at] : 0.0;
          ASSERT_NEAR(got[i], was + (bias ? db : dw)[at],
                      product_tolerance(rows, (bias ? db_norm : dw_norm)[at] + std::abs(was)))
              << rows << "x" << inputs << "x" << outputs << " at " << i;
        }
        expect_same_with_any_threads(run);
        // Without the bias the weights are the same.
        Floats w = dw0;
        linear_backward_weight(target, rows, inputs, outputs, dy.data(), lddy, x.data(), ldx,
                               w.data(), nullptr, accumulate);
        ASSERT_TRUE(same_bits(w.data(), got.data(), outputs * inputs));
      }
    });
  }
}

}  // namespace
}  // namespace foci::kernels
