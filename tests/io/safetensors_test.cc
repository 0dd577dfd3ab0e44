// safetensors: what is written comes back bit for bit, and every lie a header can tell is refused.
#include "foci/io/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "foci/io/file.h"
#include "io/damage.h"

namespace foci {
namespace {

using testing::message_of;
using testing::TemporaryFolder;

std::string file_of(std::string_view header, size_t data_bytes, uint64_t claimed) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &claimed, 8);
  bytes += header;
  for (size_t i = 0; i < data_bytes; ++i) bytes += static_cast<char>(i % 2);
  return bytes;
}
std::string file_of(std::string_view header, size_t data_bytes) {
  return file_of(header, data_bytes, header.size());
}

std::string refusal(const std::string& bytes) {
  const std::string message = message_of([&] { parse_safetensors(bytes, "f"); });
  testing::expect_one_line(message);
  EXPECT_EQ(message.rfind("f: ", 0), 0u) << message;
  return message;
}
void expect_refused(std::string_view header, size_t data_bytes, const std::string& text) {
  const std::string message = refusal(file_of(header, data_bytes));
  EXPECT_NE(message.find(text), std::string::npos) << message << "\nwanted: " << text;
}

std::vector<std::pair<std::string, Tensor>> every_type() {
  std::vector<std::pair<std::string, Tensor>> tensors;
  for (const DType dtype :
       {DType::u8, DType::f32, DType::boolean, DType::f16, DType::f64, DType::i32, DType::bf16,
        DType::i64, DType::i8, DType::u64, DType::i16, DType::u32, DType::u16}) {
    Tensor t = Tensor::empty({3, 5}, dtype);
    for (size_t i = 0; i < t.nbytes(); ++i) {
      static_cast<uint8_t*>(t.raw())[i] =
          static_cast<uint8_t>(dtype == DType::boolean ? i % 2 : i * 37);
    }
    tensors.emplace_back(std::string(name_of(dtype)), t);
  }
  tensors.emplace_back("scalar", Tensor::full({}, 4.5));
  tensors.emplace_back("nothing", Tensor::zeros({0, 4}));
  tensors.emplace_back("turned", Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3}).transpose(0, 1));
  tensors.emplace_back("quote \" and ü", Tensor::zeros({1}, DType::u8));
  return tensors;
}

TEST(Safetensors, EveryTypeComesBack) {
  const TemporaryFolder folder;
  const auto tensors = every_type();
  const std::map<std::string, std::string> metadata = {{"a", "1"}, {"line", "x\ny\"\\"}};
  write_safetensors(folder / "t", tensors, metadata);
  EXPECT_EQ(folder.count(), 1);
  const std::string bytes = read_file(folder / "t");
  for (const Safetensors& got :
       {read_safetensors(folder / "t"), parse_safetensors(bytes, "bytes")}) {
    EXPECT_EQ(got.metadata, metadata);
    ASSERT_EQ(got.tensors.size(), tensors.size());
    for (const auto& [name, want] : tensors) {
      const Tensor& t = got.tensors.at(name);
      ASSERT_EQ(t.dtype(), want.dtype()) << name;
      ASSERT_EQ(t.shape(), want.shape()) << name;
      EXPECT_TRUE(t.is_contiguous());
      EXPECT_EQ(std::memcmp(t.raw(), want.contiguous().raw(), t.nbytes()), 0) << name;
    }
  }
}

TEST(Safetensors, MappedTensorsOutliveTheResultAndMayBeWritten) {
  const TemporaryFolder folder;
  write_safetensors(folder / "t", {{"a", Tensor::full({4}, 2)}, {"b", Tensor::full({4}, 3)}});
  Tensor a;
  {
    const Safetensors file = read_safetensors(folder / "t");
    a = file.tensors.at("a");
    EXPECT_TRUE(a.shares_storage(file.tensors.at("b")));  // mapped, not copied
  }
  std::filesystem::remove(folder / "t");
  a.fill(5);
  EXPECT_EQ(a.at<float>(3), 5);
}

