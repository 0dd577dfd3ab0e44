// The tree of modules: paths, the list of parameters, fresh values.
#include "foci/nn/module.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <unordered_set>

#include "foci/core/threads.h"

namespace foci::nn {
namespace {

// Normal numbers by Box–Muller, both of a pair, from a stream of their own; the same on any number
// of threads.
template <class T>
void fill_normal(const Tensor& t, double deviation, uint64_t stream) {
  constexpr int64_t kBlock = 1 << 12;
  T* const to = t.data<T>();
  const int64_t n = t.numel();
  parallel_for((n + kBlock - 1) / kBlock, [&](int64_t task) {
    const int64_t end = std::min(n, (task + 1) * kBlock);
    for (int64_t i = task * kBlock; i < end; i += 4) {
      const auto at = static_cast<uint64_t>(i / 4);
      const auto words =
          philox(kDefaultSeed, {static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32),
                                static_cast<uint32_t>(stream), 0x66726573u});
      for (int64_t j = 0; j < std::min<int64_t>(4, end - i); ++j) {
        const int64_t pair = j / 2 * 2;
        const double u = (static_cast<double>(words[pair]) + 0.5) * 0x1p-32;
        const double angle =
            2 * std::numbers::pi * (static_cast<double>(words[pair + 1]) * 0x1p-32);
        const double radius = deviation * std::sqrt(-2 * std::log(u));
        to[i + j] = static_cast<T>(radius * (j % 2 == 0 ? std::cos(angle) : std::sin(angle)));
      }
    }
  });
}

// How many tensors this thread's modules have drawn.
thread_local uint64_t drawn = 0;

// Whether a parameter was made as ShapesOnly: many elements in the memory of one.
bool shape_alone(const Tensor& t) {
  for (int d = 0; d < t.rank(); ++d) {
    if (t.dim(d) > 1 && t.stride(d) == 0) return true;
  }
  return false;
}

std::string join(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

thread_local bool shapes_only = false;

}  // namespace

ShapesOnly::ShapesOnly() : outer_(shapes_only) {
  shapes_only = true;
}
ShapesOnly::~ShapesOnly() {
  shapes_only = outer_;
}

template <class T>
void Module<T>::add_parameter(const char* name, Parameter<T>& p, const Dims& shape, bool decay,
                              double start) {
  require(std::isfinite(start), "add_parameter: {} starts as {}, a finite number is right",
          name ? name : "", start);
  declare(name, p, decay);
  p.value = shapes_only ? Tensor::full({1}, start, dtype_v<T>).broadcast_to(shape)
                        : Tensor::full(shape, start, dtype_v<T>);
}

template <class T>
void Module<T>::add_normal_parameter(const char* name, Parameter<T>& p, const Dims& shape,
                                     bool decay, double deviation) {
  require(std::isfinite(deviation) && deviation >= 0,
          "add_normal_parameter: {} of deviation {}, a finite number >= 0 is right",
          name ? name : "", deviation);
  declare(name, p, decay);
  if (shapes_only) {
    p.value = Tensor::zeros({1}, dtype_v<T>).broadcast_to(shape);
    return;
  }
  p.value = Tensor::empty(shape, dtype_v<T>);
  fill_normal<T>(p.value, deviation, drawn++);
}

template <class T>
void Module<T>::declare(const char* name, Parameter<T>& p, bool decay) {
  require(name != nullptr, "add_parameter: the name is null");
  check_name(name);
  for (const auto& [other, known] : own_) {
    require(known != &p, "add_parameter: {} is the parameter that was declared as {}", name, other);
  }
  own_.emplace_back(name, &p);
  p.name = name;
  p.grad = Tensor();
  p.decay = decay;
}

template <class T>
void Module<T>::check_name(const std::string& name) const {
  require(!name.empty(), "a name of a parameter or module is empty");
  const auto same = [&](const auto& entry) { return entry.first == name; };
  require(std::none_of(own_.begin(), own_.end(), same) &&
              std::none_of(children_.begin(), children_.end(), same),
          "{}: a parameter or module of this name is there already", name);
}

template <class T>
bool Module<T>::holds(const Module& other) const {
  if (this == &other) return true;
  return std::any_of(children_.begin(), children_.end(),
                     [&](const auto& entry) { return entry.second->holds(other); });
}

template <class T>
void Module<T>::add_module(const std::string& name, Module& child) {
  check_name(name);
  require(!child.holds(*this), "add_module: {} is this module, or holds it already", name);
  children_.emplace_back(name, &child);
}

template <class T>
void Module<T>::set_path(const std::string& path) {
  path_ = path;
  for (auto& [name, p] : own_) p->name = join(path, name);
  for (auto& [name, child] : children_) child->set_path(join(path, name));
}

template <class T>
void Module<T>::collect(std::vector<Parameter<T>*>& into) {
  for (auto& [name, p] : own_) into.push_back(p);
  for (auto& [name, child] : children_) child->collect(into);
}

template <class T>
std::vector<Parameter<T>*> Module<T>::parameters() {
  set_path("");
  std::vector<Parameter<T>*> all, once;
  collect(all);
  std::unordered_set<Parameter<T>*> seen;
  for (Parameter<T>* p : all) {
    if (seen.insert(p).second) once.push_back(p);
  }
  return once;
}

template <class T>
int64_t Module<T>::parameter_count() {
  int64_t n = 0;
  for (const Parameter<T>* p : parameters()) n += p->value.numel();
  return n;
}

template <class T>
void Module<T>::reset_all(Rng& rng) {
  reset_own(rng);
  for (auto& [name, child] : children_) child->reset_all(rng);
}

template <class T>
void Module<T>::reset(uint64_t seed) {
  for (Parameter<T>* p : parameters()) {
    if (!shape_alone(p->value)) continue;
    const double start = p->value.item(Dims(std::vector<int64_t>(p->value.rank(), 0)));
    p->value = Tensor::full(p->value.shape(), start, dtype_v<T>);
  }
  Rng rng(seed);
  reset_all(rng);
}

template <class To, class From>
void copy_parameters(Module<From>& from, Module<To>& to) {
  const std::vector<Parameter<From>*> a = from.parameters();
  const std::vector<Parameter<To>*> b = to.parameters();
  require(a.size() == b.size(), "copy_parameters: {} parameters into {}", a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    require(a[i]->name == b[i]->name, "copy_parameters: {} into {}", a[i]->name, b[i]->name);
    if (shape_alone(b[i]->value)) b[i]->value = Tensor::empty(b[i]->value.shape(), dtype_v<To>);
    b[i]->value.copy_from(a[i]->value);
  }
}

template class Module<float>;
template class Module<double>;
template void copy_parameters(Module<float>&, Module<double>&);
template void copy_parameters(Module<double>&, Module<float>&);
template void copy_parameters(Module<float>&, Module<float>&);

}  // namespace foci::nn
