// Which kernels this machine can run.
#include <stdexcept>

#include "kernels.h"

namespace twostep {
#if !defined(TWOSTEP_X86)
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
#endif

namespace {

bool runs_avx2() {
#if defined(TWOSTEP_X86)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool runs_avx512() {
#if defined(TWOSTEP_X86)
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> out;
  if (runs_avx512()) out.push_back(avx512_kernels());
  if (runs_avx2()) out.push_back(avx2_kernels());
  out.push_back(portable_kernels());
  return out;
}

}  // namespace

std::vector<std::string> usable_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable()) names.emplace_back(kernels->name);
  return names;
}

const Kernels& choose_kernels(const std::string& name) {
  std::string known;
  for (const Kernels* kernels : usable()) {
    if (name.empty() || name == kernels->name) return *kernels;
    known += (known.empty() ? "" : ", ") + std::string(kernels->name);
  }
  throw std::invalid_argument("instruction set '" + name + "' is not among those this machine runs: " + known);
}

}  // namespace twostep
