// How weights lie in memory. A matrix of (outputs, inputs) is cut into panels of 16 outputs; a panel is a run of groups of
// 32 inputs, read front to back. Within a group, step s (0..7) is 64 bytes: 16 outputs x 4 inputs, the operand of one
// 8-bit dot product instruction. Quantised values are unsigned, `zero` below them:
//   weight = scale * (q - zero)          or          weight = scale * q + min.
//
//   nibbles   4 x 64 bytes: byte t of vector j = step 2j | step 2j+1 << 4
//   crumbs    2 x 64 bytes: bits 2s..2s+1 of vector t = bits 4..5 of step 4t+s
//   bytes     8 x 64 bytes: one a step
//
//   format  per group                                              per 8 groups (first)    bits/weight   bits/weight in GGUF
//   Q4_0    nibbles, f16 scale[16]                                                          4.5           4.5
//   Q4_1    nibbles, f16 scale[16], f16 min[16]                                             5             5
//   Q4_K    nibbles, u8 scale[16], u8 min[16]                      f16 d[16], f16 dmin[16]  4.625         4.5
//   Q5_0    nibbles, crumbs, f16 scale[16]                                                  6.5           5.5
//   Q6_K    nibbles, crumbs, i8 scale[2][16] (16 inputs each)      f16 d[16]                6.5625        6.5625
//   Q8_0    bytes, f16 scale[16]                                                            8.5           8.5
//   F32, F16, BF16: no groups; [inputs][16] elements.
#pragma once
#include <cstddef>
#include <cstdint>

namespace twostep {

constexpr int kPanel = 16;
constexpr int kGroup = 32;
constexpr int kSuper = 8;  // groups of a K-quant's super-block

enum class Format : int { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q8_0 = 8, Q4_K = 12, Q6_K = 14, BF16 = 30 };

struct Layout {
  int block_elements, block_bytes;  // in the file
  int group_bytes, super_bytes;     // in memory; 0 groups for float formats
  bool quantised() const { return group_bytes > 0; }
  int element_bytes() const { return block_bytes; }  // float formats only
  size_t file_row_bytes(int inputs) const { return size_t(inputs) / block_elements * block_bytes; }
  size_t panel_bytes(int inputs) const {
    if (!quantised()) return size_t(inputs) * kPanel * element_bytes();
    const size_t groups = inputs / kGroup;
    return groups * group_bytes + groups / kSuper * super_bytes;
  }
};

inline Layout layout_of(Format format) {
  switch (format) {
    case Format::F32: return {1, 4, 0, 0};
    case Format::F16: return {1, 2, 0, 0};
    case Format::BF16: return {1, 2, 0, 0};
    case Format::Q4_0: return {32, 18, 256 + 32, 0};
    case Format::Q4_1: return {32, 20, 256 + 64, 0};
    case Format::Q5_0: return {32, 22, 256 + 128 + 32, 0};
    case Format::Q8_0: return {32, 34, 512 + 32, 0};
    case Format::Q4_K: return {256, 144, 256 + 32, 64};
    case Format::Q6_K: return {256, 210, 256 + 128 + 32, 32};
  }
  return {0, 0, 0, 0};
}

// A view of a packed matrix; `outputs` is the true number, the last panel is padded with zeros.
struct Matrix {
  Format format;
  int outputs, inputs;
  const uint8_t* data;
  size_t panel_bytes;
  int panels() const { return (outputs + kPanel - 1) / kPanel; }
  const uint8_t* panel(int p) const { return data + size_t(p) * panel_bytes; }
};

}  // namespace twostep
