// The arithmetic limits of one core, by the instructions that the kernels use, on registers only: what "x % of peak"
// in the benchmark refers to. Each function does a fixed number of operations and returns it; the caller takes the time.
#pragma once
#include "kernels.h"

namespace twostep::TWOSTEP_ISA {

template <class T>
inline void keep(T& value) {
  asm volatile("" : "+m"(value) : : "memory");
}

template <bool kFirst, class D>
TWOSTEP_INLINE inline void peak_pair(D& dot, const typename D::Weights& w0, const typename D::Weights& w1, const int8_t* x) {
  if constexpr (!D::kStepwise) {
    if constexpr (kFirst) dot.start(w0, w1, x);
    else dot.add(w0, w1, x);
  } else {
    if constexpr (kFirst) dot.start(w0, D::broadcast(x));
    else dot.add(w0, D::broadcast(x));
    dot.add(w1, D::broadcast(x + 4));
  }
}

// The dot products of groups of 4-bit weights as a prefill tile runs them, with the weights in registers and the rows in
// the first-level cache: no unpacking, no scales.
inline double peak_int8() {
  constexpr int kGroups = 16384;
  alignas(64) int8_t x[kRows][kGroup] = {};
  alignas(64) uint8_t weights[128] = {};
  keep(x);
  keep(weights);
  using D = Dot<15>;
  const D::Weights w0 = D::prepare(load_bytes(weights)), w1 = D::prepare(load_bytes(weights + 64));
  for (int g = 0; g < kGroups; ++g) {
    D dot[kRows];
    unroll<4>([&](auto p) TWOSTEP_INLINE {
      unroll<kRows>([&](auto r) TWOSTEP_INLINE { peak_pair<p == 0>(dot[r], w0, w1, x[r] + p * 8); });
    });
    unroll<kRows>([&](auto r) TWOSTEP_INLINE { dot[r].pin(); });
    keep(x);
  }
  return 2.0 * kGroups * kRows * kPanel * kGroup;
}

inline double peak_f32() {
  constexpr int kRounds = 1 << 16, kChains = kFloatRows;
  F32 acc[kChains], x = set1(1.0f), y = set1(1e-9f);
  keep(x);
  keep(y);
  for (int c = 0; c < kChains; ++c) acc[c] = zero();
  for (int i = 0; i < kRounds; ++i)
    unroll<kChains>([&](auto c) TWOSTEP_INLINE { acc[c] = fma(x, y, acc[c]); });
  unroll<kChains>([&](auto c) TWOSTEP_INLINE { keep(acc[c]); });
  return 2.0 * kRounds * kChains * kPanel;
}

}  // namespace twostep::TWOSTEP_ISA
