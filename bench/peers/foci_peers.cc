// foci's C functions for the peers' runner: exceptions turned into messages.
#include "foci_peers.h"

#include <exception>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "foci/core/error.h"
#include "foci/core/simd_target.h"
#include "foci/core/threads.h"
#include "foci/measure/training.h"

using namespace foci;

struct foci_peers_training {
  foci_peers_training(const std::string& workload, uint64_t seed)
      : job(workload, seed), tensors(job.tensors()) {}
  measure::TrainingJob job;
  std::vector<measure::TrainingTensor> tensors;
};

namespace {

thread_local std::string message, description;

// Runs `body`, and gives what a C function gives.
template <class F>
const char* said(const F& body) noexcept {
  try {
    try {
      body();
      return nullptr;
    } catch (const std::exception& e) {
      message = e.what();
    }
    for (char& c : message) {
      if (c == '\n') c = ' ';
    }
    return message.c_str();
  } catch (...) {  // no memory for the message
    return "foci: out of memory";
  }
}

void given(const void* pointer, const char* name) {
  require(pointer != nullptr, "{}: a null pointer", name);
}

nlohmann::json described(const foci_peers_training& training) {
  const measure::TrainingWorkload& w = training.job.workload();
  nlohmann::json tensors = nlohmann::json::array();
  for (const measure::TrainingTensor& t : training.tensors) {
    tensors.push_back(
        {{"name", t.name},
         {"shape", std::vector<int64_t>(t.value.shape().begin(), t.value.shape().end())},
         {"dtype", name_of(t.value.dtype())},
         {"trained", t.first.defined()},
         {"decay", t.decay}});
  }
  return {{"name", w.name},
          {"language", w.language},
          {"width", w.width},
          {"layers", w.layers},
          {"heads", w.heads},
          {"feed_forward", w.feed_forward},
          {"batch", w.batch},
          {"grids", w.grids},
          {"lengths", w.lengths()},
          {"patch_values", w.patch_values},
          {"classes", w.classes},
          {"position_rows", w.position_rows},
          {"position_cols", w.position_cols},
          {"class_token", w.class_token},
          {"length", w.length},
          {"vocabulary", w.vocabulary},
          {"learning_rate", w.learning_rate},
          {"betas", {w.beta1, w.beta2}},
          {"adam_eps", w.adam_eps},
          {"weight_decay", w.weight_decay},
          {"clip", w.clip},
          {"label_smoothing", w.label_smoothing},
          {"steps", training.job.steps()},
          {"parameters", training.job.parameters()},
          {"tensors", tensors}};
}

}  // namespace

extern "C" {

const char* foci_peers_about(const char** text) {
  return said([&] {
    given(text, "text");
    description =
        fmt::format("SIMD target {}, {} threads", name_of(current_target()), num_threads());
    *text = description.c_str();
  });
}

const char* foci_peers_set_threads(int n) {
  return said([&] { set_num_threads(n); });
}

const char* foci_peers_training_make(const char* workload, uint64_t seed,
                                     foci_peers_training** made) {
  return said([&] {
    given(workload, "workload");
    given(made, "made");
    *made = new foci_peers_training(workload, seed);
  });
}

void foci_peers_training_free(foci_peers_training* training) {
  delete training;
}

const char* foci_peers_training_about(foci_peers_training* training, const char** json) {
  return said([&] {
    given(training, "training");
    given(json, "json");
    description = described(*training).dump();
    *json = description.c_str();
  });
}

const char* foci_peers_training_tensor(foci_peers_training* training, const char* name,
                                       const char* part, const void** data) {
  return said([&] {
    given(training, "training");
    given(name, "name");
    given(part, "part");
    given(data, "data");
    const std::string which = part;
    require(which == "value" || which == "first" || which == "second",
            "part: '{}' given, value, first and second are right", which);
    for (const measure::TrainingTensor& t : training->tensors) {
      if (t.name != name) continue;
      const Tensor& found = which == "value" ? t.value : which == "first" ? t.first : t.second;
      require(found.defined(), "part: {} is not trained and has no moments", t.name);
      *data = found.raw();
      return;
    }
    throw ArgumentError(fmt::format("name: there is no tensor '{}'", name));
  });
}

const char* foci_peers_training_step(foci_peers_training* training, double* loss) {
  return said([&] {
    given(training, "training");
    given(loss, "loss");
    *loss = training->job.step();
  });
}

}  // extern "C"
