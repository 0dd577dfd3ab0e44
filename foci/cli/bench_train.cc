// foci bench train: how fast a training step is, and by operator where its time goes.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "foci/cli/build_info.h"
#include "foci/cli/json_text.h"
#include "foci/cli/verb.h"
#include "foci/core/simd_target.h"
#include "foci/core/threads.h"
#include "foci/measure/training.h"

namespace foci::cli {
namespace {

using measure::TrainingReport;
using measure::TrainingRow;

const char* name_of(Pass pass) {
  return pass == Pass::forward ? "forward" : "backward";
}

class BenchTrain : public Verb {
 public:
  void declare(CLI::App& app) override {
    std::string known = "all";
    for (const std::string& name : measure::training_workloads()) known += ", " + name;
    app.add_option("--workload", workload_, "Which model: " + known)->type_name("NAME");
    app.add_flag("--profile", profile_, "Time by operator too, and its share of the peak");
    app.add_flag("--checkpoint-layers", checkpoint_layers_,
                 "Layers are computed again on the way back instead of kept");
    declare_seconds(app, seconds_, "How long to measure each; five steps are the least");
    declare_seed(app, common_);
    declare_threads(app, common_);
    declare_json(app, common_);
  }

  int run() override {
    apply_threads(common_);
    std::vector<std::string> names = {workload_};
    if (workload_ == "all") names = measure::training_workloads();
    std::vector<measure::TrainingWorkload> workloads;
    for (const std::string& name : names) {
      try {
        workloads.push_back(measure::training_workload(name));
        workloads.back().checkpoint_layers = checkpoint_layers_;
      } catch (const ArgumentError& e) {
        throw UsageError(fmt::format("--{}", e.what()));
      }
    }
    catch_interrupts();
    nlohmann::ordered_json all = nlohmann::ordered_json::array();
    bool stopped = false;
    for (size_t i = 0; i < workloads.size() && !stopped; ++i) {
      const TrainingReport r =
          measure::measure_training({.workload = workloads[i],
                                     .seed = common_.seed,
                                     .seconds = seconds_,
                                     .profile = profile_,
                                     .keep_going = [] { return !interrupted(); }});
      stopped = r.stopped;
      if (r.steps == 0) break;
      if (common_.json) {
        all.push_back(json_of(r));
      } else {
        if (i > 0) fmt::print("\n");
        print(r);
      }
      std::fflush(stdout);
    }
    if (common_.json) {
      const nlohmann::ordered_json out = {{"processor", processor_name()},
                                          {"target", foci::name_of(current_target())},
                                          {"threads", num_threads()},
                                          {"workloads", all},
                                          {"stopped", stopped}};
      std::printf("%s", json_text(out).c_str());
    }
    return stopped ? kInterrupted : kOk;
  }

 private:
  static void print(const TrainingReport& r) {
    const measure::TrainingWorkload& w = r.workload;
    fmt::print("workload   {}: {}\n", w.name, w.about);
    fmt::print("model      width {}, {} layers, {} heads, {} parameters; {} tokens a step\n",
               w.width, w.layers, w.heads, r.parameters, w.tokens());
    fmt::print("processor  {}, {} threads, multiply-add peak {:.0f} GF/s\n", processor_name(),
               num_threads(), r.peak_gflops);
    fmt::print(
        "step       {:.2f} ms (quartiles {:.2f}-{:.2f}, {} steps): {:.0f} {}/s, {:.1f} GF/s, "
        "{:.0f} % of peak\n",
        1e3 * r.seconds, 1e3 * r.low, 1e3 * r.high, r.steps, r.items_per_second,
        w.language ? "texts" : "pictures", r.gflops, 100 * r.share);
    fmt::print(
        "memory     {:.1f} MB of tensors at most; {:.0f} tensors a step, {:.3g} of them new\n",
        static_cast<double>(r.peak_bytes) / (1 << 20), r.tensors, r.allocations);
    if (!r.rows.empty()) {
      fmt::print("\n{:<12}{:<10}{:>8}{:>11}{:>9}{:>10}{:>9}\n", "operator", "pass", "calls",
                 "ms a step", "of time", "GF/s", "of peak");
      for (const TrainingRow& row : r.rows) {
        fmt::print("{:<12}{:<10}{:>8.0f}{:>11.3f}{:>7.1f} %", row.name, name_of(row.pass),
                   row.calls, 1e3 * row.seconds, 100 * row.share);
        if (row.gflops > 0) fmt::print("{:>10.1f}{:>7.0f} %", row.gflops, 100 * row.peak);
        fmt::print("\n");
      }
    }
    if (r.stopped) fmt::print("stopped    before all was measured\n");
  }

  static nlohmann::ordered_json json_of(const TrainingReport& r) {
    const measure::TrainingWorkload& w = r.workload;
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const TrainingRow& row : r.rows) {
      rows.push_back({{"operator", row.name},
                      {"pass", name_of(row.pass)},
                      {"calls", row.calls},
                      {"seconds", row.seconds},
                      {"share", row.share},
                      {"gflops", row.gflops},
                      {"share_of_peak", row.peak}});
    }
    return {{"workload", w.name},
            {"width", w.width},
            {"layers", w.layers},
            {"heads", w.heads},
            {"checkpoint_layers", w.checkpoint_layers},
            {"parameters", r.parameters},
            {"tokens", w.tokens()},
            {"flops", r.flops},
            {"seconds", r.seconds},
            {"seconds_quartiles", {r.low, r.high}},
            {"steps", r.steps},
            {"items_per_second", r.items_per_second},
            {"tokens_per_second", r.tokens_per_second},
            {"gflops", r.gflops},
            {"peak_gflops", r.peak_gflops},
            {"share_of_peak", r.share},
            {"peak_tensor_bytes", r.peak_bytes},
            {"tensors_per_step", r.tensors},
            {"allocations_per_step", r.allocations},
            {"first_loss", r.first_loss},
            {"last_loss", r.last_loss},
            {"profile", rows}};
  }

  Common common_;
  std::string workload_ = "vit-demo";
  double seconds_ = 5;
  bool profile_ = false, checkpoint_layers_ = false;
};

}  // namespace

std::unique_ptr<Verb> make_bench_train() {
  return std::make_unique<BenchTrain>();
}

}  // namespace foci::cli
