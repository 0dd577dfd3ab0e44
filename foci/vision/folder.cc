// Finds classes and pictures in a folder, splits them, and reads, shrinks and varies one at a time.
#include "foci/vision/folder.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <fstream>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "foci/core/rng.h"
#include "foci/core/threads.h"
#include "foci/io/file.h"
#include "foci/io/file_kind.h"

namespace foci::vision {

namespace fs = std::filesystem;

// Prepared pictures, those used last kept longest. Pictures are shared, never copied.
class Folder::Cache {
 public:
  explicit Cache(int64_t capacity) : capacity_(capacity) {}

  bool find(const Item* key, Image& picture) {
    const std::lock_guard lock(mutex_);
    const auto at = entries_.find(key);
    if (at == entries_.end()) return false;
    order_.splice(order_.begin(), order_, at->second);
    picture = at->second->picture;
    return true;
  }

  void insert(const Item* key, const Image& picture) {
    const auto bytes = static_cast<int64_t>(picture.pixels.nbytes());
    const std::lock_guard lock(mutex_);
    if (bytes > capacity_ || entries_.count(key) > 0) return;
    while (used_ + bytes > capacity_) {
      used_ -= static_cast<int64_t>(order_.back().picture.pixels.nbytes());
      entries_.erase(order_.back().key);
      order_.pop_back();
    }
    order_.push_front({key, picture});
    entries_[key] = order_.begin();
    used_ += bytes;
  }

 private:
  struct Entry {
    const Item* key;
    Image picture;
  };
  std::mutex mutex_;
  std::list<Entry> order_;
  std::unordered_map<const Item*, std::list<Entry>::iterator> entries_;
  int64_t capacity_;
  int64_t used_ = 0;
};

namespace {

// Folders whose files are smaller than this altogether are decoded at once, so that a bad picture
// is found before training begins. In larger ones only the heads are looked at first.
constexpr uint64_t kDecodedAtOnce = uint64_t{256} << 20;
constexpr uint64_t kMaxFile = ImageLimits{}.max_bytes;

bool hidden(const fs::path& path) {
  return path.filename().string().starts_with('.');
}

// Of a file's name, in small letters: ".png".
std::string ending_of(const fs::path& path) {
  std::string ending = path.extension().string();
  for (char& c : ending) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return ending;
}

bool named_as_picture(const fs::path& path) {
  const std::string ending = ending_of(path);
  for (const char* known : {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".pjpeg", ".pjp"}) {
    if (ending == known) return true;
  }
  return false;
}

// The first bytes of a file, as many as tell its kind; nothing where it cannot be read.
std::string beginning_of(const fs::path& path) {
  std::array<char, 16> bytes{};
  std::ifstream in(path, std::ios::binary);
  in.read(bytes.data(), bytes.size());
  return {bytes.data(), static_cast<size_t>(in.gcount())};
}

bool begins_as_picture(std::string_view bytes) {
  return bytes.starts_with("\x89PNG\r\n\x1a\n") || bytes.starts_with("\xff\xd8\xff");
}

// What a file is that is neither PNG nor JPEG, by its first bytes, else by its name: "WebP".
std::string kind_of(std::string_view bytes, const fs::path& path) {
  std::string_view kind = kind_of_bytes(bytes);
  constexpr std::string_view kPicture = " picture";
  if (kind.ends_with(kPicture)) {
    kind.remove_suffix(kPicture.size());
    kind.remove_prefix(kind.find(' ') + 1);  // its article
    return std::string(kind);
  }
  constexpr std::pair<const char*, const char*> kEndings[] = {
      {".webp", "WebP"}, {".gif", "GIF"},   {".bmp", "BMP"},   {".tif", "TIFF"}, {".tiff", "TIFF"},
      {".avif", "AVIF"}, {".heic", "HEIC"}, {".heif", "HEIC"}, {".svg", "SVG"}};
  const std::string ending = ending_of(path);
  for (const auto& [known, name] : kEndings) {
    if (ending == known) return name;
  }
  return "other files";
}

// Class names end up in JSON and HTML.
bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t more = lead < 0x80 ? 0 : lead >> 5 == 6 ? 1 : lead >> 4 == 14 ? 2 : 3;
    if (more == 3 && lead >> 3 != 30) return false;
    uint32_t code = more == 0 ? lead : lead & (0x3fu >> more);
    if (text.size() - i <= more) return false;
    for (size_t k = 1; k <= more; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      if (next >> 6 != 2) return false;
      code = code << 6 | (next & 0x3f);
    }
    constexpr uint32_t kSmallest[] = {0, 0x80, 0x800, 0x10000};
    if (code < kSmallest[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
      return false;
    i += more + 1;
  }
  return true;
}

// FNV-1a, then one Philox round trip to spread it: the same on every machine.
uint64_t hash_of(const std::string& text) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  const auto words = philox(h, {0, 0, 0, 0});
  return uint64_t{words[0]} << 32 | words[1];
}

std::string_view bytes_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.data), file.size};
}

