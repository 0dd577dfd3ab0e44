// The table of reported cases and fixed numbers, on the oracle.
#include "reference/reported_cases.h"

namespace foci::testing {
namespace {

[[maybe_unused]] const bool registered = [] {
  register_reported_tests("", reference_engine);
  return true;
}();

}  // namespace
}  // namespace foci::testing
