// Errors: what foci throws at its public boundary.
//
// Every message says which argument was wrong, what arrived and what would be right, in one line.
// Inside the library, behind the boundary, asserts take over.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "foci/core/api.h"

namespace foci {

// The base of all errors that foci throws on purpose.
class FOCI_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A caller passed a wrong argument: shape, dtype, range, combination.
class FOCI_API ArgumentError : public Error {
 public:
  using Error::Error;
};

// Bytes that came from outside (a file, an image, a header) are not what their format promises.
class FOCI_API FormatError : public Error {
 public:
  using Error::Error;
};

// The system refused: a file could not be opened, a disk is full.
class FOCI_API IoError : public Error {
 public:
  using Error::Error;
};

// A number went wrong where training cannot continue (NaN or infinite loss).
class FOCI_API NumericError : public Error {
 public:
  using Error::Error;
};

// Somebody asked a long call to end (InterruptScope, core/threads.h).
class FOCI_API Interrupted : public Error {
 public:
  using Error::Error;
};

// Throws E with a formatted message unless `ok`.
template <class E = ArgumentError, class... Args>
inline void require(bool ok, fmt::format_string<Args...> text, Args&&... args) {
  if (!ok) [[unlikely]] {
    throw E(fmt::format(text, std::forward<Args>(args)...));
  }
}

}  // namespace foci
