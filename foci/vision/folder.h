// A person's own pictures: a folder with one folder a class, PNG or JPEG files of any size and name
// inside (at any depth), grey or colour.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "foci/core/api.h"
#include "foci/core/error.h"
#include "foci/vision/dataset.h"
#include "foci/vision/folder_record.h"

namespace foci::vision {

struct FolderOptions {
  int64_t patch = 4;
  int64_t max_side = 64;            // longer pictures are shrunk, the aspect kept
  double test_share = 0.2;          // of every class, by a hash of the paths: at least one each way
  bool mirror = false;              // training pictures are mirrored half of the time
  int64_t cache_bytes = 512 << 20;  // decoded pictures kept in memory
  uint64_t seed = 1;                // for mirroring
};

// Something about the files of a folder that whoever gave it should know.
struct FolderRemark {
  std::string what;  // "WebP", "hidden"
  int64_t count = 0;
  std::string example;  // the first by name, from the folder on
};

// All that is wrong with a folder's files. what() tells it in one line: the only problem, or how
// many there are and the first few.
class FOCI_API FolderErrors : public FormatError {
 public:
  static constexpr size_t kInOneLine = 3;  // so many what() tells
  // `about`: "FOLDER: 3 of 17 pictures cannot be read". At least one problem.
  FolderErrors(std::string about, std::vector<std::string> problems);
  const std::string& about() const { return about_; }
  const std::vector<std::string>& problems() const { return problems_; }  // one line each

 private:
  std::string about_;
  std::vector<std::string> problems_;
};

class FOCI_API Folder : public Dataset {
 public:
  // Lists the folder and looks at the head of every file; decodes all of them where they have less
  // than 256 MB together. Colour if any picture has colour. A file is a picture where its first
  // bytes say PNG or JPEG, or its name does; all others, and what is hidden, are left out and told
  // by left_out(). Throws IoError where the folder cannot be read; FormatError naming the folder or
  // file: fewer than two classes; FolderErrors with all classes without two pictures, or with all
  // pictures that cannot be read.
  explicit Folder(const std::filesystem::path& root, const FolderOptions& options = {});
  ~Folder() override;

  const PictureFormat& format() const override { return format_; }
  const std::vector<std::string>& classes() const override { return classes_; }  // sorted
  std::optional<int64_t> size(Split split) const override;
  bool has_landmarks() const override { return false; }
  std::string fingerprint() const override { return record_.fingerprint(); }
  Sample get(Split split, int64_t index, int64_t epoch = 0) const override;

  const FolderRecord& record() const { return record_; }
  // Files and folders that are no part of the set, by kind, the most first.
  const std::vector<FolderRemark>& left_out() const { return left_out_; }
  // Pictures that are part of it, though somebody may not expect so: in folders inside a class, and
  // of names that do not say PNG or JPEG.
  const FolderRemark& nested() const { return nested_; }
  const FolderRemark& misnamed() const { return misnamed_; }

 private:
  struct Item {
    std::filesystem::path path;
    int64_t label = 0;
  };
  class Cache;
  class Remarks;
  std::vector<std::filesystem::path> pictures_in(const std::filesystem::path& root,
                                                 const std::filesystem::path& folder,
                                                 Remarks& remarks);
  void look_at_files(const std::filesystem::path& root);
  Image prepared(const Item& item) const;
  void measure(const std::filesystem::path& root);

  FolderOptions options_;
  PictureFormat format_;
  std::vector<std::string> classes_;
  std::vector<Item> train_, test_;
  FolderRecord record_;
  std::vector<FolderRemark> left_out_;
  FolderRemark nested_, misnamed_;
  std::unique_ptr<Cache> cache_;
};

}  // namespace foci::vision
