// 16 lanes as two AVX2 registers. The same names as in simd_avx512.h and simd_portable.h.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace twostep::TWOSTEP_ISA {

constexpr int kRows = 4;  // rows of one quantised tile: 8 accumulators, 2 weights, 1 broadcast of 16 registers
constexpr int kTileRows = kRows, kTilePanels = 1;  // of unpacked weights: no room for a second panel
constexpr int kFloatRows = 6;  // rows of one float tile: 12 accumulators, 2 operands, 1 broadcast
constexpr int kQueryRows = 6, kChains = 4;  // rows of a tile of attention; accumulators, beside which its vectors must fit too

struct F32 { __m256 a, b; };
struct I32 { __m256i a, b; };
struct Bytes { __m256i a, b; };  // 64 unsigned bytes: 16 outputs x 4 inputs

inline F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32 set1(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(int32_t* p, I32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline void store(float* p, F32 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline F32 operator+(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F32 operator-(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F32 operator*(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F32 operator/(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F32 fma(F32 x, F32 y, F32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F32 max(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F32 min(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F32 abs(F32 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// x where test >= bound, else 0
inline F32 keep_if_at_least(F32 x, F32 test, F32 bound) {
  return {_mm256_and_ps(x.a, _mm256_cmp_ps(test.a, bound.a, _CMP_GE_OQ)),
          _mm256_and_ps(x.b, _mm256_cmp_ps(test.b, bound.b, _CMP_GE_OQ))};
}
inline bool any_at_least(F32 x, F32 bound) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(x.a, bound.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, bound.b, _CMP_GE_OQ))) != 0;
}
inline I32 round_to_int(F32 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I32 operator+(I32 x, I32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I32 subtract(I32 x, int32_t y) {
  const __m256i v = _mm256_set1_epi32(y);
  return {_mm256_sub_epi32(x.a, v), _mm256_sub_epi32(x.b, v)};
}
inline F32 round_to_whole(F32 x) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
// x · 2^n for whole n and results in the normal range
inline F32 times_power_of_two(F32 x, F32 n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return x * F32{_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.a), bias), 23)),
                 _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.b), bias), 23))};
}

inline F32 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline F32 load_bf16(const uint16_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1)), 16))};
}
inline void store_f16(uint16_t* p, F32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline F32 load_u8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))))};
}
inline F32 load_i8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))))};
}
inline void store_i8(int8_t* p, I32 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

// In the order of fine values: 0, 2, 1, 3 of each four.
inline void store_i16_fine(int16_t* p, I32 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}

inline float horizontal_sum(F32 x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float horizontal_max(F32 x) {
  const __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
// Rows [i] merged to lane i by an operation: pairs are merged and their lanes interleaved, until 8 lie in one register.
template <class Row, class Merge>
inline F32 horizontal(Row&& row, Merge&& merge) {
  __m256 quarter[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 a = row(4 * i), b = row(4 * i + 1), c = row(4 * i + 2), d = row(4 * i + 3);
    const __m256d ab = _mm256_castps_pd(merge(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
    const __m256d cd = _mm256_castps_pd(merge(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
    quarter[i] = merge(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
  }
  const auto join = [&](__m256 x, __m256 y) { return merge(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31)); };
  return {join(quarter[0], quarter[1]), join(quarter[2], quarter[3])};
}
// Lane i: the greatest, or the sum, of rows[i].
inline F32 horizontal_maxima(const F32 (&rows)[16]) {
  const auto merge = [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); };
  return horizontal([&](int i) { return merge(rows[i].a, rows[i].b); }, merge);
}
inline I32 horizontal_sums(const I32 (&rows)[16]) {
  const auto merge = [](__m256 x, __m256 y) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
  };
  const F32 out = horizontal([&](int i) { return _mm256_castsi256_ps(_mm256_add_epi32(rows[i].a, rows[i].b)); }, merge);
  return {_mm256_castps_si256(out.a), _mm256_castps_si256(out.b)};
}

inline __m256i load_256(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Bytes load_bytes(const uint8_t* p) { return {load_256(p), load_256(p + 32)}; }
inline void store_bytes(uint8_t* p, Bytes x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
}
inline Bytes operator|(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Bytes low_nibbles(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Bytes high_nibbles(Bytes x) { return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
// bits 2s, 2s+1 of each byte, as bits 4, 5
template <int kStep>
inline Bytes crumbs(Bytes x) {
  constexpr int left = kStep < 2 ? 4 - 2 * kStep : 0, right = kStep > 2 ? 2 * kStep - 4 : 0;
  const __m256i mask = _mm256_set1_epi8(0x30);
  return {_mm256_and_si256(_mm256_srli_epi16(_mm256_slli_epi16(x.a, left), right), mask),
          _mm256_and_si256(_mm256_srli_epi16(_mm256_slli_epi16(x.b, left), right), mask)};
}

template <class Value>
inline __m256i broadcast_4(const Value* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}

// Keeps an accumulator in its register: GCC else computes all products of a group first, spills them and adds at the end
// (measured: a third of the speed).
inline void settle(__m256i& a, __m256i& b) { asm("" : "+x"(a), "+x"(b)); }

inline I32 widen_pairs(__m256i a, __m256i b) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)};
}

// Dot products of one row with weights 0..kMax of 16 outputs, two steps at a time: start(), add() .., sum().
// vpmaddubsw gives 16-bit sums of two products: with 4-bit weights eight of them fit (8·2·15·127 = 30 480), with
// 6-bit weights two (2·2·63·127 = 32 004), so the widening vpmaddwd is paid that seldom.
template <int kMax>
struct Dot;

template <>
struct Dot<15> {
  static constexpr bool kTakesZero = false, kStepwise = false;
  using Value = int8_t;
  using Weights = Bytes;
  static Weights prepare(Bytes w) { return w; }
  __m256i a, b;
  void start(const Weights& w0, const Weights& w1, const int8_t* x) {
    const __m256i x0 = broadcast_4(x);
    a = _mm256_maddubs_epi16(w0.a, x0);
    b = _mm256_maddubs_epi16(w0.b, x0);
    add_step(w1, broadcast_4(x + 4));
  }
  void add(const Weights& w0, const Weights& w1, const int8_t* x) {
    add_step(w0, broadcast_4(x));
    add_step(w1, broadcast_4(x + 4));
  }
  I32 sum() const { return widen_pairs(a, b); }
  void pin() { asm volatile("" : "+x"(a), "+x"(b)); }  // as if the sums were used

 private:
  void add_step(const Weights& w, __m256i x) {
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(w.a, x));
    b = _mm256_add_epi16(b, _mm256_maddubs_epi16(w.b, x));
    settle(a, b);
  }
};

template <>
struct Dot<63> {
  static constexpr bool kTakesZero = false, kStepwise = false;
  using Value = int8_t;
  using Weights = Bytes;
  static Weights prepare(Bytes w) { return w; }
  I32 total;
  void start(const Weights& w0, const Weights& w1, const int8_t* x) {
    total = pair(w0, w1, x);
    settle(total.a, total.b);
  }
  void add(const Weights& w0, const Weights& w1, const int8_t* x) {
    total = total + pair(w0, w1, x);
    settle(total.a, total.b);
  }
  I32 sum() const { return total; }

 private:
  static I32 pair(const Weights& w0, const Weights& w1, const int8_t* x) {
    const __m256i x0 = broadcast_4(x), x1 = broadcast_4(x + 4);
    return widen_pairs(_mm256_add_epi16(_mm256_maddubs_epi16(w0.a, x0), _mm256_maddubs_epi16(w1.a, x1)),
                       _mm256_add_epi16(_mm256_maddubs_epi16(w0.b, x0), _mm256_maddubs_epi16(w1.b, x1)));
  }
};

// 8-bit weights would overflow 16 bits as unsigned: |w| times x with w's sign does not (2·128·127 = 32 512).
template <>
struct Dot<255> {
  static constexpr bool kTakesZero = true;  // sums w - 128
  static constexpr bool kStepwise = false;
  using Value = int8_t;
  struct Weights { Bytes size, sign; };
  static Weights prepare(Bytes w) {
    const __m256i flip = _mm256_set1_epi8(-128);
    const Bytes sign{_mm256_xor_si256(w.a, flip), _mm256_xor_si256(w.b, flip)};
    return {{_mm256_abs_epi8(sign.a), _mm256_abs_epi8(sign.b)}, sign};
  }
  I32 total;
  void start(const Weights& w0, const Weights& w1, const int8_t* x) {
    total = step(w0, broadcast_4(x));
    total = total + step(w1, broadcast_4(x + 4));
    settle(total.a, total.b);
  }
  void add(const Weights& w0, const Weights& w1, const int8_t* x) {
    total = total + step(w0, broadcast_4(x));
    total = total + step(w1, broadcast_4(x + 4));
    settle(total.a, total.b);
  }
  I32 sum() const { return total; }

 private:
  static I32 step(const Weights& w, __m256i x) {
    return widen_pairs(_mm256_maddubs_epi16(w.size.a, _mm256_sign_epi8(x, w.sign.a)),
                       _mm256_maddubs_epi16(w.size.b, _mm256_sign_epi8(x, w.sign.b)));
  }
};

// 16-bit rows (order 0, 2, 1, 3) with weights of up to 8 bits, a step at a time: bytes widened to even and odd 16-bit lanes.
struct FineDot {
  static constexpr bool kTakesZero = false, kStepwise = true;
  using Value = int16_t;
  struct Weights { Bytes even, odd; };
  static Weights prepare(Bytes w) {
    const __m256i low = _mm256_set1_epi16(255);
    return {{_mm256_and_si256(w.a, low), _mm256_and_si256(w.b, low)}, {_mm256_srli_epi16(w.a, 8), _mm256_srli_epi16(w.b, 8)}};
  }
  struct Broadcast { __m256i even, odd; };
  static Broadcast broadcast(const int16_t* x) { return {broadcast_4(x), broadcast_4(x + 2)}; }
  I32 total;
  void start(const Weights& w, const Broadcast& x) {
    total = {_mm256_madd_epi16(w.even.a, x.even), _mm256_madd_epi16(w.even.b, x.even)};
    add_lanes(w.odd, x.odd);
  }
  void add(const Weights& w, const Broadcast& x) {
    add_lanes(w.even, x.even);
    add_lanes(w.odd, x.odd);
  }
  I32 sum() const { return total; }

 private:
  void add_lanes(const Bytes& w, __m256i x) {
    total = total + I32{_mm256_madd_epi16(w.a, x), _mm256_madd_epi16(w.b, x)};
    settle(total.a, total.b);
  }
};

}  // namespace twostep::TWOSTEP_ISA
