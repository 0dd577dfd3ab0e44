// foci inspect: a page that shows where a trained model looks in pictures.
#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "foci/cli/json_text.h"
#include "foci/cli/pictures.h"
#include "foci/cli/session.h"
#include "foci/cli/verb.h"
#include "foci/report/picture.h"
#include "foci/report/text.h"

namespace foci::cli {
namespace {

class Inspect : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("MODEL", model_, "Folder of a trained model")->required()->type_name("FOLDER");
    app.add_option("IMAGE", images_, "PNG or JPEG files")->required()->type_name("FILE");
    app.add_option("--report", report_, "The page to write")->required()->type_name("FILE");
    declare_threads(app, common_);
    declare_json(app, common_);
  }

  int run() override {
    apply_threads(common_);
    check_writable("--report", report_);
    const Pictures pictures = look_at(model_, images_);
    report::write_report(report_, report_for(pictures));
    if (common_.json) {
      std::printf("%s", json_text(json(pictures)).c_str());
      return kOk;
    }
    const std::vector<std::string>& classes = pictures.model->config().classes;
    for (const report::Scene& s : pictures.scenes) {
      const auto predicted = static_cast<size_t>(s.predicted);
      std::printf("%s\t%s %.3f\n", s.name.c_str(), classes[predicted].c_str(),
                  s.probabilities[predicted]);
    }
    std::printf("report\t%s\n", report_.c_str());
    return kOk;
  }

 private:
  report::Report report_for(const Pictures& pictures) const {
    const VitConfig& config = pictures.model->config();
    report::Report r;
    r.title = pictures.scenes.size() == 1
                  ? "Where the model looks: " + pictures.scenes[0].name
                  : fmt::format("Where the model looks in {} pictures", pictures.scenes.size());
    r.summary = fmt::format("A vision transformer of {} layers × {} heads with {} classes.",
                            config.layers, config.heads, config.classes.size());
    r.classes = config.classes;
    r.gallery = pictures.scenes;
    r.reading = reading_of(config.pooling);
    r.entropy = {pictures.model->map_layers(), config.heads, {}, {}, 0};
    r.entropy.value.assign(pictures.entropy[0].size(), 0.0);
    const double share = 1 / static_cast<double>(pictures.scenes.size());
    for (size_t i = 0; i < pictures.scenes.size(); ++i) {
      for (size_t k = 0; k < r.entropy.value.size(); ++k) {
        r.entropy.value[k] += share * pictures.entropy[i][k];
      }
      const report::Scene& s = pictures.scenes[i];
      r.entropy.full += share * std::log(static_cast<double>(s.rows * s.columns));
    }
    if (r.entropy.full <= 0) r.entropy.full = 1;  // pictures of a single patch
    r.provenance =
        provenance(std::filesystem::path(model_) / "model.safetensors",
                   fmt::format("{} pictures given on the command line", pictures.scenes.size()));
    return r;
  }

  nlohmann::ordered_json json(const Pictures& pictures) const {
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    for (size_t i = 0; i < pictures.scenes.size(); ++i) {
      const report::Scene& s = pictures.scenes[i];
      nlohmann::ordered_json heads = nlohmann::ordered_json::array();
      const int64_t patches = s.rows * s.columns;
      for (int64_t k = 0; k < s.layers * s.heads; ++k) {
        const int64_t top =
            report::top_patch(&s.attention[static_cast<size_t>(k * patches)], patches);
        heads.push_back({{"layer", k / s.heads + 1},
                         {"head", k % s.heads + 1},
                         {"entropy", pictures.entropy[i][static_cast<size_t>(k)]},
                         {"top_patch", {top / s.columns, top % s.columns}}});
      }
      const auto predicted = static_cast<size_t>(s.predicted);
      all.push_back({{"image", s.name},
                     {"class", pictures.model->config().classes[predicted]},
                     {"probability", s.probabilities[predicted]},
                     {"grid", {s.rows, s.columns}},
                     {"heads", heads}});
    }
    return {{"report", report_}, {"pictures", all}};
  }

  Common common_;
  std::string model_, report_;
  std::vector<std::string> images_;
};

}  // namespace

std::unique_ptr<Verb> make_inspect() {
  return std::make_unique<Inspect>();
}

}  // namespace foci::cli
