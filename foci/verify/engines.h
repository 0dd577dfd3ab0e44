// What a case runs on: the engine on one SIMD target with one implementation, or the oracle.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "foci/attention/raw_scores.h"
#include "foci/attention/rotary.h"
#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"
#include "foci/verify/verify.h"

namespace foci::verify {

// One call of attention, and what of its results is wanted.
struct AttentionRequest {
  AttentionSpec spec;
  AttentionInputs in;
  AttentionUpstream up;
  AttentionWanted wanted;
  bool backward = false;
  bool weights = false;
  std::optional<ScoreStage> scores;
};

// x [B,H,N,D], turned.
struct RotaryRequest {
  Tensor x;
  RotaryAngles angles;
};

using Request = std::variant<AttentionRequest, RotaryRequest>;

struct Answer {
  AttentionOutputs out;
  AttentionGradients gradients;
  Tensor weights;  // [B,H,N,M]
  Tensor scores;   // [B,H,N,M] at the stage asked for
  Tensor turned;   // [B,H,N,D]
};

struct Engine {
  std::string name;
  // nullopt where the implementation does not serve a (valid) request. Throws ArgumentError where
  // the request is to be refused, also where it is far too large to be checked.
  std::function<std::optional<Answer>(const Request&)> run;
};

// Empty sizes let a small file ask for huge results, so sizes are bounded before anything is made.
// Sizes that are 0 count as 1. Throws ArgumentError.
void require_small(const char* what, Dims sizes, int64_t most);
inline constexpr int64_t kMostElements = int64_t{1} << 26;  // of one tensor; 512 MB in double
inline constexpr int64_t kMostPairs = int64_t{1} << 32;     // [B,H,N,M]; minutes for the engine
inline constexpr int64_t kMostOraclePairs = int64_t{1} << 24;

std::vector<Engine> engines(const VerifyOptions& options);
Engine reference_engine();

}  // namespace foci::verify
