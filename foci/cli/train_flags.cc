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

vision::TrainOptions train_options(const TrainFlags& flags, uint64_t seed) {
  vision::TrainOptions out;
  if (flags.steps && *flags.steps < 1) {
    throw UsageError(fmt::format("--steps: {} given, give 1 or more", *flags.steps));
  }
  out.steps = flags.steps;
  if (!out.steps) out.minutes = flags.minutes;
  if (flags.layers < 1) {
    throw UsageError(fmt::format("--layers: {} given, give 1 or more", flags.layers));
  }
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
  } catch (const ArgumentError& e) {
    throw UsageError(fmt::format("--spec: {}", e.what()));
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
