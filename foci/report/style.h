// The style sheet of the page and of the SVG files behind its download links.
//
// Colours are from the palette of Okabe and Ito (distinct for colour-blind readers), darker on a
// light ground and lighter on a dark one. Series classes: c0 blue, c1 vermilion, c2 green, c3
// purple.
#pragma once

#include <string_view>

namespace foci::report {

// Everything inside <style> of the page.
std::string_view page_style();
// What a chart needs when it stands alone: light colours only.
std::string_view chart_style();

}  // namespace foci::report