MappedFile map_picture(const fs::path& path) {
  MappedFile file = map_file(path);
  require<FormatError>(file.size <= kMaxFile, "{}: {} bytes, at most {} are allowed", shown(path),
                       file.size, kMaxFile);
  return file;
}

Tensor mirrored(const Tensor& pixels) {
  const int64_t h = pixels.dim(0), w = pixels.dim(1), c = pixels.dim(2);
  Tensor result = Tensor::empty(pixels.shape(), DType::u8);
  const uint8_t* from = pixels.data<uint8_t>();
  uint8_t* to = result.data<uint8_t>();
  for (int64_t y = 0; y < h; ++y) {
    for (int64_t x = 0; x < w; ++x) {
      std::copy_n(from + (y * w + w - 1 - x) * c, c, to + (y * w + x) * c);
    }
  }
  return result;
}

// Runs f on every item, several at once; what went wrong with each, or an empty text.
template <class Items, class F>
std::vector<std::string> errors_of_each(const Items& items, F&& f) {
  std::vector<std::string> errors(items.size());
  parallel_for(std::ssize(items), [&](int64_t i) {
    try {
      f(i);
    } catch (const Error& e) {
      errors[static_cast<size_t>(i)] = e.what();
    }
  });
  return errors;
}

void throw_errors(const fs::path& root, size_t total, std::vector<std::string> errors) {
  std::erase(errors, "");
  if (errors.empty()) return;
  std::sort(errors.begin(), errors.end());
  std::string about =
      fmt::format("{}: {} of {} pictures cannot be read", shown(root), errors.size(), total);
  throw FolderErrors(std::move(about), std::move(errors));
}

std::string one_line_of(const std::string& about, const std::vector<std::string>& problems) {
  constexpr size_t kShown = FolderErrors::kInOneLine;
  if (problems.size() == 1) return problems[0];
  std::string out = about;
  for (size_t i = 0; i < std::min(kShown, problems.size()); ++i) {
    out += (i == 0 ? ": " : "; ") + problems[i];
  }
  if (problems.size() > kShown) out += fmt::format("; and {} more", problems.size() - kShown);
  return out;
}

void count(FolderRemark& remark, const std::string& example) {
  if (remark.count++ == 0 || example < remark.example) remark.example = example;
}

}  // namespace

FolderErrors::FolderErrors(std::string about, std::vector<std::string> problems)
    : FormatError(one_line_of(about, problems)),
      about_(std::move(about)),
      problems_(std::move(problems)) {}

// What is left out, by kind; kinds of one class apart, for the message where it has no pictures.
class Folder::Remarks {
 public:
  void leave_out(const std::string& kind, const fs::path& path, const fs::path& root) {
    FolderRemark& remark = kinds_[kind];
    remark.what = kind;
    count(remark, shown(path.lexically_relative(root)));
  }
  void add(const Remarks& other) {
    for (const auto& [kind, more] : other.kinds_) {
      FolderRemark& mine = kinds_[kind];
      mine.what = kind;
      if (mine.count == 0 || more.example < mine.example) mine.example = more.example;
      mine.count += more.count;
    }
  }
  std::vector<FolderRemark> by_count() const {
    std::vector<FolderRemark> out;
    for (const auto& [kind, remark] : kinds_) out.push_back(remark);
    std::stable_sort(out.begin(), out.end(), [](const FolderRemark& a, const FolderRemark& b) {
      return a.count > b.count;
    });
    return out;
  }

 private:
  std::map<std::string, FolderRemark> kinds_;
};

