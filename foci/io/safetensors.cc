// The header read strictly and every offset checked, and the writer of such files.
#include "foci/io/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "foci/io/file.h"
#include "foci/io/file_kind.h"

namespace foci {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tensors are stored little-endian and mapped as they are");

constexpr uint64_t kMaxHeader = 100'000'000;  // the limit of the reference implementation
// Far above any model: keeps what a header costs in memory near its own size.
constexpr size_t kMaxEntries = 200'000;

struct NamedType {
  const char* name;
  DType dtype;
};
constexpr std::array<NamedType, 13> kTypes = {{{"F32", DType::f32},
                                               {"F64", DType::f64},
                                               {"F16", DType::f16},
                                               {"BF16", DType::bf16},
                                               {"I32", DType::i32},
                                               {"I64", DType::i64},
                                               {"U8", DType::u8},
                                               {"BOOL", DType::boolean},
                                               {"I8", DType::i8},
                                               {"I16", DType::i16},
                                               {"U16", DType::u16},
                                               {"U32", DType::u32},
                                               {"U64", DType::u64}}};
constexpr size_t kMaxShape = 64;  // numbers in a shape: NumPy's limit

// A tensor as the header describes it.
struct Entry {
  std::optional<DType> dtype;
  std::string why;  // it cannot be read; empty where it can
  std::vector<uint64_t> shape;
  std::vector<uint64_t> offsets;
  bool has_shape = false;
  bool has_offsets = false;
};

// Reads the header as a stream of events: a parsed tree would already have dropped duplicate names,
// and nesting is refused where it begins. Three levels are legal: the file, a tensor (or the
// metadata), and the lists of numbers inside a tensor.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(std::string file) : file_(std::move(file)) {}

