// KvCache: the keys and values of sequences that grow, and attention of the queries at their ends.
//
//   KvCache cache({.sequences = 2, .Hk = 8, .D = 64, .Dv = 64});
//   cache.append(k, v);                                        // k [2,8,n,64] of n new tokens
//   AttentionOutputs out = cache.attend({.masks = {Causal{}}}, q);  // q [2,H,n,64] of the same
//
// Every sequence has a length of its own and holds its tokens contiguous and in order, so that a
// call on them is a call of Plan like any other: queries stand at the last tokens, p = i + M − N.
// All that a spec says by position (causal, windows, ALiBi, Relative1D) depends on differences of
// positions alone, so that positions counted from the first token held serve as well as absolute
// ones. What does not (rotary angles) is written into k before it is appended, at position(s).
//
// The same bits. A row's result does not depend on how many queries or sequences share a call, and
// kernels cut keys at fixed distances from the first token held. So a cache that keeps everything
// gives, prefilled in chunks of any size and token by token, the bits of one call over all tokens.
// A rolling cache holds other first tokens at other times: its sums run in another order than one
// call with the mask Window{W − 1}, and agree to rounding (2e-5 of the largest value).
//
// A cache may be read by several threads at once, and changed by one that is alone with it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "foci/attention/plan.h"
#include "foci/core/api.h"
#include "foci/spec/arguments.h"
#include "foci/spec/spec.h"

namespace foci {

struct KvCacheShape {
  int64_t sequences = 1, Hk = 1, D = 0, Dv = 0;
  DType dtype = DType::f32;  // float32, float16 or bfloat16
};

// Which sequences the entries of a batch belong to, and how many of their rows count.
struct KvRows {
  std::vector<int64_t> sequences;  // one for each entry, none twice; empty: all, in order
  std::vector<int64_t> counts;     // rows of each entry that count, the first ones; empty: all
};

class FOCI_API KvCache {
 public:
  // `window`: a rolling cache, in which a token sees itself and the window − 1 before it; what no
  // later query can see is dropped. Memory is then bounded by about twice what is held. nullopt
  // keeps everything, in buffers that double. Throws ArgumentError for impossible sizes.
  explicit KvCache(const KvCacheShape& shape, std::optional<int64_t> window = std::nullopt);
  KvCache(KvCache&&) noexcept;
  KvCache& operator=(KvCache&&) noexcept;
  ~KvCache();

  const KvCacheShape& shape() const { return shape_; }
  std::optional<int64_t> window() const { return window_; }

  // Tokens of a sequence so far: the position of the next one. Throws ArgumentError, as everything
  // that takes a sequence, where there is none of that number.
  int64_t position(int64_t sequence) const;
  // The first token still held; 0 unless the cache rolls.
  int64_t first(int64_t sequence) const;
  // Tokens held: position − first.
  int64_t length(int64_t sequence) const { return position(sequence) - first(sequence); }
  // Views [Hk, length, D] and [Hk, length, Dv], good until the cache changes.
  Tensor keys(int64_t sequence) const;
  Tensor values(int64_t sequence) const;
  size_t bytes() const;  // of all buffers

  // k [E,Hk,n,D] and v [E,Hk,n,Dv] of the cache's dtype, of any strides but the last, go to the
  // ends of E sequences. Throws ArgumentError, naming the argument, where they do not fit, and
  // bad_alloc; the cache is then what it was before.
  void append(const Tensor& k, const Tensor& v, const KvRows& rows = {});

  // Forgets the tokens from `position` on (speculative decoding). A rolling cache can go back as
  // far as whole windows are held: over what the last append added. Throws ArgumentError otherwise.
  void truncate(int64_t sequence, int64_t position);
  // Forgets all of a sequence, and gives its memory back.
  void reset(int64_t sequence);

  // Attention of queries at the ends of sequences: the last of an entry's n rows that count stands
  // at the sequence's last token. q [E,H,n,D] of the cache's dtype. Masks are the spec's: causal
  // ones are for the caller to ask for, a rolling cache adds its window. Masks and positional
  // biases may be aligned bottom-right or past, which is the same here. `tables` gives slopes,
  // table1d and score_w where the spec reads them.
  //
  // Outputs as of Bound::forward, of [E,H,n,…]; rows that do not count are empty rows. max_key and
  // coverage [E,H,longest length] count from the first token held. Throws ArgumentError for specs
  // that need tensors laid out by key (keep, key_lengths, segments, tensor bias, relative2d), for
  // dropout, for more queries than tokens whose window is held, and as Plan and bind do.
  AttentionOutputs attend(const AttentionSpec& spec, const Tensor& q,
                          const AttentionInputs& tables = {}, const KvRows& rows = {},
                          const PlanOptions& options = {}) const;

 private:
  struct Sequence;
  struct Entry;
  const Sequence& sequence(int64_t s) const;
  std::vector<Entry> entries(const KvRows& rows, int64_t batch, int64_t n, const char* name) const;
  void check_whole_windows(const std::vector<Entry>& list) const;

  KvCacheShape shape_;
  std::optional<int64_t> window_;
  std::vector<Sequence> sequences_;
};

}  // namespace foci
