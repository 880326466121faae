#include "kv_pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "crc32c.h"

namespace twostep {
namespace {

// Before the bytes of a block that is sent. Little-endian, as every machine this is built for.
struct Header {
  char magic[4];
  uint32_t version;
  char digest[16];
  uint32_t group;
  uint8_t length[8];  // unaligned
  uint8_t zeros[24];
  uint32_t checksum;  // of all other bytes, the block's included
};
static_assert(sizeof(Header) == KvPool::kHeader);
constexpr char kMagic[] = "2SKV";
constexpr uint32_t kVersion = 1;

uint32_t checksum(const Header& header, const uint8_t* block, size_t size) {
  return crc32c(block, size, crc32c(&header, sizeof header - sizeof header.checksum));
}

// Of f16 values, not aligned.
bool all_finite(const uint8_t* values, size_t count) {
  uint16_t highest = 0;
  for (size_t i = 0; i < count; ++i) {
    uint16_t value;
    std::memcpy(&value, values + 2 * i, sizeof value);
    highest = std::max<uint16_t>(highest, value & 0x7FFF);
  }
  return highest < 0x7C00;
}

std::string hexadecimal(const char* bytes, size_t size) {
  const char* digits = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < size; ++i) (out += digits[uint8_t(bytes[i]) >> 4]) += digits[bytes[i] & 15];
  return out;
}

[[noreturn]] void refuse(const std::string& fault) { throw std::invalid_argument(fault); }

}  // namespace

KvPool::KvPool(std::vector<KvGroup> groups, int kv_heads, int head_dim, std::string digest, bool shareable)
    : groups_(std::move(groups)),
      kv_heads_(kv_heads),
      layer_elements_(size_t(2) * padded(head_dim) * kBlock * kv_heads),
      digest_(std::move(digest)) {
  if (digest_.size() != sizeof Header::digest) refuse("a layout's digest has 16 bytes");
  size_t total = 0;
  std::vector<size_t> offsets;
  for (size_t g = 0; g < groups_.size(); ++g) {
    offsets.push_back(total);
    total += Arena::rounded(groups_[g].blocks * block_bytes(static_cast<int>(g)));
  }
  uint8_t* start = take(total, shareable);
  bytes_ = total;
  for (size_t offset : offsets) starts_.push_back(reinterpret_cast<uint16_t*>(start + offset));
}

KvPool::~KvPool() {
  if (mapped_) munmap(mapped_, bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

// A memory file is sealed against a change of its size: a peer that shortened it would kill this process at its next read.
uint8_t* KvPool::take(size_t bytes, bool shareable) {
  if (!shareable) return arena_.take(bytes);
#if defined(__linux__)
  descriptor_ = memfd_create("twostep-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  void* start = MAP_FAILED;
  if (descriptor_ >= 0 && ftruncate(descriptor_, static_cast<off_t>(bytes)) == 0 &&
      fcntl(descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
    start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (start == MAP_FAILED) {
    if (descriptor_ >= 0) close(descriptor_);
    throw std::bad_alloc();
  }
#if defined(MADV_HUGEPAGE)
  madvise(start, bytes, MADV_HUGEPAGE);
#endif
  return mapped_ = static_cast<uint8_t*>(start);
#else
  refuse("this system has no memory files; KV memory cannot be shareable");
#endif
}

void KvPool::copy(int group, int source, int target) {
  std::copy_n(block(group, 0, source), block_stride(group), block(group, 0, target));
}

void KvPool::export_block(int group, int number, uint8_t* out) const {
  const uint64_t length = block_bytes(group);
  std::memcpy(out + kHeader, block(group, 0, number), length);
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof header.magic);
  header.version = kVersion;
  std::memcpy(header.digest, digest_.data(), sizeof header.digest);
  header.group = static_cast<uint32_t>(group);
  std::memcpy(header.length, &length, sizeof length);
  header.checksum = checksum(header, out + kHeader, length);
  std::memcpy(out, &header, kHeader);
}

// Numbers that are not finite are refused although the checksum may be right: attention relies on their absence, also in
// blocks that a sequence does not see (attention.h).
void KvPool::import_block(int group, int number, const uint8_t* data, size_t size) {
  const uint64_t length = block_bytes(group);
  if (size != kHeader + length)
    refuse("the block has " + std::to_string(size) + " bytes; one of group " + std::to_string(group) + " has " + std::to_string(kHeader + length));
  Header header;
  std::memcpy(&header, data, kHeader);
  if (std::memcmp(header.magic, kMagic, sizeof header.magic) != 0 || header.version != kVersion)
    refuse("the data does not begin as a KV block of version " + std::to_string(kVersion) + " does");
  if (std::memcmp(header.digest, digest_.data(), sizeof header.digest) != 0)
    refuse("the block has KV layout " + hexadecimal(header.digest, sizeof header.digest) + "; this cache has " + hexadecimal(digest_.data(), digest_.size()));
  if (header.group != static_cast<uint32_t>(group) || std::memcmp(header.length, &length, sizeof length) != 0)
    refuse("the block belongs to group " + std::to_string(header.group) + ", not to group " + std::to_string(group));
  if (header.checksum != checksum(header, data + kHeader, length)) refuse("the checksum does not match: the block was damaged on its way");
  if (!all_finite(data + kHeader, length / sizeof(uint16_t))) refuse("the block holds numbers that are not finite");
  std::memcpy(block(group, 0, number), data + kHeader, length);
}

}  // namespace twostep
