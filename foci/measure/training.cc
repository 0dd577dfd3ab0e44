// The workloads of training, and their steps, timed.
#include "foci/measure/training.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "foci/core/memory.h"
#include "foci/core/rng.h"
#include "foci/core/threads.h"
#include "foci/measure/fma_peak.h"
#include "foci/models/lm/lm.h"
#include "foci/models/vit/vit.h"
#include "foci/nn/optimiser.h"

namespace foci::measure {
namespace {

// Canvases of the demo have 16 to 32 pixels a side, four a patch.
std::vector<std::pair<int64_t, int64_t>> demo_grids(int64_t batch) {
  std::vector<std::pair<int64_t, int64_t>> grids;
  Rng rng(1);
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t rows = 4 + rng.below(5);
    grids.emplace_back(rows, 4 + rng.below(5));
  }
  return grids;
}

std::vector<TrainingWorkload> all_workloads() {
  std::vector<TrainingWorkload> all;
  TrainingWorkload demo{.name = "vit-demo",
                        .about = "the demo's vision transformer, scenes of mixed sizes",
                        .width = 64,
                        .layers = 4,
                        .heads = 4,
                        .feed_forward = 256,
                        .batch = 64,
                        .grids = demo_grids(64),
                        .patch_values = 16,
                        .classes = 10,
                        .position_rows = 8,
                        .position_cols = 8,
                        .class_token = true,
                        .label_smoothing = 0.1};
  all.push_back(demo);
  demo.name = "vit-demo-even";
  demo.about = "the demo's vision transformer, scenes of 36 patches";
  demo.grids.assign(64, {6, 6});
  demo.position_rows = demo.position_cols = 6;
  all.push_back(demo);
  all.push_back({.name = "vit-d192",
                 .about = "a small vision transformer",
                 .width = 192,
                 .layers = 6,
                 .heads = 3,
                 .feed_forward = 768,
                 .batch = 32,
                 .grids = std::vector<std::pair<int64_t, int64_t>>(32, {8, 8}),
                 .patch_values = 48,
                 .classes = 10,
                 .position_rows = 8,
                 .position_cols = 8,
                 .label_smoothing = 0.1});
  all.push_back({.name = "lm-d256",
                 .about = "a causal language model",
                 .language = true,
                 .width = 256,
                 .layers = 4,
                 .heads = 4,
                 .feed_forward = 1024,
                 .batch = 8,
                 .length = 256,
                 .vocabulary = 4096});
  all.push_back({.name = "vit-s",
                 .about = "ViT-S/16 at 224 pixels",
                 .width = 384,
                 .layers = 12,
                 .heads = 6,
                 .feed_forward = 1536,
                 .batch = 8,
                 .grids = std::vector<std::pair<int64_t, int64_t>>(8, {14, 14}),
                 .patch_values = 768,
                 .classes = 1000,
                 .position_rows = 14,
                 .position_cols = 14,
                 .class_token = true,
                 .label_smoothing = 0.1});
  return all;
}

VitConfig vit_config(const TrainingWorkload& w) {
  VitConfig c;
  // Only the number of values a patch matters here.
  c.patch = 1;
  c.channels = w.patch_values;
  c.max_side = std::max(w.position_rows, w.position_cols);
  for (int64_t i = 0; i < w.classes; ++i) c.classes.push_back(std::to_string(i));
  c.width = w.width;
  c.layers = w.layers;
  c.heads = w.heads;
  c.feed_forward = w.feed_forward;
  c.pooling = w.class_token ? Pooling::class_token : Pooling::mean;
  c.position_rows = w.position_rows;
  c.position_cols = w.position_cols;
  return c;
}

LmConfig lm_config(const TrainingWorkload& w) {
  return {.vocabulary = w.vocabulary,
          .max_length = w.length,
          .width = w.width,
          .layers = w.layers,
          .heads = w.heads,
          .feed_forward = w.feed_forward};
}

double quantile(std::vector<double> v, double q) {
  std::sort(v.begin(), v.end());
  return v[static_cast<size_t>(std::lround(q * static_cast<double>(v.size() - 1)))];
}

}  // namespace

