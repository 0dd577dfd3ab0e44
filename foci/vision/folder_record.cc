// Records of a folder's pictures: their text, their fingerprint, and what changed between two.
#include "foci/vision/folder_record.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "foci/core/error.h"
#include "foci/io/file.h"

namespace foci::vision {
namespace {

constexpr std::string_view kHead = "foci.pictures.1";

// FNV-1a of 64 bits.
struct Hash {
  uint64_t value = 0xcbf29ce484222325u;
  void add(std::string_view bytes) {
    for (const char c : bytes) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  void add(uint64_t number) {
    for (int i = 0; i < 64; i += 8) {
      value = (value ^ (number >> i & 0xff)) * 0x100000001b3u;
    }
  }
};

std::string_view take_field(std::string_view& line) {
  const size_t end = std::min(line.find('\t'), line.size());
  const std::string_view field = line.substr(0, end);
  line.remove_prefix(std::min(end + 1, line.size()));
  return field;
}

template <class T>
bool parse(std::string_view text, T& value, int base) {
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value, base);
  return parsed.ec == std::errc() && parsed.ptr == text.data() + text.size();
}

// "3 are gone from cat (cat/1.png)"
std::string counted(size_t count, const char* one, const char* many, const std::string& rest,
                    const std::string& example) {
  return fmt::format("{} {}{} ({})", count, count == 1 ? one : many, rest, example);
}

// Pictures of one kind of change.
struct Group {
  size_t count = 0;
  std::string example;  // the first by name
  void add(const std::string& path) {
    if (count++ == 0 || path < example) example = path;
  }
};

// The class whose pictures another one's are, mostly: it has a new name. By content.
std::map<std::string, std::string> renamed_classes(const FolderRecord& then,
                                                   const FolderRecord& now,
                                                   const std::set<std::string>& gone,
                                                   const std::set<std::string>& fresh) {
  const auto contents = [](const FolderRecord& record, const std::set<std::string>& names) {
    std::map<std::string, std::multiset<uint64_t>> out;
    for (const PictureRecord& p : record.pictures) {
      const std::string& name = record.classes[static_cast<size_t>(p.label)];
      if (names.count(name) > 0) out[name].insert(p.hash);
    }
    return out;
  };
  const auto before = contents(then, gone), after = contents(now, fresh);
  std::vector<std::tuple<size_t, std::string, std::string>> pairs;  // pictures shared, old, new
  for (const auto& [old_name, old_hashes] : before) {
    for (const auto& [new_name, new_hashes] : after) {
      std::vector<uint64_t> both;
      std::set_intersection(old_hashes.begin(), old_hashes.end(), new_hashes.begin(),
                            new_hashes.end(), std::back_inserter(both));
      if (2 * both.size() > old_hashes.size()) pairs.emplace_back(both.size(), old_name, new_name);
    }
  }
  std::sort(pairs.rbegin(), pairs.rend());
  std::map<std::string, std::string> out;  // old → new
  std::set<std::string> taken;
  for (const auto& [shared, old_name, new_name] : pairs) {
    if (out.count(old_name) > 0 || !taken.insert(new_name).second) continue;
    out[old_name] = new_name;
  }
  return out;
}

}  // namespace

std::string FolderRecord::fingerprint() const {
  Hash hash;
  for (const std::string& name : classes) {
    hash.add(name);
    hash.add(uint64_t{0});
  }
  for (const PictureRecord& p : pictures) {
    hash.add(p.path);
    hash.add(static_cast<uint64_t>(p.label));
    hash.add(p.bytes);
    hash.add(p.hash);
  }
  return fmt::format("{:016x}", hash.value);
}

uint64_t content_hash(std::string_view bytes) {
  constexpr size_t kWhole = 64 << 10, kEnd = kWhole / 2;
  Hash hash;
  if (bytes.size() <= kWhole) {
    hash.add(bytes);
  } else {
    hash.add(bytes.substr(0, kEnd));
    hash.add(bytes.substr(bytes.size() - kEnd));
  }
  hash.add(uint64_t{bytes.size()});
  return hash.value;
}

std::string folder_record_to_text(const FolderRecord& record) {
  std::string out = std::string(kHead) + "\n";
  for (const std::string& name : record.classes) out += fmt::format("class\t{}\n", shown(name));
  for (const PictureRecord& p : record.pictures) {
    out += fmt::format("{:016x}\t{}\t{}\t{}\n", p.hash, p.bytes, p.label, p.path);
  }
  return out;
}

FolderRecord folder_record_from_text(std::string_view text, const std::string& name) {
  FolderRecord out;
  bool head = true;
  for (int64_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const auto check = [&](bool good) {
      require<FormatError>(good, "{}: line {} is none of a list of pictures", name, number);
    };
    if (head) {
      check(line == kHead);
      head = false;
      continue;
    }
    const std::string_view first = take_field(line);
    if (first == "class") {
      out.classes.emplace_back(line);
      continue;
    }
    PictureRecord p;
    check(parse(first, p.hash, 16));
    check(parse(take_field(line), p.bytes, 10));
    check(parse(take_field(line), p.label, 10));
    check(p.label >= 0 && p.label < std::ssize(out.classes) && !line.empty());
    p.path = line;
    out.pictures.push_back(std::move(p));
  }
  require<FormatError>(!head, "{}: is empty", name);
  return out;
}

std::vector<std::string> differences(const FolderRecord& then, const FolderRecord& now) {
  std::vector<std::string> out;
  std::set<std::string> gone, fresh;
  const std::set<std::string> before(then.classes.begin(), then.classes.end());
  const std::set<std::string> after(now.classes.begin(), now.classes.end());
  std::set_difference(before.begin(), before.end(), after.begin(), after.end(),
                      std::inserter(gone, gone.end()));
  std::set_difference(after.begin(), after.end(), before.begin(), before.end(),
                      std::inserter(fresh, fresh.end()));
  const auto renamed = renamed_classes(then, now, gone, fresh);
  for (const auto& [old_name, new_name] : renamed) {
    out.push_back(fmt::format("class {} is called {} now", shown(old_name), shown(new_name)));
    gone.erase(old_name);
    fresh.erase(new_name);
  }

  // Pictures by their class as it is called now, and their name in it.
  struct Place {
    std::string group, name;
    const PictureRecord* picture;
  };
  const auto places = [&](const FolderRecord& record, bool old) {
    std::map<std::pair<std::string, std::string>, const PictureRecord*> all;
    for (const PictureRecord& p : record.pictures) {
      std::string group = record.classes[static_cast<size_t>(p.label)];
      if (const auto it = renamed.find(group); old && it != renamed.end()) group = it->second;
      all[{group, p.path.substr(std::min(p.path.find('/') + 1, p.path.size()))}] = &p;
    }
    return all;
  };
  const auto old_places = places(then, true), new_places = places(now, false);
  // What is at its place with its bytes has not changed. Of the rest, what has the same bytes
  // elsewhere moved.
  std::vector<Place> left, arrived;
  for (const auto& [at, picture] : old_places) {
    const auto same = new_places.find(at);
    if (same != new_places.end() && same->second->hash == picture->hash) continue;
    left.push_back({at.first, at.second, picture});
  }
  std::multimap<uint64_t, size_t> by_hash;
  for (const auto& [at, picture] : new_places) {
    const auto same = old_places.find(at);
    if (same != old_places.end() && same->second->hash == picture->hash) continue;
    by_hash.emplace(picture->hash, arrived.size());
    arrived.push_back({at.first, at.second, picture});
  }
  std::map<std::pair<std::string, std::string>, Group> moved;  // from, to
  std::map<std::string, Group> named, changed, lost, added;    // by class
  std::vector<bool> found(arrived.size(), false);
  const auto match = [&](bool same_class) {
    std::vector<Place> rest;
    for (const Place& from : left) {
      const auto [first, last] = by_hash.equal_range(from.picture->hash);
      const auto it = std::find_if(first, last, [&](const auto& entry) {
        return (arrived[entry.second].group == from.group) == same_class;
      });
      if (it == last) {
        rest.push_back(from);
        continue;
      }
      const Place& to = arrived[it->second];
      if (same_class) {
        named[from.group].add(to.picture->path);
      } else {
        moved[{from.group, to.group}].add(to.picture->path);
      }
      found[it->second] = true;
      by_hash.erase(it);
    }
    left = std::move(rest);
  };
  match(true);
  match(false);
  std::map<std::pair<std::string, std::string>, size_t> at_new;
  for (size_t i = 0; i < arrived.size(); ++i) {
    if (!found[i]) at_new[{arrived[i].group, arrived[i].name}] = i;
  }
  for (const Place& from : left) {
    const auto it = at_new.find({from.group, from.name});
    if (it == at_new.end()) {
      lost[from.group].add(from.picture->path);
    } else {
      changed[from.group].add(from.picture->path);
      found[it->second] = true;
    }
  }
  for (size_t i = 0; i < arrived.size(); ++i) {
    if (!found[i]) added[arrived[i].group].add(arrived[i].picture->path);
  }

  for (const auto& [way, g] : moved) {
    out.push_back(fmt::format("{} moved from {} to {} ({})", g.count, shown(way.first),
                              shown(way.second), g.example));
  }
  for (const std::string& name : gone) {
    out.push_back(fmt::format("class {} is gone", shown(name)));
    lost.erase(name);
  }
  for (const std::string& name : fresh) {
    out.push_back(fmt::format("class {} is new", shown(name)));
    added.erase(name);
  }
  const auto tell = [&](const std::map<std::string, Group>& groups, const char* one,
                        const char* many, const char* where) {
    for (const auto& [name, g] : groups) {
      out.push_back(counted(g.count, one, many, where + shown(name), g.example));
    }
  };
  tell(lost, "is gone", "are gone", " from ");
  tell(added, "is new", "are new", " in ");
  tell(changed, "has other bytes", "have other bytes", " in ");
  tell(named, "has another name", "have other names", " in ");
  return out;
}

}  // namespace foci::vision
