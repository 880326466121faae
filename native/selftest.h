// Every kernel of an instruction set against plain scalar arithmetic in double precision, odd sizes included, and the
// bitwise rule: a row's result is the same alone and in company.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace twostep {

struct Check {
  std::string name;
  double error, limit;  // worst over all cases; 0 is the limit of a bitwise check (the number of differing results)
  bool passed() const { return error <= limit; }
};

std::vector<Check> selftest(const Kernels& kernels);

}  // namespace twostep
