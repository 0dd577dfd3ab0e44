// A person's own pictures: a folder with one folder a class, PNG or JPEG files of any size inside
// (at any depth), grey or colour.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "foci/core/api.h"
#include "foci/vision/dataset.h"

namespace foci::vision {

struct FolderOptions {
  int64_t patch = 4;
  int64_t max_side = 64;            // longer pictures are shrunk, the aspect kept
  double test_share = 0.2;          // of every class, by a hash of the paths: at least one each way
  bool mirror = false;              // training pictures are mirrored half of the time
  int64_t cache_bytes = 512 << 20;  // decoded pictures kept in memory
  uint64_t seed = 1;                // for mirroring
};

class FOCI_API Folder : public Dataset {
 public:
  // Lists the folder and looks at the head of every file; decodes all of them where they have less
  // than 256 MB together. Colour if any picture has colour. Hidden files and files that are not
  // named .png, .jpg or .jpeg are skipped. Throws IoError where the folder cannot be read;
  // FormatError naming the folder or file: fewer than two classes, a class without two pictures, an
  // unreadable picture.
  explicit Folder(const std::filesystem::path& root, const FolderOptions& options = {});
  ~Folder() override;

  const PictureFormat& format() const override { return format_; }
  const std::vector<std::string>& classes() const override { return classes_; }  // sorted
  std::optional<int64_t> size(Split split) const override;
  bool has_landmarks() const override { return false; }
  Sample get(Split split, int64_t index, int64_t epoch = 0) const override;

 private:
  struct Item {
    std::filesystem::path path;
    int64_t label = 0;
  };
  class Cache;
  Image prepared(const Item& item) const;
  void measure();

  FolderOptions options_;
  PictureFormat format_;
  std::vector<std::string> classes_;
  std::vector<Item> train_, test_;
  std::unique_ptr<Cache> cache_;
};

}  // namespace foci::vision
