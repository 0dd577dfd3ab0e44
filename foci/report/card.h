// Cards: one scene of the page as HTML that fits its width, from a phone's to a wide screen's.
#pragma once

#include <string>
#include <vector>

#include "foci/report/report.h"

namespace foci::report {

// What goes inside the card's <figure>: name and verdict, the original, what the last layer's heads
// look at together, and every head of every layer; `id` as in picture.h.
std::string scene_card(const Scene& scene, const std::vector<std::string>& classes,
                       const std::string& id);

// Name and verdict, the original, and what the last layer's heads look at together.
std::string mistake_card(const Scene& scene, const std::vector<std::string>& classes,
                         const std::string& id);

// An entry of the list at the head of many cards: the small original with its name, a link to the
// card of this id, whose definitions it uses.
std::string index_entry(const Scene& scene, const std::vector<std::string>& classes,
                        const std::string& id);

}  // namespace foci::report
