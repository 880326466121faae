// 16 lanes as four vectors of the compiler's extension (GCC, Clang): SSE2, NEON or plain scalars, whatever the target has.
// The same names as in simd_avx2.h and simd_avx512.h; a fused multiply-add is two roundings here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "pack.h"

namespace twostep::TWOSTEP_ISA {

constexpr int kRows = 2, kTileRows = 2, kTilePanels = 1;
constexpr int kFloatRows = 2;
constexpr int kQueryRows = 2, kChains = 2;
constexpr int kParts = 4;  // vectors of 16 bytes in 16 lanes

typedef float F32Part __attribute__((vector_size(16)));
typedef int32_t I32Part __attribute__((vector_size(16)));
typedef uint32_t U32Part __attribute__((vector_size(16)));
typedef int16_t I16Part __attribute__((vector_size(16)));
typedef uint16_t U16Part __attribute__((vector_size(16)));
typedef uint8_t BytePart __attribute__((vector_size(16)));
typedef uint16_t U16Half __attribute__((vector_size(8)));
typedef uint8_t ByteQuarter __attribute__((vector_size(4)));
typedef int8_t I8Quarter __attribute__((vector_size(4)));

template <class Part>
struct Parts {
  Part p[kParts];
};
using F32 = Parts<F32Part>;
using I32 = Parts<I32Part>;
using Bytes = Parts<BytePart>;  // 64 unsigned bytes: 16 outputs x 4 inputs

// f(part) for each of the four parts, as 16 lanes
template <class Part, class F>
inline Parts<Part> each(F&& f) { return {{f(0), f(1), f(2), f(3)}}; }

template <class To>
inline To load_part(const void* from) {
  To out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline F32Part splat(float x) { return F32Part{x, x, x, x}; }

inline F32 zero() { return each<F32Part>([](int) { return F32Part{}; }); }
inline F32 set1(float x) { return each<F32Part>([&](int) { return splat(x); }); }
inline F32 load(const float* p) { return each<F32Part>([&](int i) { return load_part<F32Part>(p + 4 * i); }); }
inline void store(int32_t* p, I32 x) { std::memcpy(p, &x, 64); }
inline void store(float* p, F32 x) { std::memcpy(p, &x, 64); }
inline F32 operator+(F32 x, F32 y) { return each<F32Part>([&](int i) { return x.p[i] + y.p[i]; }); }
inline F32 operator-(F32 x, F32 y) { return each<F32Part>([&](int i) { return x.p[i] - y.p[i]; }); }
inline F32 operator*(F32 x, F32 y) { return each<F32Part>([&](int i) { return x.p[i] * y.p[i]; }); }
inline F32 operator/(F32 x, F32 y) { return each<F32Part>([&](int i) { return x.p[i] / y.p[i]; }); }
inline F32 fma(F32 x, F32 y, F32 z) { return each<F32Part>([&](int i) { return x.p[i] * y.p[i] + z.p[i]; }); }
inline F32 max(F32 x, F32 y) { return each<F32Part>([&](int i) { return x.p[i] > y.p[i] ? x.p[i] : y.p[i]; }); }
inline F32 min(F32 x, F32 y) { return each<F32Part>([&](int i) { return x.p[i] < y.p[i] ? x.p[i] : y.p[i]; }); }
inline F32 abs(F32 x) { return each<F32Part>([&](int i) { return (F32Part)((I32Part)x.p[i] & 0x7fffffff); }); }
// x where test >= bound, else 0
inline F32 keep_if_at_least(F32 x, F32 test, F32 bound) {
  return each<F32Part>([&](int i) { return (F32Part)((I32Part)x.p[i] & (I32Part)(test.p[i] >= bound.p[i])); });
}
// Round to nearest even by the float adder: adding 1.5 · 2^23 leaves the integer in the low bits (|x| < 2^22).
inline bool any_at_least(F32 x, F32 bound) {
  const I32 found = each<I32Part>([&](int i) { return (I32Part)(x.p[i] >= bound.p[i]); });
  const I32Part any = found.p[0] | found.p[1] | found.p[2] | found.p[3];
  return (any[0] | any[1] | any[2] | any[3]) != 0;
}
inline I32 round_to_int(F32 x) {
  return each<I32Part>([&](int i) { return (I32Part)(x.p[i] + splat(0x1.8p23f)) - 0x4b400000; });
}
inline F32 to_float(I32 x) { return each<F32Part>([&](int i) { return __builtin_convertvector(x.p[i], F32Part); }); }
inline I32 operator+(I32 x, I32 y) { return each<I32Part>([&](int i) { return x.p[i] + y.p[i]; }); }
inline I32 subtract(I32 x, int32_t y) { return each<I32Part>([&](int i) { return x.p[i] - y; }); }
inline F32 round_to_whole(F32 x) { return to_float(round_to_int(x)); }
// x · 2^n for whole n and results in the normal range
inline F32 times_power_of_two(F32 x, F32 n) {
  const I32 whole = round_to_int(n);
  return each<F32Part>([&](int i) { return x.p[i] * (F32Part)((whole.p[i] + 127) << 23); });
}

// Finite values: exponent and fraction shifted into place are the value times 2^-112, subnormals included.
inline F32 load_f16(const uint16_t* p) {
  return each<F32Part>([&](int i) {
    const U32Part half = __builtin_convertvector(load_part<U16Half>(p + 4 * i), U32Part);
    const F32Part size = (F32Part)((half & 0x7fff) << 13) * splat(0x1p112f);
    return (F32Part)((U32Part)size | (half & 0x8000) << 16);
  });
}
inline F32 load_bf16(const uint16_t* p) {
  return each<F32Part>([&](int i) { return (F32Part)(__builtin_convertvector(load_part<U16Half>(p + 4 * i), U32Part) << 16); });
}
inline F32 load_u8(const uint8_t* p) {
  return each<F32Part>([&](int i) { return __builtin_convertvector(load_part<ByteQuarter>(p + 4 * i), F32Part); });
}
inline F32 load_i8(const uint8_t* p) {
  return each<F32Part>([&](int i) { return __builtin_convertvector(load_part<I8Quarter>(p + 4 * i), F32Part); });
}

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
  for (int i = 0; i < kPanel; ++i) p[i] = f32_to_f16(x.p[i / 4][i % 4]);
}
inline void store_i8(int8_t* p, I32 x) {
  for (int i = 0; i < kPanel; ++i) p[i] = static_cast<int8_t>(x.p[i / 4][i % 4]);
}

// In the order of fine values: 0, 2, 1, 3 of each four.
inline void store_i16_fine(int16_t* p, I32 x) {
  for (int i = 0; i < kParts; ++i, p += 4)
    for (int j = 0; j < 4; ++j) p[j] = static_cast<int16_t>(x.p[i][j == 1 || j == 2 ? 3 - j : j]);
}

inline float horizontal_sum(F32 x) {
  const F32Part s = (x.p[0] + x.p[2]) + (x.p[1] + x.p[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
inline float horizontal_max(F32 x) {
  const F32 y = max(x, each<F32Part>([&](int i) { return x.p[i ^ 2]; }));
  const F32Part s = y.p[0] > y.p[1] ? y.p[0] : y.p[1];
  const float a = s[0] > s[1] ? s[0] : s[1], b = s[2] > s[3] ? s[2] : s[3];
  return a > b ? a : b;
}
inline int32_t horizontal_sum(I32 x) {
  const I32Part s = (x.p[0] + x.p[1]) + (x.p[2] + x.p[3]);
  return s[0] + s[1] + s[2] + s[3];
}
// Lane i: the greatest, or the sum, of rows[i].
inline F32 horizontal_maxima(const F32 (&rows)[16]) {
  F32 out;
  for (int i = 0; i < 16; ++i) out.p[i / kParts][i % kParts] = horizontal_max(rows[i]);
  return out;
}
inline I32 horizontal_sums(const I32 (&rows)[16]) {
  I32 out;
  for (int i = 0; i < 16; ++i) out.p[i / kParts][i % kParts] = horizontal_sum(rows[i]);
  return out;
}

inline Bytes load_bytes(const uint8_t* p) { return each<BytePart>([&](int i) { return load_part<BytePart>(p + 16 * i); }); }
inline void store_bytes(uint8_t* p, Bytes x) { std::memcpy(p, &x, 64); }
inline Bytes operator|(Bytes x, Bytes y) { return each<BytePart>([&](int i) { return x.p[i] | y.p[i]; }); }
// Shifts of 16 bits at a time, as vector units have them; the mask drops what came from the neighbour.
inline Bytes shift_right(Bytes x, int bits, uint8_t mask) {
  return each<BytePart>([&](int i) { return (BytePart)((U16Part)x.p[i] >> bits) & mask; });
}
inline Bytes low_nibbles(Bytes x) { return shift_right(x, 0, 15); }
inline Bytes high_nibbles(Bytes x) { return shift_right(x, 4, 15); }
// bits 2s, 2s+1 of each byte, as bits 4, 5
template <int kStep>
inline Bytes crumbs(Bytes x) {
  const Bytes low = shift_right(x, 2 * kStep, 3);
  return each<BytePart>([&](int i) { return (BytePart)((U16Part)low.p[i] << 4); });
}

// Dot products of one row with weights 0..kMax of 16 outputs: start(), add() .., sum(). A product of 8 by 8 bits fits 16
// bits, which every vector unit multiplies: bytes 0 and 2 of an output's four are its two even lanes, 1 and 3 its odd ones.
// With 4-bit weights the sums of a group fit too (8·2·15·127 = 30 480); wider weights are summed in 32 bits step by step.
template <int kMax>
struct Dot {
  static constexpr bool kTakesZero = false, kStepwise = false;
  using Value = int8_t;
  static constexpr bool kNarrow = kMax <= 15;
  using Weights = Bytes;
  static Weights prepare(Bytes w) { return w; }
  I32Part total[kParts];  // narrow: two 16-bit sums in each lane
  void start(const Weights& w0, const Weights& w1, const int8_t* x) {
    for (int i = 0; i < kParts; ++i) total[i] = I32Part{};
    add(w0, w1, x);
  }
  void add(const Weights& w0, const Weights& w1, const int8_t* x) {
    add_step(w0, x);
    add_step(w1, x + 4);
  }
  I32 sum() const {
    return each<I32Part>([&](int i) { return kNarrow ? widen((I16Part)total[i]) : total[i]; });
  }
  void pin() { asm volatile("" : "+m"(total)); }  // as if the sums were used

 private:
  static I16Part pair(int8_t low, int8_t high) {
    return (I16Part)(I32Part{} + static_cast<int32_t>((low & 0xffff) | uint32_t(high) << 16));
  }
  static I32Part widen(I16Part x) { return ((I32Part)x << 16 >> 16) + ((I32Part)x >> 16); }
  void add_step(const Weights& w, const int8_t* x) {
    const I16Part x_even = pair(x[0], x[2]), x_odd = pair(x[1], x[3]);
    for (int i = 0; i < kParts; ++i) {
      const U16Part bytes = (U16Part)w.p[i];
      const I16Part even = (I16Part)(bytes & 0xff) * x_even, odd = (I16Part)(bytes >> 8) * x_odd;
      if (kNarrow) total[i] = (I32Part)((I16Part)total[i] + (even + odd));
      else total[i] += widen(even) + widen(odd);
    }
  }
};

// 16-bit rows (order 0, 2, 1, 3) with weights of up to 8 bits, a step at a time, in 32-bit lanes.
struct FineDot {
  static constexpr bool kTakesZero = false, kStepwise = true;
  using Value = int16_t;
  using Weights = Bytes;
  static Weights prepare(Bytes w) { return w; }
  static const int16_t* broadcast(const int16_t* x) { return x; }
  I32 total;
  void start(const Weights& w, const int16_t* x) {
    total = each<I32Part>([](int) { return I32Part{}; });
    add(w, x);
  }
  void add(const Weights& w, const int16_t* x) {
    for (int i = 0; i < kParts; ++i) {
      const I32Part v = (I32Part)w.p[i];
      total.p[i] += (v & 255) * x[0] + (v >> 16 & 255) * x[1] + (v >> 8 & 255) * x[2] + (v >> 24 & 255) * x[3];
    }
  }
  I32 sum() const { return total; }
};

}  // namespace twostep::TWOSTEP_ISA
