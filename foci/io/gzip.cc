// Unpacks member after member with zlib.
#include "foci/io/gzip.h"

#include <zlib.h>

#include <algorithm>
#include <limits>

#include "foci/core/error.h"

namespace foci {
namespace {

struct Inflater {
  Inflater() {
    constexpr int kGzipOnly = 16;
    require<IoError>(inflateInit2(&stream, MAX_WBITS + kGzipOnly) == Z_OK, "zlib: out of memory");
  }
  ~Inflater() { inflateEnd(&stream); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;
  z_stream stream{};
};

}  // namespace

std::string gunzip(std::string_view bytes, const std::string& name, uint64_t limit) {
  require<FormatError>(bytes.substr(0, 2) == "\x1f\x8b", "{}: not a gzip file", name);
  Inflater inflater;
  z_stream& stream = inflater.stream;
  std::string out;
  while (true) {
    constexpr uint64_t kMost = std::numeric_limits<uInt>::max();
    const auto take = static_cast<uInt>(std::min<uint64_t>(bytes.size(), kMost));
    const auto room = static_cast<uInt>(std::min<uint64_t>(1 << 16, limit - out.size() + 1));
    const size_t had = out.size();
    out.resize(had + room);
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
    stream.avail_in = take;
    stream.next_out = reinterpret_cast<Bytef*>(out.data() + had);
    stream.avail_out = room;
    const int status = inflate(&stream, Z_NO_FLUSH);
    out.resize(had + room - stream.avail_out);
    bytes.remove_prefix(take - stream.avail_in);
    require<FormatError>(out.size() <= limit, "{}: more than {} bytes unpacked", name, limit);
    if (status == Z_STREAM_END) {
      if (bytes.empty()) return out;
      require<FormatError>(bytes.substr(0, 2) == "\x1f\x8b", "{}: {} bytes behind its end", name,
                           bytes.size());
      inflateReset(&stream);
      continue;
    }
    require<FormatError>(status == Z_OK || status == Z_BUF_ERROR, "{}: broken gzip data: {}", name,
                         stream.msg != nullptr ? stream.msg : "unknown reason");
    require<FormatError>(!bytes.empty() || stream.avail_out == 0, "{}: truncated gzip data", name);
  }
}

}  // namespace foci
