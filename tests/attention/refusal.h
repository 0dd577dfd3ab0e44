// The message with which something refuses its arguments; empty where it does not.
#pragma once

#include <string>

#include "foci/core/error.h"

namespace foci::testing {

template <class F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const ArgumentError& e) {
    return e.what();
  }
  return "";
}

}  // namespace foci::testing