// All pictures of a class, in no order.
std::vector<fs::path> Folder::pictures_in(const fs::path& root, const fs::path& folder,
                                          Remarks& remarks) {
  std::vector<fs::path> found;
  std::error_code error;
  fs::recursive_directory_iterator at(folder, error);
  require<IoError>(!error, "{}: cannot be read: {}", shown(folder), error.message());
  while (at != fs::recursive_directory_iterator()) {
    const fs::path& path = at->path();
    const bool is_folder = at->is_directory(error);
    if (hidden(path)) {
      remarks.leave_out("hidden", path, root);
      if (is_folder) at.disable_recursion_pending();
    } else if (is_folder) {
      if (at->is_symlink(error)) remarks.leave_out("links to folders", path, root);
    } else if (!at->is_regular_file(error)) {
      remarks.leave_out(at->is_symlink(error) ? "links to nothing" : "special files", path, root);
    } else {
      const bool named = named_as_picture(path);
      const std::string beginning = named ? std::string() : beginning_of(path);
      if (named || begins_as_picture(beginning)) {
        const std::string name = shown(path.lexically_relative(root));
        if (at.depth() > 0) count(nested_, name);
        if (!named) count(misnamed_, name);
        found.push_back(path);
      } else {
        remarks.leave_out(kind_of(beginning, path), path, root);
      }
    }
    at.increment(error);
    require<IoError>(!error, "{}: cannot be read: {}", shown(folder), error.message());
  }
  return found;
}

Folder::Folder(const fs::path& root, const FolderOptions& options) : options_(options) {
  require(options.test_share > 0 && options.test_share < 1,
          "test_share: {}, between 0 and 1 is right", options.test_share);
  require(options.cache_bytes >= 0, "cache_bytes: {}, 0 or more is right", options.cache_bytes);
  format_ = {options.patch, 1, options.max_side};
  validate(format_);
  cache_ = std::make_unique<Cache>(options.cache_bytes);

  std::error_code error;
  const fs::file_status status = fs::status(root, error);
  require<IoError>(fs::exists(status), "{}: no such folder", shown(root));
  require<IoError>(fs::is_directory(status), "{}: is not a folder", shown(root));
  std::vector<fs::path> class_folders;
  Remarks remarks;
  fs::directory_iterator at(root, error);
  require<IoError>(!error, "{}: cannot be read: {}", shown(root), error.message());
  for (; at != fs::directory_iterator(); at.increment(error)) {
    if (hidden(at->path())) {
      remarks.leave_out("hidden", at->path(), root);
    } else if (at->is_directory(error)) {
      class_folders.push_back(at->path());
    } else {
      remarks.leave_out("outside the classes", at->path(), root);
    }
  }
  require<IoError>(!error, "{}: cannot be read: {}", shown(root), error.message());
  require<FormatError>(!class_folders.empty(),
                       "{}: no folders in it; one folder a class, with its pictures, is expected",
                       shown(root));
  require<FormatError>(class_folders.size() >= 2,
                       "{}: only one class, {}; at least two folders are needed", shown(root),
                       in_quotes(class_folders[0].filename().string()));
  std::sort(class_folders.begin(), class_folders.end());

  std::vector<std::string> problems;
  for (const fs::path& folder : class_folders) {
    const std::string name = folder.filename().string();
    require<FormatError>(is_utf8(name), "{}: the folder name {} is not UTF-8", shown(root),
                         in_quotes(name));
    Remarks own;
    std::vector<fs::path> pictures = pictures_in(root, folder, own);
    remarks.add(own);
    if (pictures.empty()) {
      std::string instead;
      for (const FolderRemark& r : own.by_count()) {
        instead += fmt::format("{}{} {}", instead.empty() ? "; left out: " : ", ", r.count, r.what);
      }
      problems.push_back(
          fmt::format("{}: no PNG or JPEG pictures in it{}", shown(folder), instead));
      continue;
    }
    if (pictures.size() == 1) {
      problems.push_back(
          fmt::format("{}: one picture; a class needs two, to train and to test", shown(folder)));
      continue;
    }
    // The hash of its path decides on which side a picture is, so most stay where they are when
    // others are added.
    std::vector<std::pair<uint64_t, fs::path>> order;
    order.reserve(pictures.size());
    for (fs::path& path : pictures) {
      const uint64_t hash = hash_of(path.lexically_relative(root).generic_string());
      order.emplace_back(hash, std::move(path));
    }
    std::sort(order.begin(), order.end());
    const auto n = static_cast<int64_t>(order.size());
    const int64_t tests =
        std::clamp<int64_t>(std::llround(options.test_share * static_cast<double>(n)), 1, n - 1);
    for (int64_t i = 0; i < n; ++i) {
      auto& items = i < tests ? test_ : train_;
      items.push_back({std::move(order[static_cast<size_t>(i)].second), std::ssize(classes_)});
    }
    classes_.push_back(name);
  }

  if (!problems.empty()) {
    std::string about = fmt::format("{}: {} of {} classes have too few pictures", shown(root),
                                    problems.size(), class_folders.size());
    throw FolderErrors(std::move(about), std::move(problems));
  }
  left_out_ = remarks.by_count();
  for (const std::string& name : classes_) record_.classes.push_back(shown(name));
  look_at_files(root);
  measure(root);
}

