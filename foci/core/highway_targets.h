// Which Highway targets foci compiles. Include before any Highway header.
//
// Each target costs compile time, so they are few: the baseline, AVX2 and AVX-512. Highway numbers
// its x86 targets so that bits 0–7 are the forms above plain AVX-512 (AVX3_DL, ZEN4, SPR …), whose
// extra instructions float32 attention does not use.
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#define HWY_DISABLED_TARGETS (0xFFLL | HWY_SSE4 | HWY_SSSE3)
#elif defined(__aarch64__)
// Kernels keep vectors in arrays, which SVE's sizeless types do not allow.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
