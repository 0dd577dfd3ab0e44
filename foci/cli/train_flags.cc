// Declares the options of training and turns them into those of the trainer.
#include "foci/cli/train_flags.h"

#include <CLI/CLI.hpp>

#include "foci/spec/json.h"

namespace foci::cli {

void declare_length(CLI::App& app, TrainFlags& flags) {
  app.add_option("--minutes", flags.minutes, "How long to train")
      ->check(check_number)
      ->type_name("MINUTES");
  app.add_option("--steps", flags.steps, "Train so many steps instead; the same bits every time")
      ->check(check_whole)
      ->type_name("N")
      ->default_str("");
}

namespace {

void declare_shape(CLI::App& app, TrainFlags& flags) {
  const char* group = "Model";
  const auto number = [&](const char* name, int64_t& value, const char* about) {
    app.add_option(name, value, about)->check(check_whole)->type_name("N")->group(group);
  };
  number("--width", flags.width, "Values a token");
  number("--layers", flags.layers, "Encoder layers");
  number("--heads", flags.heads, "Attention heads a layer");
  number("--feed-forward", flags.feed_forward, "Hidden values of the feed-forward part");
  app.add_option("--pooling", flags.pooling, "class_token, mean or attention")
      ->type_name("NAME")
      ->group(group);
  app.add_option("--spec", flags.spec,
                 "Attention as JSON, for example '{\"normalizer\":{\"kind\":\"sparsemax\"}}'")
      ->type_name("TEXT")
      ->group(group);
  app.add_option("--dropout", flags.dropout, "Share of values dropped in training")
      ->check(check_number)
      ->type_name("X")
      ->group(group);
}

void declare_optimiser(CLI::App& app, TrainFlags& flags) {
  const char* group = "Optimiser";
  const auto number = [&](const char* name, double& value, const char* about) {
    app.add_option(name, value, about)->check(check_number)->type_name("X")->group(group);
  };
  app.add_option("--batch", flags.batch, "Pictures a step")
      ->check(check_whole)
      ->type_name("N")
      ->group(group);
  number("--lr", flags.learning_rate, "Peak learning rate of AdamW");
  number("--warm-up", flags.warm_up, "Share of the run in which the rate rises");
  number("--weight-decay", flags.weight_decay, "Decoupled weight decay");
  number("--clip", flags.clip, "Largest gradient norm; 0 for no limit");
  number("--label-smoothing", flags.label_smoothing, "Share of a label given to all classes");
  number("--checkpoint-seconds", flags.checkpoint_seconds, "At most so long between checkpoints");
  app.add_flag("--checkpoint-layers", flags.checkpoint_layers,
               "Less memory: compute each layer again on the way back, for a third more time")
      ->group(group);
}

}  // namespace

void declare_run(CLI::App& app, TrainFlags& flags, Common& common) {
  declare_shape(app, flags);
  declare_optimiser(app, flags);
  declare_seed(app, common);
  declare_threads(app, common);
  declare_json(app, common);
  declare_quiet(app, common);
}

void check_range(const char* option, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  throw UsageError(fmt::format("{}: {} given, {} to {} is right", option, value, least, most));
}

vision::TrainOptions train_options(const TrainFlags& flags, uint64_t seed) {
  vision::TrainOptions out;
  if (flags.steps && *flags.steps < 1) {
    throw UsageError(fmt::format("--steps: {} given, give 1 or more", *flags.steps));
  }
  out.steps = flags.steps;
  if (!out.steps) out.minutes = flags.minutes;
  const auto check = [](bool good, const char* option, double value, const char* right) {
    if (!good) throw UsageError(fmt::format("{}: {} given, {} is right", option, value, right));
  };
  const auto is_share = [](double x) { return x >= 0 && x <= 1; };
  constexpr const char *kAboveNone = "a number above 0", *kShare = "a share from 0 to 1";
  if (!out.steps) check(flags.minutes > 0, "--minutes", flags.minutes, kAboveNone);
  constexpr int64_t kMost = 1 << 20;
  check_range("--width", flags.width, 1, kMost);
  check_range("--layers", flags.layers, 1, 4096);
  check_range("--heads", flags.heads, 1, kMost);
  check_range("--feed-forward", flags.feed_forward, 1, kMost);
  check_range("--batch", flags.batch, 1, kMost);
  if (flags.width % flags.heads != 0) {
    throw UsageError(fmt::format("--heads: {} given, what divides --width ({}) is right",
                                 flags.heads, flags.width));
  }
  check(flags.dropout >= 0 && flags.dropout < 1, "--dropout", flags.dropout,
        "0 or more and less than 1");
  check(flags.learning_rate > 0, "--lr", flags.learning_rate, "a learning rate above 0");
  check(is_share(flags.warm_up), "--warm-up", flags.warm_up, kShare);
  check(flags.weight_decay >= 0, "--weight-decay", flags.weight_decay, "0 or more");
  check(flags.clip >= 0, "--clip", flags.clip, "0 (no limit) or more");
  check(is_share(flags.label_smoothing), "--label-smoothing", flags.label_smoothing, kShare);
  check(flags.checkpoint_seconds > 0, "--checkpoint-seconds", flags.checkpoint_seconds, kAboveNone);
  VitConfig& m = out.model;
  m.width = flags.width;
  m.layers = flags.layers;
  m.heads = flags.heads;
  m.feed_forward = flags.feed_forward;
  m.dropout = flags.dropout;
  bool known = false;
  for (Pooling p : {Pooling::mean, Pooling::class_token, Pooling::attention}) {
    if (flags.pooling != name_of(p)) continue;
    m.pooling = p;
    known = true;
  }
  if (!known) {
    throw UsageError(fmt::format("--pooling: '{}' given, class_token, mean or attention is right",
                                 flags.pooling));
  }
  try {
    m.attention = spec_from_json_text(flags.spec);
    VitConfig shape = m;
    shape.classes = {"any"};
    validate(shape);  // all else in it has been checked
  } catch (const ArgumentError& e) {
    std::string what = e.what();
    constexpr std::string_view kAbout = "vit attention: ";
    if (what.starts_with(kAbout)) what.erase(0, kAbout.size());
    throw UsageError(fmt::format("--spec: {}", what));
  }
  out.batch = flags.batch;
  out.schedule.peak = flags.learning_rate;
  out.schedule.warm_up = flags.warm_up;
  out.adamw.weight_decay = flags.weight_decay;
  out.clip = flags.clip;
  out.label_smoothing = flags.label_smoothing;
  out.checkpoint_seconds = flags.checkpoint_seconds;
  out.checkpoint_layers = flags.checkpoint_layers;
  out.seed = seed;
  return out;
}

}  // namespace foci::cli
