#include "sampling_scan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

// Compiled once for any machine and once for AVX2, chosen when the library is loaded. The two agree bit for bit.
#if defined(__x86_64__) && defined(__GLIBC__)
#define TWOSTEP_PASS __attribute__((target_clones("avx2", "default")))
#else
#define TWOSTEP_PASS
#endif
#define TWOSTEP_INLINE inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed only to functions that are always inlined

namespace twostep::scan {
namespace {

constexpr int kLanes = 8;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
typedef float Floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(32), aligned(4), may_alias));

TWOSTEP_INLINE Floats& lanes(float* p) { return *reinterpret_cast<Floats*>(p); }
TWOSTEP_INLINE const Floats& lanes(const float* p) { return *reinterpret_cast<const Floats*>(p); }

// exp(z) for z <= 0, error below 2 units in the last place; 0 where the result would be subnormal.
// z = n ln 2 + r, |r| <= ln 2 / 2, after Cody and Waite; exp(r) by its Taylor series; 2^n by adding n to the exponent.
TWOSTEP_INLINE Floats exp_lanes(const Floats& z) {
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low bits
  const Floats shifted = z * 1.44269504f + kRound;
  const Floats n = shifted - kRound;
  const Floats r = (z - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  const Floats scaled = (Floats)((Bits)p + ((Bits)shifted << 23));
  return z < -87.0f ? Floats{} : scaled;
}

TWOSTEP_INLINE float sum_lanes(const Floats& v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

TWOSTEP_INLINE int sum_lanes(const Ints& v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

TWOSTEP_INLINE float max_lanes(const Floats& v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

TWOSTEP_INLINE Tally tally_elements(const float* x, const float* w, float floor) {
  Floats mass{};
  Ints count{};
  for (int i = 0; i < kBlock; i += kLanes) {
    const Floats weight = lanes(x + i) >= floor ? lanes(w + i) : Floats{};
    mass += weight;
    count -= weight > 0.0f;
  }
  return {sum_lanes(count), sum_lanes(mass)};
}

}  // namespace

void load(Row& row, const float* logits, int vocab) {
  std::memcpy(row.logit, logits, sizeof(float) * vocab);
  std::fill(row.logit + vocab, row.logit + row.blocks * kBlock, -kInfinity);
}

TWOSTEP_PASS void forbid(Row& row, const uint32_t* mask, int vocab) {
  const Ints bit = {1, 2, 4, 8, 16, 32, 64, 128};
  for (int i = 0; i < vocab; i += kLanes) {
    const int32_t eight = mask[i / 32] >> (i % 32) & 255;
    Floats& x = lanes(row.logit + i);
    x = (bit & eight) != 0 ? x : Floats{} - kInfinity;
  }
}

TWOSTEP_PASS bool find_maxima(Row& row) {
  Ints finite = Ints{} - 1;
  for (int block = 0; block < row.blocks; ++block) {
    const float* x = row.logit + block * kBlock;
    Floats highest = Floats{} - kInfinity;
    for (int i = 0; i < kBlock; i += kLanes) {
      highest = lanes(x + i) > highest ? lanes(x + i) : highest;
      finite &= lanes(x + i) < kInfinity;
    }
    row.highest[block] = max_lanes(highest);
  }
  return sum_lanes(finite) == -kLanes;
}

TWOSTEP_PASS double sum_of_exp(const Row& row, float highest) {
  double total = 0;
  for (int block = 0; block < row.blocks; ++block) {
    const float* x = row.logit + block * kBlock;
    Floats sum{};
    for (int i = 0; i < kBlock; i += kLanes) sum += exp_lanes(lanes(x + i) - highest);
    total += sum_lanes(sum);
  }
  return total;
}

TWOSTEP_PASS void weigh(Row& row, float highest, float inverse_temperature, float floor) {
  for (int block = 0; block < row.blocks; ++block) {
    if (row.highest[block] < floor) continue;
    const float* x = row.logit + block * kBlock;
    float* w = row.weight + block * kBlock;
    for (int i = 0; i < kBlock; i += kLanes) {
      const Floats weight = exp_lanes((lanes(x + i) - highest) * inverse_temperature);
      lanes(w + i) = lanes(x + i) >= floor ? weight : Floats{};
    }
  }
}

TWOSTEP_PASS int count_from(const Row& row, float floor) {
  Ints count{};
  for (int block = 0; block < row.blocks; ++block) {
    if (row.highest[block] < floor) continue;
    const float* x = row.logit + block * kBlock;
    for (int i = 0; i < kBlock; i += kLanes) count -= lanes(x + i) >= floor;
  }
  return sum_lanes(count);
}

TWOSTEP_PASS Tally tally_from(const Row& row, float floor) {
  Tally total{0, 0};
  for (int block = 0; block < row.blocks; ++block) {
    if (row.highest[block] < floor) continue;
    const Tally part = tally_elements(row.logit + block * kBlock, row.weight + block * kBlock, floor);
    total.count += part.count;
    total.mass += part.mass;
  }
  return total;
}

TWOSTEP_PASS Tally tally_block(const Row& row, int block, float floor) {
  return tally_elements(row.logit + block * kBlock, row.weight + block * kBlock, floor);
}

TWOSTEP_PASS void trim(Row& row, float floor, float smallest_weight) {
  for (int block = 0; block < row.blocks; ++block) {
    if (row.highest[block] < floor) continue;
    float* w = row.weight + block * kBlock;
    for (int i = 0; i < kBlock; i += kLanes) lanes(w + i) = lanes(w + i) >= smallest_weight ? lanes(w + i) : Floats{};
  }
}

TWOSTEP_PASS int count_before(const float* logits, int vocab, int token) {
  const float own = logits[token];
  int count = 0;
  for (int i = 0; i < token; ++i) count += logits[i] >= own;
  for (int i = token + 1; i < vocab; ++i) count += logits[i] > own;
  return count;
}

}  // namespace twostep::scan
