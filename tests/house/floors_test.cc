// The floors hold: with the compile command that each floor really has, including a header of a
// floor it did not declare fails to compile, and including those it did declare works.
//
// Commands come from the build folder's compile_commands.json, declarations from floors.txt, which
// CMake writes beside it.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace foci {
namespace {

namespace fs = std::filesystem;

const fs::path kSource = FOCI_SOURCE_DIR;
const fs::path kBuild = FOCI_BINARY_DIR;

struct Floor {
  std::vector<std::string> deps, private_deps, headers;
  std::string source;  // one of its .cc files, whose compile command stands for all
};

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

// The floors in the order of their declaration, lowest first.
const std::vector<std::pair<std::string, Floor>>& floors() {
  static const auto* all = [] {
    auto* list = new std::vector<std::pair<std::string, Floor>>;
    std::ifstream in(kBuild / "floors.txt");
    for (std::string line; std::getline(in, line);) {
      const auto f = split(line, '|');
      list->push_back(
          {f.at(0), {split(f.at(1), ','), split(f.at(2), ','), split(f.at(3), ','), f.at(4)}});
    }
    return list;
  }();
  return *all;
}

const Floor& floor_named(const std::string& name) {
  for (const auto& [n, floor] : floors()) {
    if (n == name) return floor;
  }
  throw std::out_of_range(name);
}

// A floor's own headers may reach what its public dependencies reach; its .cc files also what its
// private ones do.
void add_reachable(const std::string& name, std::set<std::string>& reached) {
  if (!reached.insert(name).second) return;
  for (const auto& dep : floor_named(name).deps) add_reachable(dep, reached);
}
std::set<std::string> reachable(const std::string& name) {
  std::set<std::string> reached;
  add_reachable(name, reached);
  for (const auto& dep : floor_named(name).private_deps) add_reachable(dep, reached);
  return reached;
}

// The value of a JSON line `"key": "value",` without its escapes, or "" where the key is another.
// CMake writes one key a line.
std::string value_of(const std::string& line, const std::string& key) {
  const std::string head = "\"" + key + "\": \"";
  const auto start = line.find(head);
  if (start == std::string::npos) return "";
  std::string value;
  for (size_t i = start + head.size(); i < line.size() && line[i] != '"'; ++i) {
    if (line[i] == '\\') ++i;
    value += line[i];
  }
  return value;
}

// The floor's compile command up to its output, for a syntax check of what comes on standard input.
std::string check_command(const Floor& floor) {
  std::ifstream in(kBuild / "compile_commands.json");
  std::string directory, command;
  for (std::string line; std::getline(in, line);) {
    if (const auto v = value_of(line, "directory"); !v.empty()) directory = v;
    if (const auto v = value_of(line, "command"); !v.empty()) command = v;
    if (value_of(line, "file") != (kSource / floor.source).string()) continue;
    return "cd '" + directory + "' && " + command.substr(0, command.find(" -o ")) +
           " -w -fsyntax-only -x c++ - 2>&1";
  }
  ADD_FAILURE() << "no compile command for " << floor.source;
  return "false";
}

struct Outcome {
  bool compiles;
  std::string output;
};

Outcome check(const std::string& command, const std::string& code) {
  const fs::path file = fs::temp_directory_path() / ("foci-floors-" + std::to_string(getpid()));
  std::ofstream(file) << code;
  FILE* pipe = popen((command + " <'" + file.string() + "'").c_str(), "r");
  if (!pipe) return {false, "popen failed"};
  std::string output;
  char buffer[4096];
  while (size_t n = fread(buffer, 1, sizeof buffer, pipe)) output.append(buffer, n);
  const int status = pclose(pipe);
  fs::remove(file);
  return {WIFEXITED(status) && WEXITSTATUS(status) == 0, output};
}

class Floors : public ::testing::TestWithParam<std::string> {};

TEST_P(Floors, WhatIsDeclaredCompiles) {
  std::string code;
  for (const auto& name : reachable(GetParam())) {
    for (const auto& header : floor_named(name).headers) {
      // -inl.h files want their includer's set-up first.
      if (header.ends_with("-inl.h")) continue;
      code += "#include \"foci/" + name + "/" + header + "\"\n";
    }
  }
  const Outcome o = check(check_command(floor_named(GetParam())), code);
  EXPECT_TRUE(o.compiles) << code << o.output;
}

TEST_P(Floors, WhatIsNotDeclaredDoesNotCompile) {
  const std::string command = check_command(floor_named(GetParam()));
  const auto allowed = reachable(GetParam());
  for (const auto& [name, floor] : floors()) {
    if (allowed.count(name) || floor.headers.empty()) continue;
    const std::string include = "foci/" + name + "/" + floor.headers[0];
    const Outcome o = check(command, "#include \"" + include + "\"\n");
    EXPECT_FALSE(o.compiles) << GetParam() << " can include " << include;
    // For this reason, and not for another.
    EXPECT_NE(o.output.find(include + ": No such file"), std::string::npos) << o.output;
  }
}

INSTANTIATE_TEST_SUITE_P(Each, Floors, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const auto& [name, floor] : floors()) names.push_back(name);
                           return names;
                         }()),
                         [](const auto& each) { return each.param; });

TEST(House, AFloorUsesOnlyFloorsBelowIt) {
  std::set<std::string> below;
  for (const auto& [name, floor] : floors()) {
    for (const auto* list : {&floor.deps, &floor.private_deps}) {
      for (const auto& dep : *list) EXPECT_TRUE(below.count(dep)) << name << " uses " << dep;
    }
    below.insert(name);
  }
  EXPECT_GE(below.size(), 2u);
}

// The oracle judges the fast path, so the fast path must not contain it; kernels are private.
TEST(House, ReferenceAndKernelsAreUsedOnlyWhereTheyMay) {
  for (const auto& [name, floor] : floors()) {
    if (reachable(name).count("reference")) {
      EXPECT_TRUE(name == "reference" || name == "verify" || name == "cli") << name;
    }
    for (const auto& dep : floor.deps)
      EXPECT_NE(dep, "kernels") << name << " shows kernels to others";
    for (const auto& dep : floor.private_deps) {
      if (dep == "kernels") {
        // measure has a kernel of its own: the multiply-add peak.
        EXPECT_TRUE(name == "attention" || name == "autograd" || name == "measure") << name;
      }
    }
  }
}

// A relative include would walk around the floors' include roots.
TEST(House, NoIncludeClimbsTheTree) {
  int files = 0;
  for (const char* folder : {"foci", "tests", "bench", "fuzz", "examples"}) {
    if (!fs::exists(kSource / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(kSource / folder)) {
      const auto extension = entry.path().extension();
      if (extension != ".h" && extension != ".cc") continue;
      ++files;
      std::ifstream in(entry.path());
      int number = 0;
      for (std::string line; std::getline(in, line);) {
        ++number;
        const auto first = line.find_first_not_of(" \t");
        if (first == std::string::npos || line[first] != '#') continue;
        EXPECT_FALSE(line.find("include") != std::string::npos &&
                     line.find("../") != std::string::npos)
            << entry.path().string() << ":" << number << ": " << line;
      }
    }
  }
  EXPECT_GT(files, 10);
}

}  // namespace
}  // namespace foci
