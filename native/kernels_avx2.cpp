#define TWOSTEP_ISA isa_avx2
#define TWOSTEP_USE_AVX2
#include "kernels_isa.h"

namespace twostep {
const Kernels* avx2_kernels() { return isa_avx2::table("avx2"); }
}  // namespace twostep
