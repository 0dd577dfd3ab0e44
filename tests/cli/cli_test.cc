// The parts of the command line that need no process: hashes, suggestions, clock texts, the list.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

#include "foci/cli/progress.h"
#include "foci/cli/sha256.h"
#include "foci/cli/suggest.h"
#include "foci/cli/verb.h"

namespace foci::cli {
namespace {

TEST(Sha256, AnswersOfFips180) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PaddingAtEveryLengthAroundABlock) {
  // All hashes of runs of one letter must differ, and a file must hash as its bytes do.
  std::set<std::string> seen;
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("foci-sha-" + std::to_string(getpid()));
  for (size_t n = 0; n < 200; ++n) {
    const std::string bytes(n, 'x');
    EXPECT_TRUE(seen.insert(sha256(bytes)).second) << n;
    std::ofstream(path, std::ios::binary) << bytes;
    ASSERT_EQ(sha256_of_file(path), sha256(bytes)) << n;
  }
  std::filesystem::remove(path);
  EXPECT_THROW(sha256_of_file(path), IoError);
}

TEST(Suggest, CountsEdits) {
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("trian", "train"), 1);  // neighbours swapped
  EXPECT_EQ(edit_distance("same", "same"), 0);
}

TEST(Suggest, NamesOnlyWhatIsNear) {
  const std::vector<std::string> verbs{"demo", "train", "classify", "inspect", "verify"};
  EXPECT_EQ(nearest("tran", verbs), "train");
  EXPECT_EQ(nearest("clasify", verbs), "classify");
  EXPECT_EQ(nearest("insp", verbs), "inspect");
  EXPECT_EQ(nearest("xylophone", verbs), "");
  EXPECT_EQ(nearest("", verbs), "");
  EXPECT_EQ(did_you_mean("demi", verbs), "; did you mean demo?");
  EXPECT_EQ(did_you_mean("qqqq", verbs), "");
}

TEST(Progress, ClockTexts) {
  EXPECT_EQ(clock_text(0), "0:00");
  EXPECT_EQ(clock_text(75.4), "1:15");
  EXPECT_EQ(clock_text(3675), "1:01:15");
  EXPECT_EQ(clock_text(-1), "0:00");
  EXPECT_EQ(clock_text(std::numeric_limits<double>::infinity()), "?");
}

TEST(Verbs, HaveDistinctNamesAndSayWhatTheyDo) {
  std::set<std::string> names;
  for (const VerbEntry& entry : verbs()) {
    EXPECT_TRUE(names.insert(entry.name).second) << entry.name;
    EXPECT_GT(std::string(entry.about).size(), 10u);
    EXPECT_NE(entry.make(), nullptr);
  }
  for (const char* name : {"demo", "train vit", "classify", "inspect", "verify", "version"}) {
    EXPECT_TRUE(names.count(name)) << name;
  }
}

}  // namespace
}  // namespace foci::cli
