// foci demo: trains a small transformer on digits in clutter and writes a page that shows where it
// looks, against chance and against itself untrained.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "foci/cli/json_text.h"
#include "foci/cli/run_folder.h"
#include "foci/cli/session.h"
#include "foci/cli/train_flags.h"
#include "foci/report/text.h"
#include "foci/vision/scenes.h"

namespace foci::cli {
namespace {

// The best head is chosen on scenes of training digits that no step has used, so that it is judged
// on other scenes than those it won on.
constexpr int64_t kChoiceBegin = int64_t{1} << 31;
constexpr int64_t kChoiceScenes = 300;

nlohmann::ordered_json to_json(const insight::Estimate& e) {
  return {{"value", e.value},
          {"low", e.low},
          {"high", e.high},
          {"count", e.count},
          {"independent", e.independent}};
}

class Demo : public Verb {
 public:
  Demo() {
    // What suits these scenes; `train vit` has its own defaults.
    flags_.minutes = 1;
  }

  void declare(CLI::App& app) override {
    app_ = &app;
    declare_length(app, flags_);
    app.add_flag("--anywhere", anywhere_, "Digits at any pixel, not only where a patch begins");
    app.add_option("--scenes", scenes_, "Unseen scenes to test on")
        ->check(check_whole)
        ->check(CLI::Range(1, 1000000).description(""))
        ->type_name("N");
    app.add_option("--out", out_, "Folder for the model; a demo's old one is replaced")
        ->type_name("FOLDER");
    app.add_option("--report", report_, "The page (default: report.html in --out)")
        ->type_name("FILE");
    app.add_flag("--resume", resume_,
                 "Go on from the checkpoint in --out, with the options it was started with");
    declare_run(app, flags_, common_);
  }

  std::string settings_to_go_on_from() override {
    return resume_ ? settings_of_run(out_, kVerb) : std::string();
  }

  int run() override {
    apply_threads(common_);
    check_writable("--report", report_);
    catch_interrupts();
    const auto start = std::chrono::steady_clock::now();
    Progress progress(common_.quiet);
    vision::TrainOptions options = train_options(flags_, common_.seed);
    // A demo may replace an older demo, and nothing that somebody trained.
    const auto use = resume_ ? RunFolder::Use::resume : RunFolder::Use::replace;
    const RunFolder folder(out_, kVerb, use, *app_, call);
    const vision::Scenes data({.seed = common_.seed, .anywhere = anywhere_});
    options.folder = out_;
    options.resume = resume_;
    options.replace = true;
    options.record = folder.record(data, nullptr);
    progress.say(
        fmt::format("training a transformer of {} layers × {} heads on digits in clutter, {}",
                    flags_.layers, flags_.heads,
                    flags_.steps ? fmt::format("{} steps", *flags_.steps)
                                 : fmt::format("{:g} min", flags_.minutes)));
    // An older model's page would tell of a model that is gone.
    const TrainOutcome outcome = train(data, options, progress, {}, [&] {
      std::error_code ignored;
      std::filesystem::remove(own_page(), ignored);
    });
    const std::string go_on = resume_command(call, common_, kVerb, out_);
    if (!outcome.result.finished) return stopped(outcome, go_on, progress);

    progress.say(fmt::format("looking at {} unseen scenes", scenes_));
    Vit<float>& model = outcome.trainer->model();
    Vit<float> untrained(model.config());
    untrained.reset(common_.seed);
    EvaluateOptions test{.count = scenes_, .gallery = 12, .mistakes = 24};
    EvaluateOptions plain_test{.count = scenes_};
    EvaluateOptions choice{
        .split = vision::Split::train, .begin = kChoiceBegin, .count = kChoiceScenes};
    for (EvaluateOptions* o : {&test, &plain_test, &choice}) {
      o->keep_going = [](int64_t) { return !interrupted(); };
    }
    const Result r{outcome, evaluate(model, data, test), evaluate(untrained, data, plain_test),
                   evaluate(model, data, choice).hits->best_head(),
                   evaluate(untrained, data, choice).hits->best_head()};
    if (interrupted()) return stopped(outcome, go_on, progress);
    const std::filesystem::path page =
        report_.empty() ? own_page() : std::filesystem::path(report_);
    report::write_report(page, report_for(r, data));
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    print(r, page, seconds);
    return kOk;
  }

 private:
  struct Result {
    const TrainOutcome& outcome;
    Evaluation trained, untrained;
    std::pair<int64_t, int64_t> best, best_untrained;  // layer, head

    double ms_per_step() const {
      return 1000 * outcome.result.seconds /
             static_cast<double>(std::max<int64_t>(1, outcome.result.steps));
    }
  };

  std::filesystem::path own_page() const { return std::filesystem::path(out_) / "report.html"; }

  insight::Estimate hits(const Evaluation& e) const { return e.hits->last_layer(); }

