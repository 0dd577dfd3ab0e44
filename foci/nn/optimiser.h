// AdamW over flat storage, gradient clipping, and the learning rate's course.
#pragma once

#include <cstdint>
#include <vector>

#include "foci/autograd/tape.h"
#include "foci/core/api.h"

namespace foci::nn {

// Moves the parameters' values and gradients into two flat tensors, those with weight decay first,
// so that the optimiser runs over plain memory. The parameters stay valid: they become views.
//
// A parameter listed twice counts once. Parameters that are one tensor (tied weights: one value's
// handle given to both) share one place, where their gradients add up; they have one decay. Throws
// ArgumentError naming the parameter: null, without values, or overlapping another in part.
class FOCI_API FlatParameters {
 public:
  explicit FlatParameters(std::vector<Parameter<float>*> parameters);

  const std::vector<Parameter<float>*>& parameters() const { return parameters_; }  // each once
  const Tensor& values() const { return values_; }
  const Tensor& grads() const { return grads_; }
  int64_t decayed() const { return decayed_; }  // length of the part with weight decay
  void zero_grads();
  // √Σ g² over all parameters, summed in a fixed order.
  double grad_norm() const;
  // The part of a flat tensor of this length that belongs to parameter i, in its shape.
  Tensor part(const Tensor& flat, size_t i) const;
  // Throws ArgumentError where a parameter has been given another tensor since (by another
  // FlatParameters, or by hand): steps would not reach it.
  void check_views() const;

 private:
  std::vector<Parameter<float>*> parameters_;
  std::vector<int64_t> begin_;
  Tensor values_, grads_;
  int64_t decayed_ = 0;
};

// Throws (AdamW does) where beta1 or beta2 lies outside [0, 1), eps is not above 0 in float32, or
// weight_decay is negative or not finite.
struct AdamWConfig {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.05;  // of the parameters that have it
};

// Decoupled weight decay (Loshchilov & Hutter 2019).
class FOCI_API AdamW {
 public:
  AdamW(FlatParameters& parameters, const AdamWConfig& config);

  // One step. Gradients are scaled so that their global norm is at most `max_norm` (0: unlimited).
  // Returns the norm before. Leaves the gradients zero, in the same pass over memory: a training
  // loop need not clear them. A NaN or infinite norm changes nothing; the caller decides.
  // Throws ArgumentError, naming the argument, for a learning rate or norm that is NaN, infinite or
  // negative, and as FlatParameters::check_views.
  double step(double learning_rate, double max_norm);

  // The whole state, for checkpoints: first and second moments, flat, and the number of steps.
  const Tensor& first() const { return m_; }
  const Tensor& second() const { return v_; }
  int64_t steps() const { return steps_; }
  void restore_steps(int64_t steps);  // throws ArgumentError below 0

 private:
  FlatParameters& parameters_;
  AdamWConfig config_;
  Tensor m_, v_;
  int64_t steps_ = 0;
};

// Linear warm-up, then half a cosine down to `floor` of the peak.
struct FOCI_API Schedule {
  double peak = 1e-3;
  double warm_up = 0.05;  // share of the run
  double floor = 0.01;    // share of the peak
  // progress in [0, 1]: the share of the run (steps, or time) that is over; what lies outside is
  // taken as the nearer end. Throws ArgumentError naming what is NaN, infinite or out of range:
  // peak ≥ 0, warm_up and floor in [0, 1].
  double at(double progress) const;
};

}  // namespace foci::nn
