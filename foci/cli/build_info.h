// What the program is: names and numbers for `version` and for the foot of reports.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace foci::cli {

std::string program_version();   // "0.1.0"
std::string program_commit();    // short hash, "+" behind it where files were changed; or "unknown"
std::string processor_name();    // of the machine, or "unknown"
std::string program_compiler();  // "GNU 12.2.0"
// Libraries and their versions, as compiled against.
std::vector<std::pair<std::string, std::string>> library_versions();
// Names of the SIMD targets.
std::vector<std::string> built_target_names();
std::vector<std::string> supported_target_names();

}  // namespace foci::cli
