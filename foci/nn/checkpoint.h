// Parameters in files, and the state of a training run.
//
// A run's state is one file, written all or nothing: weights, both moments of AdamW, and whatever
// else the run needs to go on (step, schedule, place in the data) as text. So a kill at any moment
// leaves either the old state or the new one, never a mixture; the model files beside it, each
// written all or nothing too, are for those who only want the model.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "foci/core/api.h"
#include "foci/nn/module.h"
#include "foci/nn/optimiser.h"

namespace foci::nn {

// All parameters of a model by name, as a safetensors file.
FOCI_API void save_parameters(const std::filesystem::path& file, Module<float>& model);
// Throws FormatError naming the file and the tensor: missing, unknown, or of another shape (both
// shapes are told). Changes nothing then. Other floating dtypes are converted.
FOCI_API void load_parameters(const std::filesystem::path& file, Module<float>& model);

using StateText = std::map<std::string, std::string>;

FOCI_API void save_training(const std::filesystem::path& file, const FlatParameters& parameters,
                            const AdamW& optimiser, const StateText& text);
// Only the text: to see what a run was before its model is made.
FOCI_API StateText read_training_text(const std::filesystem::path& file);
// Restores weights, moments and the optimiser's step; gives the text. Errors as load_parameters.
FOCI_API StateText load_training(const std::filesystem::path& file, FlatParameters& parameters,
                                 AdamW& optimiser);

}  // namespace foci::nn
