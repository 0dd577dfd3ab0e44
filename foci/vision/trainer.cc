// The training loop: steps, checkpoints, resuming, the curve; and evaluation.
#include "foci/vision/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <span>
#include <sstream>
#include <string>

#include "foci/core/memory.h"
#include "foci/nn/checkpoint.h"

namespace foci::vision {
namespace {

constexpr const char *kRecord = "run", *kData = "data";  // in the text of a training state
constexpr double kSmoothing = 0.02;  // moving means look back over about 50 steps
constexpr size_t kCurvePoints = 500;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int64_t argmax(const Tensor& rows, int64_t row) {
  const std::span<const float> all = rows.span<float>();
  const auto classes = static_cast<std::ptrdiff_t>(rows.dim(1));
  const auto first = all.begin() + row * classes;
  return std::max_element(first, first + classes) - first;
}

std::vector<int64_t> labels_of(const Batch& batch) {
  const auto labels = batch.labels.span<int64_t>();
  return {labels.begin(), labels.end()};
}

// Each step's dropout has a seed of its own.
uint64_t step_seed(uint64_t seed, int64_t step) {
  constexpr uint32_t kPurpose = 0x64726f70;  // apart from the other uses of this seed
  const auto words =
      philox(seed, {static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), kPurpose, 0});
  return words[0] | uint64_t{words[1]} << 32;
}

void check(const TrainOptions& o) {
  require(o.steps.has_value() != o.minutes.has_value(),
          "training: give either steps or minutes, {} were given",
          o.steps.has_value() ? "both" : "none");
  require(!o.steps || *o.steps >= 1, "steps: {} given, at least 1 is needed", o.steps.value_or(0));
  require(!o.minutes || (*o.minutes > 0 && std::isfinite(*o.minutes)),
          "minutes: {} given, a number above 0 is needed", o.minutes.value_or(0));
  require(o.batch >= 1 && o.batch <= 1 << 20, "batch: {} pictures given, 1 to {} are right",
          o.batch, 1 << 20);
  require(o.schedule.peak > 0, "learning rate: {} given, it must be above 0", o.schedule.peak);
  require(o.schedule.warm_up >= 0 && o.schedule.warm_up <= 1 && o.schedule.floor >= 0 &&
              o.schedule.floor <= 1,
          "schedule: warm-up {} and floor {} are shares, from 0 to 1", o.schedule.warm_up,
          o.schedule.floor);
  require(o.clip >= 0, "clip: {} given, 0 (unlimited) or more is right", o.clip);
  require(o.label_smoothing >= 0 && o.label_smoothing <= 1,
          "label smoothing: {} given, it lies in [0, 1]", o.label_smoothing);
  require(o.checkpoint_seconds > 0, "checkpoint seconds: {} given, it must be above 0",
          o.checkpoint_seconds);
  require(!o.checkpoint_every || *o.checkpoint_every >= 1,
          "checkpoint every {} steps: at least 1 is needed", o.checkpoint_every.value_or(0));
  require(!o.resume || !o.folder.empty(), "resume: from which folder?");
}

VitConfig config_of(const Dataset& data, VitConfig c) {
  const PictureFormat& f = data.format();
  validate(f);
  c.patch = f.patch;
  c.channels = f.channels;
  c.max_side = f.max_side;
  c.mean = f.mean;
  c.deviation = f.deviation;
  c.classes = data.classes();
  c.position_rows = c.position_cols = f.max_side / f.patch;
  foci::validate(c);
  return c;
}

// What a run's bits depend on, but for its length: a resumed run must agree in all of it.
std::vector<std::pair<std::string, std::string>> identity(const TrainOptions& o,
                                                          const VitConfig& config) {
  const auto number = [](double x) { return fmt::format("{}", x); };  // the shortest that is exact
  return {{"model", vit_config_to_json(config)},
          {"batch", std::to_string(o.batch)},
          {"seed", std::to_string(o.seed)},
          {"learning rate", number(o.schedule.peak)},
          {"warm-up", number(o.schedule.warm_up)},
          {"floor", number(o.schedule.floor)},
          {"beta1", number(o.adamw.beta1)},
          {"beta2", number(o.adamw.beta2)},
          {"eps", number(o.adamw.eps)},
          {"weight decay", number(o.adamw.weight_decay)},
          {"clip", number(o.clip)},
          {"label smoothing", number(o.label_smoothing)}};
}

// Points of a curve, each the mean over `stride` steps. Strides double when there are too many.
class Curve {
 public:
  void add(const CurvePoint& p) {
    if (pending_ == 0) sum_ = {};
    sum_.step = p.step;
    sum_.seconds = p.seconds;
    sum_.learning_rate = p.learning_rate;
    sum_.loss += p.loss;
    sum_.accuracy += p.accuracy;
    sum_.grad_norm += p.grad_norm;
    if (++pending_ < stride_) return;
    const auto n = static_cast<double>(stride_);
    points_.push_back({sum_.step, sum_.seconds, sum_.loss / n, sum_.accuracy / n,
                       sum_.grad_norm / n, sum_.learning_rate});
    pending_ = 0;
    if (points_.size() <= kCurvePoints) return;
    std::vector<CurvePoint> half;
    for (size_t i = 1; i < points_.size(); i += 2) {
      const CurvePoint &a = points_[i - 1], &b = points_[i];
      half.push_back({b.step, b.seconds, (a.loss + b.loss) / 2, (a.accuracy + b.accuracy) / 2,
                      (a.grad_norm + b.grad_norm) / 2, b.learning_rate});
    }
    points_ = std::move(half);
    stride_ *= 2;
  }
  const std::vector<CurvePoint>& points() const { return points_; }

