// 16 lanes by the compiler's vector extension (GCC, Clang): SSE2, NEON or plain scalars, whatever the target has.
// The same names as in simd_avx2.h and simd_avx512.h; a fused multiply-add is two roundings here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "pack.h"

namespace twostep::TWOSTEP_ISA {

constexpr int kRows = 4;
constexpr int kFloatRows = 4;

typedef float F32Lanes __attribute__((vector_size(64)));
typedef int32_t I32Lanes __attribute__((vector_size(64)));
typedef uint8_t ByteLanes __attribute__((vector_size(64)));

struct F32 { F32Lanes v; };
struct I32 { I32Lanes v; };
struct Bytes { ByteLanes v; };  // 64 unsigned bytes: 16 outputs x 4 inputs

inline F32 zero() { return {F32Lanes{}}; }
inline F32 set1(float x) { return {F32Lanes{} + x}; }
inline F32 load(const float* p) { F32 x; std::memcpy(&x.v, p, 64); return x; }
inline void store(float* p, F32 x) { std::memcpy(p, &x.v, 64); }
inline F32 operator+(F32 x, F32 y) { return {x.v + y.v}; }
inline F32 operator-(F32 x, F32 y) { return {x.v - y.v}; }
inline F32 operator*(F32 x, F32 y) { return {x.v * y.v}; }
inline F32 operator/(F32 x, F32 y) { return {x.v / y.v}; }
inline F32 fma(F32 x, F32 y, F32 z) { return {x.v * y.v + z.v}; }
inline F32 max(F32 x, F32 y) { return {x.v > y.v ? x.v : y.v}; }
inline F32 min(F32 x, F32 y) { return {x.v < y.v ? x.v : y.v}; }
inline F32 abs(F32 x) { return {x.v < 0 ? -x.v : x.v}; }
// x where test >= bound, else 0
inline F32 keep_if_at_least(F32 x, F32 test, F32 bound) { return {test.v >= bound.v ? x.v : F32Lanes{}}; }
// Round to nearest even by the float adder: adding 1.5 · 2^23 leaves the integer in the low bits (|x| < 2^22).
inline I32 round_to_int(F32 x) {
  const F32Lanes shifted = x.v + 0x1.8p23f;
  I32 bits;
  std::memcpy(&bits.v, &shifted, 64);
  return {bits.v - 0x4b400000};
}
inline F32 to_float(I32 x) { return {__builtin_convertvector(x.v, F32Lanes)}; }
inline I32 operator+(I32 x, I32 y) { return {x.v + y.v}; }
inline I32 subtract(I32 x, int32_t y) { return {x.v - y}; }
// x · 2^n for results in the normal range
inline F32 times_power_of_two(F32 x, I32 n) {
  const I32Lanes bits = (n.v + 127) << 23;
  F32 power;
  std::memcpy(&power.v, &bits, 64);
  return x * power;
}

template <class Function>
inline F32 each_lane(Function&& lane) {
  float out[kPanel];
  for (int i = 0; i < kPanel; ++i) out[i] = lane(i);
  return load(out);
}
inline F32 load_f16(const uint16_t* p) { return each_lane([&](int i) { return f16_to_f32(p[i]); }); }
inline F32 load_bf16(const uint16_t* p) {
  return each_lane([&](int i) {
    const uint32_t bits = uint32_t(p[i]) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  });
}
inline F32 load_u8(const uint8_t* p) { return each_lane([&](int i) { return float(p[i]); }); }
inline F32 load_i8(const uint8_t* p) { return each_lane([&](int i) { return float(static_cast<int8_t>(p[i])); }); }

// Round to nearest even; values are within the range of f16 (the caller saturates).
inline uint16_t f32_to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = bits >> 16 & 0x8000;
  const float size = std::fabs(x);
  if (size < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(size * 0x1p24f));
  bits &= 0x7fffffff;
  bits += 0xfff + (bits >> 13 & 1);
  return sign | static_cast<uint16_t>((bits >> 13) - (112 << 10));
}
inline void store_f16(uint16_t* p, F32 x) {
  for (int i = 0; i < kPanel; ++i) p[i] = f32_to_f16(x.v[i]);
}
inline void store_i8(int8_t* p, I32 x) {
  for (int i = 0; i < kPanel; ++i) p[i] = static_cast<int8_t>(x.v[i]);
}

inline float horizontal_sum(F32 x) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = x.v[i] + x.v[i + 8];
  for (int width = 4; width; width /= 2)
    for (int i = 0; i < width; ++i) s[i] += s[i + width];
  return s[0];
}
inline float horizontal_max(F32 x) {
  float out = x.v[0];
  for (int i = 1; i < kPanel; ++i) out = x.v[i] > out ? x.v[i] : out;
  return out;
}
inline int32_t horizontal_sum(I32 x) {
  int32_t out = 0;
  for (int i = 0; i < kPanel; ++i) out += x.v[i];
  return out;
}

inline Bytes load_bytes(const uint8_t* p) { Bytes x; std::memcpy(&x.v, p, 64); return x; }
inline void store_bytes(uint8_t* p, Bytes x) { std::memcpy(p, &x.v, 64); }
inline Bytes operator|(Bytes x, Bytes y) { return {x.v | y.v}; }
inline Bytes low_nibbles(Bytes x) { return {x.v & 15}; }
inline Bytes high_nibbles(Bytes x) { return {x.v >> 4}; }
// bits 2s, 2s+1 of each byte, as bits 4, 5
template <int kStep>
inline Bytes crumbs(Bytes x) { return {(x.v >> (2 * kStep) & 3) << 4}; }

// Dot products of one row with weights 0..kMax of 16 outputs, in plain integers that the compiler vectorises: start(),
// add() .., sum().
template <int kMax>
struct Dot {
  static constexpr bool kTakesZero = false;
  using Weights = Bytes;
  static Weights prepare(Bytes w) { return w; }
  int32_t total[kPanel];
  void start(const Weights& w0, const Weights& w1, const int8_t* x) {
    for (int c = 0; c < kPanel; ++c) total[c] = 0;
    add(w0, w1, x);
  }
  void add(const Weights& w0, const Weights& w1, const int8_t* x) {
    add_step(w0, x);
    add_step(w1, x + 4);
  }
  I32 sum() const {
    I32 out;
    std::memcpy(&out.v, total, 64);
    return out;
  }
  void pin() { asm volatile("" : : "r"(total) : "memory"); }  // as if the sums were used

 private:
  void add_step(const Weights& w, const int8_t* x) {
    uint8_t weights[64];
    store_bytes(weights, w);
    for (int c = 0; c < kPanel; ++c) {
      int32_t sum = 0;
      for (int i = 0; i < 4; ++i) sum += int32_t(weights[4 * c + i]) * x[i];
      total[c] += sum;
    }
  }
};

}  // namespace twostep::TWOSTEP_ISA
