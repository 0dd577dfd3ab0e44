// Versions of what the program is made of.
#include "foci/cli/build_info.h"

#include <fmt/format.h>
#include <stdio.h>  // jpeglib.h needs it

#include <jpeglib.h>
#include <oneapi/dnnl/dnnl_version.h>
#include <png.h>
#include <tbb/version.h>
#include <zlib.h>

#include <CLI/Version.hpp>
#include <fstream>
#include <nlohmann/detail/abi_macros.hpp>

#include "foci/core/simd_target.h"
#include "foci_commit.h"

// jconfig.h has the version as a bare token.
#define FOCI_STRING_OF(x) #x
#define FOCI_STRING(x) FOCI_STRING_OF(x)

namespace foci::cli {
namespace {

std::vector<std::string> names(const std::vector<SimdTarget>& targets) {
  std::vector<std::string> out;
  for (SimdTarget t : targets) out.emplace_back(name_of(t));
  return out;
}

}  // namespace

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

std::string program_version() {
  return FOCI_VERSION;
}
std::string program_commit() {
  return FOCI_COMMIT;
}
std::string program_compiler() {
  return FOCI_COMPILER;
}

std::vector<std::pair<std::string, std::string>> library_versions() {
  return {
      {"Highway", FOCI_HIGHWAY_VERSION},
      {"oneTBB", fmt::format("{}.{}", TBB_VERSION_MAJOR, TBB_VERSION_MINOR)},
      {"oneDNN",
       fmt::format("{}.{}.{}", DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH)},
      {"fmt",
       fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100)},
      {"nlohmann-json", fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR,
                                    NLOHMANN_JSON_VERSION_MINOR, NLOHMANN_JSON_VERSION_PATCH)},
      {"CLI11", CLI11_VERSION},
      {"libpng", PNG_LIBPNG_VER_STRING},
      {"libjpeg-turbo", FOCI_STRING(LIBJPEG_TURBO_VERSION)},
      {"zlib", ZLIB_VERSION},
  };
}

std::vector<std::string> built_target_names() {
  return names(built_targets());
}
std::vector<std::string> supported_target_names() {
  return names(supported_targets());
}

}  // namespace foci::cli