  std::string text() const {
    std::string s = std::to_string(stride_);
    for (const CurvePoint& p : points_) {
      s += fmt::format(";{} {:.3f} {:.6g} {:.6g} {:.6g} {:.6g}", p.step, p.seconds, p.loss,
                       p.accuracy, p.grad_norm, p.learning_rate);
    }
    return s;
  }
  // A curve that cannot be read starts anew: nothing but a picture depends on it.
  static Curve from_text(const std::string& text) {
    Curve c;
    std::istringstream in(text);
    char separator = ';';
    if (!(in >> c.stride_) || c.stride_ < 1) return {};
    CurvePoint p;
    while (in >> separator >> p.step >> p.seconds >> p.loss >> p.accuracy >> p.grad_norm >>
           p.learning_rate) {
      c.points_.push_back(p);
      if (c.points_.size() > kCurvePoints) return {};
    }
    return c;
  }

 private:
  std::vector<CurvePoint> points_;
  CurvePoint sum_;
  int64_t stride_ = 1;
  int64_t pending_ = 0;
};

}  // namespace

struct Trainer::State {
  KeepMemory keep;
  const Dataset& data;
  TrainOptions options;
  Vit<float> model;
  nn::FlatParameters parameters;
  nn::AdamW optimiser;
  int64_t step = 0;
  double seconds_before = 0;  // of training, in the runs that this one continues
  Curve curve;
  Progress progress;
  int64_t averaged = 0;  // steps of this run in the means of progress

  State(const Dataset& d, TrainOptions o)
      : data(d),
        options(std::move(o)),
        model(options.model),
        parameters(model.parameters()),
        optimiser(parameters, options.adamw) {
    model.reset(options.seed);
    model.encoder.checkpoint = options.checkpoint_layers;
  }

  std::filesystem::path training_file() const { return options.folder / kTrainingFile; }

  // A step may leave weights whose loss is not finite, which only the next step would notice: such
  // a state must not replace a good checkpoint.
  void check_state() {
    constexpr int64_t kPictures = 8;
    const Batch batch =
        make_batch(training_samples(data, options.seed, step, std::min(options.batch, kPictures)),
                   data.format());
    Tape<float> tape(false);
    nn::Context<float> context{tape};
    const Var<float> logits =
        model.forward(context, tape.constant(batch.patches), patch_grids(batch));
    const double loss =
        ops::softmax_cross_entropy(tape, logits, labels_of(batch), 0).value().item();
    const std::span<const float> weights = parameters.values().span<float>();
    require<NumericError>(
        std::isfinite(loss) &&
            std::all_of(weights.begin(), weights.end(), [](float x) { return std::isfinite(x); }),
        "training step {}: after it the loss is {}; a lower learning rate may help", step, loss);
  }

  void save(double seconds) {
    if (options.folder.empty()) return;
    check_state();
    nn::StateText text;
    for (const auto& [key, value] : identity(options, model.config())) text[key] = value;
    text["step"] = std::to_string(step);
    text["seconds"] = fmt::format("{:.6f}", seconds);
    text["curve"] = curve.text();
    if (!options.record.empty()) text[kRecord] = options.record;
    if (const std::string word = data.fingerprint(); !word.empty()) text[kData] = word;
    nn::save_training(training_file(), parameters, optimiser, text);
    save_vit(options.folder, model);
  }

