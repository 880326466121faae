// CRC-32C (Castagnoli), with the processor's instruction where it has one, else by table.
#pragma once
#include <cstddef>
#include <cstdint>

namespace twostep {

// Of `size` bytes that follow others whose CRC is `crc`; crc32c of nothing is 0.
uint32_t crc32c(const void* data, size_t size, uint32_t crc = 0);
// The same without the processor's instruction: what other machines do, for the tests.
uint32_t crc32c_portable(const void* data, size_t size, uint32_t crc = 0);

}  // namespace twostep
