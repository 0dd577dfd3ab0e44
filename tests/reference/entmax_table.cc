// Reads entmax_table.txt, whose lines entmax_table.py describes.
#include "reference/entmax_table.h"

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>

namespace foci::testing {
namespace {

double number(std::istringstream& in) {  // operator>> reads no "inf"
  std::string text;
  in >> text;
  char* end = nullptr;
  const double x = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != 0) throw std::runtime_error("entmax_table.txt: " + in.str());
  return x;
}

std::vector<float> read_scores(std::istringstream& in) {
  std::vector<float> scores;
  std::string kind, text;
  in >> kind;
  if (kind == "list") {
    while (in >> text) scores.push_back(std::strtof(text.c_str(), nullptr));
    return scores;
  }
  int64_t count = 0, mul = 0, mod = 1;
  int exponent = 0;
  in >> count >> mul >> mod >> exponent;
  for (int64_t j = 0; j < count; ++j) {
    scores.push_back(std::ldexp(static_cast<float>(j * mul % mod), exponent));
  }
  return scores;
}

std::vector<EntmaxCase> read_table() {
  std::ifstream file(FOCI_SOURCE_DIR "/tests/reference/entmax_table.txt");
  std::map<std::string, std::vector<float>> rows;
  std::vector<EntmaxCase> cases;
  for (std::string line; std::getline(file, line);) {
    std::istringstream in(line);
    std::string word, name;
    in >> word;
    if (word == "row") {
      in >> name;
      rows[name] = read_scores(in);
    } else if (word == "case") {
      EntmaxCase c{};
      in >> name;
      c.alpha = number(in);
      c.name = line.substr(5);
      c.scores = rows.at(name);
      cases.push_back(c);
    } else if (word == "tau") {
      EntmaxCase& c = cases.back();
      c.tau = number(in);
      c.support = static_cast<int64_t>(number(in));
      c.entropy = number(in);
      c.largest = number(in);
    } else {
      EntmaxKey key{};
      key.j = static_cast<int64_t>(number(in));
      key.p = number(in);
      key.ds = number(in);
      key.dtau = number(in);
      cases.back().keys.push_back(key);
    }
  }
  if (cases.empty()) throw std::runtime_error("entmax_table.txt: nothing read");
  return cases;
}

}  // namespace

const std::vector<EntmaxCase>& entmax_table() {
  static const std::vector<EntmaxCase> cases = read_table();
  return cases;
}

}  // namespace foci::testing
