// FOCI_API marks what libfoci.so shows; everything else in it is hidden.
#pragma once

#define FOCI_API __attribute__((visibility("default")))