std::vector<int64_t> TrainingWorkload::lengths() const {
  if (language) return std::vector<int64_t>(static_cast<size_t>(batch), length);
  std::vector<int64_t> out;
  for (const auto& [rows, cols] : grids) out.push_back(rows * cols + (class_token ? 1 : 0));
  return out;
}

int64_t TrainingWorkload::tokens() const {
  const std::vector<int64_t> all = lengths();
  return std::accumulate(all.begin(), all.end(), int64_t{0});
}

std::vector<std::string> training_workloads() {
  std::vector<std::string> names;
  for (const TrainingWorkload& w : all_workloads()) names.push_back(w.name);
  return names;
}

TrainingWorkload training_workload(const std::string& name) {
  std::string known;
  for (const TrainingWorkload& w : all_workloads()) {
    if (w.name == name) return w;
    known += (known.empty() ? "" : ", ") + w.name;
  }
  throw ArgumentError(fmt::format("workload: '{}' given, there are {}", name, known));
}

struct TrainingJob::State {
  KeepMemory keep;
  TrainingWorkload workload;
  uint64_t seed;
  std::unique_ptr<Vit<float>> vit;
  std::unique_ptr<Lm<float>> lm;
  std::unique_ptr<nn::FlatParameters> parameters;
  std::unique_ptr<nn::AdamW> optimiser;
  Tensor patches;
  std::vector<int64_t> ids, lengths, labels;
  double flops = 0;
  int64_t steps = 0;

  State(TrainingWorkload w, uint64_t s) : workload(std::move(w)), seed(s) {
    nn::Module<float>* model = nullptr;
    Rng rng(seed, 1);
    lengths = workload.lengths();
    if (workload.language) {
      lm = std::make_unique<Lm<float>>(lm_config(workload));
      model = lm.get();
      for (int64_t i = 0; i < workload.tokens(); ++i) ids.push_back(rng.below(workload.vocabulary));
      // Each token's successor; a text's last one wraps to its first.
      for (size_t begin = 0, t = 0; t < lengths.size(); begin += lengths[t++]) {
        for (int64_t i = 0; i < lengths[t]; ++i) {
          labels.push_back(ids[begin + static_cast<size_t>((i + 1) % lengths[t])]);
        }
      }
    } else {
      vit = std::make_unique<Vit<float>>(vit_config(workload));
      model = vit.get();
      int64_t count = 0;
      for (const auto& [rows, cols] : workload.grids) count += rows * cols;
      patches = Tensor::empty({count, workload.patch_values});
      for (float& x : patches.span<float>()) x = static_cast<float>(rng.normal());
      for (int64_t i = 0; i < workload.batch; ++i) labels.push_back(rng.below(workload.classes));
    }
    model->reset(seed);
    (lm ? lm->encoder : vit->encoder).checkpoint = workload.checkpoint_layers;
    parameters = std::make_unique<nn::FlatParameters>(model->parameters());
    optimiser = std::make_unique<nn::AdamW>(*parameters,
                                            nn::AdamWConfig{.beta1 = workload.beta1,
                                                            .beta2 = workload.beta2,
                                                            .eps = workload.adam_eps,
                                                            .weight_decay = workload.weight_decay});
    Profile profile;
    {
      const Profiling on(profile);
      step();
    }
    for (const Profile::Row& row : profile.rows()) flops += row.flops;
  }

  double step() {
    Tape<float> tape;
    nn::Context<float> context{tape, true, seed + static_cast<uint64_t>(steps)};
    const Var<float> logits = lm ? lm->forward(context, ids, lengths)
                                 : vit->forward(context, tape.constant(patches), workload.grids);
    const Var<float> loss =
        ops::softmax_cross_entropy(tape, logits, labels, workload.label_smoothing);
    const double value = loss.value().item();
    tape.backward(loss);
    optimiser->step(workload.learning_rate, workload.clip);
    ++steps;
    return value;
  }
};

TrainingJob::TrainingJob(const std::string& name, uint64_t seed)
    : TrainingJob(training_workload(name), seed) {}
TrainingJob::TrainingJob(const TrainingWorkload& workload, uint64_t seed)
    : state_(std::make_unique<State>(workload, seed)) {}
TrainingJob::~TrainingJob() = default;

