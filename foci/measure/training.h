// How fast a training step is, for a few models of known size: forward, backward, clipping and
// AdamW, on inputs drawn once from a seed.
//
// Another library's twin of a workload needs no more than TrainingWorkload says:
//   Each layer, pre-LN: x += W_o attention(W_q n, W_k n, W_v n), n = LN(x); x += W_2 gelu(W_1
//   LN(x)); every linear map with a bias but the language model's head, gelu exact, eps 1e-5, no
//   dropout, one more LN after the last layer; scale 1/√(width/heads). Pictures: tokens = W patches
//   + position table (one row a cell; a picture of another grid than the table's reads it
//   bilinearly), after a learned class token where there is one. The class token, or else the mean
//   of all tokens, goes to a linear classifier. Texts: token table + position table; causal; the
//   head is the token table again (tied). Loss: mean cross-entropy (of pictures with label
//   smoothing; of every token's successor). Update: the gradients' global norm clipped, then AdamW,
//   weight decay on linear weights alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "foci/autograd/profile.h"
#include "foci/core/api.h"
#include "foci/core/tensor.h"

namespace foci::measure {

struct TrainingWorkload {
  std::string name, about;
  bool language = false;  // a causal language model; else a vision transformer
  int64_t width = 0, layers = 0, heads = 0, feed_forward = 0;
  int64_t batch = 0;  // pictures or texts a step
  // Pictures: their grids of patches (rows, columns), one each; values a patch; classes.
  std::vector<std::pair<int64_t, int64_t>> grids;
  int64_t patch_values = 0, classes = 0;
  int64_t position_rows = 0, position_cols = 0;  // the position table's own grid
  bool class_token = false;
  // Texts: tokens each, and the vocabulary.
  int64_t length = 0, vocabulary = 0;

  double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.999, adam_eps = 1e-8, weight_decay = 0.05;
  double clip = 1;
  bool checkpoint_layers = false;  // see nn::Encoder::checkpoint
  double label_smoothing = 0;

  // Tokens of one step, and of each member of the batch, class tokens too.
  int64_t tokens() const;
  std::vector<int64_t> lengths() const;
};

// vit-demo        the demo's own model and batch: 64 scenes of mixed sizes, 17 to 65 tokens each
// vit-demo-even   the same model on 64 scenes of 36 patches
// vit-d192        width 192, 6 layers, 3 heads, 64 tokens, batch 32
// lm-d256         causal, width 256, 4 layers, 4 heads, 256 tokens, batch 8, vocabulary 4096
// vit-s           ViT-S/16 at 224 pixels: width 384, 12 layers, 6 heads, 197 tokens, batch 8
std::vector<std::string> training_workloads();
// Throws ArgumentError naming those that exist.
TrainingWorkload training_workload(const std::string& name);

// A tensor of a job. Those trained have their moments and a place among what decays; the batch's
// have neither.
struct TrainingTensor {
  std::string name;
  Tensor value, first, second;
  bool decay = false;
};

// A model, its optimiser and one batch. The constructor runs the first step, which makes all memory
// and counts the work.
class TrainingJob {
 public:
  explicit TrainingJob(const std::string& name, uint64_t seed = 1);
  explicit TrainingJob(const TrainingWorkload& workload, uint64_t seed = 1);
  ~TrainingJob();

  const TrainingWorkload& workload() const;
  int64_t parameters() const;  // trained values
  // Of matrix products and attention (visible pairs alone), forward and backward, a multiply-add
  // counting two.
  double flops() const;
  // One step on the job's batch; returns its loss.
  double step();
  int64_t steps() const;  // so far, the first one too
  // What a twin in another library needs to go on from here: all that is trained, by path, as
  // views; and copies of the batch, "patches" [patches, values] or "ids" [tokens] (int64), and
  // "labels" (int64), one a picture or token.
  std::vector<TrainingTensor> tensors() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct TrainingRow {
  std::string name;  // "linear", … , "other"
  Pass pass = Pass::forward;
  double seconds = 0;  // a step, mean over the profiled ones
  double share = 0;    // of the profiled steps' time
  double gflops = 0;   // 0 where the operator has no products to count
  double peak = 0;     // share of the multiply-add peak
  double calls = 0;    // a step
};

struct TrainingReport {
  TrainingWorkload workload;
  int64_t parameters = 0;
  double flops = 0;          // a step
  double seconds = 0;        // a step, median
  double low = 0, high = 0;  // quartiles
  double items_per_second = 0, tokens_per_second = 0;
  double gflops = 0, peak_gflops = 0, share = 0;
  int steps = 0;
  double first_loss = 0, last_loss = 0;
  // Pieces of memory for tensors that a step takes, and those among them that are asked of the
  // system; most bytes of tensors at once, parameters and optimiser too.
  double tensors = 0, allocations = 0;
  int64_t peak_bytes = 0;
  std::vector<TrainingRow> rows;  // with profile
  bool stopped = false;
};

struct TrainingMeasurement {
  TrainingWorkload workload;
  uint64_t seed = 1;
  double seconds = 5;    // of steps; five are the least
  bool profile = false;  // as many steps again, timed by operator
  std::function<bool()> keep_going;
};
TrainingReport measure_training(const TrainingMeasurement& measurement);

}  // namespace foci::measure
