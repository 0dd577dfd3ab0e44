// foci train vit: trains a vision transformer and keeps it in a folder.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "foci/cli/json_text.h"
#include "foci/cli/session.h"
#include "foci/cli/train_flags.h"
#include "foci/io/file.h"
#include "foci/report/text.h"
#include "foci/vision/folder.h"
#include "foci/vision/scenes.h"

namespace foci::cli {
namespace {

constexpr int64_t kMaxTested = 2000;

class TrainVit : public Verb {
 public:
  void declare(CLI::App& app) override {
    app_ = &app;
    const char* data = "Data";
    app.add_option("--data", data_,
                   "Folder with one folder a class, PNG or JPEG inside, upright as EXIF says, "
                   "clear parts over white (default: the demo's digits in clutter)")
        ->type_name("FOLDER")
        ->group(data);
    app.add_option("--patch", patch_, "Pixels a side of a patch")
        ->check(check_whole)
        ->type_name("N")
        ->group(data);
    app.add_option("--max-side", max_side_, "Longer pictures are shrunk to this")
        ->check(check_whole)
        ->type_name("N")
        ->group(data);
    app.add_option("--test-share", test_share_, "Share of each class held back for testing")
        ->check(check_number)
        ->type_name("X")
        ->group(data);
    app.add_flag("--mirror", mirror_, "Mirror half of the training pictures")->group(data);
    app.add_flag("--anywhere", anywhere_, "Digits at any pixel, not only where a patch begins")
        ->group(data);
    app.add_option("--out", out_, "Folder for the model and its checkpoints")->type_name("FOLDER");
    app.add_flag("--resume", resume_,
                 "Go on from the checkpoint in --out, with the options it was started with");
    app.add_option("--report", report_, "Write a report about the training to this file")
        ->type_name("FILE");
    declare_length(app, flags_);
    declare_run(app, flags_, common_);
  }

  // A resumed run takes its options from where it began.
  std::filesystem::path implied_config(std::span<const std::string> words) override {
    std::filesystem::path out = out_;
    bool resume = false;
    for (size_t i = 0; i < words.size(); ++i) {
      if (words[i] == "--resume") resume = true;
      if (words[i] == "--out" && i + 1 < words.size()) out = words[i + 1];
      if (words[i].starts_with("--out=")) out = words[i].substr(6);
    }
    out /= kSettingsFile;
    return resume && std::filesystem::exists(out) ? out : std::filesystem::path();
  }

  int run() override {
    apply_threads(common_);
    check_writable("--report", report_);
    catch_interrupts();
    Progress progress(common_.quiet);
    if (out_.empty()) throw UsageError("--out: an empty text given, a folder is needed");
    const std::string settings = own_settings();
    const std::unique_ptr<vision::Dataset> data = dataset();
    vision::TrainOptions options = train_options(flags_, common_.seed);
    options.folder = out_;
    options.resume = resume_;
    const TrainOutcome outcome = train(*data, options, progress, [&] {
      if (!resume_) write_file(std::filesystem::path(out_) / kSettingsFile, settings);
    });
    if (!outcome.result.finished) {
      return stopped(outcome, fmt::format("foci train vit --out {} --resume", out_), progress);
    }
    EvaluateOptions test{.count = kMaxTested, .gallery = 12, .mistakes = 24};
    test.keep_going = [](int64_t) { return !interrupted(); };
    const Evaluation evaluation = evaluate(outcome.trainer->model(), *data, test);
    if (interrupted()) return kInterrupted;
    if (!report_.empty()) write(outcome, *data, evaluation);
    print(outcome, evaluation);
    return kOk;
  }

 private:
  std::unique_ptr<vision::Dataset> dataset() const {
    if (data_.empty()) {
      vision::SceneOptions scenes;
      scenes.seed = common_.seed;
      scenes.anywhere = anywhere_;
      return std::make_unique<vision::Scenes>(scenes);
    }
    vision::FolderOptions folder;
    folder.patch = patch_;
    folder.max_side = max_side_;
    folder.test_share = test_share_;
    folder.mirror = mirror_;
    folder.seed = common_.seed;
    return reading([&] { return std::make_unique<vision::Folder>(data_, folder); });
  }

