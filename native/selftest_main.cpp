// twostep_selftest [ISA ...]: checks the named instruction sets, or all that this machine runs. Exit status 1 if any fails.
#include <cstdio>
#include <stdexcept>

#include "selftest.h"

namespace {

bool report(const std::string& isa) {
  bool good = true;
  for (const twostep::Check& check : twostep::selftest(twostep::choose_kernels(isa))) {
    std::printf("%-6s %-9s %-45s %.3g (limit %.3g)\n", check.passed() ? "ok" : "FAILED", isa.c_str(), check.name.c_str(), check.error, check.limit);
    good &= check.passed();
  }
  return good;
}

}  // namespace

int main(int argc, char** argv) try {
  std::vector<std::string> isas(argv + 1, argv + argc);
  if (isas.empty()) isas = twostep::usable_isas();
  bool good = true;
  for (const std::string& isa : isas) good &= report(isa);
  return good ? 0 : 1;
} catch (const std::invalid_argument& error) {
  std::fprintf(stderr, "twostep_selftest: %s\n", error.what());
  return 2;
}
