// Case files against the engine: inputs and expected outputs made elsewhere, run on every SIMD
// target and implementation, and compared element by element.
//
// A case is a safetensors file with tensors `in.*` and `out.*` and metadata `op`, `attributes`,
// and where wanted `tolerance`:
//   Attention, RotaryEmbedding   the ONNX operators (opset 23 to 25)
//   foci.attention               `attributes` is a spec as JSON
//   refuse                       as foci.attention, but must be refused, with a message that
//                                contains the metadata `message_contains`
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/core/simd_target.h"

namespace foci {

struct VerifyOptions {
  // The double-precision oracle instead of the engine: checks the case files themselves.
  bool reference = false;
  std::vector<SimdTarget> targets;               // empty: all that the machine supports
  std::optional<Implementation> implementation;  // nullopt: each that serves the case
};

// One tensor that is not as expected, or one case that was refused, or not refused.
struct VerifyFailure {
  std::filesystem::path path;
  std::string op;
  std::string engine;  // "fused on avx2", "reference"
  std::string tensor;  // "y", "dq" …; empty where no tensor was compared
  // Where a tensor was compared: its worst element, and how many are too far off.
  Dims index;
  double got = 0, want = 0;
  double error = 0;    // |got − want|; infinite where an infinity or NaN differs in kind
  double allowed = 0;  // largest error that passes
  int64_t wrong = 0, elements = 0;
  std::string message;  // one line that says all of this but the path
};

struct VerifyUnreadable {
  std::filesystem::path path;
  std::string message;
};

struct VerifyReport {
  int64_t passed = 0, failed = 0;  // case files; a case fails if it does on any engine
  int64_t skipped = 0;             // cases that the one implementation asked for does not serve
  int64_t runs = 0;                // case files times the engines that ran them
  std::vector<VerifyFailure> failures;
  std::vector<VerifyUnreadable> unreadable;  // files that are no cases, or lie
};

// Files, and folders searched for *.safetensors at any depth, in the order of their names. Never
// throws for what a file holds: that is what the report is for. Throws ArgumentError for options
// that make no sense (a target that the machine lacks).
VerifyReport verify_paths(const std::vector<std::filesystem::path>& paths,
                          const VerifyOptions& options = {});

}  // namespace foci
