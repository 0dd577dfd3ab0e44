// Pictures with attention laid over them, as SVG around small PNGs. Everything is drawn in units of
// patches: a picture of R × C patches fills the box from (0, 0) to (C, R).
#pragma once

#include <string>
#include <vector>

#include "foci/report/chart.h"
#include "foci/report/report.h"

namespace foci::report {

// RGBA pixels [R, C, 4] of one head's map: clear where there is no attention, then amber, then a
// solid deep red at the map's largest value. `heat` holds R·C values ≥ 0.
Tensor heat_pixels(const float* heat, int64_t rows, int64_t columns);

// The first patch with the largest value.
int64_t top_patch(const float* heat, int64_t patches);

// The mean map [R, C] of the last layer's heads, each scaled to sum 1 first.
std::vector<float> last_layer_mean(const Scene& scene);

// The outline of the landmark patches, as an SVG path in units of patches; empty without any.
std::string outline_path(const std::vector<uint8_t>& landmark, int64_t rows, int64_t columns);

// Definitions that the marks below refer to: the picture, once for the whole drawing, and the
// outline of its landmarks. `id` makes the element names unique in the page.
std::string scene_definitions(const Scene& scene, const std::string& id);
// The picture and its landmarks.
std::string original_marks(const std::string& id);
// The picture, darkened, a head's map [R, C] over it, and the most-attended patch framed: the frame
// stands a little outside, so that the patch is seen whole.
std::string heat_marks(const Scene& scene, const float* heat, const std::string& id);

// "true 7, predicted 9 (62 %)" behind the scene's name.
std::string describe(const Scene& scene, const std::vector<std::string>& classes);
// How sure the model was of what it said, "62 %"; empty where that is not known.
std::string confidence(const Scene& scene);

// For the download: the original, every head of every layer, and the last layer's heads together.
Chart draw_scene(const Scene& scene, const std::vector<std::string>& classes,
                 const std::string& id);

// For the download: the original beside the mean over the heads of the last layer.
Chart draw_mistake(const Scene& scene, const std::vector<std::string>& classes,
                   const std::string& id);

// Throws ArgumentError naming `what` where the scene's parts do not fit together.
void check_scene(const Scene& scene, size_t classes, const std::string& what);

}  // namespace foci::report