TEST(Safetensors, MisalignedTensorsAreCopied) {
  const TemporaryFolder folder;
  const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("b":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})";
  write_file(folder / "t", file_of(header, 9));
  const Safetensors file = read_safetensors(folder / "t");
  const Tensor& b = file.tensors.at("b");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.raw()) % 4, 0u);
  EXPECT_EQ(static_cast<uint8_t*>(b.raw())[0], 1);
  EXPECT_EQ(static_cast<uint8_t*>(b.raw())[7], 0);
}

TEST(Safetensors, AnEmptyFileOfTensorsIsLegal) {
  EXPECT_TRUE(parse_safetensors(file_of("{}", 0), "f").tensors.empty());
  EXPECT_TRUE(parse_safetensors(file_of("{}     ", 0), "f").tensors.empty());
  EXPECT_TRUE(parse_safetensors(file_of(R"({"__metadata__":{}})", 0), "f").metadata.empty());
}

TEST(Safetensors, EachLieHasItsMessage) {
  expect_refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,12]}})", 8, "beyond");
  expect_refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "backwards");
  expect_refused(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8,
                 "shape [3] of float32 needs 12 bytes, offsets give 8");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                 R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                 8, "tensor \"a\" stands twice");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                 R"("\u0061":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                 8, "tensor \"a\" stands twice");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                 R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                 4, "overlap");
  expect_refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                 R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                 8, "overlap");
  expect_refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                 R"("b":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}})",
                 8, "overlap");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                 R"("b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
                 12, "4 bytes before it belong to none");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 6,
                 "last 2 bytes belong to no tensor");
  expect_refused("{}", 1, "last 1 bytes");
  expect_refused(R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4,
                 "key \"dtype\" stands twice");
  expect_refused(R"({"a":{"shape":[1],"shape":[1],"dtype":"F32","data_offsets":[0,4]}})", 4,
                 "key \"shape\" stands twice");
  expect_refused(R"({"__metadata__":{"k":"1","k":"2"}})", 0, "metadata key \"k\" stands twice");
  expect_refused(R"({"__metadata__":{},"__metadata__":{}})", 0, "stands twice");
  expect_refused(R"({"__metadata__":{"k":1}})", 0, "a number where it does not belong");
  expect_refused(R"({"__metadata__":{"k":{}}})", 0, "an object where it does not belong");
  expect_refused(R"({"__metadata__":"k"})", 0, "a string where it does not belong");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":"F32"}})", 4,
                 "unknown key \"x\"");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1]}})", 4, "no data_offsets");
  expect_refused(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "no shape");
  expect_refused(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4, "no dtype");
  expect_refused(R"({"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}})", 4, "a list");
  expect_refused(R"({"a":{"dtype":"F32","shape":"x","data_offsets":[0,4]}})", 4, "a string");
  expect_refused(R"({"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})", 4, "a number");
  expect_refused(R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", 4, "a list");
  expect_refused(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "negative");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4, "64-bit");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, "1 numbers, not 2");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}})", 4, "3 numbers");
  expect_refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,null]}})", 4, "null");
  std::string ones = "1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  expect_refused(R"({"a":{"dtype":"U8","shape":[)" + ones + R"(],"data_offsets":[0,1]}})", 1,
                 "shape has more than 64 numbers");
  expect_refused(R"({"a":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]},)"
                 R"("b":{"dtype":"U8","shape":[1],"data_offsets":[2,1]}})",
                 2, "backwards");
  expect_refused("[]", 0, "not a safetensors file");
  expect_refused("", 0, "not a safetensors file");
  expect_refused("\xef\xbb\xbf{}", 0, "not a safetensors file");
  expect_refused(std::string_view("{}\0{", 4), 0, "not a safetensors file");
  expect_refused("{} {}", 0, "not JSON");
  expect_refused("{\"a\":", 0, "not JSON");
  expect_refused("{\"\xff\":{}}", 0, "not JSON");
  EXPECT_NE(refusal("").find("0 bytes are too few"), std::string::npos);
  EXPECT_NE(refusal("1234567").find("7 bytes are too few"), std::string::npos);
  std::string truth = file_of(R"({"a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})", 2);
  parse_safetensors(truth, "f");
  truth.back() = 2;
  EXPECT_NE(refusal(truth).find("neither 0 nor 1"), std::string::npos);
}

