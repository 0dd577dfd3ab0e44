// Scopes that time operators.
#include "foci/autograd/profile.h"

#include <utility>

namespace foci {

const char* name_of(Operator op) {
  switch (op) {
    case Operator::linear:
      return "linear";
    case Operator::attention:
      return "attention";
    case Operator::layer_norm:
      return "layer norm";
    case Operator::activation:
      return "activation";
    case Operator::add:
      return "add";
    case Operator::dropout:
      return "dropout";
    case Operator::rows:
      return "embedding";
    case Operator::copy:
      return "copy";
    case Operator::loss:
      return "loss";
    case Operator::optimiser:
      return "optimiser";
  }
  return "";
}

std::vector<Profile::Row> Profile::rows() const {
  std::vector<Row> out;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (int op = 0; op < kOperators; ++op) {
      const Cell& c = cells_[static_cast<size_t>(pass)][static_cast<size_t>(op)];
      if (c.calls > 0)
        out.push_back({static_cast<Operator>(op), pass, c.seconds, c.flops, c.calls});
    }
  }
  return out;
}

namespace detail {
ProfileState& profile_state() {
  static thread_local ProfileState state;
  return state;
}
}  // namespace detail

Profiling::Profiling(Profile& profile)
    : outer_(std::exchange(detail::profile_state().profile, &profile)) {}

Profiling::~Profiling() {
  detail::profile_state().profile = outer_;
}

ProfileScope::ProfileScope(Operator op, Pass pass, double flops)
    : profile_(detail::profile_state().profile), flops_(flops), op_(op), pass_(pass) {
  if (!profile_) return;
  outer_ = std::exchange(detail::profile_state().innermost, this);
  start_ = std::chrono::steady_clock::now();
}

void ProfileScope::end() {
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  detail::profile_state().innermost = outer_;
  if (outer_) outer_->inner_seconds_ += seconds;
  Profile::Cell& cell = profile_->cells_[static_cast<size_t>(pass_)][static_cast<size_t>(op_)];
  cell.seconds += seconds - inner_seconds_;
  cell.flops += flops_;
  ++cell.calls;
}

}  // namespace foci
