#define TWOSTEP_ISA isa_avx512
#define TWOSTEP_USE_AVX512
#include "kernels_isa.h"

namespace twostep {
const Kernels* avx512_kernels() { return isa_avx512::table("avx512"); }
}  // namespace twostep
