// The public ONNX cases: through the oracle, which checks how ONNX is read, and through the engine.
#include <gtest/gtest.h>

#include <cstdlib>

#include "foci/verify/verify.h"
#include "verify/engine_built.h"

namespace foci {
namespace {

namespace fs = std::filesystem;

fs::path conformance() {
  const char* set = std::getenv("FOCI_CONFORMANCE_DIR");
  return set && *set ? fs::path(set) : fs::path(FOCI_SOURCE_DIR) / "../shared/conformance";
}

void expect_all_pass(const VerifyOptions& options) {
  const fs::path folder = conformance() / "onnx";
  if (!fs::is_directory(folder)) {
    GTEST_SKIP() << "no conformance cases at " << folder << " (set FOCI_CONFORMANCE_DIR)";
  }
  const VerifyReport report = verify_paths({folder}, options);
  for (const VerifyFailure& f : report.failures) {
    ADD_FAILURE() << f.path.filename().string() << ": " << f.message;
  }
  for (const VerifyUnreadable& u : report.unreadable) {
    ADD_FAILURE() << u.path.filename().string() << ": " << u.message;
  }
  EXPECT_GE(report.passed, 60);
  EXPECT_EQ(report.skipped, 0);
  if (options.reference) return;
  // `plain` serves every case, in float32 and in float16, on every target.
  const auto targets = static_cast<int64_t>(supported_targets().size());
  EXPECT_GE(report.runs, 2 * targets * report.passed);
}

TEST(Conformance, OnnxThroughTheOracle) {
  expect_all_pass({.reference = true});
}

TEST(Conformance, OnnxThroughTheEngine) {
  FOCI_SKIP_WITHOUT_AN_ENGINE();
  expect_all_pass({});
}

}  // namespace
}  // namespace foci
