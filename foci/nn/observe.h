// Observers: how to look into a model's attention while it runs, in linear memory.
//
//   Observer watch;
//   watch.add({.path = "encoder.layer.*.attention", .statistics = {Statistic::entropy}});
//   Context<float> context{.tape = tape, .observer = &watch};
//   model.forward(context, …);
//   for (const AttentionRecord& r : watch.records()) …
//
// An observer asks for statistics of every row, or for exact weights of chosen rows; n×n weights
// are never made.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "foci/core/api.h"
#include "foci/core/tensor.h"
#include "foci/spec/spec.h"

namespace foci::nn {

struct AttentionRequest {
  std::string path;            // of the attention module; * stands for any run of characters
  Statistics statistics;       // of all rows and heads
  std::vector<int64_t> rows;   // exact weights of these queries …
  std::vector<int64_t> heads;  // … and heads; empty means all heads
};

// What was seen at one attention module in one pass. Undefined what nobody asked for.
struct AttentionRecord {
  std::string path;
  int64_t heads = 0;
  Tensor entropy;              // [B,H,N] nats
  Tensor max_weight, max_key;  // [B,H,N], [B,H,N] int64
  Tensor support;              // [B,H,N]
  Tensor coverage;             // [B,H,M] column sums of weights
  Tensor weights;  // [B, asked heads, asked rows, M], of the first request that wants rows
};

class FOCI_API Observer {
 public:
  void add(AttentionRequest request) { requests_.push_back(std::move(request)); }
  const std::vector<AttentionRecord>& records() const { return records_; }
  void clear() { records_.clear(); }

  // ---- for attention modules ----
  Statistics statistics_of(std::string_view path) const;
  // The first request for this path that wants rows, or null.
  const AttentionRequest* rows_of(std::string_view path) const;
  bool watches(std::string_view path) const;
  void note(AttentionRecord record) { records_.push_back(std::move(record)); }

 private:
  std::vector<AttentionRequest> requests_;
  std::vector<AttentionRecord> records_;
};

// Whether `pattern`, in which * stands for any run of characters, is all of `text`.
FOCI_API bool matches(std::string_view pattern, std::string_view text);

}  // namespace foci::nn
