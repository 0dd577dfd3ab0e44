// Reads a model and pictures, and lets the one look at the others.
#include "foci/cli/pictures.h"

#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "foci/cli/evaluate.h"
#include "foci/cli/json_text.h"
#include "foci/cli/session.h"
#include "foci/cli/verb.h"
#include "foci/report/picture.h"
#include "foci/report/text.h"
#include "foci/vision/trainer.h"

namespace foci::cli {

namespace {

Pictures look(const std::string& model_folder, const std::vector<std::string>& files,
              bool go_on_without) {
  constexpr size_t kBatch = 32;
  Pictures out;
  out.model = reading([&] { return load_vit(model_folder); });
  const vision::PictureFormat format = vision::format_of(out.model->config());
  std::vector<vision::Sample> samples;
  for (size_t i = 0; i < files.size(); ++i) {
    try {
      samples.push_back(reading([&] { return vision::read_sample(files[i], format); }));
    } catch (const UsageError& e) {
      if (!go_on_without) throw;
      out.unread.push_back({i, files[i], e.what()});
    }
  }
  if (samples.empty() && out.unread.size() == 1) throw UsageError(out.unread[0].message);
  if (samples.empty() && !out.unread.empty()) {
    std::vector<std::string> lines;
    for (const UnreadPicture& u : out.unread) lines.push_back(u.message);
    throw UsageError(fmt::format("none of {} pictures can be read", files.size()),
                     std::move(lines));
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
          "{}: the model {} answers with numbers that are not finite", some[i].name, model_folder);
      out.scenes.push_back(scene_of(some[i], look.pictures[i], logits, classes, false));
      const auto nats = look.pictures[i].entropy.span<float>();
      out.entropy.emplace_back(nats.begin(), nats.end());
    }
  }
  return out;
}

}  // namespace

Pictures look_at(const std::string& model_folder, const std::vector<std::string>& files) {
  return look(model_folder, files, false);
}

Pictures look_at_readable(const std::string& model_folder, const std::vector<std::string>& files) {
  return look(model_folder, files, true);
}

report::Report report_of(const Pictures& pictures, const std::string& model_folder) {
  const VitConfig& config = pictures.model->config();
  report::Report r;
  r.title = pictures.scenes.size() == 1
                ? "Where the model looks: " + pictures.scenes[0].name
                : fmt::format("Where the model looks in {} pictures", pictures.scenes.size());
  r.summary = fmt::format("A vision transformer of {} layers × {} heads with {} classes.",
                          config.layers, config.heads, config.classes.size());
  r.classes = config.classes;
  r.gallery = pictures.scenes;
  r.reading = reading_of(config.pooling);
  r.entropy = {pictures.model->map_layers(), config.heads, {}, {}, 0};
  r.entropy.value.assign(pictures.entropy[0].size(), 0.0);
  const double share = 1 / static_cast<double>(pictures.scenes.size());
  for (size_t i = 0; i < pictures.scenes.size(); ++i) {
    for (size_t k = 0; k < r.entropy.value.size(); ++k) {
      r.entropy.value[k] += share * pictures.entropy[i][k];
    }
    const report::Scene& s = pictures.scenes[i];
    r.entropy.full += share * even_entropy(config, s.rows * s.columns);
  }
  r.entropy.count = std::ssize(pictures.scenes);
  r.provenance =
      provenance(std::filesystem::path(model_folder) / "model.safetensors",
                 fmt::format("{} pictures given on the command line", pictures.scenes.size()));
  return r;
}

std::string looks_json(const Pictures& pictures, const std::string& report) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (size_t i = 0; i < pictures.scenes.size(); ++i) {
    const report::Scene& s = pictures.scenes[i];
    nlohmann::ordered_json heads = nlohmann::ordered_json::array();
    const int64_t patches = s.rows * s.columns;
    for (int64_t k = 0; k < s.layers * s.heads; ++k) {
      const int64_t top =
          report::top_patch(&s.attention[static_cast<size_t>(k * patches)], patches);
      heads.push_back({{"layer", k / s.heads + 1},
                       {"head", k % s.heads + 1},
                       {"entropy", pictures.entropy[i][static_cast<size_t>(k)]},
                       {"top_patch", {top / s.columns, top % s.columns}}});
    }
    const auto predicted = static_cast<size_t>(s.predicted);
    all.push_back({{"image", s.name},
                   {"class", pictures.model->config().classes[predicted]},
                   {"probability", s.probabilities[predicted]},
                   {"grid", {s.rows, s.columns}},
                   {"heads", heads}});
  }
  nlohmann::ordered_json out = {{"report", report}, {"pictures", all}};
  if (!pictures.unread.empty()) out["unread"] = nlohmann::ordered_json::array();
  for (const UnreadPicture& u : pictures.unread) {
    out["unread"].push_back({{"image", u.file}, {"error", u.message}});
  }
  return json_text(out);
}

}  // namespace foci::cli
