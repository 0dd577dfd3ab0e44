// foci verify: the attention engine against case files made elsewhere.
#include "foci/verify/verify.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "foci/cli/json_text.h"
#include "foci/cli/verb.h"

namespace foci::cli {
namespace {

class Verify : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("PATH", paths_, "Case files, or folders of them")
        ->required()
        ->type_name("FILE|FOLDER");
    app.add_option("--target", target_, "One SIMD target (default: all that this machine runs)")
        ->type_name("NAME");
    app.add_option("--implementation", implementation_, "plain or fused (default: both)")
        ->type_name("NAME");
    app.add_flag("--reference", reference_,
                 "Check the double-precision oracle, and so the cases themselves");
    declare_threads(app, common_);
    declare_json(app, common_);
  }

  int run() override {
    apply_threads(common_);
    for (const char* option : {"--target", "--implementation"}) {
      if (reference_ && call.gives(option)) {
        throw UsageError(fmt::format("{}: nothing reads it with --reference", option));
      }
    }
    VerifyOptions options;
    options.reference = reference_;
    if (!target_.empty()) {
      try {
        options.targets = {parse_target(target_)};
      } catch (const ArgumentError& e) {
        throw UsageError(fmt::format("--target: {}", e.what()));
      }
    }
    if (!implementation_.empty()) {
      if (implementation_ != "plain" && implementation_ != "fused") {
        throw UsageError("--implementation: '" + implementation_ +
                         "' given, plain or fused is right");
      }
      options.implementation =
          implementation_ == "plain" ? Implementation::plain : Implementation::fused;
    }
    const VerifyReport report = verify_paths({paths_.begin(), paths_.end()}, options);
    if (common_.json) {
      print_json(report);
    } else {
      for (const VerifyUnreadable& u : report.unreadable) {
        const bool named = u.message.find(u.path.string()) != std::string::npos;
        std::fprintf(stderr, "foci: verify: %s%s\n", named ? "" : (u.path.string() + ": ").c_str(),
                     u.message.c_str());
      }
      for (const VerifyFailure& f : report.failures) {
        std::printf("FAILED %s: %s\n", f.path.c_str(), f.message.c_str());
      }
      // Of nothing there is nothing to count.
      if (report.passed + report.failed > 0) {
        const std::string unread = report.unreadable.empty()
                                       ? std::string()
                                       : fmt::format(", {} not read", report.unreadable.size());
        std::printf("%lld passed, %lld failed%s\n", static_cast<long long>(report.passed),
                    static_cast<long long>(report.failed), unread.c_str());
      }
    }
    if (!report.unreadable.empty()) return kUsage;
    if (report.passed + report.failed == 0) {
      throw UsageError("verify: no case file (*.safetensors) in " + paths_[0]);
    }
    return report.failed > 0 ? kFailure : kOk;
  }

 private:
  static void print_json(const VerifyReport& report) {
    nlohmann::ordered_json failures = nlohmann::ordered_json::array();
    for (const VerifyFailure& f : report.failures) {
      failures.push_back({{"path", f.path.string()},
                          {"op", f.op},
                          {"engine", f.engine},
                          {"tensor", f.tensor},
                          {"error", f.error},
                          {"allowed", f.allowed},
                          {"wrong", f.wrong},
                          {"elements", f.elements},
                          {"message", f.message}});
    }
    nlohmann::ordered_json unreadable = nlohmann::ordered_json::array();
    for (const VerifyUnreadable& u : report.unreadable) {
      unreadable.push_back({{"path", u.path.string()}, {"message", u.message}});
    }
    const nlohmann::ordered_json out = {{"passed", report.passed},
                                        {"failed", report.failed},
                                        {"runs", report.runs},
                                        {"failures", failures},
                                        {"unreadable", unreadable}};
    std::printf("%s", json_text(out).c_str());
  }

  Common common_;
  std::vector<std::string> paths_;
  std::string target_, implementation_;
  bool reference_ = false;
};

}  // namespace

std::unique_ptr<Verb> make_verify() {
  return std::make_unique<Verify>();
}

}  // namespace foci::cli
