// What pictures a folder held: kept beside a training, so that whoever goes on with it is told what
// changed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "foci/core/api.h"

namespace foci::vision {

struct PictureRecord {
  std::string path;   // from the folder on: "cats/1.png"
  int64_t label = 0;  // index into the record's classes
  uint64_t bytes = 0;
  uint64_t hash = 0;  // content_hash of the file
};

struct FolderRecord {
  std::vector<std::string> classes;
  std::vector<PictureRecord> pictures;  // sorted by path

  // One word for all of it: 16 hexadecimal digits.
  FOCI_API std::string fingerprint() const;
};

// Of a file's bytes: of all where there are up to 64 KiB, else of the first and last 32 KiB and the
// length. (PNG ends with a checksum of its pixels; a JPEG of other pixels has another length.) It
// tells accidents, not forgery.
FOCI_API uint64_t content_hash(std::string_view bytes);

// A line each class and each picture. Reading throws FormatError naming `name`.
FOCI_API std::string folder_record_to_text(const FolderRecord& record);
FOCI_API FolderRecord folder_record_from_text(std::string_view text, const std::string& name);

// What differs, in words, each with a count and an example: classes that are new, gone or have
// another name; pictures that moved to another class, are gone, new, have another name or other
// bytes. Empty where the records are equal.
FOCI_API std::vector<std::string> differences(const FolderRecord& then, const FolderRecord& now);

}  // namespace foci::vision
