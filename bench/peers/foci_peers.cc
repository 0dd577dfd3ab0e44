// foci's C functions for the peers' runner: tensors wrapped, exceptions turned into messages.
#include "foci_peers.h"

#include <exception>
#include <string>

#include "foci/attention/plan.h"
#include "foci/core/error.h"
#include "foci/core/simd_target.h"
#include "foci/core/threads.h"
#include "foci/spec/json.h"

using namespace foci;

struct foci_peers_attention {
  Plan plan;
  AttentionGradients gradients{};
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
                                const float* dy, const float** dq, const float** dk,
                                const float** dv) {
  return said([&] {
    given(attention, "attention");
    given(dq, "dq");
    given(dk, "dk");
    given(dv, "dv");
    const AttentionShape& s = attention->plan.shape();
    attention->gradients = {};  // its memory serves the next ones
    attention->gradients =
        attention->plan.bind(inputs(s, q, k, v))
            .backward(outputs(s, y, statistic), {.dy = over(dy, {s.B, s.H, s.N, s.Dv}, "dy")});
    *dq = attention->gradients.dq.data<float>();
    *dk = attention->gradients.dk.data<float>();
    *dv = attention->gradients.dv.data<float>();
  });
}

}  // extern "C"
