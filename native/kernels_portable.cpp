#define TWOSTEP_ISA isa_portable
#define TWOSTEP_USE_PORTABLE
#include "kernels_isa.h"

namespace twostep {
const Kernels* portable_kernels() { return isa_portable::table("portable"); }
}  // namespace twostep