TEST(Safetensors, WhatATensorCannotHoldStopsOnlyWhoAsksForIt) {
  const Safetensors file = parse_safetensors(
      file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
              R"("b":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[8,12]},)"
              R"("c":{"dtype":"f32","shape":[99,99],"data_offsets":[12,14]},)"
              R"("d":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[14,16]},)"
              R"("e":{"dtype":"I8","shape":[2],"data_offsets":[16,18]}})",
              18),
      "f");
  EXPECT_EQ(file.tensors.size(), 2u);
  EXPECT_EQ(file.unreadable.size(), 3u);
  EXPECT_EQ(file.at("e").at<int8_t>(1), 1);
  const auto refused = [&](const char* name, const char* text) {
    const std::string message = message_of([&] { (void)file.at(name); });
    testing::expect_one_line(message);
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  refused("b", "f: tensor \"b\": dtype \"F8_E4M3\" is not one of");
  refused("c", "dtype \"f32\"");
  refused("d", "more than 8 numbers");
  refused("z", "no tensor \"z\"");
  // Their places in the file are checked like all others.
  expect_refused(R"({"a":{"dtype":"F4","shape":[2],"data_offsets":[0,9]}})", 8, "beyond");
  expect_refused(R"({"a":{"dtype":"F4","shape":[2],"data_offsets":[0,2]},)"
                 R"("b":{"dtype":"F4","shape":[2],"data_offsets":[1,3]}})",
                 3, "overlap");
}

