// foci classify: names what pictures show.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>

#include "foci/cli/json_text.h"
#include "foci/cli/pictures.h"
#include "foci/cli/verb.h"

namespace foci::cli {
namespace {

class Classify : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("MODEL", model_, "Folder of a trained model")->required()->type_name("FOLDER");
    app.add_option("IMAGE", images_,
                   "PNG or JPEG files: upright as EXIF says, clear parts over white")
        ->required()
        ->type_name("FILE");
    app.add_option("--top", top_, "How many classes to name for each picture")
        ->check(check_whole)
        ->check(CLI::Range(1, 1000000).description(""))
        ->type_name("N");
    declare_threads(app, common_);
    declare_json(app, common_);
  }

  int run() override {
    apply_threads(common_);
    const Pictures pictures = look_at_readable(model_, images_);
    const std::vector<std::string>& classes = pictures.model->config().classes;
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    auto unread = pictures.unread.begin();
    auto scene = pictures.scenes.begin();
    for (size_t i = 0; i < images_.size(); ++i) {
      if (unread != pictures.unread.end() && unread->index == i) {
        complain(unread->message);
        all.push_back({{"image", images_[i]}, {"error", unread->message}});
        ++unread;
        continue;
      }
      const std::vector<double>& p = (scene++)->probabilities;
      std::vector<size_t> order(p.size());
      std::iota(order.begin(), order.end(), size_t{0});
      std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] > p[b]; });
      order.resize(std::min(order.size(), static_cast<size_t>(top_)));
      if (common_.json) {
        nlohmann::ordered_json best = nlohmann::ordered_json::array();
        for (size_t c : order) best.push_back({{"class", classes[c]}, {"probability", p[c]}});
        all.push_back({{"image", images_[i]}, {"classes", best}});
        continue;
      }
      std::string line = images_[i];
      for (size_t c : order) line += fmt::format("\t{} {:.3f}", classes[c], p[c]);
      std::printf("%s\n", line.c_str());
    }
    if (common_.json) std::printf("%s", json_text(all).c_str());
    return pictures.unread.empty() ? kOk : kFailure;
  }

 private:
  Common common_;
  std::string model_;
  std::vector<std::string> images_;
  int64_t top_ = 3;
};

}  // namespace

std::unique_ptr<Verb> make_classify() {
  return std::make_unique<Classify>();
}

}  // namespace foci::cli
