// Linear layers, a panel of 16 outputs at a time, for any number of rows. Included once for each instruction set.
//
// Arithmetic of one output of one row, the same for any number of rows and any blocking (the bitwise rule of the design):
//   acc = 0;  for each group (or half group) in ascending order:  acc = fma(float(integer dot product), scale · row scale, acc)
//                                       with minima also:         acc = fma(min, row scale · sum of the row's group, acc)
#pragma once
#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>

#include "formats.h"
#include "kernels.h"

namespace twostep::TWOSTEP_ISA {

// The compiler must see through the lambdas of a tile, or accumulators live in memory (measured: half the speed).
#define TWOSTEP_INLINE __attribute__((always_inline))

template <int kCount, class F, int... kIndex>
TWOSTEP_INLINE inline void unroll_indices(F&& f, std::integer_sequence<int, kIndex...>) {
  (f(std::integral_constant<int, kIndex>{}), ...);
}
// f(0), f(1), ... with each index a compile-time constant
template <int kCount, class F>
TWOSTEP_INLINE inline void unroll(F&& f) {
  unroll_indices<kCount>(f, std::make_integer_sequence<int, kCount>{});
}

// What each format's groups hold: how to read two steps of weights, scales of 16 outputs, and minima.
template <Format kFormat>
struct Traits;
template <>
struct Traits<Format::Q4_0> {
  static constexpr int kMax = 15, kZero = 8, kHalves = 1;
  static constexpr bool kHasMin = false;
  static F32 scale(const uint8_t* group, const uint8_t*, int) { return load_f16(reinterpret_cast<const uint16_t*>(group + 256)); }
  static F32 min(const uint8_t*, const uint8_t*) { return zero(); }
};
template <>
struct Traits<Format::Q4_1> {
  static constexpr int kMax = 15, kZero = 0, kHalves = 1;
  static constexpr bool kHasMin = true;
  static F32 scale(const uint8_t* group, const uint8_t*, int) { return load_f16(reinterpret_cast<const uint16_t*>(group + 256)); }
  static F32 min(const uint8_t* group, const uint8_t*) { return load_f16(reinterpret_cast<const uint16_t*>(group + 288)); }
};
template <>
struct Traits<Format::Q4_K> {
  static constexpr int kMax = 15, kZero = 0, kHalves = 1;
  static constexpr bool kHasMin = true;
  static F32 scale(const uint8_t* group, const uint8_t* header, int) {
    return load_f16(reinterpret_cast<const uint16_t*>(header)) * load_u8(group + 256);
  }
  static F32 min(const uint8_t* group, const uint8_t* header) {
    return zero() - load_f16(reinterpret_cast<const uint16_t*>(header + 32)) * load_u8(group + 272);
  }
};
template <>
struct Traits<Format::Q5_0> {
  static constexpr int kMax = 63, kZero = 16, kHalves = 1;
  static constexpr bool kHasMin = false;
  static F32 scale(const uint8_t* group, const uint8_t*, int) { return load_f16(reinterpret_cast<const uint16_t*>(group + 384)); }
  static F32 min(const uint8_t*, const uint8_t*) { return zero(); }
};
template <>
struct Traits<Format::Q6_K> {
  static constexpr int kMax = 63, kZero = 32, kHalves = 2;
  static constexpr bool kHasMin = false;
  static F32 scale(const uint8_t* group, const uint8_t* header, int half) {
    return load_f16(reinterpret_cast<const uint16_t*>(header)) * load_i8(group + 384 + 16 * half);
  }
  static F32 min(const uint8_t*, const uint8_t*) { return zero(); }
};
template <>
struct Traits<Format::Q8_0> {
  static constexpr int kMax = 255, kZero = 128, kHalves = 1;
  static constexpr bool kHasMin = false;
  static F32 scale(const uint8_t* group, const uint8_t*, int) { return load_f16(reinterpret_cast<const uint16_t*>(group + 512)); }
  static F32 min(const uint8_t*, const uint8_t*) { return zero(); }
};

// Steps 2·kPair and 2·kPair + 1 of a packed group.
template <int kMax, int kPair>
inline std::pair<Bytes, Bytes> unpack_pair(const uint8_t* group) {
  if constexpr (kMax == 255) {
    return {load_bytes(group + 128 * kPair), load_bytes(group + 128 * kPair + 64)};
  } else {
    const Bytes nibbles = load_bytes(group + 64 * kPair);
    if constexpr (kMax == 15) return {low_nibbles(nibbles), high_nibbles(nibbles)};
    const Bytes high = load_bytes(group + 256 + 64 * (kPair / 2));
    constexpr int step = 2 * kPair % 4;
    return {low_nibbles(nibbles) | crumbs<step>(high), high_nibbles(nibbles) | crumbs<step + 1>(high)};
  }
}

constexpr int kFetchAhead = 4096;  // bytes

// Weights as they lie in the panel, unpacked as they are used: for few rows.
template <Format kFormat>
struct Packed : Traits<kFormat> {
  using T = Traits<kFormat>;
  const uint8_t* panel;
  explicit Packed(const uint8_t* p = nullptr) : panel(p) {}
  struct Group {
    const uint8_t *group, *header;
    template <int kPair>
    std::pair<Bytes, Bytes> pair() const { return unpack_pair<T::kMax, kPair>(group); }
    F32 scale(int half) const { return T::scale(group, header, half); }
    F32 min() const { return T::min(group, header); }
  };
  Group at(int g) const {
    const Layout layout = layout_of(kFormat);
    const uint8_t* super = panel + size_t(g / kSuper) * (kSuper * layout.group_bytes + layout.super_bytes);
    return {super + layout.super_bytes + g % kSuper * layout.group_bytes, super};
  }
  // With one row the panel streams through; a core's own foresight leaves a quarter of the bandwidth unused (measured).
  void fetch_ahead(int g, int) const {
    const uint8_t* ahead = at(g).group + kFetchAhead;
    for (int i = 0; i < layout_of(kFormat).group_bytes; i += 64) __builtin_prefetch(ahead + i);
  }
};

// Lines t and t + 4 of the group, t the number of the tile: four tiles fetch a group of up to 512 bytes.
template <Format kFormat>
inline void fetch_lines(const Packed<kFormat>& panel, int g, int line) {
  if (line >= 4) return;
  const uint8_t* group = panel.at(g).group;
  __builtin_prefetch(group + 64 * line, 0, 2);
  __builtin_prefetch(group + 64 * (line + 4), 0, 2);
}

// Weights unpacked beforehand into a scratch of `first`..: one byte a weight, float scales and minima: for many rows.
template <Format kFormat>
struct Unpacked : Traits<kFormat> {
  using T = Traits<kFormat>;
  static constexpr int kBytes = 512 + 64 * (T::kHalves + T::kHasMin);
  uint8_t* scratch;
  int first;
  Packed<kFormat> next;  // the panel that will be unpacked after this one
  Unpacked() = default;
  Unpacked(const Packed<kFormat>& from, const Packed<kFormat>& next_panel, int g0, int g1, uint8_t* into)
      : scratch(into), first(g0), next(next_panel) {
    for (int g = g0; g < g1; ++g) unpack(from.at(g), scratch + size_t(g - g0) * kBytes);
  }
  static void unpack(const typename Packed<kFormat>::Group& from, uint8_t* to) {
    unroll<4>([&](auto p) TWOSTEP_INLINE {
      const auto [w0, w1] = from.template pair<p>();
      store_bytes(to + 128 * p, w0);
      store_bytes(to + 128 * p + 64, w1);
    });
    for (int h = 0; h < T::kHalves; ++h) store(reinterpret_cast<float*>(to + 512 + 64 * h), from.scale(h));
    if (T::kHasMin) store(reinterpret_cast<float*>(to + 512 + 64 * T::kHalves), from.min());
  }
  struct Group {
    const uint8_t* at;
    template <int kPair>
    std::pair<Bytes, Bytes> pair() const { return {load_bytes(at + 128 * kPair), load_bytes(at + 128 * kPair + 64)}; }
    F32 scale(int half) const { return load(reinterpret_cast<const float*>(at + 512 + 64 * half)); }
    F32 min() const { return load(reinterpret_cast<const float*>(at + 512 + 64 * T::kHalves)); }
  };
  Group at(int g) const { return {scratch + size_t(g - first) * kBytes}; }
  // While one panel is computed the next one comes from memory, a line or two with each group: all at once would stall.
  void fetch_ahead(int g, int tile) const { fetch_lines<kFormat>(next, g, tile); }
};

// Rows of 8-bit or 16-bit values meet the weights in different instructions.
template <int kMax, bool kFine>
using DotOf = std::conditional_t<kFine, FineDot, Dot<kMax>>;

// One part of the records of kCount rows, group by group. Three rows share a pointer, the others are reached by the stride:
// a pointer a row and part does not fit the general registers (measured: 36 reloads a group).
template <int kCount>
struct RowParts {
  static constexpr int kPointers = (kCount + 2) / 3;
  const uint8_t* first[kPointers];
  size_t stride;
  RowParts(const uint8_t* base, size_t row_stride) : stride(row_stride) {
    for (int i = 0; i < kPointers; ++i) first[i] = base + 3 * i * row_stride;
  }
  template <class T, int kRow>
  TWOSTEP_INLINE const T* row() const { return reinterpret_cast<const T*>(first[kRow / 3] + kRow % 3 * stride); }
  TWOSTEP_INLINE void advance(size_t bytes) {
    unroll<kPointers>([&](auto i) TWOSTEP_INLINE {
      first[i] += bytes;
      asm("" : "+r"(first[i]));  // else the compiler makes a pointer a row of it
    });
  }
};

// From the sum of unsigned weights to that of (q - zero), given the row's sums of the group's two halves.
template <class Source, class D, int kHalf>
TWOSTEP_INLINE inline I32 subtract_zero(I32 sum, const int32_t* half_sums) {
  if constexpr (Source::kZero == 0 || D::kTakesZero) return sum;
  else return subtract(sum, Source::kZero * (Source::kHalves == 2 ? half_sums[kHalf] : half_sums[0] + half_sums[1]));
}

// One step of all rows and panels of a tile. A row's values are broadcast once for all panels.
template <int kCount, bool kFirst, class D, int kPanels, class Values>
TWOSTEP_INLINE inline void add_step(D (*dot)[kPanels], const Bytes (&bytes)[kPanels], const Values& values, int offset) {
  typename D::Weights w[kPanels];
  unroll<kPanels>([&](auto p) TWOSTEP_INLINE { w[p] = D::prepare(bytes[p]); });
  unroll<kCount>([&](auto r) TWOSTEP_INLINE {
    const auto x = D::broadcast(values.template row<typename D::Value, r>() + offset);
    unroll<kPanels>([&](auto p) TWOSTEP_INLINE {
      if constexpr (kFirst) dot[r][p].start(w[p], x);
      else dot[r][p].add(w[p], x);
    });
  });
}

// The same with two steps, for dot products that save work on pairs.
template <int kCount, bool kFirst, class D, int kPanels, class Values>
TWOSTEP_INLINE inline void add_pair(D (*dot)[kPanels], const Bytes (&even)[kPanels], const Bytes (&odd)[kPanels], const Values& values, int offset) {
  typename D::Weights w0[kPanels], w1[kPanels];
  unroll<kPanels>([&](auto p) TWOSTEP_INLINE { w0[p] = D::prepare(even[p]), w1[p] = D::prepare(odd[p]); });
  unroll<kCount>([&](auto r) TWOSTEP_INLINE {
    const typename D::Value* x = values.template row<typename D::Value, r>() + offset;
    unroll<kPanels>([&](auto p) TWOSTEP_INLINE {
      if constexpr (kFirst) dot[r][p].start(w0[p], w1[p], x);
      else dot[r][p].add(w0[p], w1[p], x);
    });
  });
}

// The dot products of one group, or half group.
template <int kCount, int kHalf, class Source, int kPanels, class D, class Values>
TWOSTEP_INLINE inline void add_group(const typename Source::Group (&group)[kPanels], D (*dot)[kPanels], const Values& values) {
  constexpr int kPairs = 4 / Source::kHalves;
  unroll<kPairs>([&](auto i) TWOSTEP_INLINE {
    constexpr int pair = kHalf * kPairs + i;
    Bytes even[kPanels], odd[kPanels];
    unroll<kPanels>([&](auto p) TWOSTEP_INLINE { std::tie(even[p], odd[p]) = group[p].template pair<pair>(); });
    if constexpr (D::kStepwise) {
      add_step<kCount, i == 0>(dot, even, values, pair * 8);
      add_step<kCount, false>(dot, odd, values, pair * 8 + 4);
    } else {
      add_pair<kCount, i == 0>(dot, even, odd, values, pair * 8);
    }
  });
}

// Accumulates groups g0..g1-1 of kCount rows from `row` on into out[p] + 16 · row of each panel; starts from zero when g0 is 0.
template <int kCount, bool kFine, class Source, int kPanels>
TWOSTEP_INLINE inline void tile(const Source (&source)[kPanels], int g0, int g1, const QuantRows& x, int row, float* const* out) {
  using D = DotOf<Source::kMax, kFine>;
  using Value = typename D::Value;
  constexpr bool kSubtracts = Source::kZero != 0 && !D::kTakesZero;
  RowParts<kCount> values(reinterpret_cast<const uint8_t*>(x.values<Value>(row) + g0 * kGroup), x.stride);
  RowParts<kCount> scales(reinterpret_cast<const uint8_t*>(x.scales<Value>(row) + g0), x.stride);
  RowParts<kCount> sums(kSubtracts ? reinterpret_cast<const uint8_t*>(x.half_sums<Value>(row) + 2 * g0)
                                   : reinterpret_cast<const uint8_t*>(x.scaled_sums<Value>(row) + g0), x.stride);
  F32 acc[kCount][kPanels];
  unroll<kPanels>([&](auto p) TWOSTEP_INLINE {
    unroll<kCount>([&](auto r) TWOSTEP_INLINE { acc[r][p] = g0 ? load(out[p] + size_t(row + r) * kPanel) : zero(); });
  });
  for (int g = g0; g < g1; ++g) {
    typename Source::Group group[kPanels];
    unroll<kPanels>([&](auto p) TWOSTEP_INLINE {
      group[p] = source[p].at(g);
      source[p].fetch_ahead(g, row / kCount);
    });
    unroll<Source::kHalves>([&](auto half) TWOSTEP_INLINE {
      D dot[kCount][kPanels];
      add_group<kCount, half, Source>(group, dot, values);
      unroll<kPanels>([&](auto p) TWOSTEP_INLINE {
        const F32 scale = group[p].scale(half);
        unroll<kCount>([&](auto r) TWOSTEP_INLINE {
          const I32 sum = subtract_zero<Source, D, half>(dot[r][p].sum(), sums.template row<int32_t, r>());
          acc[r][p] = fma(to_float(sum), scale * set1(*scales.template row<float, r>()), acc[r][p]);
        });
      });
    });
    if constexpr (Source::kHasMin)
      unroll<kPanels>([&](auto p) TWOSTEP_INLINE {
        const F32 min = group[p].min();
        unroll<kCount>([&](auto r) TWOSTEP_INLINE { acc[r][p] = fma(min, set1(*sums.template row<float, r>()), acc[r][p]); });
      });
    values.advance(kGroup * sizeof(Value));
    scales.advance(sizeof(float));
    sums.advance(kSubtracts ? 2 * sizeof(int32_t) : sizeof(float));
  }
  unroll<kPanels>([&](auto p) TWOSTEP_INLINE {
    unroll<kCount>([&](auto r) TWOSTEP_INLINE { store(out[p] + size_t(row + r) * kPanel, acc[r][p]); });
  });
}

// Calls f(integral constant `count`); 1 <= count <= kMost.
template <int kMost, class F>
inline void with_constant(int count, F&& f) {
  if constexpr (kMost > 1)
    if (count < kMost) return with_constant<kMost - 1>(count, f);
  f(std::integral_constant<int, kMost>{});
}

// Calls f(row, count) over tiles of at most kLargest rows, as even as can be: a last tile of one row would run at half speed.
template <int kLargest, class F>
inline void in_even_tiles(int first, int rows, F&& f) {
  const int tiles = (rows - first + kLargest - 1) / kLargest;
  for (int t = 0, row = first; t < tiles; ++t) {
    const int count = (rows - row + tiles - t - 1) / (tiles - t);
    with_constant<kLargest>(count, [&](auto constant) { f(row, constant); });
    row += count;
  }
}

template <bool kFine, int kLargest, class Source, int kPanels>
inline void rows_of_panels(const Source (&source)[kPanels], int g0, int g1, const QuantRows& x, int rows, float* const* out) {
  in_even_tiles<kLargest>(0, rows, [&](int row, auto count) { tile<count, kFine>(source, g0, g1, x, row, out); });
}

// Weights as they lie for few rows; else unpacked, as many groups at a time as fit the cache beside the rows.
template <Format kFormat, bool kFine>
void few_rows(const PanelJob& job, int inputs, const QuantRows& x, int rows) {
  const Packed<kFormat> packed[1] = {Packed<kFormat>(job.panel)};
  rows_of_panels<kFine, kRows>(packed, 0, inputs / kGroup, x, rows, &job.out);
}

template <Format kFormat, bool kFine, int kPanels>
void many_rows(const PanelJob* jobs, int inputs, const QuantRows& x, int rows, uint8_t* scratch) {
  const int groups = inputs / kGroup;
  float* out[kPanels];
  for (int p = 0; p < kPanels; ++p) out[p] = jobs[p].out;
  for (int g0 = 0; g0 < groups; g0 += kScratchGroups) {
    const int g1 = std::min(groups, g0 + kScratchGroups);
    using Source = Unpacked<kFormat>;
    Source source[kPanels];
    for (int p = 0; p < kPanels; ++p)
      source[p] = Source(Packed<kFormat>(jobs[p].panel), Packed<kFormat>(jobs[p].next), g0, g1, scratch + p * kScratchBytes);
    rows_of_panels<kFine, kTileRows>(source, g0, g1, x, rows, out);
  }
}

template <Format kFormat, bool kFine>
void quantised_panels(const PanelJob* jobs, int count, int inputs, const QuantRows& x, int rows, uint8_t* scratch) {
  if (rows <= kRows) {
    for (int i = 0; i < count; ++i) few_rows<kFormat, kFine>(jobs[i], inputs, x, rows);
  } else if (count == kTilePanels) {
    many_rows<kFormat, kFine, kTilePanels>(jobs, inputs, x, rows, scratch);
  } else {
    for (int i = 0; i < count; ++i) many_rows<kFormat, kFine, 1>(jobs + i, inputs, x, rows, scratch);
  }
}

template <bool kFine>
inline void panels_of_format(Format format, const PanelJob* jobs, int count, int inputs, const QuantRows& x, int rows, uint8_t* scratch) {
  switch (format) {
    case Format::Q4_0: return quantised_panels<Format::Q4_0, kFine>(jobs, count, inputs, x, rows, scratch);
    case Format::Q4_1: return quantised_panels<Format::Q4_1, kFine>(jobs, count, inputs, x, rows, scratch);
    case Format::Q4_K: return quantised_panels<Format::Q4_K, kFine>(jobs, count, inputs, x, rows, scratch);
    case Format::Q5_0: return quantised_panels<Format::Q5_0, kFine>(jobs, count, inputs, x, rows, scratch);
    case Format::Q6_K: return quantised_panels<Format::Q6_K, kFine>(jobs, count, inputs, x, rows, scratch);
    case Format::Q8_0: return quantised_panels<Format::Q8_0, kFine>(jobs, count, inputs, x, rows, scratch);
    default: return;  // float formats: float_panel
  }
}

inline void linear_panels(Format format, const PanelJob* jobs, int count, const QuantRows& x, int rows, uint8_t* scratch) {
  if (x.fine) panels_of_format<true>(format, jobs, count, x.inputs, x, rows, scratch);
  else panels_of_format<false>(format, jobs, count, x.inputs, x, rows, scratch);
}

// Calls f(row, count) over tiles of the compiled sizes: kLargest, then the halves of it down to 1.
template <int kLargest, class F>
inline void in_tiles(int rows, F&& f, int row = 0) {
  for (; row + kLargest <= rows; row += kLargest) f(row, std::integral_constant<int, kLargest>{});
  if constexpr (kLargest > 1) in_tiles<(kLargest + 1) / 2>(rows, f, row);
}

// One panel's element types for float tiles: 16 consecutive elements as floats.
struct FromF32 { static F32 at(const uint8_t* p, size_t i) { return load(reinterpret_cast<const float*>(p) + i); } };
struct FromF16 { static F32 at(const uint8_t* p, size_t i) { return load_f16(reinterpret_cast<const uint16_t*>(p) + i); } };
struct FromBf16 { static F32 at(const uint8_t* p, size_t i) { return load_bf16(reinterpret_cast<const uint16_t*>(p) + i); } };

// acc[r] += sum over i ascending of x[r][i] · panel[16 · i ..]
template <class From, int kCount>
TWOSTEP_INLINE inline void float_tile(const uint8_t* panel, int length, const float* x, size_t x_stride, F32* acc) {
  for (int i = 0; i < length; ++i) {
    const F32 w = From::at(panel, size_t(i) * kPanel);
    unroll<kCount>([&](auto r) TWOSTEP_INLINE { acc[r] = fma(set1(x[r * x_stride + i]), w, acc[r]); });
  }
}

template <class From>
inline void float_rows(const Matrix& matrix, int panel, const float* x, size_t x_stride, int rows, float* out) {
  in_tiles<kFloatRows>(rows, [&](int row, auto count) {
    F32 acc[count];
    for (int r = 0; r < count; ++r) acc[r] = zero();
    float_tile<From, count>(matrix.panel(panel), matrix.inputs, x + row * x_stride, x_stride, acc);
    for (int r = 0; r < count; ++r) store(out + size_t(row + r) * kPanel, acc[r]);
  });
}

inline void float_panel(const Matrix& matrix, int panel, const float* x, size_t x_stride, int rows, float* out) {
  switch (matrix.format) {
    case Format::F32: return float_rows<FromF32>(matrix, panel, x, x_stride, rows, out);
    case Format::F16: return float_rows<FromF16>(matrix, panel, x, x_stride, rows, out);
    default: return float_rows<FromBf16>(matrix, panel, x, x_stride, rows, out);
  }
}

}  // namespace twostep::TWOSTEP_ISA
