// Memory for kernels, aligned for vectors, in large pages where it is large. Arena: taken once at load, zeroed, never given
// back before the end.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace twostep {

constexpr size_t kLine = 64, kLargePage = size_t(2) << 20;

// For vectors that kernels read and write: 64 bytes that begin within a line are two accesses, and small pages are many.
// Large ones are mappings of their own, so that the system has them back at once: malloc would keep them.
template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes < kLargePage) return static_cast<T*>(::operator new(bytes, std::align_val_t(kLine)));
    void* out = mmap(nullptr, mapped(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (out == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(out, mapped(bytes), MADV_HUGEPAGE);
#endif
    return static_cast<T*>(out);
  }
  void deallocate(T* at, size_t count) {
    const size_t bytes = count * sizeof(T);
    if (bytes < kLargePage) ::operator delete(at, std::align_val_t(kLine));
    else munmap(at, mapped(bytes));
  }
  template <class U>
  bool operator==(const LineAllocator<U>&) const { return true; }
  template <class U>
  bool operator!=(const LineAllocator<U>&) const { return false; }

 private:
  static size_t mapped(size_t bytes) { return (bytes + kLargePage - 1) / kLargePage * kLargePage; }
};
template <class T>
using Aligned = std::vector<T, LineAllocator<T>>;

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
  static constexpr size_t kLeast = size_t(32) << 20;
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