  // Without what differs from call to call.
  std::string own_settings() const {
    constexpr std::string_view kOfThisCall[] = {"resume", "quiet", "json", "threads", "out"};
    nlohmann::ordered_json all = nlohmann::ordered_json::parse(settings_json(*app_, kOfThisCall));
    // The run may be resumed from another place.
    if (!data_.empty()) all["data"] = std::filesystem::absolute(data_).string();
    return json_text(all);
  }

  std::string data_name() const {
    return data_.empty() ? "1,797 handwritten digits in clutter (E. Alpaydin and C. Kaynak, UCI, "
                           "1998, CC BY 4.0)"
                         : data_;
  }

  void write(const TrainOutcome& outcome, const vision::Dataset& data, const Evaluation& test) {
    report::Report r = report_of(data.classes(), outcome, test);
    const auto accuracy = test.accuracy();
    r.title = "A vision transformer, trained";
    r.summary = fmt::format("{}, {} of {}. Tested on {} that never trained it.",
                            report::counted(std::ssize(data.classes()), "class", "classes"),
                            report::counted(outcome.result.steps, "step", "steps"),
                            report::counted(flags_.batch, "picture", "pictures"),
                            report::counted(accuracy.count, "picture", "pictures"));
    r.numbers = {
        {"right on unseen pictures", report::percent(accuracy.value),
         interval_words(accuracy, "picture")},
        {"training", report::duration(outcome.result.seconds),
         report::counted(outcome.result.steps, "step", "steps")},
        {"parameters", report::grouped(outcome.trainer->model().parameter_count()),
         fmt::format("{} layers, {} heads, width {}", flags_.layers, flags_.heads, flags_.width)}};
    r.reading = reading_of(outcome.trainer->model().config().pooling);
    r.provenance = provenance(std::filesystem::path(out_) / "model.safetensors", data_name());
    r.provenance.emplace_back("seed", std::to_string(common_.seed));
    report::write_report(report_, r);
  }

  void print(const TrainOutcome& outcome, const Evaluation& test) const {
    const auto accuracy = test.accuracy();
    const double ms = 1000 * outcome.result.seconds /
                      static_cast<double>(std::max<int64_t>(1, outcome.result.steps));
    if (common_.json) {
      const nlohmann::ordered_json out = {
          {"accuracy",
           {{"value", accuracy.value},
            {"low", accuracy.low},
            {"high", accuracy.high},
            {"count", accuracy.count},
            {"independent", accuracy.independent}}},
          {"loss", test.loss},
          {"steps", outcome.result.steps},
          {"seconds", outcome.result.seconds},
          {"ms_per_step", ms},
          {"model", out_},
          {"report", report_.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(report_)}};
      std::printf("%s", json_text(out).c_str());
      return;
    }
    std::printf(
        "right       %s of unseen pictures (%s)\n"
        "trained     %s in %s, %.1f ms a step\nmodel       %s\n",
        report::percent(accuracy.value).c_str(), interval_words(accuracy, "picture").c_str(),
        report::counted(outcome.result.steps, "step", "steps").c_str(),
        report::duration(outcome.result.seconds).c_str(), ms, out_.c_str());
    if (!report_.empty()) std::printf("report      %s\n", report_.c_str());
  }

  CLI::App* app_ = nullptr;
  Common common_;
  TrainFlags flags_;
  std::string data_, out_ = "foci-model", report_;
  int64_t patch_ = 4, max_side_ = 64;
  double test_share_ = 0.2;
  bool mirror_ = false, anywhere_ = false, resume_ = false;
};

}  // namespace

std::unique_ptr<Verb> make_train_vit() {
  return std::make_unique<TrainVit>();
}

}  // namespace foci::cli
