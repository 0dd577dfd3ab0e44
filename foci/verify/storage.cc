// Which storage types a case is also run in, and how it is narrowed to them.
#include "foci/verify/storage.h"

#include <algorithm>
#include <cmath>

#include "foci/verify/ops.h"

namespace foci::verify {
namespace {

bool all_finite(const Tensor& t) {
  const Tensor x = t.to(DType::f64).contiguous();
  const auto values = x.span<double>();
  return std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v); });
}

}  // namespace

std::vector<DType> other_storage(const CaseFile& c) {
  if (c.op != "Attention" && c.op != "RotaryEmbedding") return {};
  const Tensor first = c.input(c.op == "Attention" ? "q" : "x");
  if (!first.defined()) return {};
  switch (first.dtype()) {
    case DType::f32:
    case DType::f64:  // the engine computes it in float32
      return {DType::f16};
    case DType::f16:
      return {DType::f32};
    case DType::bf16:
      return {DType::f32, DType::f16};
    default:
      return {};
  }
}

std::optional<CaseFile> with_storage(const CaseFile& c, DType storage) {
  CaseFile other = c;
  for (auto& [name, tensor] : other.in) {
    if (!is_floating(tensor.dtype())) continue;
    const Tensor rounded = tensor.to(storage);
    if (name != "mask" && all_finite(tensor) && !all_finite(rounded)) return std::nullopt;
    tensor = rounded;
  }
  return other;
}

double restored_tolerance(const CaseFile& c, DType storage) {
  const double result = storage == DType::f16 ? 0x1p-11 : 0;
  return std::max(c.tolerance.value_or(0), onnx_tolerance({}, DType::f32) + result);
}

}  // namespace foci::verify
