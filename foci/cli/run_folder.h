// The folder of a training run: whose it is, what it was begun with, and what may be done in it.
//
// A run's checkpoint carries its record: the verb, all of its options as JSON, and the fingerprint
// of its data. What guards a run that goes on is this record, so that a new option is guarded from
// the day it is declared.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "foci/cli/verb.h"
#include "foci/io/lock.h"
#include "foci/vision/dataset.h"
#include "foci/vision/folder_record.h"

namespace foci::cli {

// What `foci VERB --resume` in this folder goes on from, as Verb::settings_to_go_on_from wants it.
// Throws UsageError where the folder holds no run, or one of another verb.
std::string settings_of_run(const std::string& folder, const std::string& verb);

// The command that goes on with the run of this call, ready to be typed.
std::string resume_command(const Call& call, const Common& common, const std::string& verb,
                           const std::string& folder);

class RunFolder {
 public:
  enum class Use {
    begin,    // what is there already stays: refused
    replace,  // an earlier run of the same verb may be written over
    resume
  };
  // Makes the folder where it is missing, holds it against other runs, and takes away what killed
  // ones left half written. Throws UsageError naming --out where it may not be used so.
  // Where it resumes, also names each option that is another than when the run began.
  RunFolder(const std::string& folder, const std::string& verb, Use use, const CLI::App& app,
            const Call& call);
  // Takes away what it made, where no model came of it.
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  // The record of this run on these data, for vision::TrainOptions::record. Where it resumes,
  // throws UsageError naming what changed in them. `pictures`: what they consist of, where that is
  // a list.
  std::string record(const vision::Dataset& data, const vision::FolderRecord* pictures) const;
  // Writes the list of pictures beside the checkpoint. To be called when all else is found good.
  void keep_pictures(const vision::FolderRecord* pictures) const;

 private:
  std::filesystem::path folder_;
  std::string verb_, options_;
  std::string earlier_;  // the record of the run that is resumed
  bool fresh_ = false;   // no model stood there before
  std::vector<std::filesystem::path> files_, made_;
  std::optional<FolderLock> lock_;
};

// Throws UsageError where the options of the run in `folder` (JSON objects, as settings_json gives
// them) differ in what may not change while it lasts. `given`: how it is asked to go on.
void check_same_options(const std::string& folder, const std::string& then, const std::string& now,
                        const Call& given);

}  // namespace foci::cli
