// Pictures with attention laid over them, as SVG around small PNGs.
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

// The original, every head of every layer, and the last layer's heads together. `id` makes the
// element names unique in the page.
Chart draw_scene(const Scene& scene, const std::vector<std::string>& classes,
                 const std::string& id);

// The original beside the mean over the heads of the last layer: for the gallery of mistakes.
Chart draw_mistake(const Scene& scene, const std::vector<std::string>& classes,
                   const std::string& id);

// Throws ArgumentError naming `what` where the scene's parts do not fit together.
void check_scene(const Scene& scene, size_t classes, const std::string& what);

}  // namespace foci::report