  void resume() {
    const std::filesystem::path file = training_file();
    const nn::StateText text = nn::read_training_text(file);
    const auto value = [&](const char* key) {
      const auto it = text.find(key);
      require<FormatError>(it != text.end(), "{}: no \"{}\" in it", file.string(), key);
      return it->second;
    };
    for (const auto& [key, mine] : identity(options, model.config())) {
      const std::string saved = value(key.c_str());
      if (key == "model") {
        // Which tensor differs is the clearer message, where one does; load_training tells it.
        continue;
      }
      require(saved == mine, "resume: {} is {} in {}, {} was given", key, saved, file.string(),
              mine);
    }
    const auto data_then = text.find(kData);
    require(data_then == text.end() || data_then->second == data.fingerprint(),
            "resume: the data are others than those of {}", file.string());
    nn::load_training(file, parameters, optimiser);
    require(value("model") == identity(options, model.config())[0].second,
            "resume: the model in {} was made with other options", file.string());
    std::istringstream(value("step")) >> step;
    std::istringstream(value("seconds")) >> seconds_before;
    require<FormatError>(step >= 0 && step == optimiser.steps() && seconds_before >= 0,
                         "{}: step {} of {} optimiser steps, {} seconds", file.string(), step,
                         optimiser.steps(), seconds_before);
    curve = Curve::from_text(value("curve"));
  }

  // One step at this learning rate.
  void train_step(double learning_rate) {
    const std::vector<Sample> samples = training_samples(data, options.seed, step, options.batch);
    const Batch batch = make_batch(samples, data.format());
    std::vector<int64_t> labels = labels_of(batch);
    Tape<float> tape;
    nn::Context<float> context{tape, true, step_seed(options.seed, step)};
    const Var<float> logits =
        model.forward(context, tape.constant(batch.patches), patch_grids(batch));
    int64_t right = 0;
    for (int64_t i = 0; i < batch.size(); ++i) {
      right += argmax(logits.value(), i) == labels[static_cast<size_t>(i)];
    }
    const Var<float> loss =
        ops::softmax_cross_entropy(tape, logits, std::move(labels), options.label_smoothing);
    const double value = loss.value().item();
    require<NumericError>(std::isfinite(value),
                          "training step {}: the loss is {}; a lower learning rate may help",
                          step + 1, value);
    tape.backward(loss);
    const double norm = optimiser.step(learning_rate, options.clip);
    require<NumericError>(
        std::isfinite(norm),
        "training step {}: the gradient norm is {}; a lower learning rate may help", step + 1,
        norm);
    ++step;
    progress.step = step;
    progress.loss = value;
    progress.grad_norm = norm;
    progress.learning_rate = learning_rate;
    const double accuracy = static_cast<double>(right) / static_cast<double>(batch.size());
    // The plain mean until there are enough steps for the moving one.
    const double weight = std::max(kSmoothing, 1.0 / static_cast<double>(++averaged));
    progress.smooth_loss += weight * (value - progress.smooth_loss);
    progress.accuracy += weight * (accuracy - progress.accuracy);
    curve.add({step, progress.seconds, value, accuracy, norm, learning_rate});
  }
};

std::string read_record(const std::filesystem::path& folder) {
  const nn::StateText text = nn::read_training_text(folder / kTrainingFile);
  const auto it = text.find(kRecord);
  return it == text.end() ? std::string() : it->second;
}

Trainer::Trainer(const Dataset& data, TrainOptions options) {
  check(options);
  options.model = config_of(data, options.model);
  state_ = std::make_unique<State>(data, std::move(options));
  State& s = *state_;
  if (s.options.folder.empty()) return;
  if (s.options.resume) {
    s.resume();
    return;
  }
  for (const char* file : {kTrainingFile, "model.safetensors"}) {
    std::error_code unknown;  // then making the folder will say why
    require(s.options.replace || !std::filesystem::exists(s.options.folder / file, unknown),
            "{}: holds {} already; resume, or give another folder", s.options.folder.string(),
            file);
  }
  std::error_code failed;
  std::filesystem::create_directories(s.options.folder, failed);
  require<IoError>(!failed, "{}: cannot make the folder: {}", s.options.folder.string(),
                   failed.message());
}

Trainer::~Trainer() = default;

