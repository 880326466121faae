#include "crc32c.h"

#include <array>
#include <cstring>
#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace twostep {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // of Castagnoli, bits reversed
using Tables = std::array<std::array<uint32_t, 256>, 8>;

// Table i: the CRC of a byte that i further bytes of zeros follow.
Tables make_tables() {
  Tables tables;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (int i = 1; i < 8; ++i)
    for (int byte = 0; byte < 256; ++byte) tables[i][byte] = tables[i - 1][byte] >> 8 ^ tables[0][tables[i - 1][byte] & 255];
  return tables;
}

uint64_t load64(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// On inverted values, as the instructions compute it.
uint32_t by_table(const uint8_t* at, size_t size, uint32_t crc) {
  static const Tables tables = make_tables();
  for (; size >= 8; size -= 8, at += 8) {
    const uint64_t word = load64(at) ^ crc;
    crc = 0;
    for (int i = 0; i < 8; ++i) crc ^= tables[7 - i][word >> (8 * i) & 255];
  }
  for (; size; --size, ++at) crc = crc >> 8 ^ tables[0][(crc ^ *at) & 255];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(const uint8_t* at, size_t size, uint32_t crc) {
  uint64_t wide = crc;
  for (; size >= 8; size -= 8, at += 8) wide = _mm_crc32_u64(wide, load64(at));
  crc = static_cast<uint32_t>(wide);
  for (; size; --size, ++at) crc = _mm_crc32_u8(crc, *at);
  return crc;
}
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__) && defined(__linux__)
uint32_t by_instruction(const uint8_t* at, size_t size, uint32_t crc) {
  for (; size >= 8; size -= 8, at += 8) asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(load64(at)));
  for (; size; --size, ++at) asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(uint32_t(*at)));
  return crc;
}
bool has_instruction() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
#else
uint32_t by_instruction(const uint8_t* at, size_t size, uint32_t crc) { return by_table(at, size, crc); }
bool has_instruction() { return false; }
#endif

}  // namespace

uint32_t crc32c(const void* data, size_t size, uint32_t crc) {
  static const bool instruction = has_instruction();
  const uint8_t* at = static_cast<const uint8_t*>(data);
  return ~(instruction ? by_instruction(at, size, ~crc) : by_table(at, size, ~crc));
}

uint32_t crc32c_portable(const void* data, size_t size, uint32_t crc) { return ~by_table(static_cast<const uint8_t*>(data), size, ~crc); }

}  // namespace twostep
