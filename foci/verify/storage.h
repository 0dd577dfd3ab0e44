// ONNX cases in storage types that they were not made in: the same operator, its inputs rounded.
#pragma once

#include <optional>
#include <vector>

#include "foci/verify/case_file.h"

namespace foci::verify {

// The types beside its own that a case is run in: an ONNX case runs in float32 and in float16.
std::vector<DType> other_storage(const CaseFile& c);

// The case with its floating inputs in another type. nullopt where a number, other than one of a
// mask, is finite and would not be any more.
std::optional<CaseFile> with_storage(const CaseFile& c, DType storage);

// Of such a run against the oracle on the same rounded inputs: float32's error, and for float16 the
// rounding of the result, 2^-11 of an element.
double restored_tolerance(const CaseFile& c, DType storage);

}  // namespace foci::verify
