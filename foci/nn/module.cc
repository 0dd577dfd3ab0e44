// The tree of modules: paths, the list of parameters, fresh values.
#include "foci/nn/module.h"

namespace foci::nn {
namespace {

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
  p.name = name;
  p.value = shapes_only ? Tensor::full({1}, start, dtype_v<T>).broadcast_to(shape)
                        : Tensor::full(shape, start, dtype_v<T>);
  p.decay = decay;
  own_.emplace_back(name, &p);
}

template <class T>
void Module<T>::add_module(const std::string& name, Module& child) {
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
  std::vector<Parameter<T>*> all;
  collect(all);
  return all;
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
    b[i]->value.copy_from(a[i]->value);
  }
}

template class Module<float>;
template class Module<double>;
template void copy_parameters(Module<float>&, Module<double>&);
template void copy_parameters(Module<double>&, Module<float>&);
template void copy_parameters(Module<float>&, Module<float>&);

}  // namespace foci::nn
