// Memory taken once at load, never given back before the end: large pages asked for, zeroed, aligned for vectors.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace twostep {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (const Chunk& chunk : chunks_) munmap(chunk.start, chunk.size);
  }

  // Zeroed, aligned to 64 bytes. Throws std::bad_alloc.
  uint8_t* take(size_t bytes) {
    bytes = rounded(bytes);
    if (chunks_.empty() || chunks_.back().size - used_ < bytes) grow(bytes);
    uint8_t* out = static_cast<uint8_t*>(chunks_.back().start) + used_;
    used_ += bytes;
    taken_ += bytes;
    return out;
  }
  template <class T>
  T* take_array(size_t count) { return reinterpret_cast<T*>(take(count * sizeof(T))); }

  // Bytes that take(bytes) takes.
  static size_t rounded(size_t bytes) { return (bytes + 63) / 64 * 64; }
  size_t taken() const { return taken_; }

 private:
  static constexpr size_t kLargePage = size_t(2) << 20, kLeast = size_t(32) << 20;
  struct Chunk { void* start; size_t size; };

  void grow(size_t bytes) {
    size_t size = bytes < kLeast ? kLeast : bytes;
    size = (size + kLargePage - 1) / kLargePage * kLargePage;
    void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(start, size, MADV_HUGEPAGE);
#endif
    chunks_.push_back({start, size});
    used_ = 0;
  }

  std::vector<Chunk> chunks_;
  size_t used_ = 0, taken_ = 0;
};

}  // namespace twostep
