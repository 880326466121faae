// Fills the table of kernels for the instruction set that the including file was compiled for (TWOSTEP_ISA names it).
#pragma once
#include "kernels.h"
#if defined(TWOSTEP_USE_AVX512)
#include "simd_avx512.h"
#elif defined(TWOSTEP_USE_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif
#include "linear.h"
// after linear.h: in_tiles, float_tile
#include "elementwise.h"
// after elementwise.h: exponential
#include "attention.h"
#include "peaks.h"

namespace twostep::TWOSTEP_ISA {

inline const Kernels* table(const char* name) {
  static const Kernels kernels{name, quantise, rms_norm, linear_panels, float_panel, put, add, gated_silu,
                               rope, write_kv, attend, merge, finish, peak_int8, peak_f32};
  return &kernels;
}

}  // namespace twostep::TWOSTEP_ISA
