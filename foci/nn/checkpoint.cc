// Parameters and training states as safetensors files: checked whole before anything is changed.
#include "foci/nn/checkpoint.h"

#include <charconv>
#include <functional>

#include "foci/io/file.h"
#include "foci/io/safetensors.h"

namespace foci::nn {
namespace {

constexpr const char* kFormat = "foci.training.1";

using Named = std::vector<std::pair<std::string, Tensor>>;

// Throws unless the file has exactly the wanted tensors.
void check_fit(const std::filesystem::path& file, const Safetensors& in, const Named& wanted) {
  const std::map<std::string, Tensor>& have = in.tensors;
  for (const auto& [name, to] : wanted) {
    if (in.unreadable.count(name) > 0) (void)in.at(name);  // throws
    const auto it = have.find(name);
    require<FormatError>(it != have.end(), "{}: tensor {} of shape {} is missing", file.string(),
                         name, to.shape());
    require<FormatError>(it->second.shape() == to.shape(),
                         "{}: tensor {} has shape {}, the model's is {}", file.string(), name,
                         it->second.shape(), to.shape());
    require<FormatError>(is_floating(it->second.dtype()), "{}: tensor {} holds {}, no floats",
                         file.string(), name, name_of(it->second.dtype()));
  }
  if (have.size() + in.unreadable.size() != wanted.size()) {
    std::map<std::string, bool> known;
    for (const auto& [name, to] : wanted) known[name] = true;
    for (const auto& [name, tensor] : have) {
      require<FormatError>(known.count(name) > 0,
                           "{}: tensor {} of shape {} has no place in the model", file.string(),
                           in_quotes(name), tensor.shape());
    }
    require<FormatError>(in.unreadable.empty(), "{}: tensor {} has no place in the model",
                         file.string(),
                         in.unreadable.empty() ? "" : in_quotes(in.unreadable.begin()->first));
  }
}

// Copies each wanted tensor from the file, after all of them have been found to fit.
void take(const std::filesystem::path& file, const Safetensors& in, const Named& wanted) {
  check_fit(file, in, wanted);
  for (const auto& [name, to] : wanted) to.copy_from(in.at(name));
}

Named training_tensors(const FlatParameters& parameters, const AdamW& optimiser) {
  Named all;
  for (size_t i = 0; i < parameters.parameters().size(); ++i) {
    const std::string& name = parameters.parameters()[i]->name;
    all.emplace_back("model." + name, parameters.part(parameters.values(), i));
    all.emplace_back("adamw.first." + name, parameters.part(optimiser.first(), i));
    all.emplace_back("adamw.second." + name, parameters.part(optimiser.second(), i));
  }
  return all;
}

const std::string& text_of(const StateText& text, const char* key,
                           const std::filesystem::path& file) {
  const auto it = text.find(key);
  require<FormatError>(it != text.end(), "{}: no training state, it has no \"{}\"", file.string(),
                       key);
  return it->second;
}

void check_format(const StateText& text, const std::filesystem::path& file) {
  const std::string& format = text_of(text, "format", file);
  require<FormatError>(format == kFormat, "{}: format {}, \"{}\" is what this reads", file.string(),
                       in_quotes(format), kFormat);
}

}  // namespace

void save_parameters(const std::filesystem::path& file, Module<float>& model) {
  Named all;
  for (const Parameter<float>* p : model.parameters()) all.emplace_back(p->name, p->value);
  write_safetensors(file, all, {{"format", "pt"}});  // what Hugging Face's readers look for
}

void load_parameters(const std::filesystem::path& file, Module<float>& model) {
  const Safetensors in = read_safetensors(file);
  Named wanted;
  for (const Parameter<float>* p : model.parameters()) wanted.emplace_back(p->name, p->value);
  check_fit(file, in, wanted);
  for (Parameter<float>* p : model.parameters()) {
    // Made as ShapesOnly: now memory for it is known to be no more than the file's own.
    if (!p->value.is_contiguous()) p->value = Tensor::empty(p->value.shape());
    p->value.copy_from(in.at(p->name));
  }
}

void save_training(const std::filesystem::path& file, const FlatParameters& parameters,
                   const AdamW& optimiser, const StateText& text) {
  parameters.check_views();
  StateText all = text;
  all["format"] = kFormat;
  all["adamw.steps"] = std::to_string(optimiser.steps());
  write_safetensors(file, training_tensors(parameters, optimiser), all);
}

StateText read_training_text(const std::filesystem::path& file) {
  const Safetensors in = read_safetensors(file);
  check_format(in.metadata, file);
  return in.metadata;
}

StateText load_training(const std::filesystem::path& file, FlatParameters& parameters,
                        AdamW& optimiser) {
  const Safetensors in = read_safetensors(file);
  check_format(in.metadata, file);
  const std::string& count = text_of(in.metadata, "adamw.steps", file);
  int64_t steps = -1;
  const auto parsed = std::from_chars(count.data(), count.data() + count.size(), steps);
  require<FormatError>(
      parsed.ec == std::errc() && parsed.ptr == count.data() + count.size() && steps >= 0,
      "{}: adamw.steps is {}, a whole number is needed", file.string(), in_quotes(count));
  take(file, in, training_tensors(parameters, optimiser));
  optimiser.restore_steps(steps);
  return in.metadata;
}

}  // namespace foci::nn
