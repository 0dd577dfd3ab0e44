// Reads a model and pictures, and lets the one look at the others.
#include "foci/cli/pictures.h"

#include <algorithm>
#include <cmath>

#include "foci/cli/evaluate.h"
#include "foci/cli/verb.h"
#include "foci/vision/trainer.h"

namespace foci::cli {

Pictures look_at(const std::string& model_folder, const std::vector<std::string>& files) {
  constexpr size_t kBatch = 32;
  Pictures out;
  out.model = reading([&] { return load_vit(model_folder); });
  const vision::PictureFormat format = vision::format_of(out.model->config());
  std::vector<vision::Sample> samples;
  for (const std::string& file : files) {
    samples.push_back(reading([&] { return vision::read_sample(file, format); }));
  }
  const int64_t classes = static_cast<int64_t>(out.model->config().classes.size());
  for (size_t at = 0; at < samples.size(); at += kBatch) {
    const std::span<const vision::Sample> some =
        std::span(samples).subspan(at, std::min(kBatch, samples.size() - at));
    const vision::Batch batch = vision::make_batch(some, format);
    const auto look = out.model->look(batch.patches, vision::patch_grids(batch));
    for (size_t i = 0; i < some.size(); ++i) {
      const float* logits = look.logits.data<float>() + static_cast<int64_t>(i) * classes;
      require<NumericError>(
          std::all_of(logits, logits + classes, [](float x) { return std::isfinite(x); }),
          "{}: the model {} answers with numbers that are not finite", files[at + i], model_folder);
      out.scenes.push_back(scene_of(some[i], look.pictures[i], logits, classes, false));
      const auto nats = look.pictures[i].entropy.span<float>();
      out.entropy.emplace_back(nats.begin(), nats.end());
    }
  }
  return out;
}

}  // namespace foci::cli