  std::map<std::string, Entry> entries;
  std::map<std::string, std::string> metadata;

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a boolean"); }
  bool number_integer(number_integer_t) override { return refuse("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return refuse("a number that is not a 64-bit integer");
  }
  bool binary(binary_t&) override { return refuse("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (list_ == nullptr) return refuse("a number");
    require<FormatError>(list_->size() < kMaxShape, "{}: tensor {}: {} has more than {} numbers",
                         file_, in_quotes(name_), key_, kMaxShape);
    list_->push_back(value);
    return true;
  }

  bool string(string_t& value) override {
    if (depth_ == 2 && in_metadata_) {
      check_count(metadata.size());
      const bool fresh = metadata.emplace(key_, value).second;
      require<FormatError>(fresh, "{}: metadata key {} stands twice", file_, in_quotes(key_));
      return true;
    }
    if (depth_ != 2 || key_ != "dtype") return refuse("a string");
    for (const NamedType& type : kTypes) {
      if (value == type.name) entry_->dtype = type.dtype;
    }
    if (!entry_->dtype) {
      entry_->why = fmt::format(
          "dtype {} is not one of F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8, BOOL",
          in_quotes(value));
    }
    return true;
  }

  bool start_object(size_t) override {
    if (depth_ >= 2) return refuse("an object");
    ++depth_;
    if (depth_ < 2) return true;
    in_metadata_ = key_ == "__metadata__";
    if (in_metadata_) {
      require<FormatError>(!seen_metadata_, "{}: \"__metadata__\" stands twice", file_);
      seen_metadata_ = true;
      return true;
    }
    name_ = key_;
    check_count(entries.size());
    const auto [at, fresh] = entries.emplace(name_, Entry{});
    require<FormatError>(fresh, "{}: tensor {} stands twice", file_, in_quotes(name_));
    entry_ = &at->second;
    seen_dtype_ = false;
    return true;
  }

  bool key(string_t& value) override {
    key_ = value;
    if (depth_ != 2 || in_metadata_) return true;
    bool* seen = key_ == "dtype"          ? &seen_dtype_
                 : key_ == "shape"        ? &entry_->has_shape
                 : key_ == "data_offsets" ? &entry_->has_offsets
                                          : nullptr;
    require<FormatError>(seen != nullptr, "{}: tensor {}: unknown key {}", file_, in_quotes(name_),
                         in_quotes(key_));
    require<FormatError>(!*seen, "{}: tensor {}: key {} stands twice", file_, in_quotes(name_),
                         in_quotes(key_));
    *seen = true;
    return true;
  }

  bool end_object() override {
    --depth_;
    if (depth_ != 1 || in_metadata_) {
      in_metadata_ = false;
      return true;
    }
    const char* missing = !seen_dtype_           ? "dtype"
                          : !entry_->has_shape   ? "shape"
                          : !entry_->has_offsets ? "data_offsets"
                                                 : nullptr;
    require<FormatError>(missing == nullptr, "{}: tensor {}: no {}", file_, in_quotes(name_),
                         missing == nullptr ? "" : missing);
    return true;
  }

  bool start_array(size_t) override {
    if (depth_ != 2 || in_metadata_ || list_ != nullptr) return refuse("a list");
    if (key_ == "shape") list_ = &entry_->shape;
    if (key_ == "data_offsets") list_ = &entry_->offsets;
    return list_ != nullptr || refuse("a list");
  }
  bool end_array() override {
    list_ = nullptr;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    throw FormatError(fmt::format("{}: the header is not JSON (at its byte {})", file_, position));
  }

 private:
  void check_count(size_t so_far) const {
    require<FormatError>(so_far < kMaxEntries, "{}: more than {} entries", file_, kMaxEntries);
  }
  bool refuse(const char* what) const {
    if (depth_ == 0) throw FormatError(fmt::format("{}: the header is not an object", file_));
    throw FormatError(fmt::format("{}: header entry {}: {} where it does not belong", file_,
                                  in_quotes(depth_ == 2 && !in_metadata_ ? name_ : key_), what));
  }

  std::string file_;
  std::string key_;
  std::string name_;
  Entry* entry_ = nullptr;
  std::vector<uint64_t>* list_ = nullptr;
  int depth_ = 0;
  bool in_metadata_ = false;
  bool seen_metadata_ = false;
  bool seen_dtype_ = false;
};

void check_offsets(const Entry& entry, uint64_t data_size, const std::string& where) {
  require<FormatError>(entry.offsets.size() == 2, "{}: data_offsets has {} numbers, not 2", where,
                       entry.offsets.size());
  const uint64_t begin = entry.offsets[0];
  const uint64_t end = entry.offsets[1];
  require<FormatError>(begin <= end, "{}: data_offsets [{}, {}] run backwards", where, begin, end);
  require<FormatError>(end <= data_size,
                       "{}: data_offsets [{}, {}] end beyond the file's {} bytes of data", where,
                       begin, end, data_size);
}

// The shape, once it is known to fit its bytes exactly.
Dims checked_shape(const Entry& entry, const std::string& where) {
  const uint64_t begin = entry.offsets[0];
  const uint64_t end = entry.offsets[1];
  Dims shape;
  // `span` counts a zero as one: it bounds the strides, which must not overflow either.
  int64_t span = static_cast<int64_t>(size_of(*entry.dtype));
  bool any_zero = false;
  for (const uint64_t n : entry.shape) {
    const bool fits =
        n <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) &&
        !__builtin_mul_overflow(span, static_cast<int64_t>(std::max<uint64_t>(n, 1)), &span);
    require<FormatError>(fits, "{}: its shape has too many elements", where);
    any_zero = any_zero || n == 0;
    shape.push_back(static_cast<int64_t>(n));
  }
  const uint64_t needed = any_zero ? 0 : static_cast<uint64_t>(span);
  require<FormatError>(needed == end - begin, "{}: shape {} of {} needs {} bytes, offsets give {}",
                       where, shape, name_of(*entry.dtype), needed, end - begin);
  return shape;
}

// `owner` keeps `bytes` alive and makes views possible; without one, tensors are copies.
Safetensors parse(std::byte* bytes, uint64_t size, const std::shared_ptr<void>& owner,
                  const std::string& file) {
  const std::string_view all(reinterpret_cast<const char*>(bytes), size);
  // A header begins with '{'. Where it does not, nothing is said of a length that would be some
  // other format's first 8 bytes.
  if (size < 9 || all[8] != '{') {
    require<FormatError>(size > 0, "{}: the file is empty: 0 bytes are too few for safetensors",
                         file);
    require<FormatError>(size >= 8, "{}: {} bytes are too few for a safetensors file", file, size);
    const std::string_view kind = kind_of_bytes(all);
    require<FormatError>(kind.empty(), "{}: looks like {}, not a safetensors file", file, kind);
    throw FormatError(
        fmt::format("{}: not a safetensors file (its header is not a JSON object)", file));
  }
  uint64_t header_size = 0;
  std::memcpy(&header_size, bytes, 8);
  require<FormatError>(header_size < kMaxHeader, "{}: a header of {} bytes, {} or more are refused",
                       file, header_size, kMaxHeader);
  require<FormatError>(header_size <= size - 8,
                       "{}: a header of {} bytes, but only {} bytes follow its length: cut off",
                       file, header_size, size - 8);
  const std::string_view header = all.substr(8, header_size);
  // The JSON parser would stop at a zero byte.
  require<FormatError>(!header.empty() && header.find('\0') == std::string_view::npos,
                       "{}: not a safetensors file (its header is not a JSON object)", file);
  HeaderReader reader(file);
  nlohmann::json::sax_parse(header.begin(), header.end(), &reader);

  std::byte* const data = bytes + 8 + header_size;
  const uint64_t data_size = size - 8 - header_size;
  struct Place {
    uint64_t begin, end;
    const std::string* name;
  };
  std::vector<Place> places;
  std::map<std::string, Dims> shapes;
  for (auto& [name, entry] : reader.entries) {
    const std::string where = fmt::format("{}: tensor {}", file, in_quotes(name));
    check_offsets(entry, data_size, where);
    if (entry.why.empty() && entry.shape.size() > Dims::kMaxRank) {
      entry.why = fmt::format("its shape has more than {} numbers", Dims::kMaxRank);
    }
    if (entry.why.empty()) shapes[name] = checked_shape(entry, where);
    places.push_back({entry.offsets[0], entry.offsets[1], &name});
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t covered = 0;
  for (const Place& place : places) {
    require<FormatError>(place.begin >= covered, "{}: tensor {}: its bytes overlap another tensor",
                         file, in_quotes(*place.name));
    require<FormatError>(place.begin == covered, "{}: tensor {}: {} bytes before it belong to none",
                         file, in_quotes(*place.name), place.begin - covered);
    covered = place.end;
  }
  require<FormatError>(covered == data_size, "{}: the last {} bytes belong to no tensor", file,
                       data_size - covered);

  Safetensors result;
  result.file = file;
  result.metadata = std::move(reader.metadata);
  for (const auto& [name, entry] : reader.entries) {
    if (!entry.why.empty()) {
      result.unreadable[name] = entry.why;
      continue;
    }
    std::byte* const at = data + entry.offsets[0];
    const Dims& shape = shapes[name];
    const DType dtype = *entry.dtype;
    const uint64_t length = entry.offsets[1] - entry.offsets[0];
    if (dtype == DType::boolean) {  // any other byte in a C++ bool is undefined behaviour
      const bool legal =
          std::all_of(at, at + length, [](std::byte b) { return b <= std::byte{1}; });
      require<FormatError>(legal, "{}: tensor {}: a boolean that is neither 0 nor 1", file,
                           in_quotes(name));
    }
    const bool aligned = reinterpret_cast<uintptr_t>(at) % size_of(dtype) == 0;
    if (owner != nullptr && aligned && length > 0) {
      result.tensors[name] = Tensor::wrap(at, shape, contiguous_strides(shape), dtype, owner);
    } else {
      Tensor copy = Tensor::empty(shape, dtype);
      if (length > 0) std::memcpy(copy.raw(), at, length);
      result.tensors[name] = std::move(copy);
    }
  }
  return result;
}

std::string text_of(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw ArgumentError(fmt::format("write_safetensors: {} is not UTF-8", in_quotes(text)));
  }
}

}  // namespace

