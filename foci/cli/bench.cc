// foci bench attention: how fast attention is for one spec and shape, against the machine's peak.
#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "foci/cli/build_info.h"
#include "foci/cli/json_text.h"
#include "foci/cli/verb.h"
#include "foci/core/threads.h"
#include "foci/measure/attention.h"
#include "foci/spec/json.h"

namespace foci::cli {
namespace {

using measure::AttentionJob;
using measure::AttentionReport;
using measure::AttentionRow;

// "B,H,Hk,N,M,D,Dv"
AttentionShape parse_shape(const std::string& text) {
  AttentionShape s;
  int64_t* const sizes[] = {&s.B, &s.H, &s.Hk, &s.N, &s.M, &s.D, &s.Dv};
  const char *at = text.data(), *const end = at + text.size();
  bool good = true;
  for (int64_t* size : sizes) {
    const auto parsed = std::from_chars(at, end, *size);
    const bool last = size == sizes[6];
    good = good && parsed.ec == std::errc() &&
           (last ? parsed.ptr == end : parsed.ptr != end && *parsed.ptr == ',');
    if (!good) break;
    at = parsed.ptr + 1;
  }
  if (!good) {
    throw UsageError(
        fmt::format("--shape: '{}' given, seven whole numbers B,H,Hk,N,M,D,Dv are right", text));
  }
  return s;
}

std::string bytes_text(double bytes) {
  const char* const units[] = {"B", "KB", "MB", "GB", "TB"};
  size_t unit = 0;
  for (; bytes >= 1000 && unit < 4; ++unit) bytes /= 1024;
  return unit == 0 || bytes >= 10 ? fmt::format("{:.0f} {}", bytes, units[unit])
                                  : fmt::format("{:.1f} {}", bytes, units[unit]);
}

const char* name_of(Implementation id) {
  return id == Implementation::plain ? "plain" : "fused";
}

class BenchAttention : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("--spec", spec_,
                   "Attention as JSON, for example '{\"masks\":[{\"kind\":\"causal\"}]}'")
        ->type_name("TEXT");
    app.add_option(
           "--shape", shape_,
           "Batch, query heads, key/value heads, queries, keys, head size of keys, of values")
        ->type_name("B,H,Hk,N,M,D,Dv");
    app.add_option("--dtype", dtype_, "float32, float16 or bfloat16")->type_name("NAME");
    app.add_option("--clusters", clusters_,
                   "Queries and keys in so many clusters a head, in which top-k need not score "
                   "every key; 0: all random")
        ->check(check_whole)
        ->type_name("N");
    app.add_flag("--all-gradients", all_gradients_,
                 "Those of biases, tables and scale too, beside those of q, k and v");
    declare_seconds(app, seconds_, "How long to measure, at most; one round is the least");
    declare_seed(app, common_);
    declare_threads(app, common_);
    declare_json(app, common_);
  }

  int run() override {
    apply_threads(common_);
    AttentionJob job;
    try {
      job.spec = spec_from_json_text(spec_);
    } catch (const ArgumentError& e) {
      throw UsageError(fmt::format("--spec: {}", e.what()));
    }
    job.shape = parse_shape(shape_);
    job.shape.dtype = parse_dtype();
    if (clusters_ < 0 || clusters_ > 1'000'000) {
      throw UsageError(fmt::format("--clusters: {} given, 0 to 1000000 is right", clusters_));
    }
    job.clusters = clusters_;
    job.seconds = seconds_;
    job.seed = common_.seed;
    job.all_gradients = all_gradients_;
    job.keep_going = [] { return !interrupted(); };
    const double needed = measure::bytes_needed(job), available = measure::bytes_available();
    if (needed > available) {
      throw UsageError(fmt::format("--shape: {} needs {} of memory, this machine has {}", shape_,
                                   bytes_text(needed), bytes_text(available)));
    }
    catch_interrupts();
    AttentionReport report;
    try {
      report = measure::measure_attention(job);
    } catch (const std::bad_alloc&) {
      throw UsageError(fmt::format("--shape: {} needs {} of memory, which were not to be had",
                                   shape_, bytes_text(needed)));
    }
    if (common_.json) {
      print_json(job, report);
    } else {
      print_table(job, report);
    }
    return report.stopped ? kInterrupted : kOk;
  }

 private:
  DType parse_dtype() const {
    for (DType t : {DType::f32, DType::f16, DType::bf16}) {
      if (dtype_ == foci::name_of(t)) return t;
    }
    throw UsageError(
        fmt::format("--dtype: '{}' given, float32, float16 or bfloat16 is right", dtype_));
  }

