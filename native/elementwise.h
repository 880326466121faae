// Row-wise kernels: exponential, norm, quantisation, rotation, and what follows a panel. Included once an instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"

namespace twostep::TWOSTEP_ISA {

constexpr float kExpLowest = -87.0f;  // below it exp is taken as exactly 0

// e^x for x <= 88; 0 below kExpLowest, -inf included. Cody-Waite reduction and a degree-6 Taylor polynomial on
// |r| <= ln(2)/2: relative error about 2 units of the last place.
inline F32 exponential(F32 x) {
  const F32 clamped = min(max(x, set1(kExpLowest)), set1(88.0f));
  const F32 n = round_to_whole(clamped * set1(1.44269504f));
  F32 r = fma(n, set1(-0.693145752f), clamped);
  r = fma(n, set1(-1.42860677e-6f), r);
  F32 p = fma(r, set1(1.0f / 720), set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return keep_if_at_least(times_power_of_two(p, n), x, set1(kExpLowest));
}

// 2^x for x <= 0, exactly 1 at 0; 0 below kPowerLowest and where x is no number. A minimax polynomial of degree 5 on
// |r| <= 1/2: relative error at most 1.6e-7, rounding included. Fewer than half the instructions of e^x.
constexpr float kPowerLowest = -125.0f;
inline F32 power_of_two(F32 x) {
  const F32 n = round_to_whole(x), r = x - n;
  F32 p = fma(r, set1(0.0013269406f), set1(0.00967129413f));
  p = fma(p, r, set1(0.0555071123f));
  p = fma(p, r, set1(0.240222469f));
  p = fma(p, r, set1(0.693147004f));
  p = fma(p, r, set1(1.0f));
  return keep_if_at_least(times_power_of_two(p, n), x, set1(kPowerLowest));
}

inline float power_of_two(float x) {
  float out[kPanel];
  store(out, power_of_two(set1(x)));
  return out[0];
}

inline F32 silu(F32 x) { return x / (set1(1.0f) + exponential(zero() - x)); }

// GELU by its tanh approximation: x · (1 + tanh(u)) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) · (x + 0.044715 · x³).
inline F32 gelu_tanh(F32 x) {
  const F32 minus_2u = x * fma(x * x, set1(-2 * 0.797884561f * 0.044715f), set1(-2 * 0.797884561f));
  return x / (set1(1.0f) + exponential(minus_2u));
}

// out = x / sqrt(mean(x²) + eps) · weight; any length.
inline void rms_norm(const float* x, const float* weight, float eps, int inputs, float* out) {
  const int whole = inputs / kPanel * kPanel;
  F32 squares = zero();
  for (int i = 0; i < whole; i += kPanel) squares = fma(load(x + i), load(x + i), squares);
  float sum = horizontal_sum(squares);
  for (int i = whole; i < inputs; ++i) sum += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(inputs) + eps);
  for (int i = 0; i < whole; i += kPanel) store(out + i, load(x + i) * set1(factor) * load(weight + i));
  for (int i = whole; i < inputs; ++i) out[i] = x[i] * factor * weight[i];
}

// The parts of a record of QuantRows.
template <class Value>
struct Record {
  Value* values;
  float *scales, *scaled_sums;
  int32_t* half_sums;
  Record(uint8_t* at, int inputs) {
    values = reinterpret_cast<Value*>(at);
    scales = reinterpret_cast<float*>(values + inputs);
    scaled_sums = scales + inputs / kGroup;
    half_sums = reinterpret_cast<int32_t*>(scaled_sums + inputs / kGroup);
  }
  void put_sums(int g, float scale, int32_t first_half, int32_t second_half) const {
    half_sums[2 * g] = first_half;
    half_sums[2 * g + 1] = second_half;
    scales[g] = scale;
    scaled_sums[g] = scale * static_cast<float>(first_half + second_half);
  }
};

constexpr int kAtOnce = 16;  // groups of a row that are quantised together: their maxima fill a vector

// Scales of 16 groups from their largest sizes: a 127th, 0 where that is not a normal number (but NaN stays: it has to reach the
// logits and be told). `inverse`: 1 / scale, or 0. `fine`: a 254th of the scale.
struct Scales {
  float scale[kAtOnce], inverse[kAtOnce], fine[kAtOnce];
  explicit Scales(F32 largest) {
    const F32 lowest = set1(std::numeric_limits<float>::min()), s = largest / set1(127.0f);
    store(scale, keep_if_at_least(s, s, lowest) + (s - s));
    store(inverse, keep_if_at_least(set1(1.0f) / s, s, lowest));
    store(fine, load(scale) / set1(254.0f));
  }
  // What dividing by gives 0 where there is no scale.
  static F32 divisor(float scale) { return set1(scale > 0 ? scale : std::numeric_limits<float>::infinity()); }
};

// round(quotient), given the quotient almost exactly. Only within `doubt` of a half can it have been rounded to the other side:
// there the division decides, which is slow.
template <class Divide>
TWOSTEP_INLINE inline I32 round_quotient(F32 almost, float doubt, Divide&& divide) {
  const I32 rounded = round_to_int(almost);
  if (__builtin_expect(any_at_least(abs(almost - to_float(rounded)), set1(0.5f - doubt)), 0)) return round_to_int(divide());
  return rounded;
}

// q = round(x / scale): |q| <= 127, and the product with 1 / scale is off by less than 1e-4.
TWOSTEP_INLINE inline I32 quantised(F32 x, const Scales& scales, int g) {
  return round_quotient(x * set1(scales.inverse[g]), 1e-4f, [&] { return x / Scales::divisor(scales.scale[g]); });
}

// 254 · q plus what q left, in steps of a 254th. In float32 a sum of up to 32 258 is off by up to 2^-10. Where a step is no
// normal number the product says nothing of the quotient.
TWOSTEP_INLINE inline I32 finely_quantised(F32 x, I32 q, const Scales& scales, int g) {
  const F32 steps = set1(254.0f), whole = to_float(q), left = x - whole * set1(scales.scale[g]);
  const float doubt = scales.fine[g] < std::numeric_limits<float>::min() ? 0.5f : 0.0012f;
  return round_quotient(fma(whole, steps, left * set1(scales.inverse[g]) * steps), doubt,
                        [&] { return fma(whole, steps, left / Scales::divisor(scales.fine[g])); });
}

inline void store_values(int8_t* to, I32 q) { store_i8(to, q); }
inline void store_values(int16_t* to, I32 q) { store_i16_fine(to, q); }

// `count` groups from `first` on, two vectors each: to a record, with their sums.
template <class Value>
inline void put_groups(const Record<Value>& to, int first, int count, I32 (&values)[kAtOnce], const float* scales) {
  for (int i = 0; i < 2 * count; ++i) store_values(to.values + first * kGroup + i * kPanel, values[i]);
  for (int i = 2 * count; i < kAtOnce; ++i) values[i] = values[0];
  int32_t sums[kAtOnce];
  store(sums, horizontal_sums(values));
  for (int g = 0; g < count; ++g) to.put_sums(first + g, scales[g], sums[2 * g], sums[2 * g + 1]);
}

// Eight groups or fewer of a row, from `first` on, to its records. Their scales begin at `of`.
inline void quantise_groups(const float* x, int first, int count, const Scales& scales, int of, const Record<int8_t>* coarse,
                            const Record<int16_t>* fine) {
  x += first * kGroup;
  I32 q[kAtOnce], f[kAtOnce];
  for (int i = 0; i < 2 * count; ++i) q[i] = quantised(load(x + i * kPanel), scales, of + i / 2);
  if (fine) {
    for (int i = 0; i < 2 * count; ++i) f[i] = finely_quantised(load(x + i * kPanel), q[i], scales, of + i / 2);
    put_groups(*fine, first, count, f, scales.fine + of);
  }
  if (coarse) put_groups(*coarse, first, count, q, scales.scale + of);
}

// One row to a record, a fine record, or both. 8 bits: q = round(x / scale), scale = max|x| / 127 of the group, 0 where that
// is not a normal number. 16 bits: with scale / 254, 254 · q for the 8-bit q, plus what it left.
inline void quantise(const float* x, int inputs, uint8_t* record, uint8_t* fine_record) {
  const int groups = inputs / kGroup;
  const Record<int8_t> coarse(record, inputs);
  const Record<int16_t> fine(fine_record, inputs);
  for (int first = 0; first < groups; first += kAtOnce) {
    const int all = std::min(kAtOnce, groups - first);
    F32 largest[kAtOnce];
    for (int g = 0; g < kAtOnce; ++g) {
      const float* at = x + (first + std::min(g, all - 1)) * kGroup;
      largest[g] = max(abs(load(at)), abs(load(at + kPanel)));
    }
    const Scales scales(horizontal_maxima(largest));
    for (int of = 0; of < all; of += kAtOnce / 2)
      quantise_groups(x, first + of, std::min(kAtOnce / 2, all - of), scales, of, record ? &coarse : nullptr, fine_record ? &fine : nullptr);
  }
}

inline void put(const float* panel, int rows, int count, const float* bias, float* out, size_t stride) {
  const bool whole = count == kPanel;
  const F32 b = bias && whole ? load(bias) : zero();
  for (int r = 0; r < rows; ++r, panel += kPanel, out += stride) {
    if (whole) store(out, bias ? load(panel) + b : load(panel));
    else for (int i = 0; i < count; ++i) out[i] = bias ? panel[i] + bias[i] : panel[i];
  }
}

inline void add(const float* panel, int rows, int count, float* out, size_t stride) {
  for (int r = 0; r < rows; ++r, panel += kPanel, out += stride) {
    if (count == kPanel) store(out, load(out) + load(panel));
    else for (int i = 0; i < count; ++i) out[i] += panel[i];
  }
}

template <class F>
inline void gated_by(F&& activation, const float* gate, const float* up, int rows, int count, float* out, size_t stride) {
  float whole[kPanel];
  for (int r = 0; r < rows; ++r, gate += kPanel, up += kPanel, out += stride) {
    const F32 product = activation(load(gate)) * load(up);
    if (count == kPanel) {
      store(out, product);
      continue;
    }
    store(whole, product);
    for (int i = 0; i < count; ++i) out[i] = whole[i];
  }
}

inline void gated(Activation activation, const float* gate, const float* up, int rows, int count, float* out, size_t stride) {
  switch (activation) {
    case Activation::Silu: return gated_by([](F32 x) TWOSTEP_INLINE { return silu(x); }, gate, up, rows, count, out, stride);
    case Activation::GeluTanh: return gated_by([](F32 x) TWOSTEP_INLINE { return gelu_tanh(x); }, gate, up, rows, count, out, stride);
  }
}

inline void rope(float* head, const float* cos_sin, int dim, float factor) {
  const int half = dim / 2;
  const float *cosine = cos_sin, *sine = cos_sin + half;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = (a * cosine[i] - b * sine[i]) * factor;
    head[i + half] = (b * cosine[i] + a * sine[i]) * factor;
  }
}

}  // namespace twostep::TWOSTEP_ISA
