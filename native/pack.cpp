#include "pack.h"

#include <cstring>

namespace twostep {
namespace {

uint16_t load_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

uint32_t load_u32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// One row's 32 unsigned values of group `g`, and where its scales lie in the file.
struct FileGroup {
  uint8_t q[kGroup];
  uint16_t scale = 0, min = 0;        // f16; for K-quants those of the super-block
  uint8_t sub_scale[2] = {0, 0};      // K-quants: Q4_K {scale, min}, Q6_K {first half, second half} (signed)
};

void split_nibbles(const uint8_t* packed, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = packed[i] & 15;
    q[i + 16] = packed[i] >> 4;
  }
}

FileGroup read_q4_0(const uint8_t* block) {
  FileGroup out;
  out.scale = load_u16(block);
  split_nibbles(block + 2, out.q);
  return out;
}

FileGroup read_q4_1(const uint8_t* block) {
  FileGroup out;
  out.scale = load_u16(block);
  out.min = load_u16(block + 2);
  split_nibbles(block + 4, out.q);
  return out;
}

FileGroup read_q5_0(const uint8_t* block) {
  FileGroup out;
  out.scale = load_u16(block);
  split_nibbles(block + 6, out.q);
  const uint32_t fifth = load_u32(block + 2);
  for (int i = 0; i < kGroup; ++i) out.q[i] |= (fifth >> i & 1) << 4;
  return out;
}

FileGroup read_q8_0(const uint8_t* block) {
  FileGroup out;
  out.scale = load_u16(block);
  for (int i = 0; i < kGroup; ++i) out.q[i] = block[2 + i] ^ 0x80;
  return out;
}

// Q4_K: 8 groups; 6-bit scales and minima in 12 bytes: the first four pairs whole, the last four split into 4 + 2 bits.
FileGroup read_q4_k(const uint8_t* block, int sub) {
  FileGroup out;
  out.scale = load_u16(block);
  out.min = load_u16(block + 2);
  const uint8_t* s = block + 4;
  if (sub < 4) {
    out.sub_scale[0] = s[sub] & 63;
    out.sub_scale[1] = s[sub + 4] & 63;
  } else {
    out.sub_scale[0] = (s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4;
    out.sub_scale[1] = (s[sub + 4] >> 4) | (s[sub] >> 6) << 4;
  }
  const uint8_t* nibbles = block + 16 + sub / 2 * 32;
  for (int i = 0; i < kGroup; ++i) out.q[i] = sub % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
  return out;
}

// Q6_K: two halves of 128; in each, group j (0..3) has its low 4 bits in nibble j/2 of 64 bytes and its high 2 bits in
// bits 2j of 32 bytes; 16 signed 8-bit scales, one for 16 values.
FileGroup read_q6_k(const uint8_t* block, int sub) {
  FileGroup out;
  const int half = sub / 4, j = sub % 4;
  const uint8_t* low = block + half * 64 + j % 2 * 32;
  const uint8_t* high = block + 128 + half * 32;
  for (int i = 0; i < kGroup; ++i) {
    const int nibble = j < 2 ? low[i] & 15 : low[i] >> 4;
    out.q[i] = nibble | (high[i] >> (2 * j) & 3) << 4;
  }
  std::memcpy(out.sub_scale, block + 192 + sub * 2, 2);
  out.scale = load_u16(block + 208);
  return out;
}

FileGroup read_group(Format format, const uint8_t* row, int g) {
  switch (format) {
    case Format::Q4_0: return read_q4_0(row + g * 18);
    case Format::Q4_1: return read_q4_1(row + g * 20);
    case Format::Q5_0: return read_q5_0(row + g * 22);
    case Format::Q8_0: return read_q8_0(row + g * 34);
    case Format::Q4_K: return read_q4_k(row + g / kSuper * 144, g % kSuper);
    default: return read_q6_k(row + g / kSuper * 210, g % kSuper);
  }
}

void decode_group(Format format, const FileGroup& in, float* out) {
  const float d = f16_to_f32(in.scale), m = f16_to_f32(in.min);
  for (int i = 0; i < kGroup; ++i) {
    const float q = in.q[i];
    switch (format) {
      case Format::Q4_0: out[i] = d * (q - 8); break;
      case Format::Q4_1: out[i] = d * q + m; break;
      case Format::Q5_0: out[i] = d * (q - 16); break;
      case Format::Q8_0: out[i] = d * (q - 128); break;
      case Format::Q4_K: out[i] = d * in.sub_scale[0] * q - m * in.sub_scale[1]; break;
      default: out[i] = d * static_cast<int8_t>(in.sub_scale[i / 16]) * (q - 32);
    }
  }
}

void put_nibbles(const uint8_t* q, int column, uint8_t* group) {
  for (int j = 0; j < 4; ++j) {
    const uint32_t low = load_u32(q + 8 * j) & 0x0f0f0f0f, high = load_u32(q + 8 * j + 4) & 0x0f0f0f0f;
    const uint32_t both = low | high << 4;
    std::memcpy(group + j * 64 + column * 4, &both, 4);
  }
}

void put_crumbs(const uint8_t* q, int column, uint8_t* group) {
  for (int t = 0; t < 2; ++t) {
    uint32_t crumbs = 0;
    for (int s = 0; s < 4; ++s) crumbs |= (load_u32(q + 16 * t + 4 * s) >> 4 & 0x03030303) << (2 * s);
    std::memcpy(group + 256 + t * 64 + column * 4, &crumbs, 4);
  }
}

void put_bytes(const uint8_t* q, int column, uint8_t* group) {
  for (int s = 0; s < 8; ++s) std::memcpy(group + s * 64 + column * 4, q + 4 * s, 4);
}

void put_scales(Format format, const FileGroup& in, int column, uint8_t* group) {
  const int end = layout_of(format).group_bytes;
  if (format == Format::Q4_K || format == Format::Q6_K) {
    group[end - 32 + column] = in.sub_scale[0];
    group[end - 16 + column] = in.sub_scale[1];
    return;
  }
  if (format == Format::Q4_1) {
    std::memcpy(group + end - 64 + column * 2, &in.scale, 2);
    std::memcpy(group + end - 32 + column * 2, &in.min, 2);
    return;
  }
  std::memcpy(group + end - 32 + column * 2, &in.scale, 2);
}

void put_super(Format format, const FileGroup& in, int column, uint8_t* header) {
  std::memcpy(header + column * 2, &in.scale, 2);
  if (format == Format::Q4_K) std::memcpy(header + 32 + column * 2, &in.min, 2);
}

void put_group(Format format, const FileGroup& in, int column, uint8_t* group) {
  if (format == Format::Q8_0) put_bytes(in.q, column, group);
  else put_nibbles(in.q, column, group);
  if (format == Format::Q5_0 || format == Format::Q6_K) put_crumbs(in.q, column, group);
  put_scales(format, in, column, group);
}

void pack_quantised(Format format, const uint8_t* const rows[kPanel], int inputs, uint8_t* panel) {
  const Layout layout = layout_of(format);
  uint8_t* at = panel;
  for (int g = 0; g < inputs / kGroup; ++g) {
    uint8_t* header = at;
    if (g % kSuper == 0) at += layout.super_bytes;
    for (int c = 0; c < kPanel; ++c) {
      const FileGroup group = rows[c] ? read_group(format, rows[c], g) : FileGroup{};
      put_group(format, group, c, at);
      if (g % kSuper == 0 && layout.super_bytes) put_super(format, group, c, header);
    }
    at += layout.group_bytes;
  }
}

void pack_floats(int element_bytes, const uint8_t* const rows[kPanel], int inputs, uint8_t* panel) {
  for (int c = 0; c < kPanel; ++c) {
    if (!rows[c]) continue;  // panels come zeroed
    for (int i = 0; i < inputs; ++i)
      std::memcpy(panel + (size_t(i) * kPanel + c) * element_bytes, rows[c] + size_t(i) * element_bytes, element_bytes);
  }
}

float bf16_to_f32(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

}  // namespace

float f16_to_f32(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  uint32_t bits;
  float out;
  if (exponent == 0) {
    out = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -out : out;
  }
  bits = exponent == 31 ? sign | 0x7f800000 | fraction << 13 : sign | (exponent + 112) << 23 | fraction << 13;
  std::memcpy(&out, &bits, 4);
  return out;
}

void decode_row(Format format, const uint8_t* row, int inputs, float* out) {
  if (format == Format::F32) {
    std::memcpy(out, row, size_t(inputs) * 4);
  } else if (format == Format::F16 || format == Format::BF16) {
    for (int i = 0; i < inputs; ++i) {
      const uint16_t half = load_u16(row + 2 * i);
      out[i] = format == Format::F16 ? f16_to_f32(half) : bf16_to_f32(half);
    }
  } else {
    for (int g = 0; g < inputs / kGroup; ++g) decode_group(format, read_group(format, row, g), out + g * kGroup);
  }
}

void pack_panel(Format format, const uint8_t* const rows[kPanel], int inputs, uint8_t* panel) {
  const Layout layout = layout_of(format);
  if (layout.quantised()) pack_quantised(format, rows, inputs, panel);
  else pack_floats(layout.element_bytes(), rows, inputs, panel);
}

}  // namespace twostep