  static double skipped_share(const AttentionReport& r) {
    if (r.visible_pairs == 0) return 0;
    return static_cast<double>(r.skipped_pairs) / static_cast<double>(r.visible_pairs);
  }

  static void print_table(const AttentionJob& job, const AttentionReport& r) {
    const AttentionShape& s = job.shape;
    fmt::print("shape      B {} H {} Hk {} N {} M {} D {} Dv {}, {}\n", s.B, s.H, s.Hk, s.N, s.M,
               s.D, s.Dv, foci::name_of(s.dtype));
    fmt::print("plan       {}\n", r.explanation);
    fmt::print("processor  {}, {} threads, multiply-add peak {:.0f} GF/s\n", processor_name(),
               num_threads(), r.peak_gflops);
    const double share =
        r.pairs == 0 ? 0
                     : 100 * static_cast<double>(r.visible_pairs) / static_cast<double>(r.pairs);
    fmt::print("pairs      {} of {} visible ({:.1f} %)\n", r.visible_pairs, r.pairs, share);
    if (std::holds_alternative<TopK>(job.spec.normalizer)) {
      fmt::print("top-k      {} of the visible pairs not scored ({:.1f} %){}\n", r.skipped_pairs,
                 100 * skipped_share(r), r.skipped_pairs > 0 ? "; GF/s counts them all" : "");
    }
    fmt::print("\n");
    fmt::print("{:<10}{:<7}{:>12}{:>10}{:>9}{:>12}{:>8}   {}\n", "pass", "by", "ms a call", "GF/s",
               "of peak", "workspace", "rounds", "plain : this (quartiles)");
    for (const AttentionRow& row : r.rows) {
      fmt::print("{:<10}{:<7}{:>12.3f}{:>10.1f}{:>7.0f} %{:>12}{:>8}",
                 row.backward ? "backward" : "forward", name_of(row.implementation),
                 1e3 * row.seconds, row.gflops, 100 * row.share,
                 bytes_text(static_cast<double>(row.workspace_bytes)), row.rounds);
      if (row.speedup > 0) {
        fmt::print("   {:.2f} ({:.2f}-{:.2f})", row.speedup, row.speedup_low, row.speedup_high);
      }
      fmt::print("\n");
    }
    for (const std::string& why : r.left_out) fmt::print("left out   {}\n", why);
    if (r.stopped) fmt::print("stopped    before all was measured\n");
  }

  void print_json(const AttentionJob& job, const AttentionReport& r) const {
    const AttentionShape& s = job.shape;
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const AttentionRow& row : r.rows) {
      nlohmann::ordered_json one = {{"pass", row.backward ? "backward" : "forward"},
                                    {"implementation", name_of(row.implementation)},
                                    {"seconds", row.seconds},
                                    {"gflops", row.gflops},
                                    {"share_of_peak", row.share},
                                    {"workspace_bytes", row.workspace_bytes},
                                    {"rounds", row.rounds}};
      if (row.speedup > 0) {
        one["speedup"] = row.speedup;
        one["speedup_quartiles"] = {row.speedup_low, row.speedup_high};
      }
      rows.push_back(one);
    }
    nlohmann::ordered_json out = {
        {"spec", nlohmann::ordered_json::parse(spec_to_json_text(job.spec))},
        {"shape",
         {{"B", s.B}, {"H", s.H}, {"Hk", s.Hk}, {"N", s.N}, {"M", s.M}, {"D", s.D}, {"Dv", s.Dv}}},
        {"dtype", foci::name_of(s.dtype)},
        {"seed", job.seed},
        {"processor", processor_name()},
        {"target", foci::name_of(current_target())},
        {"threads", num_threads()},
        {"explain", r.explanation},
        {"peak_gflops", r.peak_gflops},
        {"pairs", r.pairs},
        {"visible_pairs", r.visible_pairs},
        {"rows", rows},
        {"left_out", r.left_out},
        {"stopped", r.stopped}};
    if (job.clusters > 0) out["clusters"] = job.clusters;
    if (std::holds_alternative<TopK>(job.spec.normalizer)) {
      out["skipped_pairs"] = r.skipped_pairs;
      out["skipped_share"] = skipped_share(r);
    }
    std::printf("%s", json_text(out).c_str());
  }

  Common common_;
  std::string spec_ = "{}", shape_ = "1,8,8,1024,1024,64,64", dtype_ = "float32";
  double seconds_ = 3;
  int64_t clusters_ = 0;
  bool all_gradients_ = false;
};

}  // namespace

std::unique_ptr<Verb> make_bench_attention() {
  return std::make_unique<BenchAttention>();
}

}  // namespace foci::cli
