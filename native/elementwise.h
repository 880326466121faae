// Row-wise kernels: exponential, norm, quantisation, rotation, and what follows a panel. Included once an instruction set.
#pragma once
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

inline float exponential(float x) {
  float out[kPanel];
  store(out, exponential(set1(x)));
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

inline void store_fine(int16_t* to, I32 q) {
  int32_t values[kPanel];
  store(values, q);
  for (int i = 0; i < kPanel; i += 4) {
    to[i] = static_cast<int16_t>(values[i]);
    to[i + 1] = static_cast<int16_t>(values[i + 2]);
    to[i + 2] = static_cast<int16_t>(values[i + 1]);
    to[i + 3] = static_cast<int16_t>(values[i + 3]);
  }
}

// One row to a record, a fine record, or both. 8 bits: q = round(x / scale), scale = max|x| / 127 of the group, 0 where that
// is not a normal number. 16 bits: with scale / 254, 254 · q for the 8-bit q, plus what it left.
inline void quantise(const float* x, int inputs, uint8_t* record, uint8_t* fine_record) {
  for (int g = 0; g < inputs / kGroup; ++g) {
    const F32 a = load(x + g * kGroup), b = load(x + g * kGroup + kPanel);
    float scale = horizontal_max(max(abs(a), abs(b))) / 127.0f;
    if (scale < std::numeric_limits<float>::min()) scale = 0;  // but not NaN: it has to reach the logits and be told
    const F32 divisor = set1(scale > 0 ? scale : std::numeric_limits<float>::infinity());
    const I32 qa = round_to_int(a / divisor), qb = round_to_int(b / divisor);
    if (record) {
      const Record<int8_t> to(record, inputs);
      store_i8(to.values + g * kGroup, qa);
      store_i8(to.values + g * kGroup + kPanel, qb);
      to.put_sums(g, scale, horizontal_sum(qa), horizontal_sum(qb));
    }
    if (fine_record) {
      const Record<int16_t> to(fine_record, inputs);
      const F32 step = set1(scale > 0 ? scale / 254.0f : std::numeric_limits<float>::infinity());
      const I32 fa = round_to_int(fma(to_float(qa), set1(254.0f), (a - to_float(qa) * set1(scale)) / step));
      const I32 fb = round_to_int(fma(to_float(qb), set1(254.0f), (b - to_float(qb) * set1(scale)) / step));
      store_fine(to.values + g * kGroup, fa);
      store_fine(to.values + g * kGroup + kPanel, fb);
      to.put_sums(g, scale / 254.0f, horizontal_sum(fa), horizontal_sum(fb));
    }
  }
}

inline void put(const float* panel, int rows, int count, const float* bias, float* out, size_t stride) {
  for (int r = 0; r < rows; ++r, panel += kPanel, out += stride)
    for (int i = 0; i < count; ++i) out[i] = bias ? panel[i] + bias[i] : panel[i];
}

inline void add(const float* panel, int rows, int count, float* out, size_t stride) {
  for (int r = 0; r < rows; ++r, panel += kPanel, out += stride)
    for (int i = 0; i < count; ++i) out[i] += panel[i];
}

template <class F>
inline void gated_by(F&& activation, const float* gate, const float* up, int rows, int count, float* out, size_t stride) {
  float whole[kPanel];
  for (int r = 0; r < rows; ++r, gate += kPanel, up += kPanel, out += stride) {
    store(whole, activation(load(gate)) * load(up));
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