// Every file's head, and all of it where they are small; what is in the record of them.
void Folder::look_at_files(const fs::path& root) {
  std::vector<const Item*> all;
  for (const Item& item : train_) all.push_back(&item);
  for (const Item& item : test_) all.push_back(&item);
  std::vector<ImageHead> heads(all.size());
  record_.pictures.resize(all.size());
  std::vector<std::string> errors = errors_of_each(all, [&](int64_t i) {
    const fs::path& path = all[i]->path;
    const MappedFile file = map_picture(path);
    heads[i] = decode_image_head(bytes_of(file), shown(path));
    record_.pictures[i] = {shown(path.lexically_relative(root).generic_string()), all[i]->label,
                           file.size, content_hash(bytes_of(file))};
  });
  uint64_t bytes = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    bytes += record_.pictures[i].bytes;
    if (heads[i].channels == 3) format_.channels = 3;
  }
  if (bytes <= kDecodedAtOnce) {
    const auto more = errors_of_each(all, [&](int64_t i) {
      if (errors[i].empty()) prepared(*all[i]);
    });
    for (size_t i = 0; i < all.size(); ++i) errors[i] += more[i];
  }
  throw_errors(root, all.size(), std::move(errors));
  std::sort(record_.pictures.begin(), record_.pictures.end(),
            [](const PictureRecord& a, const PictureRecord& b) { return a.path < b.path; });
}

Folder::~Folder() = default;

// Mean and deviation of some training pictures; each picture counts the same.
void Folder::measure(const fs::path& root) {
  constexpr int64_t kEnough = 512;
  const int64_t count = std::min(kEnough, std::ssize(train_));
  std::vector<double> means(static_cast<size_t>(count)), squares(static_cast<size_t>(count));
  // Training pictures lie class by class: take them from everywhere.
  std::vector<std::string> errors = errors_of_each(means, [&](int64_t i) {
    const Image picture = prepared(train_[static_cast<size_t>(i * std::ssize(train_) / count)]);
    uint64_t sum = 0, square = 0;
    for (const uint8_t v : picture.pixels.span<uint8_t>()) {
      sum += v;
      square += uint64_t{v} * v;
    }
    const auto n = static_cast<double>(picture.pixels.numel());
    means[i] = static_cast<double>(sum) / (255.0 * n);
    squares[i] = static_cast<double>(square) / (255.0 * 255.0 * n);
  });
  throw_errors(root, static_cast<size_t>(count), std::move(errors));
  double mean = 0, square = 0;
  for (int64_t i = 0; i < count; ++i) {
    mean += means[i] / static_cast<double>(count);
    square += squares[i] / static_cast<double>(count);
  }
  format_.mean = mean;
  // Pictures of one single tone have no deviation; a floor keeps them finite.
  format_.deviation = std::sqrt(std::max(square - mean * mean, 1e-4));
}

Image Folder::prepared(const Item& item) const {
  Image picture;
  if (cache_->find(&item, picture)) return picture;
  const MappedFile file = map_picture(item.path);
  picture = fit(decode_image(bytes_of(file), shown(item.path)), format_);
  cache_->insert(&item, picture);
  return picture;
}

std::optional<int64_t> Folder::size(Split split) const {
  return std::ssize(split == Split::train ? train_ : test_);
}

Sample Folder::get(Split split, int64_t index, int64_t epoch) const {
  const std::vector<Item>& items = split == Split::train ? train_ : test_;
  require(index >= 0 && index < std::ssize(items) && epoch >= 0,
          "Folder::get: index {} of {}, epoch {}", index, items.size(), epoch);
  const Item& item = items[static_cast<size_t>(index)];
  Sample sample;
  sample.picture = prepared(item);
  if (split == Split::train && options_.mirror) {
    constexpr uint32_t kPurpose = 0x6d697272;
    const auto e = static_cast<uint64_t>(epoch);
    const auto key = philox(
        options_.seed, {kPurpose, 0, static_cast<uint32_t>(e), static_cast<uint32_t>(e >> 32)});
    Rng rng(uint64_t{key[0]} << 32 | key[1], static_cast<uint64_t>(index));
    if (rng.below(2) == 1) sample.picture.pixels = mirrored(sample.picture.pixels);
  }
  sample.grid = {sample.picture.height() / format_.patch, sample.picture.width() / format_.patch};
  sample.label = item.label;
  sample.source = index;
  sample.name = shown(item.path);
  return sample;
}

}  // namespace foci::vision