const TrainingWorkload& TrainingJob::workload() const {
  return state_->workload;
}
int64_t TrainingJob::parameters() const {
  int64_t n = 0;
  for (const Parameter<float>* p : state_->parameters->parameters()) n += p->value.numel();
  return n;
}
double TrainingJob::flops() const {
  return state_->flops;
}
double TrainingJob::step() {
  return state_->step();
}
int64_t TrainingJob::steps() const {
  return state_->steps;
}

std::vector<TrainingTensor> TrainingJob::tensors() const {
  const State& s = *state_;
  const auto copy = [](const std::vector<int64_t>& v) {
    return Tensor::from(v, {static_cast<int64_t>(v.size())});
  };
  std::vector<TrainingTensor> list;
  const auto& parameters = s.parameters->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    list.push_back({parameters[i]->name, parameters[i]->value,
                    s.parameters->part(s.optimiser->first(), i),
                    s.parameters->part(s.optimiser->second(), i), parameters[i]->decay});
  }
  if (s.lm) {
    list.push_back({.name = "ids", .value = copy(s.ids)});
  } else {
    list.push_back({.name = "patches", .value = s.patches.clone()});
  }
  list.push_back({.name = "labels", .value = copy(s.labels)});
  return list;
}

TrainingReport measure_training(const TrainingMeasurement& m) {
  using Clock = std::chrono::steady_clock;
  constexpr int kLeastSteps = 5;
  require(m.seconds > 0, "seconds: {} given, a number above 0 is right", m.seconds);
  TrainingJob job(m.workload, m.seed);
  TrainingReport r;
  r.workload = job.workload();
  r.parameters = job.parameters();
  r.flops = job.flops();
  std::vector<double> times;
  // Steps until their time is spent; f is told each one's seconds.
  const auto run = [&](const auto& f) {
    double spent = 0;
    for (int i = 0; i < kLeastSteps || spent < m.seconds; ++i) {
      if (m.keep_going && !m.keep_going()) {
        r.stopped = true;
        return;
      }
      if (i % 16 == 0) {
        r.peak_gflops = std::max(r.peak_gflops, fma_peak_sample(current_target(), num_threads()));
      }
      const auto start = Clock::now();
      const double loss = job.step();
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      spent += seconds;
      f(seconds, loss);
    }
  };
  const TensorMemory before = tensor_memory();
  reset_tensor_memory_peak();
  run([&](double seconds, double loss) {
    if (times.empty()) r.first_loss = loss;
    r.last_loss = loss;
    times.push_back(seconds);
  });
  if (times.empty()) return r;
  r.steps = static_cast<int>(times.size());
  const TensorMemory after = tensor_memory();
  const auto fresh = static_cast<double>(after.allocations - before.allocations);
  r.allocations = fresh / r.steps;
  r.tensors = (fresh + static_cast<double>(after.reuses - before.reuses)) / r.steps;
  r.peak_bytes = after.most_in_use;
  r.seconds = quantile(times, 0.5);
  r.low = quantile(times, 0.25);
  r.high = quantile(times, 0.75);
  r.items_per_second = static_cast<double>(r.workload.batch) / r.seconds;
  r.tokens_per_second = static_cast<double>(r.workload.tokens()) / r.seconds;
  r.gflops = 1e-9 * r.flops / r.seconds;
  if (m.profile && !r.stopped) {
    Profile profile;
    double total = 0;
    int steps = 0;
    {
      const Profiling on(profile);
      run([&](double seconds, double) {
        total += seconds;
        ++steps;
      });
    }
    double named = 0;
    const double n = std::max(1, steps);
    for (const Profile::Row& row : profile.rows()) {
      const double gflops = row.seconds > 0 ? 1e-9 * row.flops / row.seconds : 0;
      r.rows.push_back({name_of(row.op), row.pass, row.seconds / n, row.seconds / total, gflops,
                        gflops / r.peak_gflops, static_cast<double>(row.calls) / n});
      named += row.seconds;
    }
    if (total > 0) {
      r.rows.push_back(
          {"other", Pass::forward, (total - named) / n, (total - named) / total, 0, 0, 1});
    }
  }
  r.share = r.gflops / r.peak_gflops;
  return r;
}

}  // namespace foci::measure
