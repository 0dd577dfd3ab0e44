// A person's own folder: read the same way every time, and every mistake has its one line.
#include "foci/vision/folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>

#include "foci/io/file.h"
#include "io/damage.h"

namespace foci::vision {
namespace {

namespace fs = std::filesystem;
using foci::testing::message_of;
using foci::testing::TemporaryFolder;

void put(const fs::path& path, int64_t h, int64_t w, int64_t c, double value) {
  fs::create_directories(path.parent_path());
  write_file(path, encode_png(Tensor::full({h, w, c}, value, DType::u8)));
}

// Two classes, ten pictures each, in different sizes.
void fill(const TemporaryFolder& folder, int64_t channels = 1) {
  for (int i = 0; i < 10; ++i) {
    put(folder.path() / "cats" / (std::to_string(i) + ".png"), 8 + i, 20, channels, 10 * i);
    put(folder.path() / "dogs/deep" / (std::to_string(i) + ".PNG"), 90, 30 + i, 1, 255 - i);
  }
}

template <class E = FormatError>
void expect_refused(const fs::path& root, const std::string& text,
                    const FolderOptions& options = {}) {
  const std::string message = message_of<E>([&] { Folder(root, options); });
  foci::testing::expect_one_line(message);
  EXPECT_NE(message.find(text), std::string::npos) << message << "\nwanted: " << text;
}

TEST(Folder, IsSplitByClassAndReadTheSameTwice) {
  const TemporaryFolder folder;
  fill(folder);
  const Folder data(folder.path());
  EXPECT_EQ(data.classes(), (std::vector<std::string>{"cats", "dogs"}));
  EXPECT_EQ(data.size(Split::train), 16);
  EXPECT_EQ(data.size(Split::test), 4);
  EXPECT_EQ(data.format().channels, 1);
  const Folder again(folder.path());
  std::set<std::string> names;
  std::array<int, 2> tests{};
  for (const Split split : {Split::train, Split::test}) {
    for (int64_t i = 0; i < *data.size(split); ++i) {
      const Sample sample = data.get(split, i);
      names.insert(sample.name);
      tests[sample.label] += split == Split::test;
      EXPECT_EQ(sample.name, again.get(split, i).name);
      EXPECT_EQ(sample.name.find(data.classes()[sample.label]) != std::string::npos, true);
      EXPECT_TRUE(sample.landmarks.empty());
      EXPECT_LE(std::max(sample.picture.height(), sample.picture.width()), 64);
      EXPECT_EQ(sample.picture.height(), sample.grid.rows * 4);
      EXPECT_EQ(sample.picture.width(), sample.grid.cols * 4);
    }
  }
  EXPECT_EQ(names.size(), 20u);
  EXPECT_EQ(tests, (std::array<int, 2>{2, 2}));
  make_batch(training_samples(data, 1, 0, 32), data.format());
}

TEST(Folder, SplitStaysWhereverTheFolderLies) {
  const TemporaryFolder one, two;
  fill(one);
  fill(two);
  const Folder a(one.path()), b(two.path());
  for (int64_t i = 0; i < *a.size(Split::test); ++i) {
    EXPECT_EQ(fs::path(a.get(Split::test, i).name).lexically_relative(one.path()),
              fs::path(b.get(Split::test, i).name).lexically_relative(two.path()));
  }
}

TEST(Folder, OneColourPictureMakesItColour) {
  const TemporaryFolder folder;
  fill(folder);
  put(folder.path() / "cats/colour.png", 16, 16, 3, 9);
  const Folder data(folder.path());
  EXPECT_EQ(data.format().channels, 3);
  EXPECT_EQ(data.get(Split::train, 0).picture.channels(), 3);
}

TEST(Folder, NormalisesByItsOwnPictures) {
  const TemporaryFolder folder;
  for (int i = 0; i < 4; ++i) {
    put(folder.path() / "a" / (std::to_string(i) + ".png"), 8, 8, 1, 255);
    put(folder.path() / "b" / (std::to_string(i) + ".png"), 8, 8, 1, 0);
  }
  const Folder data(folder.path());
  EXPECT_NEAR(data.format().mean, 0.5, 1e-12);
  EXPECT_NEAR(data.format().deviation, 0.5, 1e-12);
}

TEST(Folder, CacheIsBoundedAndChangesNothing) {
  const TemporaryFolder folder;
  fill(folder);
  FolderOptions none;
  none.cache_bytes = 0;
  FolderOptions little;
  little.cache_bytes = 3000;
  const Folder a(folder.path(), none), b(folder.path(), little), c(folder.path());
  for (int round = 0; round < 2; ++round) {
    for (int64_t i = 0; i < 16; ++i) {
      const Tensor x = a.get(Split::train, i).picture.pixels;
      for (const Folder* other : {&b, &c}) {
        const Tensor y = other->get(Split::train, i).picture.pixels;
        ASSERT_EQ(x.shape(), y.shape());
        EXPECT_EQ(std::memcmp(x.raw(), y.raw(), x.nbytes()), 0);
      }
    }
  }
}

TEST(Folder, MirrorsHalfOfTheTrainingPictures) {
  const TemporaryFolder folder;
  const Tensor edge = Tensor::zeros({8, 8, 1}, DType::u8);
  edge.slice(1, 0, 1).fill(255);
  for (const char* name : {"a", "b"}) {
    fs::create_directory(folder / name);
    for (int i = 0; i < 50; ++i) {
      write_file(folder.path() / name / (std::to_string(i) + ".png"), encode_png(edge));
    }
  }
  FolderOptions options;
  options.mirror = true;
  const Folder data(folder.path(), options);
  int mirrored = 0;
  for (int64_t i = 0; i < 80; ++i) {
    const Tensor pixels = data.get(Split::train, i, 4).picture.pixels;
    mirrored += pixels.at<uint8_t>(0, 7, 0) == 255;
    EXPECT_EQ(pixels.at<uint8_t>(0, 7, 0) + pixels.at<uint8_t>(0, 0, 0), 255);
    EXPECT_EQ(data.get(Split::train, i, 4).picture.pixels.at<uint8_t>(0, 7, 0),
              pixels.at<uint8_t>(0, 7, 0));
  }
  EXPECT_NEAR(mirrored, 40, 20);
  EXPECT_EQ(data.get(Split::test, 0, 4).picture.pixels.at<uint8_t>(0, 0, 0), 255);
}

TEST(Folder, HiddenAndForeignFilesAreSkipped) {
  const TemporaryFolder folder;
  fill(folder);
  write_file(folder / "notes.txt", "not a picture");
  write_file(folder / "loose.png", "nor this");
  write_file(folder / "cats/.DS_Store", "x");
  write_file(folder / "cats/._0.png", "x");
  write_file(folder / "cats/readme.md", "x");
  fs::create_directory(folder / ".git");
  fs::create_directory(folder / "cats/.thumbnails");
  write_file(folder / "cats/.thumbnails/0.png", "x");
  const Folder data(folder.path());
  EXPECT_EQ(data.size(Split::train), 16);
  std::map<std::string, int64_t> counts;
  for (const FolderRemark& r : data.left_out()) counts[r.what] = r.count;
  EXPECT_EQ(counts, (std::map<std::string, int64_t>{
                        {"hidden", 4}, {"outside the classes", 2}, {"other files", 1}}));
  EXPECT_EQ(data.nested().count, 10);
  EXPECT_EQ(data.nested().example, "dogs/deep/0.PNG");
  EXPECT_EQ(data.misnamed().count, 0);
}

TEST(Folder, WhatIsPngOrJpegIsReadWhateverItsName) {
  const TemporaryFolder folder;
  fill(folder);
  for (const char* name : {"a.jfif", "b.JPE", "c.jpg", "d", "e.bin"}) {
    put(folder.path() / "cats" / name, 8, 8, 1, 1);
  }
  const Folder data(folder.path());
  EXPECT_EQ(data.record().pictures.size(), 25u);
  EXPECT_TRUE(data.left_out().empty());
  EXPECT_EQ(data.misnamed().count, 2);
  EXPECT_EQ(data.misnamed().example, "cats/d");
}

TEST(Folder, AllThatIsWrongIsToldAtOnce) {
  const TemporaryFolder folder;
  fill(folder);
  for (int i = 0; i < 5; ++i) write_file(folder / ("cats/" + std::to_string(i) + ".png"), "no");
  try {
    const Folder data(folder.path());
    FAIL() << "accepted";
  } catch (const FolderErrors& e) {
    EXPECT_NE(e.about().find("5 of 20 pictures"), std::string::npos) << e.about();
    ASSERT_EQ(e.problems().size(), 5u);
    for (int i = 0; i < 5; ++i) {
      EXPECT_NE(e.problems()[i].find(std::to_string(i) + ".png"), std::string::npos);
      foci::testing::expect_one_line(e.problems()[i]);
    }
    foci::testing::expect_one_line(e.what());
    EXPECT_NE(std::string(e.what()).find("2 more"), std::string::npos) << e.what();
  }
}

FolderRecord record_of(const std::vector<std::pair<std::string, uint64_t>>& pictures) {
  FolderRecord out;
  for (const auto& [path, hash] : pictures) {
    const std::string name = path.substr(0, path.find('/'));
    const auto it = std::find(out.classes.begin(), out.classes.end(), name);
    const int64_t label = it - out.classes.begin();
    if (it == out.classes.end()) out.classes.push_back(name);
    out.pictures.push_back({path, label, 100 + hash, hash});
  }
  return out;
}

using Words = std::vector<std::string>;

TEST(FolderRecord, ComesBackFromItsText) {
  const TemporaryFolder folder;
  fill(folder);
  const FolderRecord record = Folder(folder.path()).record();
  const std::string text = folder_record_to_text(record);
  const FolderRecord back = folder_record_from_text(text, "t");
  EXPECT_EQ(back.fingerprint(), record.fingerprint());
  EXPECT_EQ(differences(record, back), Words{});
  EXPECT_EQ(record.pictures.size(), 20u);
  for (size_t keep = 0; keep < text.size(); keep += 7) {
    try {
      EXPECT_NE(folder_record_from_text(text.substr(0, keep), "t").fingerprint(),
                record.fingerprint());
    } catch (const FormatError& e) {
      foci::testing::expect_one_line(e.what());
    }
  }
  EXPECT_THROW(folder_record_from_text("foci.pictures.1\n12\t3\t0\ta/1.png\n", "t"), FormatError);
}

TEST(FolderRecord, DifferencesHaveTheirWords) {
  const FolderRecord then = record_of(
      {{"cat/1", 1}, {"cat/2", 2}, {"cat/3", 3}, {"dog/1", 11}, {"dog/2", 12}, {"dog/3", 13}});
  const auto changed = [&](const std::vector<std::pair<std::string, uint64_t>>& now) {
    const FolderRecord record = record_of(now);
    EXPECT_NE(record.fingerprint(), then.fingerprint());
    return differences(then, record);
  };
  EXPECT_EQ(
      changed(
          {{"cat/1", 1}, {"dog/1", 11}, {"dog/2", 12}, {"dog/3", 13}, {"dog/8", 2}, {"dog/9", 3}}),
      Words{"2 moved from cat to dog (dog/8)"});
  EXPECT_EQ(
      changed(
          {{"cat/1", 11}, {"cat/2", 2}, {"cat/3", 3}, {"dog/1", 1}, {"dog/2", 12}, {"dog/3", 13}}),
      (Words{"1 moved from cat to dog (dog/1)", "1 moved from dog to cat (cat/1)"}));
  EXPECT_EQ(
      changed(
          {{"cat/1", 1}, {"cat/2", 2}, {"dog/1", 11}, {"dog/2", 12}, {"dog/3", 99}, {"dog/4", 98}}),
      (Words{"1 is gone from cat (cat/3)", "1 is new in dog (dog/4)",
             "1 has other bytes in dog (dog/3)"}));
  EXPECT_EQ(
      changed(
          {{"cat/1", 2}, {"cat/2", 1}, {"cat/3", 3}, {"dog/1", 11}, {"dog/2", 12}, {"dog/3", 13}}),
      Words{"2 have other names in cat (cat/1)"});
  EXPECT_EQ(
      changed(
          {{"Cat/1", 1}, {"Cat/2", 2}, {"Cat/3", 3}, {"dog/1", 11}, {"dog/2", 12}, {"dog/3", 13}}),
      Words{"class cat is called Cat now"});
  // Renamed, and one of it moved.
  EXPECT_EQ(
      changed(
          {{"Cat/1", 1}, {"Cat/2", 2}, {"dog/0", 3}, {"dog/1", 11}, {"dog/2", 12}, {"dog/3", 13}}),
      (Words{"class cat is called Cat now", "1 moved from Cat to dog (dog/0)"}));
  EXPECT_EQ(changed({{"cat/1", 1}, {"cat/2", 2}, {"cat/3", 3}}), Words{"class dog is gone"});
  EXPECT_EQ(changed({{"bird/1", 1},
                     {"cat/1", 1},
                     {"cat/2", 2},
                     {"cat/3", 3},
                     {"dog/1", 11},
                     {"dog/2", 12},
                     {"dog/3", 13}}),
            Words{"class bird is new"});
}

TEST(FolderRecord, HashesSeeChangesAnywhereInSmallFilesAndAtTheEndsOfLargeOnes) {
  for (const size_t size : {size_t{1}, size_t{100}, size_t{65536}, size_t{65537}, size_t{500000}}) {
    const std::string bytes(size, 'x');
    const uint64_t hash = content_hash(bytes);
    for (const size_t at : {size_t{0}, size / 3, size - 1}) {
      if (size > 65536 && at == size / 3 && at >= 32768) continue;
      std::string other = bytes;
      other[at] ^= 1;
      EXPECT_NE(content_hash(other), hash) << size << " " << at;
    }
    EXPECT_NE(content_hash(bytes + "x"), hash);
  }
}

TEST(Folder, EachMistakeHasItsLine) {
  const TemporaryFolder folder;
  expect_refused<IoError>(folder / "absent", "no such folder");
  write_file(folder / "file", "x");
  expect_refused<IoError>(folder / "file", "is not a folder");
  expect_refused(folder.path(), "no folders in it");
  fs::create_directory(folder / "cats");
  expect_refused(folder.path(), "only one class, \"cats\"");
  fs::create_directory(folder / "dogs");
  expect_refused(folder.path(), "cats: no PNG or JPEG pictures");
  put(folder / "cats/1.png", 8, 8, 1, 1);
  expect_refused(folder.path(), "cats: one picture");
  put(folder / "cats/2.png", 8, 8, 1, 1);
  put(folder / "dogs/1.png", 8, 8, 1, 1);
  put(folder / "dogs/2.png", 8, 8, 1, 1);
  EXPECT_EQ(Folder(folder.path()).size(Split::test), 2);

  write_file(folder / "dogs/text.jpg", "hello");
  expect_refused(folder.path(), "dogs/text.jpg: neither PNG nor JPEG");
  write_file(folder / "dogs/text.jpg", "");
  expect_refused(folder.path(), "dogs/text.jpg: the file is empty");
  const std::string png = encode_png(Tensor::full({40, 40, 3}, 3, DType::u8));
  write_file(folder / "dogs/text.jpg", png.substr(0, png.size() / 2));
  expect_refused(folder.path(), "dogs/text.jpg: truncated PNG");
  fs::remove(folder / "dogs/text.jpg");

  FolderOptions options;
  options.max_side = 30;
  expect_refused<ArgumentError>(folder.path(), "max_side", options);
  options = {};
  options.test_share = 1;
  expect_refused<ArgumentError>(folder.path(), "test_share", options);
}

TEST(Folder, ClassNamesMustBeUtf8) {
  const TemporaryFolder folder;
  fill(folder);
  std::error_code error;
  fs::create_directory(folder / "caf\xe9", error);
  if (error) GTEST_SKIP() << "this file system takes only UTF-8 names";
  expect_refused(folder.path(), "\"caf\\xe9\" is not UTF-8");
}

TEST(Folder, ALinkToNowhereIsSkippedAndALoopEnds) {
  const TemporaryFolder folder;
  fill(folder);
  fs::create_symlink("nowhere.png", folder / "cats/link.png");
  fs::create_directory_symlink("..", folder / "cats/up");
  EXPECT_EQ(Folder(folder.path()).size(Split::train), 16);
}

}  // namespace
}  // namespace foci::vision
