// foci train vit: trains a vision transformer and keeps it in a folder.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "foci/cli/json_text.h"
#include "foci/cli/run_folder.h"
#include "foci/cli/session.h"
#include "foci/cli/train_flags.h"
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

  std::string settings_to_go_on_from() override {
    return resume_ ? settings_of_run(out_, kVerb) : std::string();
  }

  int run() override {
    apply_threads(common_);
    check_writable("--report", report_);
    catch_interrupts();
    Progress progress(common_.quiet);
    check_data_options();
    vision::TrainOptions options = train_options(flags_, common_.seed);
    const auto use = resume_ ? RunFolder::Use::resume : RunFolder::Use::begin;
    const RunFolder folder(out_, kVerb, use, *app_, call);
    const std::unique_ptr<vision::Dataset> data = dataset();
    const auto* own = dynamic_cast<const vision::Folder*>(data.get());
    if (own) say_what_is_read(*own, progress);
    const vision::FolderRecord* const pictures = own ? &own->record() : nullptr;
    options.folder = out_;
    options.resume = resume_;
    options.record = folder.record(*data, pictures);
    const TrainOutcome outcome =
        train(*data, options, progress, [&] { folder.keep_pictures(pictures); });
    const std::string go_on = resume_command(call, common_, kVerb, out_);
    if (!outcome.result.finished) return stopped(outcome, go_on, progress);
    EvaluateOptions test{.count = kMaxTested, .gallery = 12, .mistakes = 24};
    test.keep_going = [](int64_t) { return !interrupted(); };
    const Evaluation evaluation = evaluate(outcome.trainer->model(), *data, test);
    if (interrupted()) return stopped(outcome, go_on, progress);
    if (!report_.empty()) write(outcome, *data, evaluation);
    print(outcome, own, evaluation);
    return kOk;
  }

 private:
  // What is told of the data, in the words of the options.
  void check_data_options() const {
    for (const char* option : {"--patch", "--max-side", "--test-share", "--mirror"}) {
      const CLI::Option& o = *app_->get_option(option);
      const bool other = o.get_expected_max() == 0 ? o.count() > 0
                         : o.count() > 0           ? o.results().back() != o.get_default_str()
                                                   : false;
      if (data_.empty() && (call.gives(option) || other)) {
        throw UsageError(fmt::format("{}: nothing reads it without --data", option));
      }
    }
    if (!data_.empty() && anywhere_) {
      throw UsageError("--anywhere: nothing reads it with --data");
    }
    if (app_->get_option("--data")->count() > 0 && data_.empty()) {
      throw UsageError("--data: an empty text given, a folder is needed");
    }
    check_range("--patch", patch_, 1, 1024);
    check_range("--max-side", max_side_, 1, 1 << 14);
    if (max_side_ < patch_ || max_side_ % patch_ != 0) {
      throw UsageError(
          call.gives("--max-side")
              ? fmt::format("--max-side: {} given, a multiple of --patch ({}) is right", max_side_,
                            patch_)
              : fmt::format("--patch: {} given, what divides --max-side ({}) is right", patch_,
                            max_side_));
    }
    if (!(test_share_ > 0 && test_share_ < 1)) {
      throw UsageError(
          fmt::format("--test-share: {} given, between 0 and 1 is right", test_share_));
    }
  }

  // One line about what is read otherwise than somebody may expect, and what is not.
  void say_what_is_read(const vision::Folder& data, Progress& progress) const {
    const auto part = [](const vision::FolderRemark& r, const char* what) {
      return fmt::format("{} {} ({})", r.count, what, r.example);
    };
    std::vector<std::string> parts;
    if (data.nested().count > 0) parts.push_back(part(data.nested(), "in folders inside a class"));
    if (data.misnamed().count > 0) {
      parts.push_back(part(data.misnamed(), "that only their first bytes call PNG or JPEG"));
    }
    std::string line = fmt::format("{}: {} pictures in {} classes", data_,
                                   data.record().pictures.size(), data.classes().size());
    for (size_t i = 0; i < parts.size(); ++i) line += (i == 0 ? ", of them " : ", ") + parts[i];
    for (size_t i = 0; i < data.left_out().size(); ++i) {
      const vision::FolderRemark& r = data.left_out()[i];
      line += (i == 0 ? "; left out: " : ", ") + part(r, r.what.c_str());
    }
    if (!parts.empty() || !data.left_out().empty()) progress.say(line);
  }

  static nlohmann::ordered_json to_json(const vision::FolderRemark& r) {
    return {{"count", r.count}, {"example", r.example}};
  }

  nlohmann::ordered_json data_json(const vision::Folder& data) const {
    nlohmann::ordered_json left_out = nlohmann::ordered_json::array();
    for (const vision::FolderRemark& r : data.left_out()) {
      left_out.push_back({{"what", r.what}, {"count", r.count}, {"example", r.example}});
    }
    nlohmann::ordered_json out = {{"folder", data_},
                                  {"classes", data.classes()},
                                  {"pictures", data.record().pictures.size()}};
    if (data.nested().count > 0) out["in_folders_inside_a_class"] = to_json(data.nested());
    if (data.misnamed().count > 0) out["by_first_bytes_only"] = to_json(data.misnamed());
    out["left_out"] = left_out;
    return out;
  }

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
    try {
      return std::make_unique<vision::Folder>(data_, folder);
    } catch (const vision::FolderErrors& e) {
      if (e.problems().size() <= vision::FolderErrors::kInOneLine) throw UsageError(e.what());
      throw UsageError(e.about(), e.problems());
    } catch (const IoError& e) {
      throw UsageError(fmt::format("--data: {}", e.what()));
    } catch (const FormatError& e) {
      throw UsageError(fmt::format("--data: {}", e.what()));
    }
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

  void print(const TrainOutcome& outcome, const vision::Folder* data,
             const Evaluation& test) const {
    const auto accuracy = test.accuracy();
    const double ms = 1000 * outcome.result.seconds /
                      static_cast<double>(std::max<int64_t>(1, outcome.result.steps));
    if (common_.json) {
      nlohmann::ordered_json out = {
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
      if (data) out["data"] = data_json(*data);
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

  static constexpr const char* kVerb = "train vit";
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
