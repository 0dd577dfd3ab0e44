// write_sample FOLDER: the pages that the browser test opens.
#include <cstdio>
#include <exception>
#include <string>

#include "report/sample.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    const std::filesystem::path folder = argv[1];
    foci::report::write_report(folder / "demo.html", foci::report::sample_report());
    // Texts that try to break out of where they stand.
    foci::report::Report hostile = foci::report::sample_report(2, 12, 12);
    const std::string evil = "</title></style><script>document.title='broken'</script><img src=x>";
    hostile.title = hostile.summary = hostile.reading = evil;
    for (auto& name : hostile.classes) name = "\"'><svg onload=alert(1)>" + name;
    for (auto& scene : hostile.gallery) scene.name = evil;
    hostile.numbers = {{evil, evil, evil}};
    hostile.provenance = {{evil, "javascript:alert(1)"}, {"long", std::string(3000, 'x')}};
    hostile.hits.lines[0].label = evil;
    foci::report::write_report(folder / "hostile.html", hostile);
    // Pictures only, without truth: what `inspect` writes.
    const foci::report::Report few = foci::report::sample_report(3, 2, 8);
    foci::report::Report inspect;
    inspect.title = "Three pictures";
    inspect.classes = few.classes;
    inspect.gallery = few.gallery;
    for (auto& scene : inspect.gallery) {
      scene.truth.reset();
      scene.landmark.clear();
    }
    foci::report::write_report(folder / "inspect.html", inspect);
    // One picture, six and forty, with the names that cameras give.
    for (const int64_t n : {1, 6, 40}) {
      foci::report::Report pictures = inspect;
      pictures.title = "Where the model looks";
      pictures.gallery = foci::report::sample_report(n, 2, 4).gallery;
      for (size_t i = 0; i < pictures.gallery.size(); ++i) {
        auto& scene = pictures.gallery[i];
        scene.truth.reset();
        scene.landmark.clear();
        scene.name = "/home/somebody/pictures/holiday in the mountains, summer of 2024/IMG_2024_" +
                     std::to_string(1000 + i) + ".jpeg";
      }
      pictures.entropy = {2, 4, std::vector<double>(8, 2.5), {}, 3.2, n};
      foci::report::write_report(folder / ("pictures" + std::to_string(n) + ".html"), pictures);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
