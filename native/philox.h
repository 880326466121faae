// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random numbers
// as a function of a key and a counter. Without state, nothing that happened before can move them.
#pragma once
#include <array>
#include <cstdint>

namespace twostep {

using PhiloxCounter = std::array<uint32_t, 4>;

inline PhiloxCounter philox(PhiloxCounter c, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
  }
  return c;
}

// A number in [0, 1), multiple of 2^-53, for one choice and one token position of a seed.
inline double uniform(uint64_t seed, uint32_t choice, uint64_t position) {
  const PhiloxCounter r =
      philox({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), choice, 0}, seed);
  return static_cast<double>((static_cast<uint64_t>(r[1]) << 32 | r[0]) >> 11) * 0x1p-53;
}

}  // namespace twostep
