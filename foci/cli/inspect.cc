// foci inspect: a page that shows where a trained model looks in pictures.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "foci/cli/pictures.h"
#include "foci/cli/verb.h"

namespace foci::cli {
namespace {

class Inspect : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("MODEL", model_, "Folder of a trained model")->required()->type_name("FOLDER");
    app.add_option("IMAGE", images_,
                   "PNG or JPEG files: upright as EXIF says, clear parts over white")
        ->required()
        ->type_name("FILE");
    app.add_option("--report", report_, "The page to write")->required()->type_name("FILE");
    declare_threads(app, common_);
    declare_json(app, common_);
  }

  int run() override {
    apply_threads(common_);
    check_writable("--report", report_);
    const Pictures pictures = look_at_readable(model_, images_);
    for (const UnreadPicture& u : pictures.unread) complain(u.message);
    const int code = pictures.unread.empty() ? kOk : kFailure;
    report::write_report(report_, report_of(pictures, model_));
    if (common_.json) {
      std::printf("%s", looks_json(pictures, report_).c_str());
      return code;
    }
    const std::vector<std::string>& classes = pictures.model->config().classes;
    for (const report::Scene& s : pictures.scenes) {
      const auto predicted = static_cast<size_t>(s.predicted);
      std::printf("%s\t%s %.3f\n", s.name.c_str(), classes[predicted].c_str(),
                  s.probabilities[predicted]);
    }
    std::printf("report\t%s\n", report_.c_str());
    return code;
  }

 private:
  Common common_;
  std::string model_, report_;
  std::vector<std::string> images_;
};

}  // namespace

std::unique_ptr<Verb> make_inspect() {
  return std::make_unique<Inspect>();
}

}  // namespace foci::cli