Vit<float>& Trainer::model() {
  return state_->model;
}
const TrainOptions& Trainer::options() const {
  return state_->options;
}
int64_t Trainer::step() const {
  return state_->step;
}

TrainResult Trainer::run() {
  State& s = *state_;
  const TrainOptions& o = s.options;
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] { return s.seconds_before + seconds_since(start); };
  const double limit = o.minutes ? *o.minutes * 60 : std::numeric_limits<double>::infinity();
  s.progress.steps = o.steps;
  if (!o.resume) s.save(0);  // a full disk shows now, not after the work
  double saved_at = seconds();
  double step_seconds = 0;  // moving mean
  bool finished = true;
  for (;;) {
    const double now = seconds();
    // A clock that has run out before the first step (a busy machine) still leaves one.
    if (o.steps ? s.step >= *o.steps : now >= limit && s.step > 0) break;
    if (o.stop && o.stop->load()) {
      finished = false;
      break;
    }
    // In the middle of the step: the first one then learns, and the last is not beyond the end.
    const double over = o.steps
                            ? (static_cast<double>(s.step) + 0.5) / static_cast<double>(*o.steps)
                            : std::min(1.0, (now + step_seconds / 2) / limit);
    s.progress.seconds = now;
    s.train_step(o.schedule.at(over));
    const double after = seconds();
    step_seconds += (step_seconds == 0 ? 1 : kSmoothing) * (after - now - step_seconds);
    s.progress.seconds = after;
    s.progress.items_per_second = static_cast<double>(o.batch) / step_seconds;
    s.progress.eta_seconds =
        o.steps ? static_cast<double>(*o.steps - s.step) * step_seconds : limit - after;
    if (o.progress) o.progress(s.progress);
    if (after - saved_at >= o.checkpoint_seconds ||
        (o.checkpoint_every && s.step % *o.checkpoint_every == 0)) {
      s.save(after);
      saved_at = seconds();
    }
  }
  TrainResult result;
  result.steps = s.step;
  result.seconds = seconds();
  result.finished = finished;
  result.curve = s.curve.points();
  s.save(result.seconds);
  return result;
}

int64_t Evaluation::correct() const {
  int64_t n = 0;
  for (size_t i = 0; i < labels.size(); ++i) n += labels[i] == predictions[i];
  return n;
}

double Evaluation::accuracy() const {
  return labels.empty() ? std::numeric_limits<double>::quiet_NaN()
                        : static_cast<double>(correct()) / static_cast<double>(labels.size());
}

Evaluation evaluate(Vit<float>& model, const Dataset& data, Split split, int64_t begin, int64_t end,
                    int64_t batch_size) {
  require(batch_size >= 1, "batch: {} pictures given, at least 1 is needed", batch_size);
  if (const auto size = data.size(split)) end = std::min(end, *size);
  Evaluation e;
  double loss = 0;
  for (int64_t i = begin; i < end; i += batch_size) {
    const int64_t last = std::min(end, i + batch_size);
    std::vector<Sample> samples;
    if (split == Split::test) {
      samples = test_samples(data, i, last);
    } else {
      for (int64_t j = i; j < last; ++j) samples.push_back(data.get(split, j));
    }
    const Batch batch = make_batch(samples, data.format());
    Tape<float> tape(false);
    nn::Context<float> context{tape};
    const Var<float> logits =
        model.forward(context, tape.constant(batch.patches), patch_grids(batch));
    Tensor losses;
    ops::softmax_cross_entropy(tape, logits, labels_of(batch), 0, &losses);
    for (int64_t b = 0; b < batch.size(); ++b) {
      e.labels.push_back(batch.labels.at<int64_t>(b));
      e.predictions.push_back(argmax(logits.value(), b));
      e.sources.push_back(samples[static_cast<size_t>(b)].source);
      loss += static_cast<double>(losses.at<float>(b));
    }
  }
  e.loss = e.labels.empty() ? 0 : loss / static_cast<double>(e.labels.size());
  return e;
}

PictureFormat format_of(const VitConfig& config) {
  return {.patch = config.patch,
          .channels = config.channels,
          .max_side = config.max_side,
          .mean = config.mean,
          .deviation = config.deviation};
}

std::vector<PatchGrid> patch_grids(const Batch& batch) {
  std::vector<PatchGrid> grids;
  for (const Grid& g : batch.grids) grids.emplace_back(g.rows, g.cols);
  return grids;
}

}  // namespace foci::vision
