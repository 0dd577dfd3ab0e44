// foci's C functions for the peers' runner: tensors wrapped, exceptions turned into messages.
#include "foci_peers.h"

#include <exception>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/core/error.h"
#include "foci/core/simd_target.h"
#include "foci/core/threads.h"
#include "foci/measure/training.h"
#include "foci/spec/json.h"

using namespace foci;

struct foci_peers_attention {
  Plan plan;
};

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

// A tensor over the caller's memory; an empty one needs none.
Tensor over(const float* data, const Dims& shape, const char* name) {
  if (shape.product() == 0) return Tensor::empty(shape);
  given(data, name);
  return Tensor::wrap(const_cast<float*>(data), shape, contiguous_strides(shape), DType::f32);
}

AttentionInputs inputs(const AttentionShape& s, const float* q, const float* k, const float* v) {
  return {.q = over(q, {s.B, s.H, s.N, s.D}, "q"),
          .k = over(k, {s.B, s.Hk, s.M, s.D}, "k"),
          .v = over(v, {s.B, s.Hk, s.M, s.Dv}, "v")};
}

AttentionOutputs outputs(const AttentionShape& s, const float* y, const float* statistic) {
  return {.y = over(y, {s.B, s.H, s.N, s.Dv}, "y"),
          .row_stat = over(statistic, {s.B, s.H, s.N}, "statistic")};
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

const char* foci_peers_make(const char* spec, const int64_t shape[7], foci_peers_attention** made) {
  return said([&] {
    given(spec, "spec");
    given(shape, "shape");
    given(made, "made");
    const AttentionSpec read = spec_from_json_text(spec);
    const AttentionShape s = {shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6]};
    *made = new foci_peers_attention{Plan::make(read, s)};
  });
}

void foci_peers_free(foci_peers_attention* attention) {
  delete attention;
}

const char* foci_peers_forward(foci_peers_attention* attention, const float* q, const float* k,
                               const float* v, float* y, float* statistic) {
  return said([&] {
    given(attention, "attention");
    const AttentionShape& s = attention->plan.shape();
    AttentionOutputs out = outputs(s, y, statistic);
    attention->plan.bind(inputs(s, q, k, v)).forward(out);
  });
}

const char* foci_peers_backward(foci_peers_attention* attention, const float* q, const float* k,
                                const float* v, const float* y, const float* statistic,
                                const float* dy, float* dq, float* dk, float* dv) {
  return said([&] {
    given(attention, "attention");
    const AttentionShape& s = attention->plan.shape();
    AttentionGradients gradients = {.dq = over(dq, {s.B, s.H, s.N, s.D}, "dq"),
                                    .dk = over(dk, {s.B, s.Hk, s.M, s.D}, "dk"),
                                    .dv = over(dv, {s.B, s.Hk, s.M, s.Dv}, "dv")};
    attention->plan.bind(inputs(s, q, k, v))
        .backward(outputs(s, y, statistic), {.dy = over(dy, {s.B, s.H, s.N, s.Dv}, "dy")}, {},
                  gradients);
  });
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
