// Module: a part of a model that has parameters, and a place in a tree of such parts.
//
// A module's path is made of the names its parents gave it ("encoder.layer.0.attention"), its
// parameters' names continue it (".query.weight"); these are the names in model files. Modules stay
// where they were made: parents keep pointers to them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "foci/autograd/ops.h"
#include "foci/autograd/tape.h"
#include "foci/core/api.h"
#include "foci/core/rng.h"

namespace foci::nn {

class Observer;

// While one lives, modules made on its thread declare their parameters without memory of their own:
// a model then costs no more than its shapes, and no initial values are drawn in vain.
// load_parameters() gives them memory, once the file is known to hold such tensors, so sizes from
// an untrusted file cannot exhaust memory; reset() and copy_parameters() do so too. A forward pass
// before is refused.
class FOCI_API ShapesOnly {
 public:
  ShapesOnly();
  ~ShapesOnly();
  ShapesOnly(const ShapesOnly&) = delete;
  ShapesOnly& operator=(const ShapesOnly&) = delete;

 private:
  bool outer_;
};

// What one forward pass carries through the tree.
template <class T>
struct Context {
  Tape<T>& tape;
  bool training = false;         // dropout acts in training only
  uint64_t seed = 0;             // of this pass's dropout; give each training step its own
  Observer* observer = nullptr;  // who watches attention (nn/observe.h); may be null
  uint64_t streams = 0;          // dropout streams handed out so far

  Var<T> use(Parameter<T>& p) { return tape.parameter(p); }
  uint64_t next_stream() { return ++streams; }
};

// What random initial values are drawn from where nobody called reset().
inline constexpr uint64_t kDefaultSeed = 0;

// Modules can be used as they are made: those with random initial values draw them at once, from
// kDefaultSeed and the number of such modules that the thread has made before. reset(seed) draws
// anew from a seed of the caller's, whatever was made before.
template <class T>
class FOCI_API Module {
 public:
  Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  virtual ~Module() = default;

  const std::string& path() const { return path_; }
  // Every parameter of this module and those below it, in the order they were declared, named by
  // path from here. One that is reached in several ways is there once.
  std::vector<Parameter<T>*> parameters();
  // Number of trained values.
  int64_t parameter_count();
  // Sets paths from here downwards; parameters() calls it with an empty path.
  void set_path(const std::string& path);
  // Draws fresh values for every parameter below.
  void reset(uint64_t seed);

 protected:
  // Declares a parameter of this module, and the number it is filled with at first. Names of a
  // module are not empty and differ; throws ArgumentError otherwise, and for a parameter declared
  // before.
  void add_parameter(const char* name, Parameter<T>& p, const Dims& shape, bool decay,
                     double start = 0);
  // Likewise with normal numbers of mean 0 and this deviation.
  void add_normal_parameter(const char* name, Parameter<T>& p, const Dims& shape, bool decay,
                            double deviation);
  // Throws ArgumentError also for this module itself and for one that it is a part of.
  void add_module(const std::string& name, Module& child);
  // Sets this module's own parameters (not those of its children).
  virtual void reset_own(Rng&) {}

 private:
  void declare(const char* name, Parameter<T>& p, bool decay);
  void check_name(const std::string& name) const;
  bool holds(const Module& other) const;
  void collect(std::vector<Parameter<T>*>& into);
  void reset_all(Rng& rng);

  std::string path_;
  std::vector<std::pair<std::string, Parameter<T>*>> own_;
  std::vector<std::pair<std::string, Module*>> children_;
};

// Copies values from another model of the same tree, of any float type: for checks in double.
template <class To, class From>
FOCI_API void copy_parameters(Module<From>& from, Module<To>& to);

}  // namespace foci::nn
