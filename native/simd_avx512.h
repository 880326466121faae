// 16 lanes as one AVX-512 register, 8-bit dot products by VNNI. The same names as in simd_avx2.h and simd_portable.h.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace twostep::TWOSTEP_ISA {

constexpr int kRows = 12;  // rows of one tile of packed weights: 12 integer and 12 float accumulators, weights, scales
// Of unpacked weights: as many accumulators, and a row's values are broadcast once for two panels.
constexpr int kTileRows = 6, kTilePanels = 2;
constexpr int kFloatRows = 12;  // rows of one float tile: enough chains for two FMAs of latency 4 a cycle
constexpr int kQueryRows = 6, kChains = 24;  // rows and accumulators of a tile of attention, beside 4 vectors and a broadcast

struct F32 { __m512 v; };
struct I32 { __m512i v; };
struct Bytes { __m512i v; };  // 64 unsigned bytes: 16 outputs x 4 inputs

inline F32 zero() { return {_mm512_setzero_ps()}; }
inline F32 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(int32_t* p, I32 x) { _mm512_storeu_si512(p, x.v); }
inline void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
inline F32 operator+(F32 x, F32 y) { return {_mm512_add_ps(x.v, y.v)}; }
inline F32 operator-(F32 x, F32 y) { return {_mm512_sub_ps(x.v, y.v)}; }
inline F32 operator*(F32 x, F32 y) { return {_mm512_mul_ps(x.v, y.v)}; }
inline F32 operator/(F32 x, F32 y) { return {_mm512_div_ps(x.v, y.v)}; }
inline F32 fma(F32 x, F32 y, F32 z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
inline F32 max(F32 x, F32 y) { return {_mm512_max_ps(x.v, y.v)}; }
inline F32 min(F32 x, F32 y) { return {_mm512_min_ps(x.v, y.v)}; }
inline F32 abs(F32 x) { return {_mm512_abs_ps(x.v)}; }
// x where test >= bound, else 0
inline F32 keep_if_at_least(F32 x, F32 test, F32 bound) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test.v, bound.v, _CMP_GE_OQ), x.v)};
}
inline bool any_at_least(F32 x, F32 bound) { return _mm512_cmp_ps_mask(x.v, bound.v, _CMP_GE_OQ) != 0; }
inline I32 round_to_int(F32 x) { return {_mm512_cvtps_epi32(x.v)}; }
inline F32 to_float(I32 x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline I32 operator+(I32 x, I32 y) { return {_mm512_add_epi32(x.v, y.v)}; }
inline I32 subtract(I32 x, int32_t y) { return {_mm512_sub_epi32(x.v, _mm512_set1_epi32(y))}; }
inline F32 round_to_whole(F32 x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x · 2^n for whole n and results in the normal range
inline F32 times_power_of_two(F32 x, F32 n) { return {_mm512_scalef_ps(x.v, n.v)}; }

inline F32 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F32 load_bf16(const uint16_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16))};
}
inline void store_f16(uint16_t* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline F32 load_u8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F32 load_i8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void store_i8(int8_t* p, I32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(x.v));
}

// In the order of fine values: 0, 2, 1, 3 of each four.
inline void store_i16_fine(int16_t* p, I32 x) {
  const __m256i words = _mm512_cvtsepi32_epi16(x.v);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}

inline float horizontal_sum(F32 x) { return _mm512_reduce_add_ps(x.v); }
inline float horizontal_max(F32 x) { return _mm512_reduce_max_ps(x.v); }

// Rows [i] merged to lane i by an operation: pairs are merged and their lanes interleaved, until all lie in one vector.
template <class Merge>
inline __m512 horizontal(const __m512 (&rows)[16], Merge&& merge) {
  __m512 quarter[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 a = rows[4 * i], b = rows[4 * i + 1], c = rows[4 * i + 2], d = rows[4 * i + 3];
    const __m512d ab = _mm512_castps_pd(merge(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(merge(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    quarter[i] = merge(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }
  const auto join = [&](__m512 x, __m512 y) { return merge(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd)); };
  return join(join(quarter[0], quarter[1]), join(quarter[2], quarter[3]));
}
// Lane i: the greatest, or the sum, of rows[i].
inline F32 horizontal_maxima(const F32 (&rows)[16]) {
  __m512 v[16];
  for (int i = 0; i < 16; ++i) v[i] = rows[i].v;
  return {horizontal(v, [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); })};
}
inline I32 horizontal_sums(const I32 (&rows)[16]) {
  __m512 v[16];
  for (int i = 0; i < 16; ++i) v[i] = _mm512_castsi512_ps(rows[i].v);
  return {_mm512_castps_si512(horizontal(v, [](__m512 x, __m512 y) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_castps_si512(y)));
  }))};
}

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x.v); }
inline Bytes operator|(Bytes x, Bytes y) { return {_mm512_or_si512(x.v, y.v)}; }
inline Bytes low_nibbles(Bytes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes x) { return low_nibbles({_mm512_srli_epi16(x.v, 4)}); }
// bits 2s, 2s+1 of each byte, as bits 4, 5
template <int kStep>
inline Bytes crumbs(Bytes x) {
  constexpr int left = kStep < 2 ? 4 - 2 * kStep : 0, right = kStep > 2 ? 2 * kStep - 4 : 0;
  return {_mm512_and_si512(_mm512_srli_epi16(_mm512_slli_epi16(x.v, left), right), _mm512_set1_epi8(0x30))};
}

template <class Value>
inline __m512i broadcast_4(const Value* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}

// Dot products of one row with weights 0..kMax of 16 outputs, a step at a time: start(), add() .., sum(). vpdpbusd sums in
// 32 bits whatever the width.
template <int kMax>
struct Dot {
  static constexpr bool kTakesZero = false, kStepwise = true;
  using Value = int8_t;
  using Weights = Bytes;
  using Broadcast = __m512i;
  static Weights prepare(Bytes w) { return w; }
  static Broadcast broadcast(const int8_t* x) { return broadcast_4(x); }
  __m512i total;
  void start(const Weights& w, Broadcast x) { total = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w.v, x); }
  void add(const Weights& w, Broadcast x) { total = _mm512_dpbusd_epi32(total, w.v, x); }
  I32 sum() const { return {total}; }
  void pin() { asm volatile("" : "+v"(total)); }  // as if the sums were used
};

// 16-bit rows (order 0, 2, 1, 3) with weights of up to 8 bits: bytes widened to even and odd 16-bit lanes.
struct FineDot {
  static constexpr bool kTakesZero = false, kStepwise = true;
  using Value = int16_t;
  struct Weights { __m512i even, odd; };
  struct Broadcast { __m512i even, odd; };
  static Weights prepare(Bytes w) { return {_mm512_and_si512(w.v, _mm512_set1_epi16(255)), _mm512_srli_epi16(w.v, 8)}; }
  static Broadcast broadcast(const int16_t* x) { return {broadcast_4(x), broadcast_4(x + 2)}; }
  __m512i total;
  void start(const Weights& w, const Broadcast& x) {
    total = _mm512_setzero_si512();
    add(w, x);
  }
  void add(const Weights& w, const Broadcast& x) {
    total = _mm512_dpwssd_epi32(total, w.even, x.even);
    total = _mm512_dpwssd_epi32(total, w.odd, x.odd);
  }
  I32 sum() const { return {total}; }
};

}  // namespace twostep::TWOSTEP_ISA
