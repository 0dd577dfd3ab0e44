// Training under watch, and the parts of reports that come from it.
#include "foci/cli/session.h"

#include <algorithm>

#include "foci/cli/build_info.h"
#include "foci/cli/sha256.h"
#include "foci/core/simd_target.h"
#include "foci/core/threads.h"
#include "foci/report/text.h"

namespace foci::cli {
namespace {

// While it trains, the model is tried this often on so many pictures: together about a hundredth of
// the run.
constexpr int kTries = 12;
constexpr int64_t kTryPictures = 128;
// Endless sets: far from the pictures that the final test uses.
constexpr int64_t kTryBegin = int64_t{1} << 30;

class Watch {
 public:
  Watch(const vision::Dataset& data, const vision::TrainOptions& options, Progress& progress)
      : data_(data), minutes_(options.minutes), progress_(progress) {}

  void attach(vision::Trainer* trainer) { trainer_ = trainer; }
  std::vector<report::EvaluationRecord> take_evaluations() { return std::move(evaluations_); }

  void step(const vision::Progress& p) {
    const double share = p.steps ? static_cast<double>(p.step) / static_cast<double>(*p.steps)
                                 : p.seconds / (60 * minutes_.value_or(1));
    if (next_try_ < 0) next_try_ = static_cast<int>(share * kTries) + 1;  // where a run resumes
    if (share * kTries >= next_try_ && next_try_ <= kTries) {
      try_held_back(p.step);
      next_try_ = static_cast<int>(share * kTries) + 1;
    }
    const std::string of = p.steps ? fmt::format("/{}", *p.steps) : std::string();
    const std::string held = evaluations_.empty() ? std::string()
                                                  : fmt::format("  held back {:.0f} %",
                                                                100 * evaluations_.back().accuracy);
    progress_.update(fmt::format(
        "step {}{}  loss {:.3f}  right {:.0f} %{}  grad {:.2f}  lr {:.1e}  {:.0f} pictures/s  "
        "ETA {}",
        p.step, of, p.smooth_loss, 100 * p.accuracy, held, p.grad_norm, p.learning_rate,
        p.items_per_second, clock_text(p.eta_seconds)));
  }

 private:
  void try_held_back(int64_t step) {
    const int64_t begin = data_.size(vision::Split::test) ? 0 : kTryBegin;
    const vision::Evaluation e = vision::evaluate(trainer_->model(), data_, vision::Split::test,
                                                  begin, begin + kTryPictures);
    evaluations_.push_back({step, e.loss, e.accuracy(), std::ssize(e.labels)});
  }

  const vision::Dataset& data_;
  std::optional<double> minutes_;
  Progress& progress_;
  vision::Trainer* trainer_ = nullptr;
  int next_try_ = -1;
  std::vector<report::EvaluationRecord> evaluations_;
};

}  // namespace

TrainOutcome train(const vision::Dataset& data, vision::TrainOptions options, Progress& progress,
                   const std::function<void()>& accepted, const std::function<void()>& replaced) {
  Watch watch(data, options, progress);
  bool first = true;
  options.stop = &interrupt_flag();
  options.progress = [&](const vision::Progress& p) {
    if (first && replaced) replaced();
    first = false;
    watch.step(p);
  };
  TrainOutcome out;
  // Only a resumed run reads files here.
  out.trainer = reading([&] { return std::make_unique<vision::Trainer>(data, options); });
  watch.attach(out.trainer.get());
  if (accepted) accepted();
  out.result = out.trainer->run();
  progress.finish();
  out.evaluations = watch.take_evaluations();
  return out;
}

int stopped(const TrainOutcome& outcome, const std::string& command, Progress& progress) {
  progress.say(fmt::format("stopped after step {}; the checkpoint is kept, go on with: {}",
                           outcome.result.steps, command));
  return kInterrupted;
}

std::vector<std::pair<std::string, std::string>> provenance(const std::filesystem::path& model,
                                                            const std::string& data) {
  std::vector<std::pair<std::string, std::string>> out;
  out.emplace_back("program", fmt::format("foci {} (commit {}, {})", program_version(),
                                          program_commit(), program_compiler()));
  if (!model.empty()) {
    out.emplace_back("model", model.string());
    out.emplace_back("model, SHA-256", sha256_of_file(model));
  }
  out.emplace_back("SIMD target", std::string(name_of(current_target())));
  out.emplace_back("threads", std::to_string(num_threads()));
  out.emplace_back("data", data);
  return out;
}

std::string interval_text(const insight::Estimate& e) {
  return fmt::format("{:.1f} – {:.1f} %", 100 * e.low, 100 * e.high);
}

std::string interval_words(const insight::Estimate& e, const std::string& observed,
                           const std::string& thing) {
  constexpr int64_t kFew = 5;
  std::string n = report::counted(e.count, observed, observed + "s");
  if (e.independent < e.count) n += " of " + report::counted(e.independent, thing, thing + "s");
  const std::string interval = "95 % interval " + interval_text(e);
  return e.independent < kFew ? fmt::format("only {}: {}", n, interval)
                              : fmt::format("{}; {}", interval, n);
}

report::Report report_of(const std::vector<std::string>& classes, const TrainOutcome& outcome,
                         const Evaluation& test) {
  report::Report r;
  r.classes = classes;
  for (const vision::CurvePoint& p : outcome.result.curve) {
    r.steps.push_back({p.step, p.loss, p.accuracy, p.learning_rate, p.grad_norm});
  }
  r.evaluations = outcome.evaluations;
  const double smoothing = outcome.trainer->options().label_smoothing;
  if (smoothing > 0) {
    r.training_note = fmt::format(
        "In training {:g} % of each label is shared among all classes, and pictures are varied, so "
        "the training loss stays above that of held-back pictures.",
        100 * smoothing);
  }
  r.confusion.counts = test.confusion.counts();
  r.gallery = test.gallery;
  r.mistakes = test.mistakes;
  r.unseen_count = test.confusion.total();
  r.mistake_count = test.confusion.total() - test.confusion.correct();
  r.entropy = {test.entropy.layers(), test.entropy.heads(),  test.entropy.means(), {},
               test.even_entropy,     test.confusion.total()};
  return r;
}

std::string reading_of(Pooling pooling) {
  switch (pooling) {
    case Pooling::class_token:
      return "the attention it gets from the class token, whose vector the answer is read from";
    case Pooling::mean:
      return "the attention it gets from all patches, averaged";
    case Pooling::attention:
      return "the attention it gets: in the last row from the query that pools all patches for "
             "the answer, in the rows above from all patches, averaged";
  }
  return "";
}

}  // namespace foci::cli
