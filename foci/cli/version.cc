// foci version: what this program was built from and what it runs on.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "foci/cli/build_info.h"
#include "foci/cli/json_text.h"
#include "foci/cli/verb.h"
#include "foci/core/simd_target.h"
#include "foci/core/threads.h"

namespace foci::cli {
namespace {

class Version : public Verb {
 public:
  void declare(CLI::App& app) override {
    declare_json(app, common_);
    declare_threads(app, common_);
  }

  int run() override {
    apply_threads(common_);
    const std::string in_use(name_of(current_target()));
    if (common_.json) {
      nlohmann::ordered_json libraries = nlohmann::ordered_json::object();
      for (const auto& [name, version] : library_versions()) libraries[name] = version;
      const nlohmann::ordered_json out = {{"version", program_version()},
                                          {"commit", program_commit()},
                                          {"compiler", program_compiler()},
                                          {"targets_built", built_target_names()},
                                          {"targets_supported", supported_target_names()},
                                          {"target", in_use},
                                          {"threads", num_threads()},
                                          {"libraries", libraries}};
      std::printf("%s", json_text(out).c_str());
      return kOk;
    }
    const auto listed = [](const std::vector<std::string>& names) {
      std::string out;
      for (const std::string& n : names) out += (out.empty() ? "" : ", ") + n;
      return out;
    };
    std::string libraries;
    for (const auto& [name, version] : library_versions()) {
      libraries += (libraries.empty() ? "" : ", ") + name + " " + version;
    }
    std::printf(
        "foci %s (commit %s)\ncompiler   %s\nSIMD       %s in use; built: %s; this machine "
        "runs: %s\nthreads    %d\nlibraries  %s\n",
        program_version().c_str(), program_commit().c_str(), program_compiler().c_str(),
        in_use.c_str(), listed(built_target_names()).c_str(),
        listed(supported_target_names()).c_str(), num_threads(), libraries.c_str());
    return kOk;
  }

 private:
  Common common_;
};

}  // namespace

std::unique_ptr<Verb> make_version() {
  return std::make_unique<Version>();
}

}  // namespace foci::cli
