// A trained model and a person's own pictures: what `classify` and `inspect` begin with.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "foci/models/vit/vit.h"
#include "foci/report/report.h"
#include "foci/vision/dataset.h"

namespace foci::cli {

struct UnreadPicture {
  size_t index;  // among the files that were given
  std::string file, message;
};

struct Pictures {
  std::unique_ptr<Vit<float>> model;
  std::vector<report::Scene> scenes;         // one each picture read; no truth, no landmarks
  std::vector<std::vector<double>> entropy;  // [pictures][L·H] nats
  std::vector<UnreadPicture> unread;         // in the order given
};

// Reads everything before anything is computed. Throws UsageError for a model that cannot be read,
// and for a picture.
Pictures look_at(const std::string& model_folder, const std::vector<std::string>& files);
// The same, but goes on without the pictures that cannot be read: they are told by `unread`. Throws
// UsageError, naming each, where none can.
Pictures look_at_readable(const std::string& model_folder, const std::vector<std::string>& files);

// The page of what a model saw in pictures, whose files lie in `model_folder`.
report::Report report_of(const Pictures& pictures, const std::string& model_folder);
// What `foci inspect --json` prints: class and probability of each picture, and for each head its
// entropy and the patch it looks at most; and what could not be read. `report`: the page that was
// written.
std::string looks_json(const Pictures& pictures, const std::string& report);

}  // namespace foci::cli
