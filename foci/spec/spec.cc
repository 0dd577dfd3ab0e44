// What the numbers of a spec may be.
#include "foci/spec/spec.h"

#include <cmath>

#include "foci/core/error.h"

namespace foci {
namespace {

void validate_score(const Score& score) {
  std::visit(overloaded{[](const Dot&) {}, [](const Cosine&) {},
                        [](const L2& l2) {
                          require(std::isfinite(l2.gamma),
                                  "score.gamma: {} given, a finite number is needed", l2.gamma);
                        },
                        [](const Additive&) {}},
             score);
}

void validate_scale(const Scale& scale) {
  std::visit(
      overloaded{[](const AutoScale&) {},
                 [](double s) {
                   require(std::isfinite(s), "scale: {} given, a finite number is needed", s);
                 },
                 [](const std::vector<double>& per_head) {
                   for (size_t h = 0; h < per_head.size(); ++h) {
                     require(std::isfinite(per_head[h]),
                             "scale[{}]: {} given, a finite number is needed", h, per_head[h]);
                   }
                 }},
      scale);
}

void validate_normalizer(const Normalizer& normalizer) {
  std::visit(overloaded{[](const Softmax&) {}, [](const Sparsemax&) {},
                        [](const Entmax& e) {
                          const auto check = [](double alpha, const std::string& at) {
                            require(std::isfinite(alpha) && alpha > 1,
                                    "normalizer.alpha{}: {} given, entmax needs alpha > 1 "
                                    "(softmax is the limit at 1)",
                                    at, alpha);
                          };
                          if (e.per_head.empty()) check(e.alpha, "");
                          for (size_t h = 0; h < e.per_head.size(); ++h) {
                            check(e.per_head[h], fmt::format("[{}]", h));
                          }
                        },
                        [](const TopK& t) {
                          require(t.k >= 1, "normalizer.k: {} given, top-k needs k >= 1", t.k);
                        }},
             normalizer);
}

void validate_mask(const Mask& mask, size_t index) {
  std::visit(overloaded{[](const Causal&) {},
                        [&](const Window& w) {
                          require(!w.left || *w.left >= 0,
                                  "masks[{}].left: {} given, a window side is >= 0 or unbounded",
                                  index, w.left.value_or(0));
                          require(!w.right || *w.right >= 0,
                                  "masks[{}].right: {} given, a window side is >= 0 or unbounded",
                                  index, w.right.value_or(0));
                        },
                        [](const KeyLengths&) {}, [](const Segments&) {}, [](const Keep&) {}},
             mask);
}

void validate_bias(const Bias& bias, size_t index) {
  std::visit(overloaded{[](const TensorBias&) {}, [](const Alibi&) {},
                        [&](const Relative1D& r) {
                          // The table has 2·max_distance + 1 columns; 2^40 keeps that far from
                          // overflow.
                          require(r.max_distance >= 0 && r.max_distance < (int64_t{1} << 40),
                                  "biases[{}].max_distance: {} given, it must lie in [0, 2^40)",
                                  index, r.max_distance);
                        },
                        [&](const Relative2D& r) {
                          require(r.height >= 1 && r.width >= 1 && r.height < (1 << 30) &&
                                      r.width < (1 << 30),
                                  "biases[{}].grid: [{}, {}] given, both sides must be >= 1", index,
                                  r.height, r.width);
                        }},
             bias);
}

template <class Variant>
void refuse_twice(const std::vector<Variant>& list, const char* what, bool windows_may_repeat) {
  for (size_t i = 0; i < list.size(); ++i) {
    for (size_t j = i + 1; j < list.size(); ++j) {
      if (list[i].index() != list[j].index()) continue;
      require(windows_may_repeat && list[i].index() <= 1,
              "{}[{}]: the same kind stands at {}[{}] already", what, j, what, i);
    }
  }
}

}  // namespace

void validate(const AttentionSpec& spec) {
  validate_score(spec.score);
  validate_scale(spec.scale);
  if (spec.softcap) {
    require(std::isfinite(*spec.softcap) && *spec.softcap > 0,
            "softcap: {} given, a finite number > 0 is needed", *spec.softcap);
  }
  validate_normalizer(spec.normalizer);
  for (size_t i = 0; i < spec.masks.size(); ++i) validate_mask(spec.masks[i], i);
  for (size_t i = 0; i < spec.biases.size(); ++i) validate_bias(spec.biases[i], i);
  // Causal and Window (indices 0 and 1) may repeat with other alignments; the rest read one tensor.
  static_assert(std::is_same_v<std::variant_alternative_t<0, Mask>, Causal> &&
                std::is_same_v<std::variant_alternative_t<1, Mask>, Window>);
  refuse_twice(spec.masks, "masks", true);
  refuse_twice(spec.biases, "biases", false);
  if (spec.dropout) {
    require(spec.dropout->p >= 0 && spec.dropout->p < 1,
            "dropout.p: {} given, it must lie in [0, 1)", spec.dropout->p);
  }
}

Normalizer normalizer_of(const Normalizer& normalizer, int64_t h) {
  const auto* e = std::get_if<Entmax>(&normalizer);
  if (e == nullptr || e->per_head.empty()) return normalizer;
  return Entmax{e->per_head[static_cast<size_t>(h)]};
}

Align bias_align(const AttentionSpec& spec) {
  for (const Mask& mask : spec.masks) {
    const bool past = std::visit(
        overloaded{[](const Causal& c) { return c.align == Align::past; },
                   [](const Window& w) { return w.align == Align::past; },
                   [](const KeyLengths&) { return false; }, [](const Segments&) { return false; },
                   [](const Keep&) { return false; }},
        mask);
    if (past) return Align::past;
  }
  return Align::bottom_right;
}

}  // namespace foci
