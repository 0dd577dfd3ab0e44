// foci's training steps for the peers' runner: plain C functions. (Attention it calls through the
// Python package.)
//
// Each gives NULL, or a message in one line that lasts until the thread's next call; none throws or
// aborts.
#ifndef FOCI_BENCH_PEERS_FOCI_PEERS_H_
#define FOCI_BENCH_PEERS_FOCI_PEERS_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FOCI_PEERS_API __attribute__((visibility("default")))

// "SIMD target avx2, 2 threads" in *text, which lasts until the thread's next call.
FOCI_PEERS_API const char* foci_peers_about(const char** text);
FOCI_PEERS_API const char* foci_peers_set_threads(int n);

// Training steps of a workload of foci/measure/training.h. The first step is over when it is made.
typedef struct foci_peers_training foci_peers_training;
FOCI_PEERS_API const char* foci_peers_training_make(const char* workload, uint64_t seed,
                                                    foci_peers_training** made);
FOCI_PEERS_API void foci_peers_training_free(foci_peers_training* training);  // NULL is nothing
// The workload as JSON, with "steps", "parameters" (a number) and "tensors": [{"name", "shape",
// "dtype", "trained", "decay"}, …]; the text lasts until the thread's next call.
FOCI_PEERS_API const char* foci_peers_training_about(foci_peers_training* training,
                                                     const char** json);
// The values of a tensor, or what the optimiser keeps of it: `part` is "value", "first" or
// "second". They last as long as `training`; a trained tensor's change with every step.
FOCI_PEERS_API const char* foci_peers_training_tensor(foci_peers_training* training,
                                                      const char* name, const char* part,
                                                      const void** data);
FOCI_PEERS_API const char* foci_peers_training_step(foci_peers_training* training, double* loss);

#ifdef __cplusplus
}
#endif

#endif
