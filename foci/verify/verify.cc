// Walks files and folders, runs each case on each engine, and writes down what went wrong.
#include "foci/verify/verify.h"

#include <algorithm>
#include <exception>
#include <new>
#include <system_error>

#include "foci/verify/case_file.h"
#include "foci/verify/compare.h"
#include "foci/verify/engines.h"
#include "foci/verify/ops.h"
#include "foci/verify/storage.h"

namespace foci {
namespace verify {
namespace {

namespace fs = std::filesystem;

class Run {
 public:
  explicit Run(const VerifyOptions& options)
      : engines_(engines(options)), oracle_only_(options.reference) {}

  void path(const fs::path& p) {
    std::error_code error;
    if (!fs::is_directory(p, error)) return file(p);
    std::vector<fs::path> found;
    for (auto it = fs::recursive_directory_iterator(p, error);
         !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
      if (it->path().extension() == ".safetensors") found.push_back(it->path());
    }
    if (error) return unreadable(p, error.message());
    if (found.empty()) return unreadable(p, "the folder holds no .safetensors file");
    std::sort(found.begin(), found.end());
    for (const fs::path& f : found) file(f);
  }

  VerifyReport report;

 private:
  void unreadable(const fs::path& p, const std::string& message) {
    report.unreadable.push_back({p, message});
  }

  void file(const fs::path& p) {
    try {
      const CaseFile c = read_case(p);
      const size_t failures = report.failures.size();
      const int64_t runs = report.runs;
      run(c);
      if (report.failures.size() > failures) {
        ++report.failed;
      } else {
        ++(report.runs > runs ? report.passed : report.skipped);
      }
    } catch (const Interrupted&) {
      throw;
    } catch (const std::bad_alloc&) {
      unreadable(p, "the case does not fit in memory");
    } catch (const std::exception& e) {
      unreadable(p, e.what());
    }
  }

  void fail(const CaseFile& c, const std::string& engine, const std::string& message) {
    VerifyFailure f;
    f.path = c.path;
    f.op = c.op;
    f.engine = engine;
    f.message = engine.empty() ? message : engine + ": " + message;
    report.failures.push_back(std::move(f));
  }

  void run(const CaseFile& c) {
    if (c.op == "refuse") return refuse(c);
    Prepared p;
    try {
      p = prepare(c);
    } catch (const ArgumentError& e) {
      return fail(c, "", fmt::format("refused: {}", e.what()));
    }
    require<FormatError>(!p.expected.empty(), "the case has no out.* tensor, so it checks nothing");
    run(c, p, "");
    if (oracle_only_) return;  // it computes in double, whatever the storage
    for (DType storage : other_storage(c)) {
      if (const auto other = restored(c, storage))
        run(c, *other, fmt::format(" in {}", name_of(storage)));
    }
  }

  void run(const CaseFile& c, const Prepared& p, const std::string& how) {
    for (const Engine& engine : engines_) {
      const std::string name = engine.name + how;
      try {
        if (const auto answer = engine.run(p.request)) check(c, name, p.expected, *answer);
      } catch (const ArgumentError& e) {
        fail(c, name, fmt::format("refused: {}", e.what()));
      }
    }
  }

  // The case with its inputs rounded to another storage type, and what the oracle gives for them;
  // nullopt where that type cannot hold them, or the oracle does not take so large a case.
  static std::optional<Prepared> restored(const CaseFile& c, DType storage) {
    const auto other = with_storage(c, storage);
    if (!other) return std::nullopt;
    try {
      Prepared p = prepare(*other);
      const auto answer = reference_engine().run(p.request);
      if (!answer) return std::nullopt;
      for (Expected& e : p.expected) {
        e.want = e.got(*answer);
        e.tolerance = restored_tolerance(c, storage);
      }
      return p;
    } catch (const ArgumentError&) {
      return std::nullopt;  // as stored it was refused too, which has been told
    }
  }

  static Prepared prepare(const CaseFile& c) {
    if (c.op == "Attention") return prepare_attention(c);
    if (c.op == "RotaryEmbedding") return prepare_rotary_embedding(c);
    if (c.op == "foci.attention") return prepare_foci_attention(c);
    throw FormatError(fmt::format(
        "metadata op: \"{}\" given, one of Attention, RotaryEmbedding, foci.attention, refuse is "
        "needed",
        shown(c.op)));
  }

  void check(const CaseFile& c, const std::string& engine, const std::vector<Expected>& expected,
             const Answer& answer) {
    ++report.runs;
    for (const Expected& e : expected) {
      const auto d = difference(e.got(answer), e.want, e.tolerance);
      if (!d) continue;
      report.failures.push_back({.path = c.path,
                                 .op = c.op,
                                 .engine = engine,
                                 .tensor = e.name,
                                 .index = d->index,
                                 .got = d->got,
                                 .want = d->want,
                                 .error = d->error,
                                 .allowed = d->allowed,
                                 .wrong = d->wrong,
                                 .elements = d->elements,
                                 .message = fmt::format("{}: {} {}", engine, e.name, d->message)});
    }
  }

  // The refusal may come while the spec is read, from the plan, or from the tensors.
  void refuse(const CaseFile& c) {
    const auto judge = [&](const std::string& engine, const std::string& message) {
      if (message.find(c.message_contains) == std::string::npos) {
        fail(c, engine,
             fmt::format("refused with \"{}\", which does not contain \"{}\"", message,
                         shown(c.message_contains)));
      }
    };
    Prepared p;
    try {
      p = prepare_foci_attention(c);
    } catch (const ArgumentError& e) {
      ++report.runs;
      return judge("", e.what());
    }
    auto& request = std::get<AttentionRequest>(p.request);
    const AttentionUpstream& up = request.up;
    for (const Tensor* t : {&up.dy, &up.drow_stat, &up.dentropy, &up.dmax_weight, &up.dcoverage}) {
      request.backward = request.backward || t->defined();
    }
    for (const Engine& engine : engines_) {
      try {
        if (!engine.run(p.request)) continue;
        ++report.runs;
        fail(c, engine.name, "accepted, but it must be refused");
      } catch (const ArgumentError& e) {
        ++report.runs;
        judge(engine.name, e.what());
      }
    }
  }

  const std::vector<Engine> engines_;
  const bool oracle_only_;
};

}  // namespace
}  // namespace verify

VerifyReport verify_paths(const std::vector<std::filesystem::path>& paths,
                          const VerifyOptions& options) {
  verify::Run run(options);
  for (const auto& p : paths) run.path(p);
  return std::move(run.report);
}

}  // namespace foci
