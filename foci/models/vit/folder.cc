// Model folders: config.json and model.safetensors.
#include "foci/io/file.h"
#include "foci/models/vit/vit.h"
#include "foci/nn/checkpoint.h"

namespace foci {

std::unique_ptr<Vit<float>> load_vit(const std::filesystem::path& folder) {
  const std::filesystem::path config = folder / "config.json";
  require<IoError>(std::filesystem::is_directory(folder), "{}: no such model folder",
                   folder.string());
  require<IoError>(std::filesystem::exists(config), "{}: no model folder, it has no config.json",
                   folder.string());
  const VitConfig sizes = vit_config_from_json(read_file(config, kMaxConfigBytes), shown(config));
  std::unique_ptr<Vit<float>> model;
  {
    // The config is untrusted: memory is taken once the weights are seen to be of its sizes.
    const nn::ShapesOnly no_memory;
    model = std::make_unique<Vit<float>>(sizes);
  }
  nn::load_parameters(folder / "model.safetensors", *model);
  return model;
}

void save_vit(const std::filesystem::path& folder, Vit<float>& model) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  require<IoError>(!failed, "{}: cannot make the folder: {}", folder.string(), failed.message());
  write_file(folder / "config.json", vit_config_to_json(model.config()));
  nn::save_parameters(folder / "model.safetensors", model);
}

}  // namespace foci
