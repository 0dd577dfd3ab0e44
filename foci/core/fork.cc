// One set of handlers for all that must be done around fork().
#include "foci/core/fork.h"

#include <pthread.h>

#include <array>
#include <cassert>

namespace foci {
namespace {

// No constructors: static initialisers of other files come here in any order.
constinit std::array<std::mutex*, 8> mutexes{};
constinit std::array<void (*)(), 8> calls{};
constinit size_t mutex_count = 0, call_count = 0;
constinit bool registered = false;

void before_fork() {
  for (size_t i = 0; i < mutex_count; ++i) mutexes[i]->lock();
}
void after_fork() {
  for (size_t i = mutex_count; i-- > 0;) mutexes[i]->unlock();
}
void after_fork_in_child() {
  for (size_t i = 0; i < call_count; ++i) calls[i]();
  after_fork();
}

void register_once() {
  if (registered) return;
  registered = true;
  // Fails only where there is no memory for it.
  pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

}  // namespace

bool hold_over_fork(std::mutex& mutex) {
  assert(mutex_count < mutexes.size());
  mutexes[mutex_count++] = &mutex;
  register_once();
  return true;
}

bool call_in_child(void (*f)()) {
  assert(call_count < calls.size());
  calls[call_count++] = f;
  register_once();
  return true;
}

}  // namespace foci