const Tensor& Safetensors::at(const std::string& name) const {
  const auto it = tensors.find(name);
  if (it != tensors.end()) return it->second;
  const auto lost = unreadable.find(name);
  require<FormatError>(lost == unreadable.end(), "{}: tensor {}: {}", file, in_quotes(name),
                       lost == unreadable.end() ? "" : lost->second);
  throw FormatError(fmt::format("{}: no tensor {}", file, in_quotes(name)));
}

Safetensors read_safetensors(const std::filesystem::path& path) {
  const MappedFile file = map_file(path);
  return parse(file.data, file.size, file.owner, shown(path));
}

Safetensors parse_safetensors(std::string_view bytes, const std::string& name) {
  // Without an owner nothing keeps or writes the bytes.
  auto* data = reinterpret_cast<std::byte*>(const_cast<char*>(bytes.data()));
  return parse(data, bytes.size(), nullptr, name);
}

void write_safetensors(const std::filesystem::path& path,
                       const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::set<std::string> names;
  std::vector<const std::pair<std::string, Tensor>*> order;
  for (const auto& item : tensors) {
    const std::string name = in_quotes(item.first);
    require(item.second.defined(), "write_safetensors: tensor {} is undefined", name);
    require(item.first != "__metadata__", "write_safetensors: a tensor cannot be named {}", name);
    require(names.insert(item.first).second, "write_safetensors: tensor {} is given twice", name);
    order.push_back(&item);
  }
  // Gaps are not allowed, so wide elements come first: then every tensor can be mapped.
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return size_of(a->second.dtype()) > size_of(b->second.dtype());
  });
  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      if (header.back() != '{') header += ',';
      header += text_of(key) + ':' + text_of(value);
    }
    header += "}";
  }
  uint64_t offset = 0;
  for (const auto* item : order) {
    const Tensor& tensor = item->second;
    const auto* type = std::find_if(kTypes.begin(), kTypes.end(),
                                    [&](const NamedType& t) { return t.dtype == tensor.dtype(); });
    if (header.size() > 1) header += ",";
    // Dims prints as "[2, 3]", which is JSON.
    header += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}",
                          text_of(item->first), type->name, tensor.shape().str(), offset,
                          offset + tensor.nbytes());
    offset += tensor.nbytes();
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');  // the format pads with spaces
  require(
      header.size() < kMaxHeader && tensors.size() <= kMaxEntries && metadata.size() <= kMaxEntries,
      "write_safetensors: {} tensors, {} metadata entries and a header of {} bytes are too many",
      tensors.size(), metadata.size(), header.size());

  AtomicFile file(path);
  const uint64_t header_size = header.size();
  std::array<char, 8> length{};
  std::memcpy(length.data(), &header_size, 8);
  file.write({length.data(), length.size()});
  file.write(header);
  for (const auto* item : order) {
    const Tensor tensor = item->second.contiguous();
    file.write({static_cast<const char*>(tensor.raw()), tensor.nbytes()});
  }
  file.commit();
}

}  // namespace foci