TEST(Safetensors, FilesOfOtherKindsAreNamed) {
  using std::string_literals::operator""s;
  const std::pair<std::string, const char*> kinds[] = {
      {"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"s, "looks like a PNG picture"},
      {"\xff\xd8\xff\xe0\0\x10JFIF"s, "looks like a JPEG picture"},
      {"PK\3\4\0\0\x08\x08\0\0archive/data.pkl"s, "looks like a checkpoint of PyTorch"},
      {"PK\3\4\x14\0\0\0\0\0\0\0x.npy"s, "looks like a NumPy archive"},
      {"PK\3\4..................."s, "looks like a zip archive"},
      {"\x80\2\x8a\nl\xfc\x9c"
       "F\xf9 j\xa8P\x19."s,
       "looks like a pickle"},
      {"\x93NUMPY\1\0v\0{'descr'"s, "looks like a NumPy array"},
      {"GGUF\3\0\0\0\1\0"s, "looks like a GGUF model"},
      {"<html><body>404</body></html>", "looks like an HTML page"},
      {"{\"architectures\": []}", "looks like JSON"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:", "Git LFS"}};
  for (const auto& [bytes, kind] : kinds) {
    const std::string message = refusal(bytes);
    EXPECT_NE(message.find(kind), std::string::npos) << message;
    EXPECT_EQ(message.find("a header of"), std::string::npos) << message;
  }
  EXPECT_NE(refusal("").find("the file is empty"), std::string::npos);
  EXPECT_EQ(refusal(std::string(64, '\xff')).find("header of"), std::string::npos);
}

TEST(Safetensors, NumbersThatOverflowAreRefused) {
  const auto with_shape = [](const std::string& shape, const std::string& offsets) {
    return R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  expect_refused(with_shape("[4611686018427387904,4]", "[0,0]"), 0, "too many elements");
  expect_refused(with_shape("[4294967296,4294967296]", "[0,0]"), 0, "too many elements");
  expect_refused(with_shape("[18446744073709551615]", "[0,4]"), 4, "too many elements");
  expect_refused(with_shape("[18446744073709551616]", "[0,4]"), 4, "64-bit");
  // No elements, but its strides would overflow.
  expect_refused(with_shape("[0,4611686018427387904,4]", "[0,0]"), 0, "too many elements");
  expect_refused(with_shape("[1]", "[18446744073709551612,18446744073709551615]"), 4, "beyond");
  expect_refused(with_shape("[1]", "[18446744073709551615,3]"), 4, "backwards");
}

TEST(Safetensors, LyingHeaderLengthsAreRefused) {
  for (const uint64_t claimed : {uint64_t{3}, uint64_t{4096}, uint64_t{99'999'999}}) {
    EXPECT_NE(refusal(file_of("{}", 0, claimed)).find("only 2 bytes follow"), std::string::npos);
  }
  for (const uint64_t claimed :
       {uint64_t{100'000'000}, uint64_t{1} << 40, uint64_t{1} << 63, ~uint64_t{0}}) {
    EXPECT_NE(refusal(file_of("{}", 0, claimed)).find("are refused"), std::string::npos);
  }
}

TEST(Safetensors, AHeaderOf100MegabytesIsRefusedUnread) {
  const TemporaryFolder folder;
  write_file(folder / "t", file_of("{", 0, 100 << 20));
  std::filesystem::resize_file(folder / "t", (100 << 20) + 64);  // sparse
  EXPECT_NE(message_of([&] { read_safetensors(folder / "t"); }).find("104857600"),
            std::string::npos);
}

TEST(Safetensors, DeepNestingIsRefusedWhereItBegins) {
  for (const char* opening : {"{\"a\":", "["}) {
    std::string header = "{\"a\":";
    for (int i = 0; i < 200'000; ++i) header += opening;
    refusal(file_of(header, 0));
  }
}

TEST(Safetensors, EntriesWithoutEndAreRefused) {
  std::string tensors = "{", metadata = R"({"__metadata__":{)", numbers = R"({"a":{"shape":[)";
  for (int i = 0; i < 200'001; ++i) {
    const std::string name = "\"" + std::to_string(i) + "\":";
    tensors += name + R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]},)";
    metadata += name + "\"\",";
    numbers += "1,";
  }
  tensors.pop_back();
  metadata.pop_back();
  expect_refused(tensors + "}", 0, "more than 200000 entries");
  expect_refused(metadata + "}}", 0, "more than 200000 entries");
  expect_refused(numbers + "1]}}", 0, "more than 64 numbers");
}

TEST(Safetensors, HostileNamesDoNotReachTheMessage) {
  std::string name;
  for (int i = 0; i < 10'000; ++i) name += "\\u001b[2J\\n";
  refusal(file_of("{\"" + name + R"(":{"dtype":"F32","shape":[1],"data_offsets":[0,5]}})", 5));
  refusal(file_of("{\"" + name + R"(":{"dtype":")" + name + R"("}})", 5));
}

TEST(Safetensors, DamagedBytesNeverHurt) {
  const TemporaryFolder folder;
  write_safetensors(folder / "t", every_type(), {{"a", "1"}});
  const std::string bytes = read_file(folder / "t");
  const auto read = [](std::string_view b) { parse_safetensors(b, "f"); };
  const testing::Outcome cut = testing::truncate_everywhere(bytes, 1, read);
  EXPECT_EQ(cut.accepted, 0);
  const testing::Outcome flipped = testing::flip_bits(bytes, 1, read);
  EXPECT_GT(flipped.refused, flipped.accepted);  // only the tensors' own bytes and names may change
  testing::scramble(bytes, 2000, read);
}

TEST(Safetensors, DamagedMappedFilesNeverHurt) {
  const TemporaryFolder folder;
  write_safetensors(folder / "t", every_type());
  const std::string bytes = read_file(folder / "t");
  for (size_t n = 0; n < bytes.size(); n += 13) {
    write_file(folder / "cut", std::string_view(bytes).substr(0, n));
    testing::expect_one_line(message_of([&] { read_safetensors(folder / "cut"); }));
  }
}

TEST(Safetensors, WritingRefusesWhatCannotBeRead) {
  const TemporaryFolder folder;
  const Tensor t = Tensor::zeros({1});
  const auto message = [&](const std::vector<std::pair<std::string, Tensor>>& tensors) {
    return message_of<ArgumentError>([&] { write_safetensors(folder / "t", tensors); });
  };
  EXPECT_NE(message({{"a", t}, {"a", t}}).find("given twice"), std::string::npos);
  EXPECT_NE(message({{"a", Tensor()}}).find("undefined"), std::string::npos);
  EXPECT_NE(message({{"__metadata__", t}}).find("cannot be named"), std::string::npos);
  EXPECT_NE(message({{"\xff", t}}).find("not UTF-8"), std::string::npos);
  EXPECT_EQ(folder.count(), 0);
}

}  // namespace
}  // namespace foci
