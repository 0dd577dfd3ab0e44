// Reports about causal alignment, windows and caches (part B).
#include "reference/reported_parts.h"

namespace foci::testing {
namespace {

const char* const kSuite = "Reported";

// A row that is one call with zero logits.
ReportedCase means(const char* name, AttentionSpec spec, int64_t queries,
                   std::initializer_list<float> v, std::vector<double> want) {
  const AttentionInputs in = zero_logits(queries, v);
  return {kSuite, name, [=](const Engine& e) { return y_differs_on_any_path(e, spec, in, want); }};
}

// Cached keys, once counted from the end and once from the given cache length.
ReportedCase cached(const char* name, Window window, int64_t queries,
                    std::initializer_list<float> v, std::vector<double> want) {
  AttentionInputs in = zero_logits(queries, v);
  in.past_lengths = Tensor::from<int64_t>({static_cast<int64_t>(v.size()) - queries}, {1});
  return {
      kSuite, name, [=](const Engine& e) {
        Window past = window;
        past.align = Align::past;
        return first({y_differs_on_any_path(e, {.masks = {window}}, in, want),
                      y_differs_on_any_path(e, {.masks = {past}}, in, want),
                      y_differs_on_any_path(
                          e, {.masks = {Causal{Align::past}, Window{window.left, {}}}}, in, want)});
      }};
}

}  // namespace

std::vector<ReportedCase> reported_positions() {
  return {
      means("Row21_CausalTopLeft", {.masks = {Causal{Align::top_left}}}, 2, {0, 1, 2, 3, 4},
            {0, 0.5}),
      means("Row21_CausalBottomRight", {.masks = {Causal{Align::bottom_right}}}, 2, {0, 1, 2, 3, 4},
            {1.5, 2}),
      means("Row21_BottomRightIsTheDefault", {.masks = {Causal{}}}, 2, {0, 1, 2, 3, 4}, {1.5, 2}),
      means("Row23_OneTokenDecode", {.masks = {Causal{}}}, 1, {0, 1, 2, 3}, {1.5}),
      means("Row23_OneTokenDecodeTopLeft", {.masks = {Causal{Align::top_left}}}, 1, {0, 1, 2, 3},
            {0}),
      means("Row25_WindowOfLengthMinusOne", {.masks = {Window{3, 0}}}, 4, {0, 1, 2, 3},
            {0, 0.5, 1, 1.5}),
      means("Row27_WindowAlone", {.masks = {Window{1, 1}}}, 5, {0, 1, 2, 3, 4},
            {0.5, 1, 2, 3, 3.5}),
      cached("Row28_WindowWithCachedKeys", Window{2, 0}, 2, {0, 1, 2, 3, 4, 5}, {3, 4}),
      cached("Row29_OneTokenDecodeInAWindow", Window{2, 0}, 1, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
             {8})};
}

}  // namespace foci::testing