  report::Report report_for(const Result& r, const vision::Dataset& data) const {
    report::Report out = report_of(data.classes(), r.outcome, r.trained);
    const insight::Estimate accuracy = r.trained.accuracy();
    const insight::Estimate trained = hits(r.trained), untrained = hits(r.untrained);
    const double chance = r.trained.hits->chance();
    const auto seconds = r.outcome.result.seconds;
    // Guessing gets one digit in ten right.
    const bool learned = accuracy.low > 0.1;
    out.title = learned ? "A transformer learned to read digits in clutter"
                        : "A transformer that has not learned to read digits yet";
    out.summary = fmt::format(
        "In {} it {} to name the one whole digit among scraps of others, with {} "
        "right on scenes of digits it never saw. Nobody told it where the digit lies, yet in {} of "
        "the scenes the patch it attends to most is part of the digit; before training, in {}.",
        report::duration(seconds), learned ? "learned" : "did not learn",
        report::percent(accuracy.value), report::percent(trained.value),
        report::percent(untrained.value));
    out.numbers = {
        {"right on unseen digits", report::percent(accuracy.value),
         interval_words(accuracy, "scene", "digit")},
        {"looks at the digit", report::percent(trained.value),
         fmt::format("{}; untrained {}, chance {}", interval_words(trained, "scene", "digit"),
                     report::percent(untrained.value), report::percent(chance))},
        {"training", report::duration(seconds),
         fmt::format(
             "{}, {} ms each, {} a step", report::counted(r.outcome.result.steps, "step", "steps"),
             report::number(r.ms_per_step()), report::counted(flags_.batch, "scene", "scenes"))},
        {"parameters", report::grouped(r.outcome.trainer->model().parameter_count()),
         fmt::format("{} layers, {} heads, width {}", flags_.layers, flags_.heads, flags_.width)}};
    out.reading = reading_of(r.outcome.trainer->model().config().pooling);
    const auto line = [&](const char* label, const insight::Estimate& rate, bool is_trained) {
      out.hits.lines.push_back({label, rate, is_trained});
    };
    const auto named = [](const char* when, const std::pair<int64_t, int64_t>& head) {
      return fmt::format("{}, layer {} head {} (chosen on other scenes)", when, head.first + 1,
                         head.second + 1);
    };
    line("trained, last layer's heads together", trained, true);
    line("trained, all heads together", r.trained.hits->all_heads(), true);
    line(named("trained", r.best).c_str(), r.trained.hits->head(r.best.first, r.best.second), true);
    line("untrained, last layer's heads together", untrained, false);
    line("untrained, all heads together", r.untrained.hits->all_heads(), false);
    line(named("untrained", r.best_untrained).c_str(),
         r.untrained.hits->head(r.best_untrained.first, r.best_untrained.second), false);
    out.hits.chance = chance;
    out.hits.per_head = {r.trained.hits->layers(),
                         r.trained.hits->heads(),
                         r.trained.hits->head_rates(),
                         r.untrained.hits->head_rates(),
                         1,
                         r.trained.hits->scenes()};
    out.entropy.reference = r.untrained.entropy.means();
    out.provenance = provenance(
        std::filesystem::path(out_) / "model.safetensors",
        "1,797 handwritten digits (E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten "
        "Digits, UCI, 1998, doi 10.24432/C50P49, CC BY 4.0), placed in clutter cut from other "
        "digits; training and test share no digit");
    out.provenance.emplace_back("seed", std::to_string(common_.seed));
    return out;
  }

  void print(const Result& r, const std::filesystem::path& page, double seconds) const {
    const insight::Estimate accuracy = r.trained.accuracy();
    const double chance = r.trained.hits->chance();
    if (common_.json) {
      const nlohmann::ordered_json out = {
          {"accuracy", to_json(accuracy)},
          {"landmark_hit_rate",
           {{"reading", "mean of the last layer's heads"},
            {"trained", to_json(hits(r.trained))},
            {"untrained", to_json(hits(r.untrained))},
            {"trained_best_head", to_json(r.trained.hits->head(r.best.first, r.best.second))},
            {"untrained_best_head",
             to_json(r.untrained.hits->head(r.best_untrained.first, r.best_untrained.second))}}},
          {"chance", chance},
          {"scenes", accuracy.count},
          {"seconds", r.outcome.result.seconds},
          {"seconds_in_all", seconds},
          {"steps", r.outcome.result.steps},
          {"ms_per_step", r.ms_per_step()},
          {"model", out_},
          {"report", page.string()}};
      std::printf("%s", json_text(out).c_str());
      return;
    }
    const auto with_interval = [](const insight::Estimate& e) {
      return fmt::format("{} ({})", report::percent(e.value), interval_words(e, "scene", "digit"));
    };
    std::printf(
        "right on unseen digits   %s\nlooks at the digit       %s\n  the same, untrained    %s\n"
        "  chance                 %s\ntrained                  %s in %s, %.1f ms a "
        "step\nmodel                    %s\nreport                   %s\n",
        with_interval(accuracy).c_str(), with_interval(hits(r.trained)).c_str(),
        with_interval(hits(r.untrained)).c_str(), report::percent(chance).c_str(),
        report::counted(r.outcome.result.steps, "step", "steps").c_str(),
        report::duration(r.outcome.result.seconds).c_str(), r.ms_per_step(), out_.c_str(),
        page.string().c_str());
  }

  static constexpr const char* kVerb = "demo";
  CLI::App* app_ = nullptr;
  Common common_;
  TrainFlags flags_;
  std::string out_ = "foci-demo", report_;
  int64_t scenes_ = 1000;
  bool anywhere_ = false, resume_ = false;
};

}  // namespace

std::unique_ptr<Verb> make_demo() {
  return std::make_unique<Demo>();
}

}  // namespace foci::cli
