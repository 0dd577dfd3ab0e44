// fork(): a child holds what the forking thread held, while the other threads are gone and with
// them whoever would have released a mutex. Private to the library.
#pragma once

#include <mutex>

namespace foci {

// From now on `mutex` is held over every fork(), so that a child finds it free and what it guards
// whole. For mutexes that live as long as the process; call it from a static initialiser. A thread
// that holds one must not wait for another.
bool hold_over_fork(std::mutex& mutex);

// From now on every child calls `f`, with those mutexes held.
bool call_in_child(void (*f)());

}  // namespace foci
